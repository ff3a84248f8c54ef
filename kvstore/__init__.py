"""Where every KV block is: keys, layout, the tiers that hold blocks, and the index that says who holds
what."""
