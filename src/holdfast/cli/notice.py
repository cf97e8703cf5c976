"""Says at once that a command stops, whichever it is."""

from __future__ import annotations

from holdfast.stopping import Notice

notice = Notice()
