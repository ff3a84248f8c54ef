"""The model that ships with Moonpool, and its training."""
