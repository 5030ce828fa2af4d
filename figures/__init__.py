"""One figure of the paper a file, drawn from result files alone: nothing here loads a model or computes anything."""
