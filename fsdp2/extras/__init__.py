"""What goes beyond torch's ``fully_shard`` in a step: one file per feature, off until asked for. The core imports none
of them."""
