"""What protecting a run costs: pure arithmetic. Times are in hours and sizes in bytes."""
