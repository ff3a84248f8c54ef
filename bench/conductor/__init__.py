"""``moonpool bench conductor``: decisions in clusters of any size, and the conductor's cost of requests."""
