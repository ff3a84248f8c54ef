"""The model that ships with Moonpool, and how it is trained."""
