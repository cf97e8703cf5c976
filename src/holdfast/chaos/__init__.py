"""Faults on purpose against a real job, and a checker that knows what every row must be."""
