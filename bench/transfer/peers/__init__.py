"""Other transfer engines."""
