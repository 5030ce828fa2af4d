"""What was found, and by which run? Tables, records and the words for them."""
