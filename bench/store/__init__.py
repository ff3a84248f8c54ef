"""What keeping blocks and objects costs: ``moonpool bench store``."""
