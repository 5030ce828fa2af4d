"""``python -m kvprobe``: the same as ``kvprobe``."""

from kvprobe.cli.main import main

main()
