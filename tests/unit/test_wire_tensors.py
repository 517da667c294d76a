"""Tensors with a wire format behave as their master values, keep their class when moved, and travel as they say.

float8 and int8 keep their error bounds. float8 drops outdated scales, and computes like its dequantised values.
"""

from __future__ import annotations

import copy
import functools
import io
import math
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp2.core import _torch
from fsdp2.core.types import MixedPrecisionPolicy
from fsdp2.tensors import (
    BFloat16AllGatherTensor,
    Float8AllGatherTensor,
    Float8Scaling,
    Float8Tensor,
    Int8AllGatherTensor,
    WireFormatTensor,
    float8,
    precompute_float8_scales,
    wrap_parameters,
    wrapper as pieces,
)
from fsdp2.tensors.float8 import magnitude, quantise_float8, row_magnitudes, scale_from
from fsdp2.tensors.int8 import dequantise, quantise
from fsdp2.tensors.wrapper import written_by
from fsdp2.testing.world import StandInDTensor
from tests.harness.selection import in_ci

MAKERS: dict[str, Callable[[torch.Tensor], WireFormatTensor]] = {
    "bfloat16": functools.partial(BFloat16AllGatherTensor, pad=True),
    "int8": functools.partial(Int8AllGatherTensor, block_size=4),
    "float8": functools.partial(Float8AllGatherTensor, scaling=Float8Scaling.PER_ROW),
}
every_class = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def mesh_of(size: int) -> Any:
    """What hooks ask a 1D mesh for, as long as they do not communicate."""
    return SimpleNamespace(size=lambda: size)


def pre(shard: WireFormatTensor, num_ranks: int, full: torch.Tensor, param_dtype: torch.dtype | None = None) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    return shard.fsdp_pre_all_gather(mesh_of(num_ranks), full.shape, full.stride(), nn.Module(), policy)


@pytest.fixture
def master() -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


@every_class
def test_it_looks_like_its_values_gives_plain_tensors_and_is_written_in_place(make: Any, master: torch.Tensor) -> None:
    wrapper = make(master)
    assert (wrapper.shape, wrapper.stride(), wrapper.dtype) == (master.shape, master.stride(), master.dtype)
    assert torch.equal(wrapper, master)
    assert wrapper._data.data_ptr() == master.data_ptr()
    results = [wrapper + 1, wrapper.t(), wrapper @ master.t(), torch.zeros_like(wrapper), wrapper.sum(), wrapper[0]]
    results += [*torch.unbind(wrapper), torch.cat([wrapper, wrapper]), wrapper.to(torch.int32)]
    assert {type(result) for result in results} == {torch.Tensor}
    expected, plain = master * 2 + 1, torch.zeros(6, 8)
    assert wrapper.mul_(2) is wrapper
    assert wrapper.add_(1) is wrapper
    assert wrapper.copy_(wrapper.detach()) is wrapper
    assert torch.equal(master, expected)
    assert type(plain.copy_(wrapper)) is torch.Tensor
    assert torch.equal(plain, expected)
    assert torch.equal(wrapper.copy_(torch.ones(6, 8)), master)
    assert torch.equal(master, torch.ones(6, 8))


MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detach": lambda tensor: tensor.detach(),
    "data": lambda tensor: tensor.data,
    "view": lambda tensor: tensor.view(-1),
    "slice": lambda tensor: tensor[2:4],
    "narrow": lambda tensor: tensor.narrow(0, 1, 3),
    "split": lambda tensor: tensor.split(2)[1],
    "chunk": lambda tensor: tensor.chunk(4)[1],
    "as_strided": lambda tensor: (part := tensor[2:]).as_strided((3, 8), (8, 1), part.storage_offset() + 8),
    "clone": lambda tensor: tensor.clone(),
    "to": lambda tensor: tensor.to(torch.float64),
    "deepcopy": copy.deepcopy,
    "deepcopy of a view": lambda tensor: copy.deepcopy(tensor[2:]),
    "parameter": lambda tensor: nn.Parameter(tensor),
    "new zeros": lambda tensor: tensor.new_zeros(3, 8),
}


@every_class
@pytest.mark.parametrize("move", list(MOVES.values()), ids=list(MOVES))
def test_placing_and_copying_keeps_class_options_and_values(make: Any, move: Any, master: torch.Tensor) -> None:
    wrapper = make(master)
    moved = move(wrapper)
    assert type(moved) is type(wrapper)
    assert moved._options == wrapper._options
    assert torch.equal(moved, move(master))


@every_class
@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_optimizers_step_as_on_a_plain_parameter_with_plain_states(
    make: Any, optimizer: Any, how: dict[str, bool], master: torch.Tensor
) -> None:
    plain, wrapped = nn.Parameter(master.clone()), nn.Parameter(make(master.clone()))
    momentum = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    for param in (plain, wrapped):
        step = optimizer([param], lr=0.1, **momentum, **how)
        for _ in range(3):
            param.grad = torch.full((6, 8), 0.5)
            step.step()
        states = [state for state in step.state[param].values() if state is not None]
        assert states
        assert {type(state) for state in states} == {torch.Tensor}
    assert torch.equal(plain, wrapped)


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda param: param.add_(1),
    "data": lambda param: param.data.add_(1),
    "detached": lambda param: param.detach().zero_(),
    "a view": lambda param: param.detach()[1:].zero_(),
    "out": lambda param: torch.add(torch.ones(6, 8), 1, out=param),
    "foreach": lambda param: torch._foreach_add_([param], 1),
    "the plain tensor": lambda param: param._data.add_(1),
}


@pytest.mark.parametrize("write", list(WRITES.values()), ids=list(WRITES))
@torch.no_grad()
def test_a_write_changes_the_stamp(write: Any, master: torch.Tensor) -> None:
    param = nn.Parameter(BFloat16AllGatherTensor(master))
    before = param.write_stamp
    write(param)
    assert param.write_stamp != before


@pytest.mark.parametrize(
    ("name", "is_padded"),
    [
        ("a view", False),
        *((name, pad) for name in ("in place", "data", "detached", "foreach") for pad in (False, True)),
    ],
)
@torch.no_grad()
def test_a_write_through_a_tensor_around_it_counts_for_the_plain(
    name: str, is_padded: bool, master: torch.Tensor
) -> None:
    memory = BFloat16AllGatherTensor(torch.cat([master, master]) if is_padded else master)
    around = nn.Parameter(StandInDTensor(memory[:6] if is_padded else memory))
    stamp, version = around.local.write_stamp, around.local._data._version
    WRITES[name](around)
    assert around.local.write_stamp != stamp
    assert around.local._data._version != version  # what runtimes watch


@torch.no_grad()
def test_reading_copying_and_writing_copies_leave_the_stamp(master: torch.Tensor) -> None:
    param = nn.Parameter(BFloat16AllGatherTensor(master))
    before = param.write_stamp
    torch.zeros(6, 8).copy_(param)
    param.clone().zero_()
    copy.deepcopy(param).zero_()
    torch.equal(param, param * 2)
    repr(param)
    assert param.write_stamp == before


def test_collectives_that_read_a_shard_do_not_count_as_writes(master: torch.Tensor) -> None:
    """Else only the ranks whose shards need no padding would count ``full_tensor()``, and ranks would disagree."""
    shard = BFloat16AllGatherTensor(master)
    gather, broadcast = torch.ops._c10d_functional.all_gather_into_tensor.default, torch.ops.c10d.broadcast_.default
    assert written_by(gather, (shard, 2, "group"), {}) == []
    (written,) = written_by(broadcast, ([shard],), {})
    assert written is shard


@every_class
def test_saving_writes_the_plain_tensor_which_loads_without_fsdp2(make: Any, master: torch.Tensor) -> None:
    stored = io.BytesIO()
    param = nn.Parameter(make(master), requires_grad=False)
    torch.save({"wrapper": make(master), "param": param}, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=True)
    assert type(loaded["wrapper"]) is torch.Tensor
    assert type(loaded["param"]) is nn.Parameter
    assert not loaded["param"].requires_grad
    assert all(torch.equal(tensor, master) for tensor in loaded.values())


def test_repr_shows_class_values_and_options() -> None:
    shown = [make(torch.tensor([[1.0, 2.0]])) for make in MAKERS.values()]
    assert_expected_inline(
        "\n".join(map(repr, shown)),
        """\
BFloat16AllGatherTensor(tensor([[1., 2.]]), pad=True)
Int8AllGatherTensor(tensor([[1., 2.]]), block_size=4)
Float8AllGatherTensor(tensor([[1., 2.]]), scaling=Float8Scaling.PER_ROW)""",
    )


@pytest.mark.ci
@every_class
def test_compiled_code_reads_writes_and_returns_wrappers(make: Any, master: torch.Tensor) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def write(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensor.mul_(2)
        return tensor + 1, tensor.detach()

    wrapper, expected = make(master), master * 2
    before = wrapper.write_stamp
    total, same = write(wrapper)
    assert (type(total), type(same)) == (torch.Tensor, type(wrapper))
    assert torch.equal(total, expected + 1)
    assert torch.equal(master, expected)
    assert same._options == wrapper._options
    assert wrapper.write_stamp != before


FORMATS: dict[str, tuple[Callable[[torch.Tensor], Any], float]] = {
    "bfloat16": (BFloat16AllGatherTensor, 2),
    "int8": (functools.partial(Int8AllGatherTensor, block_size=8), 1 + 4 / 8),
    "float8": (Float8AllGatherTensor, 1),
    "float8 per row": (functools.partial(Float8AllGatherTensor, scaling=Float8Scaling.PER_ROW), 1 + 4 / 8),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_few_bytes_travel_and_later_gathers_are_no_writes(name: str, dtype: torch.dtype, master: torch.Tensor) -> None:
    make, nbytes_per_element = FORMATS[name]
    shard = make(master)
    outputs, metadata = pre(shard, 1, master)
    assert sum(output.nbytes for output in outputs) == nbytes_per_element * master.numel()
    made, _ = shard.fsdp_post_all_gather(outputs, metadata, dtype)
    assert (made is outputs[0]) is (name == "bfloat16" and dtype is torch.bfloat16)
    out = nn.Parameter(made)
    before = [leaf._version for leaf in (out, *_torch.leaves(out))]
    assert shard.fsdp_post_all_gather(outputs, metadata, dtype, out=out) is None
    assert [leaf._version for leaf in (out, *_torch.leaves(out))] == before


@pytest.mark.parametrize("num_ranks", [4, 5, 8])
def test_padding_in_the_hook_gives_every_rank_the_same_size(num_ranks: int, master: torch.Tensor) -> None:
    full = BFloat16AllGatherTensor(master, pad=True)
    shards = [*torch.chunk(full, num_ranks), full[:0], full[:0], full[:0]][:num_ranks]  # empty ones for the last ranks
    payloads = [pre(shard, num_ranks, master)[0][0] for shard in shards]
    assert {payload.shape for payload in payloads} == {torch.Size([-(-6 // num_ranks), 8])}
    assert not torch.cat(payloads)[6:].any()


@pytest.mark.parametrize(("param_dtype", "released"), [(None, True), (torch.float16, True), (torch.bfloat16, False)])
def test_bfloat16_outputs_are_released_only_where_they_are_copied_from(
    param_dtype: torch.dtype | None, released: bool, master: torch.Tensor
) -> None:
    wrapper = BFloat16AllGatherTensor(master)
    assert not wrapper.fsdp_should_release_all_gather_outputs_after_post_all_gather()  # not known yet
    pre(wrapper, 1, master, param_dtype)
    assert wrapper.fsdp_should_release_all_gather_outputs_after_post_all_gather() is released


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def test_matrices_are_wrapped_ties_stay_ties_and_frozen_stays_frozen() -> None:
    model = Tied()
    before = {name: param.clone() for name, param in model.named_parameters()}
    assert wrap_parameters(model, BFloat16AllGatherTensor) == ["embedding.weight", "frozen.weight"]
    assert model.head.weight is model.embedding.weight
    wrapped = {name for name, param in model.named_parameters() if isinstance(param, BFloat16AllGatherTensor)}
    assert wrapped == {"embedding.weight", "frozen.weight"}
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    assert frozen == ["frozen.weight", "frozen.bias"]
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    chosen = wrap_parameters(Tied(), BFloat16AllGatherTensor, select=lambda name, param: name.endswith("bias"))
    assert chosen == ["norm.bias", "head.bias", "frozen.bias"]


# float8

PER_ROW, PER_TENSOR = Float8Scaling.PER_ROW, Float8Scaling.PER_TENSOR
both = pytest.mark.parametrize("scaling", [PER_ROW, PER_TENSOR])
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def random(*shape: int, spread: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    factors = 10.0 ** torch.randint(-6, 6, (shape[0], *[1] * (len(shape) - 1)), generator=generator) if spread else 1
    return torch.randn(shape, generator=generator) * factors


def scale_of(data: torch.Tensor, scaling: Float8Scaling) -> torch.Tensor:
    return scale_from(row_magnitudes(data) if scaling is PER_ROW else magnitude(data))


def unsharded(data: torch.Tensor, scaling: Float8Scaling, dtype: torch.dtype = torch.bfloat16) -> Float8Tensor:
    scale = scale_of(data, scaling)
    return Float8Tensor(quantise_float8(data, scale), scale, dtype)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (5, 64), (4, 3, 2)], ids=str)
def test_error_is_a_sixteenth_or_one_step(shape: tuple[int, ...], dtype: torch.dtype, scaling: Float8Scaling) -> None:
    data = (random(*shape) * 10.0 ** random(*shape)).to(dtype)
    scale = scale_of(data, scaling)
    assert scale.dtype is torch.float32
    error = (quantise_float8(data, scale).double() * scale - data.double()).abs()
    assert torch.all(error <= torch.maximum(data.double().abs() / 16, scale.double() / 1024) * (1 + 1e-5))


@both
def test_the_largest_magnitude_is_met(scaling: Float8Scaling) -> None:
    data = random(6, 16)
    largest = row_magnitudes(data) if scaling is PER_ROW else magnitude(data)
    quantised = unsharded(data, scaling, torch.float32).dequantised()
    torch.testing.assert_close(row_magnitudes(quantised) if scaling is PER_ROW else magnitude(quantised), largest)


@both
def test_zeros_stay_zeros(scaling: Float8Scaling) -> None:
    data = random(3, 16)
    data[1] = 0
    data[2, 4] = 0
    assert torch.equal(unsharded(data, scaling).dequantised() == 0, data == 0)
    assert not unsharded(torch.zeros(2, 2), scaling).dequantised().any()
    assert torch.equal(magnitude(torch.ones(0, 4)), torch.zeros(1))
    assert row_magnitudes(torch.ones(0, 4)).shape == (0, 1)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_inf_and_nan_are_never_hidden(bad: float) -> None:
    data = random(3, 16)
    data[1, 2] = bad
    rows = unsharded(data, PER_ROW).dequantised()
    assert rows[1].isnan().all()
    assert rows[[0, 2]].isfinite().all()
    assert not unsharded(data, PER_TENSOR).dequantised().isfinite().any()
    beyond = torch.tensor([[1e6, -1e6, 1.0]])  # of an outdated scale
    assert quantise_float8(beyond, torch.ones(1)).tolist() == [[LARGEST, -LARGEST, 1.0]]


def test_what_arrives_is_the_unsharded_parameter_and_the_precomputed_scale_is_copied() -> None:
    data = random(4, 16)
    for scaling in (PER_ROW, PER_TENSOR):
        shard = Float8AllGatherTensor(data, scaling=scaling)
        scale = scale_of(data, PER_TENSOR)
        if scaling is PER_TENSOR:
            shard.precomputed(scale)
        outputs, metadata = pre(shard, 1, data)
        made, inner = shard.fsdp_post_all_gather(outputs, metadata, torch.bfloat16)
        assert (outputs[0].dtype, outputs[0].shape, inner) == (torch.uint8, data.shape, ())
        assert made._data.data_ptr() == outputs[0].data_ptr()
        assert made._scale.data_ptr() != scale.data_ptr()


def asks(shard: Float8AllGatherTensor) -> bool:
    """Whether a gather of two ranks communicates before it."""
    mesh = mock.Mock(**{"size.return_value": 2, "get_group.side_effect": InterruptedError})
    with suppress(InterruptedError):
        shard.fsdp_pre_all_gather(mesh, shard.shape, shard.stride(), None, None)
    return mesh.get_group.called


def step(shard: Any) -> None:
    shard.grad = torch.ones(4, 8)
    torch.optim.SGD([shard], lr=0.1, foreach=True).step()


DROPS: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    "written": (True, lambda shard: shard.add_(1)),
    "written through .data": (True, lambda shard: shard.data.mul_(2)),
    "written through a view": (True, lambda shard: shard.detach()[1:].zero_()),
    "stepped": (True, step),
    "loaded": (True, lambda shard: shard.copy_(torch.ones(4, 8))),
    "read": (False, lambda shard: shard * 2),
    "saved": (False, lambda shard: torch.save(shard, io.BytesIO())),
    "copied and the copy written": (False, lambda shard: copy.deepcopy(shard).zero_()),
    "shown": (False, repr),
}


@pytest.mark.parametrize(("drops", "act"), DROPS.values(), ids=DROPS)
def test_a_precomputed_scale_is_used_until_the_shard_is_written(drops: bool, act: Any) -> None:
    shard = nn.Parameter(Float8AllGatherTensor(random(4, 8)))
    assert asks(shard)
    shard.precomputed(torch.ones(1))
    assert not asks(shard)
    assert not asks(shard)  # backward gathers a second time
    with torch.no_grad():
        act(shard)
    assert asks(shard) is drops


def test_a_scale_for_one_rank_is_not_asked_for() -> None:
    data = random(4, 8)
    (values,), metadata = pre(Float8AllGatherTensor(data), 1, data)
    assert torch.equal(metadata, scale_of(data, PER_TENSOR))
    assert torch.equal(values, quantise_float8(data, metadata).view(torch.uint8))


def test_precomputing_passes_over_what_is_not_sharded() -> None:
    module = nn.Linear(8, 4)
    module.weight = nn.Parameter(Float8AllGatherTensor(module.weight))
    precompute_float8_scales(module)
    assert asks(module.weight)


def _plain_and_float8(scaling: Float8Scaling) -> tuple[nn.Parameter, nn.Parameter]:
    weight = unsharded(random(6, 8), scaling)
    return nn.Parameter(weight.dequantised()), nn.Parameter(weight)


FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": lambda x, weight: F.linear(x, weight, torch.ones(6, dtype=x.dtype)),
    "linear of a batch": lambda x, weight: F.linear(x.expand(2, 5, 8), weight),
    "matmul": lambda x, weight: x @ weight.t(),
    "transpose": lambda x, weight: x @ weight.transpose(-1, -2),
    "left operand": lambda x, weight: weight @ x.t(),
    "checkpointed": lambda x, weight: checkpoint(F.linear, x, weight, use_reentrant=False),
    "embedding": lambda x, weight: F.embedding(torch.tensor([0, 5, 5]), weight) * x.sum(),
    "elementwise": lambda x, weight: (weight * 2 + weight.square()).sum() * x,
}
COMPILED = torch.compile(F.linear, backend="aot_eager", fullgraph=True)


@both
@pytest.mark.parametrize("function", [*FUNCTIONS.values(), *in_ci(COMPILED)], ids=[*FUNCTIONS, "compiled"])
def test_results_and_gradients_are_those_of_the_dequantised_values(function: Any, scaling: Float8Scaling) -> None:
    results = []
    for weight in _plain_and_float8(scaling):
        x = random(5, 8).bfloat16().requires_grad_()
        y = function(x, weight)
        y.square().sum().backward()
        assert type(y) is type(weight.grad) is torch.Tensor
        with torch.no_grad():
            without_autograd = function(x, weight)
        with torch.inference_mode():
            inferred = torch.cat([F.linear(x, weight), F.linear(x, weight, torch.ones(6, dtype=x.dtype))])
        results.append((y, x.grad, weight.grad, without_autograd, inferred))
    assert all(map(torch.equal, *results))


@both
def test_runtimes_cut_rows_of_padding_and_make_it_a_parameter(scaling: Float8Scaling) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = unsharded(random(6, 8), scaling, dtype)
        assert (weight.shape, weight.dtype, weight._data.nbytes) == ((6, 8), dtype, 48)  # a byte for each
        assert weight.dequantised().dtype is dtype
    cut = torch.as_strided(weight, (5, 8), (8, 1), 0)
    assert type(cut) is type(nn.Parameter(cut)) is Float8Tensor
    assert torch.equal(cut.dequantised(), weight.dequantised()[:5])
    assert cut._data.data_ptr() == weight._data.data_ptr()
    other = torch.as_strided(weight, (8, 6), (1, 8), 0)
    assert type(other) is torch.Tensor
    assert torch.equal(other, weight.dequantised().t())


def test_saving_writes_dequantised_values_and_zeros_like_reads_none_because_they_may_be_released() -> None:
    weight, stored = unsharded(random(6, 8), PER_ROW), io.BytesIO()
    torch.save(weight, stored)
    stored.seek(0)
    assert torch.equal(torch.load(stored, weights_only=True), weight.dequantised())
    weight._data.untyped_storage().resize_(0)
    zeros = torch.zeros_like(weight)
    assert (type(zeros), zeros.dtype, zeros.shape) == (torch.Tensor, torch.bfloat16, (6, 8))
    assert repr(weight) == "Float8Tensor(shape=(6, 8), dtype=torch.bfloat16, scale=(6, 1))"


@both
@pytest.mark.parametrize("with_bias", [True, False])
def test_where_the_device_multiplies_float8_forward_does_and_backward_does_not(
    with_bias: bool, scaling: Float8Scaling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float8, "_has_float8_matmul", lambda device: True)  # the CPU can, slowly
    products = []

    def scaled_mm(*args: Any, mm: Any = F.scaled_mm, **kwargs: Any) -> torch.Tensor:
        products.append(mm(*args, **kwargs))
        return products[-1]

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    data, x = random(32, 48), random(2, 5, 48).bfloat16().requires_grad_()
    bias = random(32).bfloat16() if with_bias else None
    weight = nn.Parameter(unsharded(data, scaling))
    y = F.linear(x, weight, bias)
    rounded = unsharded(x.detach().view(-1, 48), scaling, torch.float32).dequantised().view(2, 5, 48)
    expected = F.linear(rounded, unsharded(data, scaling, torch.float32).dequantised())
    torch.testing.assert_close(y.float(), expected + (0 if bias is None else bias.float()), rtol=2e-2, atol=2e-2)
    y.sum().backward()
    assert len(products) == 1
    plain = nn.Parameter(weight.dequantised())
    F.linear(x.detach(), plain, bias).sum().backward()
    assert torch.equal(weight.grad, plain.grad)


# int8

SHAPES = [(1, 1), (5, 256), (7, 300), (3, 40), (2, 3, 5), (4, 2, 3, 3), (0, 8), (3, 512)]
ROUNDING = 1e-5  # of a scale: float32 divides and multiplies numbers of up to 127 scales


def restored(data: torch.Tensor, block_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(data.shape, dtype=dtype)
    dequantise(*quantise(data, block_size), block_size, out=out)
    return out


@pytest.mark.parametrize("block_size", [1, 8, 256])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_is_at_most_half_a_step_of_the_block(shape: tuple[int, ...], block_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        data = random(*shape, spread=dtype is not torch.float16).to(dtype)
        data[1:2] = 0
        data.view(-1)[3::5] = 0
        values, scales = quantise(data, block_size)
        steps = scales.repeat_interleave(block_size, dim=1)[:, : math.prod(shape[1:])].reshape(shape)
        assert (values.dtype, values.shape) == (torch.int8, data.shape)
        assert (scales.dtype, scales.shape) == (torch.float32, (shape[0], math.ceil(math.prod(shape[1:]) / block_size)))
        result = restored(data, block_size)
        assert torch.all((result.double() - data.double()).abs() <= steps * (0.5 + ROUNDING))
        assert torch.all(result[data == 0] == 0)
        assert torch.all(result * data >= 0)
        assert torch.equal(restored(data, block_size, dtype), result.to(dtype))  # rounded once


@pytest.mark.parametrize("block_size", [4, 256])
def test_a_step_is_the_largest_magnitude_of_the_block_over_127_or_the_smallest_scale(block_size: int) -> None:
    data = random(3, 512, spread=True)
    _, scales = quantise(data, block_size)
    torch.testing.assert_close(scales, data.view(3, -1, block_size).abs().amax(-1) / 127)
    data = torch.full((2, 8), 1e-40)
    smallest = torch.finfo(torch.float32).tiny
    assert torch.all((restored(data, 8) - data).abs() <= smallest / 2)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_make_their_block_non_finite_and_no_other(bad: float) -> None:
    data = random(2, 12, spread=True)
    data[0, 5] = bad
    finite = restored(data, 4).isfinite()
    expected = torch.ones(2, 12, dtype=torch.bool)
    expected[0, 4:8] = False
    assert torch.equal(finite, expected)


def test_pieces_that_fit_the_cache_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random(33, 50, spread=True)
    whole = (*quantise(data, 16), restored(data, 16, torch.bfloat16))
    monkeypatch.setattr(pieces, "_CPU_PIECE_NUMEL", 120)
    in_pieces = (*quantise(data, 16), restored(data, 16, torch.bfloat16))
    assert all(map(torch.equal, whole, in_pieces))
