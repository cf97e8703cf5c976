"""Which files hold which rows: full versions, layouts of ``Chunked``, and what rearranges them."""
