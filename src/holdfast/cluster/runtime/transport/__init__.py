"""Transports: in memory on virtual time, or over ZeroMQ."""
