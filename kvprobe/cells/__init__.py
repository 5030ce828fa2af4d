"""What was computed already? Finished cells are kept by the hash of everything they depend on."""
