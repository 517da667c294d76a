"""Gradients travel in one format and are summed in another: ``reduce_wire`` of a ``MixedPrecisionPolicy``.

A backend's reduce-scatter adds in the dtype that it sends. Here, each rank encodes the pieces of its gradients that
other ranks own, and all pieces travel in one all-to-all. The owner decodes them and adds them in ``reduce_dtype``, in
the order of ranks. With HSDP, the sums travel in the same way to their owners among the replicas, and the totals come
back in the format of the wire.

Rules: a format sees rows of numbers, never parameters. What a step sends depends on the plan and the format alone. Sums
do not depend on the order in which messages arrive, so they are the same in every run, and on all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from fsdp2.core import Axis, ExtensionError, _torch, comms, expect, plans
from fsdp2.extras.exchange import axis_of
from fsdp2.extras.peers import PeerComm

Payload = tuple[torch.Tensor, ...]
RESIDUAL_DTYPE = torch.bfloat16  # losses are smaller than the gradients, so their own rounding hardly counts


@runtime_checkable
class GradientWire(Protocol):
    """A format of gradients on their way: implement it, and pass it as ``reduce_wire`` of a ``MixedPrecisionPolicy``.

    The hooks are pure: they keep nothing, and the same rows give the same payload on every rank. On an accelerator,
    they run on the stream of reductions, and must not wait for the device. Two attributes are optional and not part of
    the type:

    - ``block_size`` (default 1): the piece of each gradient starts at a multiple of so many elements, and the length of
      a row is a multiple of it. In between are zeros. Gradients cut along another dim than 0 share such a piece.
    - ``error_feedback`` (default False): each rank keeps what its payloads have lost, in bfloat16, and adds it to the
      next gradients that it sends. See :func:`fsdp2.tensors.wire_residuals`.
    """

    def fsdp_pre_reduce_scatter(self, pieces: torch.Tensor) -> Payload:
        """Encode ``pieces`` ``[rows, n]``, which must not be changed: row r is what rank r is going to own.

        Returns contiguous tensors of any dtype, ``[rows, ...]``: row r of each is sent to rank r. Shapes and dtypes
        depend on the shape of ``pieces`` only.
        """

    def fsdp_post_reduce_scatter(self, received: Payload, reduce_dtype: torch.dtype) -> torch.Tensor:
        """Decode what :meth:`fsdp_pre_reduce_scatter` has made: row r of each tensor comes from rank r.

        Returns ``[rows, n]`` of any floating-point dtype. The rows are then added up in ``reduce_dtype``.
        """


class CastWire:
    """Gradients travel in ``dtype``. Those that autograd has computed in it are sent as they are."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def fsdp_pre_reduce_scatter(self, pieces: torch.Tensor) -> Payload:
        return (pieces.to(self._dtype),)

    def fsdp_post_reduce_scatter(self, received: Payload, reduce_dtype: torch.dtype) -> torch.Tensor:
        return received[0]


class WireMaker:
    """Makes the comms that send gradients by ``wire``, a dtype or a :class:`GradientWire`."""

    def __init__(self, wire: Any) -> None:
        self.wire = wire

    def __call__(self, default: comms.ReduceComm, axis: Axis, device: torch.device) -> comms.ReduceComm:
        format = CastWire(self.wire) if isinstance(self.wire, torch.dtype) else self.wire
        return WiredReduce(format, default, axis, device)


class WiredReduce(comms.ReduceComm):
    """Reductions over the shard axis ``axis``, and then over replicas, by ``wire``.

    Attributes:
        shards: what sums over the shard axis.
    """

    reads_gaps = True  # blocks of what is sent to other replicas run through the whole buffer

    def __init__(self, wire: GradientWire, default: comms.ReduceComm, axis: Axis, device: torch.device) -> None:
        self.wire, self._default, self._device = wire, default, device
        self._is_alone = axis.size == 1
        # Gradients that are sent one by one can be packed where a block of their format starts.
        self.routing = default.routing if self._is_alone else plans.Routing(direct_min_nbytes=0, reduces_casts=True)
        self.shards = Exchange(wire, axis, default)
        self._replicas: dict[dist.ProcessGroup, Exchange] = {}
        self._owner: object = None  # of the residuals

    def reduce_scatter(self, *, averages: bool = False) -> comms.ReduceLaunch:
        assert not averages  # see GroupGradients._averages
        return partial(self._launch_for, object())  # called once for each set of plans

    def _launch_for(
        self, owner: object, outputs: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> Sequence[comms.Waitable]:
        """Launch for the plans ``owner``. What other plans still owe belongs to other parameters, and is dropped."""
        if self._owner not in (None, owner):
            for exchange in (self.shards, *self._replicas.values()):
                exchange.residuals.clear()
        self._owner = owner
        launch = self._default.reduce_scatter() if self._is_alone else self._launch
        return launch(outputs, inputs)

    def disown(self) -> None:
        """Let the next plans have the residuals: they were loaded for those."""
        self._owner = None

    def reduce_buffer_nbytes(self, nbytes: int) -> int:
        """The rows, what is sent and received, and the values to add: at most the rows again, three times."""
        return 0 if self._is_alone else 4 * nbytes

    def all_reduce(
        self, group: dist.ProcessGroup | None, sums: Sequence[torch.Tensor], op: dist.ReduceOp.RedOpType
    ) -> Sequence[comms.Waitable]:
        assert op == dist.ReduceOp.SUM
        exchange = self.replicas(group)
        return [work for key, each in enumerate(sums) for work in exchange.all_reduce(key, as_real(each))]

    def replicas(self, group: dist.ProcessGroup | None) -> Exchange:
        """What sums over the replicate axis, whose ranks are in ``group``."""
        assert group is not None
        if group not in self._replicas:
            axis = axis_of(group)
            self._replicas[group] = Exchange(self.wire, axis, comms.comm_for(axis, self._device))
        return self._replicas[group]

    def _launch(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Sequence[comms.Waitable]:
        pairs = [(as_real(output), as_real(values)) for output, values in zip(outputs, inputs, strict=True)]
        inputs.clear()
        works: list[comms.Waitable] = []
        for dtype in dict.fromkeys(output.dtype for output, _ in pairs):
            alike = [(output, values) for output, values in pairs if output.dtype is dtype and output.numel() > 0]
            pairs = [(output, values) for output, values in pairs if output.dtype is not dtype]
            if alike:
                works += self.shards.reduce_scatter([each for each, _ in alike], [values for _, values in alike])
        return works


class Exchange:
    """Sums over ``axis``, by ``wire``. ``comm`` sends what ranks gather, and on gloo also the pieces.

    Attributes:
        residuals: what this rank's last payloads have lost, ``[W, n]``: by the dtype of the sums, or by the plan that
            the sums belong to.
    """

    def __init__(self, wire: GradientWire, axis: Axis, comm: Any) -> None:
        self._wire, self.axis, self._comm = wire, axis, comm
        self._block_size = getattr(wire, "block_size", 1)
        self._keeps_residual = keeps_residuals(wire)
        self.residuals: dict[torch.dtype | int, torch.Tensor] = {}

    def columns(self, sizes: Sequence[int]) -> tuple[list[int], int]:
        """Where pieces of these ``sizes`` start in a row, and the length of the row."""
        starts, end = plans.pack(sizes, self._block_size)
        return starts, -(-end // self._block_size) * self._block_size

    def part_numel(self, numel: int) -> int:
        """How many of ``numel`` elements each rank owns, with padding."""
        return self.columns([-(-numel // self.axis.size)])[1]

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Sequence[comms.Waitable]:
        """Sum each of ``inputs``, whose last rows may be short, into its output."""
        sizes = [output.numel() for output in outputs]
        starts, numel = self.columns(sizes)
        dtype = outputs[0].dtype
        pieces = self._packed(sizes, starts, numel, inputs, dtype)

        def land(total: torch.Tensor) -> Sequence[comms.Waitable]:
            parts = [total[start : start + size] for start, size in zip(starts, sizes, strict=True)]
            _torch.foreach_copy(list(outputs), parts)
            return ()

        return self._sum(dtype, pieces, dtype, land)

    def all_reduce(self, key: int, tensor: torch.Tensor) -> Sequence[comms.Waitable]:
        """Sum ``tensor``, of plan ``key``, over the ranks in place. Each rank owns a part, and sends its total back."""
        size, dtype = self.axis.size, tensor.dtype
        if tensor.numel() == 0:
            return ()
        numel = self.part_numel(tensor.numel())
        pieces = pad(tensor, (0, size * numel - tensor.numel())).view(size, numel)

        def send_back(total: torch.Tensor) -> Sequence[comms.Waitable]:
            sent = self._wire.fsdp_pre_reduce_scatter(total.unsqueeze(0))
            if self._keeps_residual:
                lost = total - self._wire.fsdp_post_reduce_scatter(sent, dtype)[0]
                mine = self.residuals[key][self.axis.rank]
                mine.add_(lost.nan_to_num_(0.0, 0.0, 0.0))
            received = [part.new_empty(size, *part.shape[1:]) for part in sent]
            launch = self._comm.all_gather([_as_bytes(each) for each in received], [_as_bytes(each) for each in sent])
            return _after(launch(), partial(self._land, tensor, received))

        return self._sum(key, pieces, dtype, send_back)

    def _land(self, tensor: torch.Tensor, received: Sequence[torch.Tensor]) -> Sequence[comms.Waitable]:
        rows = self._wire.fsdp_post_reduce_scatter(tuple(received), tensor.dtype)
        tensor.copy_(rows.reshape(-1)[: tensor.numel()])
        return ()

    def _packed(
        self,
        sizes: Sequence[int],
        starts: Sequence[int],
        numel: int,
        inputs: Sequence[torch.Tensor],
        reduce_dtype: torch.dtype,
    ) -> torch.Tensor:
        """``inputs`` as the rows of all ranks, ``[W, numel]``, with zeros between them. In their own dtype, if they
        have one in common and nothing is to be added to them."""
        num_rows = self.axis.size
        if len(inputs) == 1 and inputs[0].numel() == num_rows * numel:
            return inputs[0].view(num_rows, numel)
        dtypes = {values.dtype for values in inputs}
        dtype = dtypes.pop() if len(dtypes) == 1 and not self._keeps_residual else reduce_dtype
        is_full = sum(values.numel() for values in inputs) == num_rows * numel
        packed = (torch.empty if is_full else torch.zeros)((num_rows, numel), dtype=dtype, device=inputs[0].device)
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for size, start, values in zip(sizes, starts, inputs, strict=True):
            num_full, rest = divmod(values.numel(), size)
            if num_full:
                targets.append(packed[:num_full, start : start + size])
                sources.append(values[: num_full * size].view(num_full, size))
            if rest:
                targets.append(packed[num_full, start : start + rest])
                sources.append(values[num_full * size :])
        _torch.foreach_copy(targets, sources)
        return packed

    def _sum(
        self,
        key: torch.dtype | int,
        pieces: torch.Tensor,
        dtype: torch.dtype,
        then: Callable[[torch.Tensor], Sequence[comms.Waitable]],
    ) -> Sequence[comms.Waitable]:
        """Send row r of ``pieces`` to rank r, and call ``then`` with the sum of the rows that arrive here."""
        with torch.inference_mode(False), torch.no_grad():
            sent = self._encoded(key, pieces, dtype)
            received = [torch.empty_like(part) for part in sent]
            return _after(self._all_to_all(received, sent), partial(self._add, received, dtype, then))

    @torch.no_grad()
    def _add(
        self,
        received: Sequence[torch.Tensor],
        dtype: torch.dtype,
        then: Callable[[torch.Tensor], Sequence[comms.Waitable]],
    ) -> Sequence[comms.Waitable]:
        return then(total_of(self._wire, tuple(received), dtype))

    def _encoded(self, key: torch.dtype | int, pieces: torch.Tensor, dtype: torch.dtype) -> Payload:
        if not self._keeps_residual:
            return self._wire.fsdp_pre_reduce_scatter(pieces)
        residual = self.residual(key, pieces.size(1), pieces.device)
        sent, lost = with_feedback(self._wire, pieces.to(dtype), residual)
        residual.copy_(lost)
        return sent

    def residual(self, key: torch.dtype | int, numel: int, device: torch.device) -> torch.Tensor:
        """What was lost for ``key`` in rows of ``numel`` elements. It starts as zeros."""
        found, shape = self.residuals.get(key), (self.axis.size, numel)
        if found is None or found.shape != shape:
            found = self.residuals[key] = torch.zeros(shape, dtype=RESIDUAL_DTYPE, device=device)
        return found

    def total_residual(self, key: torch.dtype | int, numel: int, device: torch.device) -> torch.Tensor:
        """What all ranks have lost of the pieces that this rank owns, added up in rank order. Waits for them."""
        totals: list[torch.Tensor] = []

        def keep(total: torch.Tensor) -> Sequence[comms.Waitable]:
            totals.append(total)
            return ()

        exact = Exchange(CastWire(RESIDUAL_DTYPE), self.axis, self._comm)
        rows = self.residual(key, numel, device)
        comms.wait_for(comms.launched(exact._sum, key, rows, torch.float32, keep))
        return totals[0]

    def _all_to_all(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Sequence[comms.Waitable]:
        if isinstance(self._comm, PeerComm):
            return self._comm.all_to_all(received, sent)
        for output, mine in zip(received, sent, strict=True):  # as bytes: backends know fewer dtypes than torch
            dist.all_to_all_single(_as_bytes(output), _as_bytes(mine), group=self.axis.group)
        return ()


def keeps_residuals(wire: GradientWire) -> bool:
    """Whether what a payload loses is added to the next one."""
    return bool(getattr(wire, "error_feedback", False))


def with_feedback(wire: GradientWire, pieces: torch.Tensor, residual: torch.Tensor) -> tuple[Payload, torch.Tensor]:
    """The payload of ``pieces`` with ``residual`` added, and what that payload loses. Where a value is not finite,
    nothing is kept, or no later gradient would be finite."""
    whole = pieces + residual
    sent = wire.fsdp_pre_reduce_scatter(whole)
    lost = whole - wire.fsdp_post_reduce_scatter(sent, whole.dtype)
    return sent, lost.nan_to_num_(0.0, 0.0, 0.0)


def total_of(wire: GradientWire, received: Payload, dtype: torch.dtype) -> torch.Tensor:
    """The sum, in ``dtype``, of the rows that ``received`` holds, in their order."""
    first, *others = wire.fsdp_post_reduce_scatter(received, dtype)
    total = torch.empty_like(first, dtype=dtype).copy_(first)
    for other in others:
        total.add_(other)
    return total


class _Then:
    """Messages in flight, and what to do when they have arrived."""

    def __init__(self, works: Sequence[comms.Waitable], then: Callable[[], Sequence[comms.Waitable]]) -> None:
        self._works, self._then = works, then

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for work in self._then():
            work.wait()


def _after(works: Sequence[comms.Waitable], then: Callable[[], Sequence[comms.Waitable]]) -> Sequence[comms.Waitable]:
    """Call ``then`` after ``works``: at once, if they are ordered on the current stream."""
    return (_Then(works, then),) if works else then()


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The flat ``tensor``; of complex numbers, both parts of each, in the same memory."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


# What a policy may ask for

_SUM_DTYPES = (torch.float32, torch.float64)


def check_wire(
    wire: Any, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, device: torch.device
) -> None:
    """Refuse a ``reduce_wire`` that cannot carry gradients to be summed in ``reduce_dtype``. Encodes a few zeros."""
    if wire is None:
        return
    where = "fully_shard: mp_policy.reduce_wire"
    is_dtype = isinstance(wire, torch.dtype)
    is_wire = not isinstance(wire, type) and isinstance(wire, GradientWire)
    remedy = "For example: MixedPrecisionPolicy(reduce_dtype=torch.float32, reduce_wire=torch.bfloat16)."
    expect(is_dtype or is_wire, where, wire, "a torch.dtype, or an fsdp2.tensors.GradientWire", remedy)
    if reduce_dtype not in _SUM_DTYPES:
        raise ValueError(
            f"{where} is {wire}, but mp_policy.reduce_dtype is {reduce_dtype}, expected torch.float32 or "
            f"torch.float64, in which the gradients that arrive are summed. {remedy}"
        )
    if is_dtype:
        _check_dtype(where, wire, param_dtype, reduce_dtype)
    else:
        check_hooks(wire, reduce_dtype, device)


def _check_dtype(where: str, dtype: torch.dtype, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype) -> None:
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(
            f"{where} is {dtype}, expected a floating-point dtype of at least 16 bits, since gradients are cast "
            "without a scale. Pass torch.bfloat16, or for fewer bytes, a format with scales: fsdp2.tensors.Int8Wire()."
        )
    if dtype.itemsize >= reduce_dtype.itemsize:
        raise ValueError(
            f"{where} is {dtype}, expected a dtype narrower than the reduce_dtype {reduce_dtype}. Leave reduce_wire "
            "out to send gradients in reduce_dtype."
        )
    if dtype is torch.float16 and param_dtype is not torch.float16:
        raise ValueError(
            f"{where} is torch.float16, which overflows beyond 65504, and mp_policy.param_dtype is {param_dtype}, so "
            "gradients may be larger. Pass torch.bfloat16, or compute in torch.float16 as well."
        )


def check_hooks(wire: GradientWire, reduce_dtype: torch.dtype, device: torch.device) -> None:
    """Refuse hooks whose results have other shapes than the protocol asks for."""
    name = type(wire).__name__
    block_size = getattr(wire, "block_size", 1)
    expect(
        isinstance(block_size, int) and block_size >= 1, f"{name}.block_size", block_size, "at least 1", by_value=True
    )
    pieces = torch.zeros(2, 2 * block_size, dtype=reduce_dtype, device=device)
    sent = wire.fsdp_pre_reduce_scatter(pieces)
    if not isinstance(sent, tuple) or not sent or not all(_has_rows(part, 2) for part in sent):
        raise ExtensionError(
            f"{name}.fsdp_pre_reduce_scatter returned {_described(sent)} for pieces of shape {tuple(pieces.shape)}, "
            "expected a tuple of contiguous tensors whose dim 0 is 2, one row for each rank."
        )
    found = wire.fsdp_post_reduce_scatter(sent, reduce_dtype)
    if not isinstance(found, torch.Tensor) or found.shape != pieces.shape or not found.dtype.is_floating_point:
        raise ExtensionError(
            f"{name}.fsdp_post_reduce_scatter returned {_described(found)}, expected a floating-point tensor of shape "
            f"{tuple(pieces.shape)}, like the pieces that were encoded."
        )


def _has_rows(part: object, num_rows: int) -> bool:
    is_tensor = isinstance(part, torch.Tensor) and part.dim() > 0
    return is_tensor and part.size(0) == num_rows and part.is_contiguous()  # type: ignore[attr-defined]


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_described, value))})"
    return repr(value)
