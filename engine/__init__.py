"""Model execution over a paged KV pool: continuous batching, prefix cache, sampling."""
