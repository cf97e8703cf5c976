"""How the processes of a job come to be."""
