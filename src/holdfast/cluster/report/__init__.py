"""What people see of a job: progress, failures, the live view."""
