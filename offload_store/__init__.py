"""The CPU tier for KV blocks that all workers share."""
