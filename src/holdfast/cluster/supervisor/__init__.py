"""The supervisor: ``machine`` decides who is alive and who replaces whom; ``process`` runs it."""
