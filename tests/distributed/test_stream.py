"""Whole parameters in buckets: when ranks gather, what travels to whom, what it takes, and how a stream ends.

The oracle of values is the unsharded model; ``test_weights`` has that for every way to shard. Messages are counted
where they are handed to the process group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.checkpoint import stream_weights
from fsdp2.extras import torch_names
from tests.distributed.changes import whole
from tests.distributed.support import NewMemory, seeded, shard_units
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of
from tests.harness.models import MLP
from tests.harness.training import Step, one_backward

NUM_LAYERS, WIDTH = 6, 512
KIB = 1024


class Layers(nn.Sequential):
    """Linear layers of 1 MiB and a small bias each; each is a unit."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))

    def units(self) -> list[nn.Module]:
        return list(self)


def _sharded(ctx: RankContext, make: Callable[[], Any] = MLP, mesh: DeviceMesh | None = None) -> Any:
    return shard_units(seeded(make), mesh=mesh or ctx.mesh_1d())


def _streamed(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    return {
        name: tensor.clone()
        for bucket in fsdp2.checkpoint.stream_full_params(model, **options).buckets()
        for name, tensor in bucket.tensors
    }


# When


@contextmanager
def _counted_gathers(key: str) -> Iterator[dist.Store]:
    """In the store, under ``key``: how many buckets rank 1 has begun to gather."""
    store, begin = torch_names.default_store(), stream_weights._Gathering.__init__

    def counting(*arguments: Any) -> None:
        if dist.get_rank() == 1:
            store.add(key, 1)
        begin(*arguments)

    with mock.patch.object(stream_weights._Gathering, "__init__", counting):
        yield store


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("to_rank", [0, None])
@distributed(2)
def test_no_rank_gathers_before_the_receiver_asks(ctx: RankContext, to_rank: int | None, ahead: int) -> None:
    """While rank 0 has a bucket, rank 1 has begun no other, or one if asked to."""
    model = _sharded(ctx)
    key = f"test_stream/{to_rank}/{ahead}"
    options = {"ahead": ahead} if ahead else {}  # 0 is the default: callers may use collectives of their own meanwhile
    stream = fsdp2.checkpoint.stream_full_params(model, bucket_nbytes=600, to_rank=to_rank, **options)
    num_buckets, found = len(stream.manifest), []
    expected = [min(index + 1 + ahead, num_buckets) for index in range(num_buckets)]
    assert num_buckets > 4
    with _counted_gathers(key) as store:
        for _ in stream.buckets():
            if ctx.rank == 0:
                while store.add(key, 0) < expected[len(found)]:  # the harness ends what never comes
                    time.sleep(0.001)
                time.sleep(0.02)  # for a gather that must not begin
                found.append(store.add(key, 0))
    assert found == (expected if ctx.rank == 0 else [])


@distributed(2)
def test_others_leave_the_loop_after_the_receiver(ctx: RankContext) -> None:
    """So also the last bucket is handed on while nobody gathers, for example for the next forward."""
    model = _sharded(ctx)
    store = torch_names.default_store()
    for _ in fsdp2.checkpoint.stream_full_params(model, to_rank=0).buckets():
        time.sleep(0.02)
        store.add("test_stream/body", 1)
    num_buckets = len(fsdp2.checkpoint.stream_full_params(model).manifest)
    assert store.add("test_stream/body", 0) == num_buckets
    dist.barrier()


# What


@distributed(2)
def test_the_manifest_says_what_comes_without_communication(ctx: RankContext) -> None:
    model = _sharded(ctx)
    if ctx.rank == 1:  # on one rank alone
        lone = fsdp2.checkpoint.stream_full_params(model, dtype=torch.bfloat16, bucket_nbytes=2000).manifest
        assert [each.name for bucket in lone for each in bucket.tensors] == [
            name for name, _ in model.named_parameters()
        ]
    stream = fsdp2.checkpoint.stream_full_params(model, dtype=torch.bfloat16, bucket_nbytes=2000)
    assert len(stream.manifest) > 2
    for bucket, manifest in zip(stream.buckets(), stream.manifest, strict=True):
        assert bucket.manifest is manifest
        assert bucket.flat.nbytes == manifest.nbytes <= 2000
        received = manifest.cut(bucket.flat.clone())
        for place, (name, tensor), (again, copied) in zip(manifest.tensors, bucket.tensors, received, strict=True):
            assert (place.name, place.shape, place.dtype) == (name, tuple(tensor.shape), tensor.dtype)
            assert name == again
            assert torch.equal(tensor, copied)
            assert tensor.is_contiguous()
            assert not tensor.requires_grad


@distributed(2)
def test_a_transform_gets_whole_tensors_together_and_may_quantise_them(ctx: RankContext) -> None:
    plain = seeded(MLP)
    model = _sharded(ctx)

    def quantised(weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
        scale = weight.abs().amax(1) / 127
        return {"exit.q": (weight / scale[:, None]).round().char(), "exit.scale": scale, "exit.bias": bias + 1}

    transform: Any = {("exit.weight", "exit.bias"): quantised, "entry.bias": lambda bias: {}}
    given = {"transform": transform, "rename": {"exit.scale": "s"}, "dtype": torch.bfloat16, "bucket_nbytes": 2000}
    stream = fsdp2.checkpoint.stream_full_params(model, **given)
    names = [each.name for bucket in stream.manifest for each in bucket.tensors]
    expected = {name: value.bfloat16() for name, value in whole(plain).items() if "entry.bias" not in name}
    made = quantised(plain.exit.weight.detach(), plain.exit.bias.detach())
    del expected["exit.weight"], expected["exit.bias"]
    expected |= {"exit.q": made["exit.q"], "s": made["exit.scale"], "exit.bias": made["exit.bias"]}
    compare_values("weights", {name: tensor.clone() for name, tensor in stream}, expected)
    assert names == list(expected)
    for to_rank in (0, 1):
        compare_values("weights", _streamed(model, **given, to_rank=to_rank), expected if ctx.rank == to_rank else {})


# How much


@distributed(4)
def test_ranks_of_the_receivers_replica_send_their_shards_once_and_others_nothing(ctx: RankContext) -> None:
    """Large shards in messages of their own; all others of a bucket in one."""
    model = _sharded(ctx, Layers, ctx.mesh_2d(2, 2))
    with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as started:
        found = _streamed(model, to_rank=2, bucket_nbytes="2200KiB")
    messages = [each for call in started.call_args_list for each in call.args[0]]
    weights, biases = [WIDTH * WIDTH * 4 // 2] * NUM_LAYERS, [2 * WIDTH * 4 // 2] * (NUM_LAYERS // 2)
    expected = {2: ("irecv", 3), 3: ("isend", 2)}.get(ctx.rank)
    assert sorted(each.tensor.nbytes for each in messages) == (sorted(weights + biases) if expected else [])
    assert {(each.op.__name__, each.peer) for each in messages} == ({expected} if expected else set())
    compare_values("weights", found, whole(seeded(Layers)) if ctx.rank == 2 else {})


@pytest.mark.parametrize("ahead", [0, 1])
@distributed(2)
def test_memory_is_that_of_few_buckets_however_many_there_are(ctx: RankContext, ahead: int) -> None:
    """The tensors of this model are gathered straight into the bucket, except for biases."""
    model = _sharded(ctx, Layers)
    bucket_nbytes = WIDTH * WIDTH * 4 + 4 * KIB
    small = 3 * 4 * KIB
    for to_rank in (None, 0):
        stream = fsdp2.checkpoint.stream_full_params(model, bucket_nbytes=bucket_nbytes, to_rank=to_rank, ahead=ahead)
        assert len(stream.manifest) == NUM_LAYERS
        with NewMemory() as new:
            for bucket in stream.buckets():
                assert bucket.flat.nbytes <= bucket_nbytes
                del bucket
        held = (1 + ahead) * bucket_nbytes if to_rank in (None, ctx.rank) else 0
        assert held <= new.peak + 4 * KIB
        assert new.peak <= held + (1 + ahead) * small


# How it ends


def _is_as_before(model: nn.Module) -> None:
    compare_values("weights", dict(fsdp2.checkpoint.stream_full_params(model)), whole(seeded(MLP)))


@contextmanager
def _caught(found: list[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("to_rank", [0, None])
@distributed(2)
def test_a_consumer_that_raises_or_breaks_off_ends_all_loops(ctx: RankContext, to_rank: int | None) -> None:
    model = _sharded(ctx)
    for ahead in (0, 1):
        for ends in ("raise", "break", "late"):
            found: list[str] = []
            stream = fsdp2.checkpoint.stream_full_params(model, bucket_nbytes=600, to_rank=to_rank, ahead=ahead)
            last = len(stream.manifest) if ends == "late" else 2
            with _caught(found):
                for index, _ in enumerate(stream.buckets(), 1):
                    if ctx.rank == 0 and index == last:
                        if ends == "break":
                            break
                        raise OSError("the engine is gone")
            expected = (
                f"RuntimeError: stream_full_params: rank 0 left the loop after {last} of {len(stream.manifest)} "
                "buckets, by break or by an error of its own, so rank 1 gets no more. To end the loops of all ranks, "
                "call stop() of the stream."
            )
            mine = [] if ends == "break" else ["OSError: the engine is gone"]
            assert found == (mine if ctx.rank == 0 else [expected])
    _is_as_before(model)


@pytest.mark.parametrize("to_rank", [1, None])
@distributed(2)
def test_stop_ends_the_loops_of_all_ranks_at_the_same_bucket(ctx: RankContext, to_rank: int | None) -> None:
    model = _sharded(ctx)
    for ahead in (0, 1):
        for also_breaks in (False, True):
            stream, num = fsdp2.checkpoint.stream_full_params(model, bucket_nbytes=600, to_rank=to_rank, ahead=ahead), 0
            for _ in stream.buckets():
                num += 1
                if ctx.rank == 1 and num == 3:
                    stream.stop()
                    if also_breaks:
                        break
            assert num == (3 if to_rank in (None, ctx.rank) else 0)
    _is_as_before(model)


@distributed(2)
def test_all_ranks_raise_what_one_finds(ctx: RankContext) -> None:
    """Arguments that only one rank has wrong, other arguments, a transform that raises on one rank, and a reuse."""
    model = _sharded(ctx)
    is_first = ctx.rank == 0

    def moody(bias: Tensor) -> dict[str, Tensor]:
        if not bias.is_meta and is_first:
            raise KeyError("scale")
        return {"exit.bias": bias}

    def lying(bias: Tensor) -> dict[str, Tensor]:
        return {"exit.bias": bias if bias.is_meta else bias.double()}

    def error(**options: Any) -> str:
        return error_of(lambda: _streamed(model, **options)).replace("\n", " ")

    def told(rank: int, text: str) -> str:
        return f"RuntimeError: stream_full_params: nothing more is gathered, because rank {rank} raised {text}"

    text = "ValueError: stream_full_params: bucket_nbytes is 0, expected a number of bytes, or a number and a unit"
    assert error(bucket_nbytes=0 if is_first else 600).startswith(text if is_first else told(0, text))
    text = "ValueError: stream_full_params: to_rank is 7, expected None or one of the ranks that hold the model"
    assert error(to_rank=None if is_first else 7).startswith(told(1, text) if is_first else text)
    text = "RuntimeError: stream_full_params: transform of 'exit.bias' raised KeyError: 'scale'"
    assert error(transform={"exit.bias": moody}) == (text if is_first else told(0, text))
    text = "ValueError: stream_full_params: transform of 'exit.bias' made torch.float64 of shape"
    assert text in error(transform={"exit.bias": lying})
    for others in ({"bucket_nbytes": 600 + 600 * ctx.rank}, {"to_rank": ctx.rank}, {"ahead": ctx.rank}):
        found = error(**others)
        assert any(f"rank {i} would stream other tensors than rank {1 - i}, or other" in found for i in (0, 1)), found
    stream = fsdp2.checkpoint.stream_full_params(model)
    assert len(dict(stream)) == len(list(model.parameters()))
    text = "RuntimeError: stream_full_params: this stream was iterated already."
    assert error_of(lambda: iter(stream)).startswith(text)
    _is_as_before(model)


@pytest.mark.parametrize("replace", ["assigned on one rank", "assigned", "another mesh"])
@distributed(2)
def test_a_stream_has_new_values_or_refuses_to_go_on(ctx: RankContext, replace: str) -> None:
    """It was made before its model was trained, loaded in place, or given other tensors."""
    model, other = (_sharded(ctx) for _ in range(2))
    earlier, stream = fsdp2.checkpoint.stream_full_params(model), fsdp2.checkpoint.stream_full_params(model)
    one_backward(Step(0, ctx.rank, None), other)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    model.load_state_dict(other.state_dict())
    expected = whole(other)
    compare_values("weights", {name: tensor.clone() for name, tensor in earlier}, expected)
    if replace == "another mesh":
        fsdp2.checkpoint.reshard_to(model, [], DeviceMesh(ctx.device_type, [0]))
        fsdp2.checkpoint.reshard_to(model, [], ctx.mesh_1d())
    elif replace == "assigned" or ctx.rank == 1:
        model.load_state_dict(other.state_dict(), assign=True)
    text = "RuntimeError: stream_full_params: 'entry.weight' was replaced after this stream was made, so"
    found = error_of(lambda: dict(stream)).replace("\n", " ")
    assert text in found or f"because rank {1 - ctx.rank} raised {text}" in found, found
    compare_values("weights", _streamed(model), expected)


@distributed(2)
def test_a_stream_that_has_ended_leaves_nothing_in_the_store(ctx: RankContext) -> None:
    model, store = _sharded(ctx), torch_names.default_store()
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    for how in ("end", "stop", "raise"):
        stream = fsdp2.checkpoint.stream_full_params(model, to_rank=0)
        with _caught([]):
            for _ in stream.buckets():
                if how == "stop":
                    stream.stop()
                assert how != "raise"
        dist.barrier()
        assert store.num_keys() == before
        dist.barrier()
