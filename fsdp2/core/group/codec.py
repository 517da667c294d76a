"""The interface of the codec, which runs all-gather hooks and decides what is sent in place of shards that have them.

Plain shards need no codec: they are sent as they are, cast to the compute dtype. ``tensors/all_gather_hooks.py`` has
the codec for the hooks of tensor subclasses, and is loaded with the first such parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from fsdp2.core.plan.plan import PlanInput


class Codec(Protocol):
    """Decides what the parameters of one group send, and makes unsharded tensors from the received data.

    Attributes:
        storages: memory that ``arrive`` fills and that is freed together with the group's unsharded storage.
    """

    storages: list[tuple[torch.UntypedStorage, int]]

    def inputs(self, first_key: int, *, keeps_consumed: bool) -> dict[int, PlanInput]:
        """The plan's input for each tensor to send, with keys from ``first_key`` on. ``keeps_consumed``: even tensors
        that may be freed on arrival are kept while the group is unsharded. If this raises, all ranks raise."""

    def bind_outputs(self, outputs: Mapping[int, torch.Tensor], first_key: int) -> None:
        """Bind the ``outputs`` of the gather whose plan was made from ``inputs(first_key)``."""

    def payloads(self) -> list[torch.Tensor]:
        """This rank's part of each tensor to send, in the order of the keys, without empty parts."""

    def arrive(self) -> None:
        """Everything has been gathered: fill the unsharded tensors. Staging memory is freed afterwards."""
