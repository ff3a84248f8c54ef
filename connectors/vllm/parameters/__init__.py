"""What a request says beside its prompt: to hand it over, whose it is, what to do with its blocks."""
