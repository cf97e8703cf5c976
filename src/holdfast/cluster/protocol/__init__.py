"""Messages between nodes, and the plan they share. No clock, no socket, no operating system."""
