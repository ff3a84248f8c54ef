"""What the store in the engine keeps: blocks that hints pin, and blocks of tenants within their quotas."""
