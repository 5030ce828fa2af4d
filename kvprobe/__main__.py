"""``python -m kvprobe``: the same as ``kvprobe``."""

from kvprobe.cli import main

main()
