"""The reference trainer: one process, tables in ``nn.EmbeddingBag``."""
