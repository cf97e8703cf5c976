"""The reference trainer: one process, tables in ``nn.EmbeddingBag``, what all else is measured against."""
