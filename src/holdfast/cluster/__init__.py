"""Parameter-server training: servers hold the tables, workers train, a supervisor detects failures."""
