"""What was computed already? Finished cells are kept by the hash of all that they depend on."""
