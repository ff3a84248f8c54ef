"""How this host and its GPUs are, and whether a node on them should get work."""
