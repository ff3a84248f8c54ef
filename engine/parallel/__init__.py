"""One model over many processes: who computes what, how they talk, and what happens when one is lost."""
