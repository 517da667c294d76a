"""Tensors with a wire format behave as their master values, keep their class when moved, and travel as they say.

Refusals are in ``golden/wire.txt``.
"""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from fsdp2.core import _torch
from fsdp2.tensors import (
    BFloat16AllGatherTensor,
    Float8AllGatherTensor,
    Float8Scaling,
    Int8AllGatherTensor,
    MXFP8AllGatherTensor,
)
from fsdp2.testing.world import StandInDTensor
from tests.harness.golden import texts_beside
from tests.unit.tensors.shards import MAKERS, Refused, assert_refused, pre

TEXTS = texts_beside(__file__)
every_class = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


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
MXFP8AllGatherTensor(tensor([[1., 2.]]), blocks=MXBlocks.ROWS)
MXFP8AllGatherTensor(tensor([[1., 2.]]), blocks=MXBlocks.COLUMNS)
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
    "mxfp8": (MXFP8AllGatherTensor, 1 + 1 / 8),  # its blocks are cut short by rows of 8
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


def _of_columns(shard: Any) -> Any:
    return pre(shard, 2, torch.ones(6, 8))


REFUSED: Refused = {
    "wire format of a list": (lambda: None, lambda _: BFloat16AllGatherTensor([1.0])),  # type: ignore[arg-type]
    "wire format twice": (lambda: BFloat16AllGatherTensor(torch.ones(2, 2)), BFloat16AllGatherTensor),
    "wire format of integers": (lambda: torch.ones(2, dtype=torch.int32), BFloat16AllGatherTensor),
    "wire format of a scalar": (lambda: torch.ones(()), BFloat16AllGatherTensor),
    "wire format of complex numbers": (lambda: torch.ones(2, dtype=torch.complex64), BFloat16AllGatherTensor),
    **{f"{name} cut into columns": (partial(make, torch.ones(6, 4)), _of_columns) for name, make in MAKERS.items()},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(name: str) -> None:
    assert_refused(TEXTS, name, REFUSED)
