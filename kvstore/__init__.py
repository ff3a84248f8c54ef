"""KV blocks: keys, layouts, the tiers that hold them, the index of their nodes, and named objects."""
