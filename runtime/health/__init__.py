"""Health of this host and its GPUs, and whether a node on them should get requests."""
