"""What is kept of the tokens that were read? One file a kind of key/value cache."""
