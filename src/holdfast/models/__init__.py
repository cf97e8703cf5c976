"""Recommendation models, one file each, given embeddings that somebody else has looked up."""
