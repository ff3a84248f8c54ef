"""The OpenAI-compatible HTTP API of a conductor."""
