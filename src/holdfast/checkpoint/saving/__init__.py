"""A save from the trainer's call to a durable version."""
