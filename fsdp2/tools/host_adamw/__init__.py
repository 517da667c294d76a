"""AdamW on the host, which steps a unit as soon as its gradients have landed, while backward goes on.

``optimizer`` is the optimizer: what is stepped when, with which options. ``memory`` knows where values lie on the host.
``jobs`` brings gradients there, steps, and brings the results back.
"""

from fsdp2.tools.host_adamw.optimizer import HostAdamW

__all__ = ["HostAdamW"]
