"""What does one layer read? The attention call, and the seam through which every experiment sees it."""
