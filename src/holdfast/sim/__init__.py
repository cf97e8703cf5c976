"""Simulation: whole clusters on virtual time, and months of failures in seconds."""
