"""How messages get from one node to another: in memory on virtual time, or over ZeroMQ."""
