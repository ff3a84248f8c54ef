"""What a request says beside its prompt: hand-over, tenant, and what to do with its blocks."""
