"""The notice that a command is stopping, shared by all commands."""

from __future__ import annotations

from holdfast.stopping import Notice

notice = Notice()
