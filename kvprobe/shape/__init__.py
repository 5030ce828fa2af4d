"""What does a configuration alone tell about a model? Its shape, parameters and bytes; no torch in here."""
