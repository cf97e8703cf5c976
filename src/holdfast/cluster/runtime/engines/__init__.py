"""Engines, which start the processes of a job."""
