"""Saving and restoring the state of a job of many ranks."""
