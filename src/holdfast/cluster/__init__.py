"""Parameter-server training: servers that hold the tables, workers that train, a supervisor that watches."""
