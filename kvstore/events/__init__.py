"""vLLM's KV events: what engines say over ZeroMQ of the blocks they cache, read and written."""
