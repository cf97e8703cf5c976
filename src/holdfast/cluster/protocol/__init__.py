"""What nodes say to each other, and what they agree on: no clock, no socket, no operating system."""
