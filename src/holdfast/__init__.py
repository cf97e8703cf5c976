"""Holdfast keeps the training of recommendation models going when machines fail."""

from holdfast._version import __version__

__all__ = ["__version__"]
