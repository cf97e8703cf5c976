"""Rows as fixed-size records, and the optimizers that update them. Nothing here knows torch."""
