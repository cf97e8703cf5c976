"""What users see of a job: progress, failures, the live view, the result."""
