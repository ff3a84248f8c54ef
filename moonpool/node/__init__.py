"""A node of any role: the services of both stages over one engine."""
