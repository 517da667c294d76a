"""Libraries that call ``torch.distributed.fsdp.fully_shard``, run with torch's runtime and with ours: `make clients`."""
