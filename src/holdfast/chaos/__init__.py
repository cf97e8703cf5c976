"""Chaos tests: inject faults into a real job, and check every row against its expected value."""
