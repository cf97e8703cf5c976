"""What protecting a run costs: pure arithmetic, in hours and bytes where a name says nothing else."""
