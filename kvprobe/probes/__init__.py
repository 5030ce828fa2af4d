"""What changes if attention reads something else? Masses, truncations, windows, and the losses that they cost."""
