"""What goes beyond torch's ``fully_shard`` in a step, each behind one seam. The core imports none of it. ``alike``
watches every root; the other features are off until asked for."""
