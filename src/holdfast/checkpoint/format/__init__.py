"""Bytes on disk: records, chunk files, dense state, manifests."""
