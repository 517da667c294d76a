"""Features beyond torch's ``fully_shard``, each behind one seam. The core imports none of them. ``alike`` watches every
root, and ``peers`` does the communication for gloo on the CPU; features that affect a step are off by default."""
