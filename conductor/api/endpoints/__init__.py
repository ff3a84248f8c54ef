"""Handlers of requests for tokens, one file a kind."""
