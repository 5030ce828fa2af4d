"""One figure of the paper in each file, drawn only from result files: nothing here loads a model or computes."""
