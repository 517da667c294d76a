"""Streams the whole parameters of a sharded model, bucket by bucket, for example to an inference engine.

``stream_plan`` decides what is in the buckets, and ``stream_gate`` when ranks may continue; this file sends the data. A
bucket takes one message per pair of ranks, besides those of large shards, which arrive where the caller reads them.
Rule: nothing is gathered before the receiving ranks have asked for it, so that no gather ever waits for a caller.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint.stream_gate import Gate, Leaving, refuse
from fsdp2.checkpoint.stream_plan import Item, PlannedBucket, StreamedBucket, Transform, called, plan_stream
from fsdp2.checkpoint.weights import Rename, Weight, check_dtype, check_ready, plain_values, send_to, weights_of
from fsdp2.core import _torch, comms, door, plans
from fsdp2.extras.checked import check
from fsdp2.extras.exchange import is_alone
from fsdp2.extras.lending import check_idle, packed
from fsdp2.extras.output import progress
from fsdp2.extras.sizes import nbytes_of

_CALLER = "stream_full_params"


@door.all_entries
class FullParamStream:
    """What :func:`stream_full_params` returns. Iterate once, over tensors or over ``buckets()``, in a ``for`` loop.

    Attributes:
        manifest: the manifests of all buckets, in order. They are available without communication.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Sequence[PlannedBucket],
        ranks: Sequence[int],
        to_rank: int | None,
        ahead: int,
        device: torch.device | str | None,
    ) -> None:
        self.manifest = tuple(bucket.manifest for bucket in plan)
        self._model, self._plan, self._ranks, self._to_rank = model, plan, ranks, to_rank
        self._ahead, self._device = ahead, device
        self._is_used = self._stops = False

    @_torch.runs_between_graphs
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(name, tensor)`` for all buckets. Tensors of a bucket share memory: clone the few that you keep."""
        return self._tensors(self.buckets())

    def buckets(self) -> Iterator[StreamedBucket]:
        """Gather one bucket after another. A rank that does not receive gets none, and stays in the loop until the
        receiver has finished.

        Raises:
            ValueError: ranks have different tensors or different arguments.
            ScheduleError: a forward or backward is running, or parameters are lent to ``fsdp2.unsharded``.
            RuntimeError: the stream was already used; a tensor was replaced since it was made; another rank left its
                loop, or raised; ``transform`` raised.
            CommunicationError: a collective failed, or a rank did not join in time.
        """
        if self._is_used:
            raise RuntimeError(f"{_CALLER}: this stream was iterated already. Call {_CALLER} again.")
        self._is_used = True
        return self._run()

    def stop(self) -> None:
        """End the loops of all ranks without an error, after the caller's current bucket."""
        self._stops = True

    @staticmethod
    @_torch.runs_between_graphs
    def _tensors(buckets: Iterator[StreamedBucket]) -> Iterator[tuple[str, torch.Tensor]]:
        with closing(buckets):  # type: ignore[type-var]  # a generator
            for bucket in buckets:
                tensors = deque(bucket.tensors)
                del bucket
                while tensors:  # no variable holds a whole tensor: the caller alone keeps it alive
                    yield tensors.popleft()

    @_torch.runs_between_graphs
    def _run(self) -> Iterator[StreamedBucket]:
        check_idle(self._model, _CALLER)  # before this rank counts the stream, since others may not begin it
        gate = Gate(self._ranks, self._ranks if self._to_rank is None else [self._to_rank], _CALLER)
        pending: deque[_Gathering] = deque()
        num_done = 0
        try:
            self._check_still_there()
            gate.join(repr((self.manifest, self._to_rank, self._ahead)))
            remaining = iter(self._plan)
            total = sum(len(bucket.items) for bucket in self._plan)
            with progress("stream", total, "parameter") as advance:
                while self._goes_on(gate, num_done) and num_done < len(self._plan):
                    for bucket in remaining:
                        pending.append(_Gathering(bucket, self._to_rank))
                        if len(pending) > self._ahead:
                            break
                    num_done += 1
                    advance(len(pending[0].items))
                    if self._to_rank in (None, _rank()):
                        yield self._handed_out(pending.popleft())
                    else:
                        pending.popleft().wait()
        except GeneratorExit:
            why = Leaving.STOPPED if self._stops else Leaving.LEFT
            gate.leave(why, f"after {num_done} of {len(self._plan)} buckets")
            raise
        except BaseException as error:
            gate.leave(Leaving.RAISED, f"{type(error).__name__}: {error}")
            raise
        finally:
            try:
                for each in pending:  # other ranks have launched it, too
                    each.wait()
            finally:
                gate.close()

    def _check_still_there(self) -> None:
        """Raise if tensors of the model were replaced since, on this or another rank: the plan has the old values."""
        current = {(id(each.tensor), id(each.param)) for each in weights_of(self._model, _CALLER)}
        planned = (weight for bucket in self._plan for item in bucket.items for weight in item.weights)
        gone = next((each for each in planned if (id(each.tensor), id(each.param)) not in current), None)
        if gone is not None:
            raise RuntimeError(
                f"{_CALLER}: '{gone.names[0]}' was replaced after this stream was made, so the stream would hand out "
                f"its old values. Call {_CALLER} after load_state_dict(assign=True), reshard_to, or whatever replaces "
                "tensors."
            )

    def _goes_on(self, gate: Gate, step: int) -> bool:
        if self._stops:
            gate.leave(Leaving.STOPPED, "")
            return False
        return gate.ask(step)

    def _handed_out(self, gathering: _Gathering) -> StreamedBucket:
        flat = gathering.finish()
        flat = flat if self._device is None else flat.to(self._device)
        return StreamedBucket(flat, gathering.manifest.cut(flat), gathering.manifest)


@door.entry
def stream_full_params(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    bucket_nbytes: int | str | None = None,
    to_rank: int | None = None,
    ahead: int = 0,
    rename: Rename | None = None,
    transform: Transform | None = None,
    buffers: bool = False,
) -> FullParamStream:
    """Stream whole parameters, for example from a trainer to an inference engine.

    ``for name, tensor in stream`` yields them one by one, ``for bucket in stream.buckets()`` yields those of a bucket,
    which fits into one message; ``stream.manifest`` lists them without communication. All ranks of the model must
    iterate, between steps. Parameters come in the order of ``named_parameters``, under the names of the state dict, and
    tied ones come once. The tensors are plain, contiguous, detached copies: for wire formats, the values of the shards;
    for quantised weights, the dequantised values.
    Shards, gradients and the optimizer stay unchanged. The model must not train meanwhile.

    **Order.** Nothing is gathered for a bucket before all receiving ranks have asked for it. While a caller has a
    bucket, other ranks wait on the store of the process group, not in a collective, so the caller may use collectives
    with other processes. After the last bucket, ranks leave the loop when all receiving ranks leave theirs.

    **Ends.** If a caller leaves the loop early on one rank, or ``transform`` raises there, the loops of others raise.
    ``stream.stop()`` ends all loops without an error.

    **Memory.** While a bucket is gathered, it is held together with a copy of its tensors that are small, unevenly cut
    or not cut along dim 0, and with the previous bucket if a variable of the caller still holds that. ``ahead=1`` takes
    one more bucket. A tensor larger than a bucket gets its own bucket. Non-receiving ranks hold only what they send.

    **Traffic.** With ``to_rank``, each rank of that rank's replica sends its shards once, and other replicas send
    nothing; on accelerators this requires NCCL. Elsewhere, and for parameters that tensor parallelism has cut, all
    ranks gather.

    Args:
        model: the model, or a part of it.
        dtype: the dtype to which floating-point parameters are cast before they are sent. Default: the dtype of the
            shards. Tensors that ``transform`` takes keep theirs.
        device: the device of the tensors. Default: the device of the mesh.
        bucket_nbytes: the largest size of a bucket, or text such as ``"512MiB"``. Default: one bucket per unit.
        to_rank: the only global rank that receives. Default: all ranks receive everything.
        ahead: 1 gathers the next bucket while the caller has one, so collectives are in flight meanwhile.
        rename: maps names to new ones: either a mapping, which need not have all names, or a function, which returns
            None to leave a tensor out.
        transform: maps names, or tuples of names, to functions. A function gets the whole tensors of its names, and
            returns a mapping of new names to the tensors that it makes, such as merged or quantised ones. It is first
            called with meta tensors, for the manifest. See ``merge_lora``.
        buffers: whether to include persistent buffers and other tensors that are not sharded: each rank's own.

    Raises:
        TypeError: ``dtype`` is not a floating-point dtype; ``rename`` or ``transform`` is of the wrong type.
        ValueError: an argument is out of range; two tensors get one name; ``transform`` names a tensor that does not
            exist; a parameter is on a mesh without this rank.
        ScheduleError: a forward or backward is running, or parameters are lent to ``fsdp2.unsharded``.
        RuntimeError: a parameter is on the meta device; ``rename`` or ``transform`` raised.
    """
    ranks = _ranks_of(model, everywhere=to_rank is not None)
    try:
        check_dtype(dtype, _CALLER)
        max_nbytes = None if bucket_nbytes is None else nbytes_of(bucket_nbytes, f"{_CALLER}: bucket_nbytes", "512MiB")
        check(f"{_CALLER}: buffers", buffers, "bool")
        _check_arguments(to_rank, ranks, ahead, device)
        weights = weights_of(model, _CALLER)
        weights = [each for each in weights if buffers or isinstance(each.tensor, nn.Parameter)]
        check_ready(weights, _CALLER)
        plan = plan_stream(weights, dtype, transform, rename, max_nbytes, _CALLER)
    except Exception as error:
        if _rank() in ranks and not is_alone(error):
            refuse(ranks, _CALLER, error)
        raise
    return FullParamStream(model, plan, ranks, to_rank, ahead, device)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks_of(model: nn.Module, *, everywhere: bool) -> list[int]:
    """The global ranks that stream ``model``: those of its largest mesh if that contains all others, else all ranks. A
    model without meshes needs only this rank, unless ``everywhere``."""
    if not dist.is_initialized():
        return [0]
    meshes = (param.device_mesh.mesh for param in model.parameters() if isinstance(param, DTensor))
    found = {tuple(sorted(mesh.flatten().tolist())) for mesh in meshes}
    everyone = list(range(dist.get_world_size()))
    if not found:
        return everyone if everywhere else [_rank()]
    largest = max(found, key=len)
    has_all = all(set(each) <= set(largest) for each in found)
    return list(largest) if has_all else everyone


def _check_arguments(to_rank: object, ranks: Sequence[int], ahead: object, device: torch.device | str | None) -> None:
    if to_rank is not None and (isinstance(to_rank, bool) or not isinstance(to_rank, int) or to_rank not in ranks):
        raise ValueError(
            f"{_CALLER}: to_rank is {to_rank!r}, expected None or one of the ranks that hold the model, {list(ranks)}."
        )
    if isinstance(ahead, bool) or ahead not in (0, 1):
        raise ValueError(f"{_CALLER}: ahead is {ahead!r}, expected 0 or 1 bucket.")
    try:
        has_values = device is None or torch.device(device).type != "meta"
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{_CALLER}: device is {device!r}, expected a device, such as 'cpu'.") from error
    if not has_values:
        raise ValueError(
            f"{_CALLER}: device is {device!r}, where tensors have no values. Shapes are in stream.manifest."
        )


# Gathering one bucket


class _Gathering:
    """The launched messages of one bucket, and the memory in which they arrive. ``to_rank`` is as in
    ``stream_full_params``."""

    @torch.no_grad()
    def __init__(self, bucket: PlannedBucket, to_rank: int | None) -> None:
        self.manifest, self.items = bucket.manifest, bucket.items
        weights = [weight for item in bucket.items for weight in item.weights]
        device = next((each.param.mesh.device for each in weights if each.param is not None), weights[0].local.device)
        self._device = device
        self._flat: torch.Tensor | None = None
        self._made: deque[tuple[Item, list[torch.Tensor], list[torch.Tensor]]] = deque()  # see _make
        if to_rank in (None, _rank()):
            self._flat = torch.empty(self.manifest.nbytes, dtype=torch.uint8, device=self._device)
        by_axis: dict[object, list[_Travelling]] = {}
        for each in self._travelling():
            if each.weight.is_cut_once:
                by_axis.setdefault(each.weight.managed[1].mesh.shard, []).append(each)
                continue
            whole = each.weight.whole(each.dtype)
            if each.target is not None:
                each.target.copy_(whole)
        self._messages = [_Messages(each, to_rank, self._device) for each in by_axis.values()]

    def _travelling(self) -> Iterator[_Travelling]:
        places = iter([] if self._flat is None else self.manifest.cut(self._flat))
        for item in self.items:
            outputs = [place for _, place in itertools.islice(places, len(item.outputs))]
            targets = outputs
            if item.function is not None and self._flat is not None:
                pairs = zip(item.weights, item.dtypes, strict=True)
                targets = [torch.empty(each.whole_like[0], dtype=dtype, device=self._device) for each, dtype in pairs]
                self._made.append((item, targets, outputs))
            # Ranks that do not receive have no targets.
            yield from itertools.starmap(_Travelling, itertools.zip_longest(item.weights, item.dtypes, targets))

    def wait(self) -> None:
        """Wait for the messages, and drop them. The CPU waits for the device, too, so that whatever the caller or
        another process then enqueues on this device cannot overlap with the gather."""
        messages, self._messages = self._messages, []
        for each in messages:
            each.finish()
        streams = comms.streams_for(self._device)
        streams.wait_on_cpu(streams.record())

    @torch.no_grad()
    def finish(self) -> torch.Tensor:
        """The whole bucket."""
        self.wait()
        flat, self._flat = self._flat, None
        assert flat is not None
        while self._made:
            _make(*self._made.popleft())
        return flat


def _make(item: Item, given: list[torch.Tensor], places: list[torch.Tensor]) -> None:
    """Call the function of ``item`` with ``given``, and copy what it makes to ``places``."""
    assert item.function is not None
    made = called(item.function, given, item.weights, _CALLER)
    for key, place in zip(item.keys, places, strict=True):
        found = made.get(key)
        if found is None or found.shape != place.shape or found.dtype is not place.dtype:
            shown = "nothing" if found is None else f"{found.dtype} of shape {tuple(found.shape)}"
            raise ValueError(
                f"{_CALLER}: transform of '{item.weights[0].names[0]}' made {shown} for '{key}', but {place.dtype} of "
                f"shape {tuple(place.shape)} of meta tensors. Let shapes, dtypes and names not depend on values."
            )
        place.copy_(found)


@dataclass(frozen=True)
class _Travelling:
    """A weight, the dtype in which it is sent, and where its whole tensor goes; None if this rank does not need it."""

    weight: Weight
    dtype: torch.dtype
    target: torch.Tensor | None

    @property
    def chunk_nbytes(self) -> int:
        """The size of the longest shard."""
        return self.weight.managed[1].layout.chunk_numel * self.dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """Whether its concatenated shards are the whole tensor, and are large enough for messages of their own."""
        group, param = self.weight.managed
        is_whole = param.layout.is_even and param.layout.is_contiguous
        return is_whole and self.chunk_nbytes >= group.comm.routing.direct_min_nbytes


class _Messages:
    """The messages of one shard axis for a bucket: large shards are sent one by one, all others in one message."""

    def __init__(self, travelling: Sequence[_Travelling], to_rank: int | None, device: torch.device) -> None:
        group, param = travelling[0].weight.managed
        axis = param.mesh.shard
        assert axis.group is not None
        self._works: Sequence[comms.Waitable] = ()
        self._streams = comms.streams_for(device)
        self._arrived: torch.Event | None = None
        self._packed: list[tuple[_Travelling, int]] = []  # with its place in the message
        self._staging: torch.Tensor | None = None
        ranks = dist.get_process_group_ranks(axis.group)
        if to_rank is not None and to_rank not in ranks:
            return  # another replica sends the shards
        backend = _torch.backend_name(axis.group, device)
        is_for_one = to_rank is not None and (device.type == "cpu" or backend == "nccl")
        receives = not is_for_one or to_rank == _rank()
        inputs, outputs = [], []
        for each in (each for each in travelling if each.is_direct):
            inputs.append(packed(each.weight.managed[1], plain_values(each.weight.local, each.dtype)).view(torch.uint8))
            if receives and each.target is not None:
                outputs.append(each.target.view(-1).view(torch.uint8))
            elif receives:
                outputs.append(inputs[-1].new_empty(axis.size * inputs[-1].numel()))
        small = [each for each in travelling if not each.is_direct]
        if small:
            inputs.append(self._packed_together(small, device))
        if small and receives:
            self._staging = inputs[-1].new_empty(axis.size * inputs[-1].numel())
            outputs.append(self._staging)
        if is_for_one and to_rank is not None:
            launch: comms.Launch = partial(send_to, to_rank, axis.group, inputs, outputs)
        else:
            launch = group.comm.all_gather(outputs, inputs)
        self._streams.gather_after_compute()  # compute has packed what is sent
        with self._streams.on_gather:
            self._works = comms.launched(launch)
            if self._streams.runs_ahead:  # in this case, only the stream waits
                comms.wait_for(self._works)
                self._works = ()
            self._arrived = self._streams.record()
        self._kept = [*inputs, *outputs]  # until they have arrived

    def _packed_together(self, small: Sequence[_Travelling], device: torch.device) -> torch.Tensor:
        """One message with this rank's shards of ``small``."""
        offsets, nbytes = plans.pack([each.chunk_nbytes for each in small], plans.ALIGNMENT_NBYTES)
        message = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._packed = list(zip(small, offsets, strict=True))
        for each, start in self._packed:
            local = each.weight.local
            place = message[start : start + local.numel() * each.dtype.itemsize]
            place.view(each.dtype).view(local.shape).copy_(local)
        return message

    def finish(self) -> None:
        """Wait, and unpack the tensors that arrived in one message."""
        works, self._works = self._works, ()
        comms.wait_for(works)
        self._streams.wait_here(self._arrived)  # compute waits for the gather: it reads the received data, or frees it
        self._kept = []
        staging, self._staging = self._staging, None
        if staging is not None:
            for each, start in self._packed:
                if each.target is not None:
                    _unpack(each, each.target, staging, start)


def _unpack(each: _Travelling, target: torch.Tensor, staging: torch.Tensor, start: int) -> None:
    layout = each.weight.managed[1].layout
    for rank, row in enumerate(staging.view(layout.num_shards, -1)):
        first, end = layout.interval(rank)
        piece = target.narrow(layout.dim, first, end - first)
        piece.copy_(row[start : start + piece.numel() * each.dtype.itemsize].view(each.dtype).view(piece.shape))
