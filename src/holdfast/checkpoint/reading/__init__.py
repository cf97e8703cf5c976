"""A version from the store to rows: which pieces, in which order, checked."""
