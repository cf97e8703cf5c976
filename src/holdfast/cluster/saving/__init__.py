"""Checkpoints of a job: a consistent cut of all servers becomes one version, and a job resumes from one."""
