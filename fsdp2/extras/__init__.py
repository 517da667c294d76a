"""What goes beyond torch's ``fully_shard``, each behind one seam. The core imports none of it. ``alike`` watches every
root, and ``peers`` carries the bytes of gloo on the CPU; features of a step are off until asked for."""
