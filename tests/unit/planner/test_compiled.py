"""What autograd keeps of blocks of ten shapes, eager and compiled, is what it keeps when they run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fsdp2.planner.blocks import find_units
from fsdp2.planner.observe import _AsOnGPU, observe
from fsdp2.planner.scenario import Kernels
from fsdp2.planner.work import Checkpointing
from fsdp2.planner.workload import Workload
from tests.unit.planner.models import square
from tests.unit.planner.shapes import SHAPES, WIDTH, Stack


def _given(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(2, 128, WIDTH, dtype=dtype, requires_grad=True)


def _saved_nbytes(block: nn.Module, called: nn.Module) -> int:
    """What autograd keeps of a call of ``block``, without parameters."""
    params = {param.untyped_storage().data_ptr() for param in block.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = called(_given())
    assert output.requires_grad
    return sum(nbytes for place, nbytes in saved.items() if place not in params)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of what torch.compile imports
@pytest.mark.parametrize("kernels", [Kernels.COMPILED, Kernels.EAGER])
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_keep_what_is_planned(name: str, kernels: Kernels) -> None:
    """Within 2%."""
    workload = Workload(2, 128, kernels=kernels.value, inputs=_given, loss=square)
    model = Stack(name)
    planned = observe(model, find_units(model), workload).kinds[0][Checkpointing.NONE]
    block = SHAPES[name]().bfloat16()
    if kernels is Kernels.EAGER:
        with _AsOnGPU():
            expected = _saved_nbytes(block, block)
    else:
        torch.compiler.reset()
        called = torch.compile(block, backend="aot_eager_decomp_partition", dynamic=False)
        expected = _saved_nbytes(block, called)
    assert planned.saved_nbytes == pytest.approx(expected, rel=0.02)
    assert (planned.scores_nbytes > 0) == (name == "eager attention")
