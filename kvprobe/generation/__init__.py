"""Which token comes next? Sampling, generating, and the engine that does it."""
