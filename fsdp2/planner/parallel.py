"""Divides the work of a model among GPUs that compute the same sequences together.

With tensor parallelism, each GPU has a part of every matrix and of the activations, sequences between products included
(sequence parallelism): per block, two products are fed by all-gathers, and two end with reduce-scatters. With context
parallelism, each GPU has a part of every sequence, and all parts of keys and values pass through it.

Both are a part of each figure, and what is sent. How the model is written does not matter, nor whether its heads can be
divided: the plan of tensor parallelism is yours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdp2.planner.machine import Machine, gather, ranks_of
from fsdp2.planner.observe import ModelWork
from fsdp2.planner.work import Checkpointing, Param, UnitWork, Work

_NUM_GATHERS = 2  # of activations, in a block's forward and in its backward; as many reduce-scatters
# What recomputation sends again: all but the last sum, or only what selective checkpointing does not keep.
_NUM_AGAIN = {Checkpointing.NONE: 0, Checkpointing.SELECTIVE: _NUM_GATHERS, Checkpointing.FULL: 2 * _NUM_GATHERS - 1}


@dataclass(frozen=True)
class Parallel:
    """``tensor`` neighbouring GPUs share every product, and ``context`` groups of them share every sequence. ``fp8``:
    activations are gathered in fp8."""

    machine: Machine
    tensor: int = 1
    context: int = 1
    fp8: bool = False

    def part_of(self, work: ModelWork) -> ModelWork:
        """The part of one GPU of ``work``, which was observed with a part of each sequence."""
        kinds = tuple({each: self._block(unit, each) for each, unit in kind.items()} for kind in work.kinds)
        activations = max(kind[Checkpointing.FULL].given_nbytes for kind in work.kinds)
        rest = self._divided(work.rest, activations, num_gathered=1)
        sent = self._sends(activations) / 2  # a gather before the head, a sum behind the embedding
        return replace(
            work,
            kinds=kinds,
            params={path: tuple(map(self._param, params)) for path, params in work.params.items()},
            rest=replace(rest, sent_s=(2 * sent, 2 * sent)) if self.tensor > 1 else rest,
        )

    def _block(self, unit: UnitWork, checkpointing: Checkpointing) -> UnitWork:
        """Selective and no checkpointing keep what was gathered."""
        forward_s = self._keys_seconds(unit.forward, 1)
        backward_s = self._keys_seconds(unit.backward, 2)  # keys and values again, and their gradients
        divided = self._divided(unit, unit.given_nbytes, num_gathered=_NUM_GATHERS)
        if self.tensor > 1:
            if checkpointing is Checkpointing.NONE:
                gathered = _NUM_GATHERS * unit.given_nbytes * (1 - 1 / self.tensor)
                divided = replace(divided, saved_nbytes=divided.saved_nbytes + gathered)
            sent = self._sends(unit.given_nbytes)
            forward_s += _NUM_GATHERS * sent
            backward_s += (_NUM_GATHERS + _NUM_AGAIN[checkpointing] / 2) * sent
        return replace(divided, sent_s=(forward_s, backward_s))

    def _divided(self, unit: UnitWork, activations: float, *, num_gathered: int) -> UnitWork:
        """``num_gathered``: how many whole ``activations`` its backward works on."""
        size = self.tensor
        return replace(
            unit,
            forward=self._work(unit.forward),
            backward=self._work(unit.backward),
            saved_nbytes=unit.saved_nbytes / size,
            working_nbytes=unit.working_nbytes / size + num_gathered * activations * (1 - 1 / size),
            unread_nbytes=unit.unread_nbytes / size,
            left_nbytes=unit.left_nbytes / size,
            given_nbytes=unit.given_nbytes / size,
            scores_nbytes=unit.scores_nbytes / size,
        )

    def _work(self, work: Work) -> Work:
        """Each query meets all keys, also those of other GPUs."""
        attention = tuple(
            each._replace(flops=each.flops * self.context, length=each.length * self.context) for each in work.attention
        )
        return replace(work, attention=attention).divided(self.tensor)

    def _param(self, param: Param) -> Param:
        if len(param.shape) < 2 or self.tensor == 1:
            return param
        return replace(param, shape=(-(-param.shape[0] // self.tensor), *param.shape[1:]))

    def _sends(self, nbytes: float) -> float:
        """Seconds to gather activations of ``nbytes``, in fp8 if products are, and to sum and scatter as many; with a
        copy of each, since sequences are not the first dim."""
        sent = ((nbytes / 2 if self.fp8 else nbytes), nbytes)
        ranks = ranks_of(self.tensor, 1, self.machine.node_size)
        return sum(gather(self.machine, ranks, each).alone + 2 * each / self.machine.copy_bandwidth for each in sent)

    def _keys_seconds(self, work: Work, num_times: int) -> float:
        """The seconds that keys and values travel longer than attention computes meanwhile."""
        if self.context == 1:
            return 0.0
        ranks = ranks_of(self.context, self.tensor, self.machine.node_size)
        added = 0.0
        for each in work.attention:
            whole = each.keys_nbytes * self.context / self.tensor
            travels = (num_times if each.is_backward else 1) * gather(self.machine, ranks, whole).alone
            flops = each.flops * self.context / self.tensor
            meanwhile = self.machine.attention_seconds(
                each._replace(flops=flops, length=each.length * self.context), "bf16"
            )
            added += max(travels - meanwhile, 0.0)
        return added
