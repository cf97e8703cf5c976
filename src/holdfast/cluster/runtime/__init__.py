"""The environment of state machines: processes, sockets, clocks, keys."""
