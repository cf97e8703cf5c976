"""``python -m holdfast`` is the ``holdfast`` command."""

from holdfast.cli import main

main()
