"""The life cycle of a save: due (``schedule``), rows (``shard_rows``), version (``publisher``, ``catalog``)."""
