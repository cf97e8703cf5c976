"""The life cycle of a save: ``schedule`` (when), ``shard_rows``, ``publisher`` and ``catalog``."""
