"""What is wrong in a cluster, from what its processes say of themselves: evidence, and pure checks of it."""
