"""What is to be said of one model? A page that needs no other file."""
