"""Tables in memory: their live rows, which of them have changed, and which to save first."""
