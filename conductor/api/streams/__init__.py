"""Responses token by token, and how they go on at another conductor."""
