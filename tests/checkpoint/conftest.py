from __future__ import annotations

from hypothesis import settings

# The first call of a kernel compiles it, which takes longer than any deadline.
settings.register_profile("holdfast", deadline=None)
settings.load_profile("holdfast")
