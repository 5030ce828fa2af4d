"""One command a file: its options, its help, and the few lines from them to a result."""
