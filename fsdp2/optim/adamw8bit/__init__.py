"""AdamW whose moments take one byte each, and do not depend on how parameters are sharded.

``optimizer`` has the optimizer; ``blocks`` decides where blocks lie, and ``states`` how moments are stored and stepped.
"""

from fsdp2.optim.adamw8bit.optimizer import AdamW8bit

__all__ = ["AdamW8bit"]
