"""What every test gets: quiet threads, and a check that it leaves no processes behind."""

from __future__ import annotations

import os

# Before torch is imported: spinning OpenMP threads starve the other processes of a test.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
