"""Libraries that call torch's ``fully_shard``, run with torch's runtime and with ours: `make clients`."""
