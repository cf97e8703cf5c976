"""One file per result that is claimed, and the harness that measures them all the same way."""
