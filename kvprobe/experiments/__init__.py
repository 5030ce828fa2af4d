"""One experiment a file: from a loaded model, and a passage where it reads one, to a result with its run record."""
