"""What does a configuration alone tell of a model? Its shape, parameters and bytes; no torch in here."""
