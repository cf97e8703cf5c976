"""Which files hold which rows: full versions, and the layouts of ``Chunked``."""
