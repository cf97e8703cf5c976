"""A server: ``machine`` holds rows and applies pushes, each once; ``process`` runs it."""
