"""``moonpool bench conductor``: decisions in clusters of any size, and what a conductor adds to requests."""
