"""Which token ids are read? Texts, passages cut from them, and corpora to train on."""
