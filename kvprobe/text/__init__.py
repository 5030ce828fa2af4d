"""Which token ids are read? Texts, the passages cut from them, and corpora to train on."""
