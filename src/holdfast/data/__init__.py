"""Readers of training data: each gives the same batches wherever and whenever it runs."""
