"""What is there to say about one model? A page that needs no other file."""
