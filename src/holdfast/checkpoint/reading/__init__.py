"""Read a version from the store: which pieces, in which order, with verification."""
