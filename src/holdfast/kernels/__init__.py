"""The hot loops, compiled by numba: ``rows`` moves and marks records and codes their ids."""
