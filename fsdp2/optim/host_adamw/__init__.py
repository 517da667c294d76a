"""AdamW on the host, which steps a unit as soon as its gradients are ready, while backward continues.

``optimizer`` decides what is stepped when, with which options. ``memory`` knows where values lie on the host.
``jobs`` copies gradients there, steps, and copies the results back.
"""

from fsdp2.optim.host_adamw.optimizer import HostAdamW

__all__ = ["HostAdamW"]
