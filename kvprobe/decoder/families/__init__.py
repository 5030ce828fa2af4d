"""One file a family: its weights, the fields of its configuration, and a tiny one for tests."""
