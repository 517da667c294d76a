"""How moments are stored in bytes, and what a step does to them.

A byte stands for the fourth root of a value, which keeps small values next to large ones. The second moment is stored
as its root. Rounding is dithered by a fixed sequence of steps and places: the nearest code would hardly ever change, as
a step moves a slow average by 0.1%, and codes are 2% apart. Rule: an element goes through the same correctly rounded
operations wherever it lies, so every mesh gives the same bits; the ranks of a block agree on its scale.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, for states in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2.core import CommunicationError, comms, plans
from fsdp2.optim.adamw8bit.blocks import Blocks, Piece


class Code(NamedTuple):
    """How a state is stored: as ``levels * (value / scale) ** (1/4)``, rounded. Scales are at least ``least_scale``, so
    that values and the squares of roots are normal numbers, which are the same again after saving and loading."""

    name: str
    dtype: torch.dtype
    levels: int
    least_scale: float

    def decoded(self, codes: Tensor, scale: Tensor) -> Tensor:
        value = codes.float().div_(self.levels)
        value.mul_(value.abs())
        return value.mul_(value.abs()).mul_(scale)

    def scale_of(self, value: Tensor) -> Tensor:
        """The scale of each block of ``value`` ``[outer, blocks, length, inner]``: its maximum, which has its own code,
        or 0 if all of it is 0."""
        most = value.abs().amax(2, keepdim=True)
        return torch.where(most > 0, most.clamp(min=self.least_scale), most)

    def encode(self, value: Tensor, scale: Tensor, dither: Tensor | float, into: Tensor) -> None:
        """``dither`` is added before rounding down. 0.5 gives the nearest code."""
        code = value.abs().div_(scale.clamp(min=self.least_scale)).sqrt_().sqrt_().mul_(self.levels).add_(dither)
        code.floor_().clamp_(max=self.levels)
        # No code of a root is 0, since updates are divided by roots.
        into.copy_(code.copysign_(value) if self.dtype.is_signed else code.clamp_(min=1))


MEAN = Code("exp_avg", torch.int8, 127, 2.0**-90)
ROOT = Code("exp_avg_sq", torch.uint8, 255, 2.0**-30)
SCALES = {MEAN: "exp_avg_scale", ROOT: "exp_avg_sq_scale"}


def new_state(param: Tensor, blocks: Blocks, number: float = 0.0) -> dict[str, Any]:
    """Moments of zero, after ``number`` steps."""
    local, scales = plans.local_part(param), (blocks.shape[0], blocks.num_scales, blocks.shape[2])
    state: dict[str, Any] = {"step": torch.tensor(number, dtype=torch.float32, device="cpu")}
    for code, name in SCALES.items():
        state[code.name] = torch.zeros(local.shape, dtype=code.dtype, device=local.device)
        state[name] = torch.zeros(scales, device=local.device)
    return state


def dithers_of(block_size: int, number: float, device: torch.device) -> dict[Code, Tensor]:
    """What step ``number`` adds to the codes of a block before rounding down, as ``[block_size, 1]``. In 4096 steps, an
    element gets each of 4096 evenly spaced values once, in an order that spreads over all of them early."""
    places = torch.arange(block_size, device=device)[:, None]
    factors = {MEAN: (2531, 1597), ROOT: (1597, 2531)}  # both odd; 2531 / 4096 is near the golden ratio
    return {
        code: (places * place + int(number) * step).remainder(4096).add(0.5).div(4096)
        for code, (place, step) in factors.items()
    }


class Shard:
    """This rank's states of one parameter, which get new values. ``agreed`` are the scales of blocks that are cut, for
    both states: ``[2, outer, blocks, inner]``."""

    dithers: Mapping[Code, Tensor] | None = None  # to the nearest code

    def __init__(self, param: Tensor, blocks: Blocks, state: dict[str, Any]) -> None:
        self.param, self.blocks, self.state = param, blocks, state
        self.device = plans.local_part(param).device
        outer, _, inner = blocks.shape
        self.agreed = torch.zeros(2, outer, blocks.num_cut, inner, device=self.device)

    def moments(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """The new values of the first moment and of the root of the second, as ``[outer, blocks, length, inner]``."""
        raise NotImplementedError

    def measure(self) -> None:
        """Set ``agreed`` to the scales of this rank's parts."""
        for piece in self.blocks.pieces:
            if piece.cut is not None:
                for found, code, value in zip(self.agreed, SCALES, self.moments(piece), strict=True):
                    known = found[piece.rows, piece.cut]
                    known.copy_(torch.maximum(known, code.scale_of(value).squeeze(2)))

    def write(self) -> None:
        """Give the states their new values."""
        for piece in self.blocks.pieces:
            values = self.moments(piece)
            self.use(piece, *values)
            for i, (code, name) in enumerate(SCALES.items()):
                scale = code.scale_of(values[i]) if piece.cut is None else self.agreed[i][piece.rows, piece.cut, None]
                self.state[name][piece.rows, piece.scales, None] = scale
                dither = 0.5 if self.dithers is None else self.dithers[code].narrow(0, piece.place, piece.length)
                code.encode(values[i], scale, dither, into=self.blocks.of_shard(self.state[code.name], piece))

    def use(self, piece: Piece, mean: Tensor, root: Tensor) -> None:
        """Called with the moments before they are rounded."""

    def decoded(self, code: Code, piece: Piece) -> Tensor:
        scale = self.state[SCALES[code]][piece.rows, piece.scales, None]
        return code.decoded(self.blocks.of_shard(self.state[code.name], piece), scale)


class Step(Shard):
    """A step of one parameter, with its ``grad`` on this rank."""

    def __init__(
        self, param: Tensor, blocks: Blocks, state: dict[str, Any], grad: Tensor, group: Mapping[str, Any]
    ) -> None:
        super().__init__(param, blocks, state)
        self._local = plans.local_part(param)
        self._values, self._grad = self._local.contiguous(), grad.contiguous()
        self._beta1, self._beta2 = map(float, group["betas"])
        self.number, lr = float(state["step"]) + 1, float(group["lr"])
        self._decay, self._eps = 1 - lr * float(group["weight_decay"]), float(group["eps"])
        self._step_size = lr / (1 - self._beta1**self.number)
        self._correction = math.sqrt(1 - self._beta2**self.number)

    def moments(self, piece: Piece) -> tuple[Tensor, Tensor]:
        grad = self.blocks.of_shard(self._grad, piece).float()
        # Not lerp_ and addcmul_: on the CPU, they may round the last elements of a tensor differently.
        mean = self.decoded(MEAN, piece).mul_(self._beta1).add_(grad.mul(1 - self._beta1))
        square = self.decoded(ROOT, piece).square_().mul_(self._beta2).add_(grad.square().mul_(1 - self._beta2))
        return mean, square.sqrt_()

    def use(self, piece: Piece, mean: Tensor, root: Tensor) -> None:
        values = self.blocks.of_shard(self._values, piece)
        wide = values.float()
        wide.mul_(self._decay).sub_(mean.div(root.div(self._correction).add_(self._eps)).mul_(self._step_size))
        if wide is not values:
            values.copy_(wide)

    def write(self) -> None:
        super().write()
        self.state["step"] += 1
        if self._values is not self._local:
            self._local.copy_(self._values)


class Loaded(Shard):
    """Moments in full precision that become a state. What a state was saved as gives the same state."""

    def __init__(self, param: Tensor, blocks: Blocks, state: dict[str, Any], given: Mapping[str, Any]) -> None:
        super().__init__(param, blocks, state)
        self._given = [plans.local_part(given[code.name]).to(self.device).contiguous() for code in SCALES]

    def moments(self, piece: Piece) -> tuple[Tensor, Tensor]:
        mean, square = (self.blocks.of_shard(each, piece).float() for each in self._given)
        return mean, square.sqrt()


def agree(shards: Sequence[Shard]) -> None:
    """Agree on the scales of blocks that are cut: one message per mesh axis, of all parameters that it cuts in blocks.
    Without such blocks, nothing is communicated."""
    joint: dict[tuple[dist.ProcessGroup, ...], list[Shard]] = {}
    for shard in shards:
        if shard.blocks.num_cut and isinstance(shard.param, DTensor):
            mesh = shard.param.device_mesh
            joint.setdefault(tuple(map(mesh.get_group, shard.blocks.axes)), []).append(shard)
            shard.measure()
    for groups, mine in joint.items():
        device = plans.mesh_device(mine[0].param.device_mesh)  # type: ignore[attr-defined]
        message = torch.cat([each.agreed.flatten().to(device) for each in mine])
        for group in groups if message.numel() else ():
            try:
                comms.wait_for(comms.launched(comms.all_reduce, group, message, dist.ReduceOp.MAX))
            except CommunicationError as error:
                raise comms.lost("AdamW8bit", error, "agree on scales", [group]) from error.__cause__
        for each, part in zip(mine, message.split([each.agreed.numel() for each in mine]), strict=True):
            each.agreed.copy_(part.view_as(each.agreed))
