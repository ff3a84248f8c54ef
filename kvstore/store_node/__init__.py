"""A node that lends host memory and SSD: KV blocks for the cluster, objects for the Python client."""
