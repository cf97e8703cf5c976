"""Checkpoints: what changed, in few bits, to a store, without stopping the trainer."""
