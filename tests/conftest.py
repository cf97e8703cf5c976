"""What every test gets: quiet threads, and a check that it leaves no processes behind."""

from __future__ import annotations

import os
import signal

# Before torch is imported: spinning OpenMP threads starve the other processes of a test.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell that starts something in the background lets it ignore SIGINT, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
