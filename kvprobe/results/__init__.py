"""What was found, and by which run? Tables, records and their wording."""
