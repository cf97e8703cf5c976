"""Where machines meet the world: processes, sockets, clocks, keys."""
