"""Private torch behind its door: the dtype of gradients that a parameter is given."""

from __future__ import annotations

import torch

from fsdp2.core import _torch
from fsdp2.core._torch import GradDtype

BF16, FP16, FP32, FP64, INT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64


def test_grad_dtype_counts_as_set_if_it_differs_from_the_dtype() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    assert _torch.own_grad_dtype(param) is None
    param.grad_dtype = BF16
    assert _torch.own_grad_dtype(param) == GradDtype(BF16)
    param.grad_dtype = None
    assert _torch.own_grad_dtype(param) == GradDtype(None)
    param = torch.nn.Parameter(param.detach())
    param.data = param.data.bfloat16()
    assert _torch.own_grad_dtype(param) is None

    class Newer(torch.Tensor):  # torch that says whether it was set is believed
        _has_grad_dtype_override = True

    assert _torch.own_grad_dtype(torch.ones(2).as_subclass(Newer)) == GradDtype(FP32)


def test_gradient_that_is_there_keeps_its_values_when_grad_dtype_is_set() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.tensor([1.0, 0.5])
    _torch.set_grad_dtype(param, BF16)
    assert param.grad_dtype is BF16
    assert torch.equal(param.grad, torch.tensor([1.0, 0.5], dtype=BF16))
    _torch.set_grad_dtype(param, None)
    assert param.grad.dtype is BF16
