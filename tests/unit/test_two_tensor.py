"""Every op on both inner tensors, views and writes included."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

from fsdp2.tensors.two_tensor import TwoTensor
from tests.harness.messages import error_of


def _two(*shape: int, seed: int = 0) -> TwoTensor:
    generator = torch.Generator().manual_seed(seed)
    return TwoTensor(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))


def _mlp() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    for module in model:
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(_two(*parameter.shape, seed=parameter.numel())))
    return model


def _halves(model: nn.Module) -> list[nn.Module]:
    """Two plain models: one of the first inner tensors, one of the second."""
    halves = []
    for which in ("a", "b"):
        half = copy.deepcopy(model)
        for module in half.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(getattr(parameter, which)))
        halves.append(half)
    return halves


# Ops


def _linear(x: torch.Tensor) -> torch.Tensor:
    return F.linear(torch.arange(6.0).view(2, 3), x).relu()


def _write_into_views(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[1].mul_(3)
    y[2:].add_(x[2:])
    y.view(-1)[3:5].mul_(x.view(-1)[:2])
    return y * y


def _write_into_as_strided(x: torch.Tensor) -> torch.Tensor:
    y = (x * 1)[2:]
    y.as_strided((2, 2), (2, 1), y.storage_offset()).mul_(3)
    return y * y


def _join_and_cut(x: torch.Tensor) -> torch.Tensor:
    pieces = torch.cat([x, x * x]).split([1, 3, 4])
    return torch.stack([pieces[1].t(), pieces[2][:3].t()])


@pytest.mark.parametrize("fn", [_linear, _write_into_views, _write_into_as_strided, _join_and_cut])
def test_values_and_gradients_are_those_of_either_inner_tensor(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    both = _two(4, 3)
    leaf = both.clone().requires_grad_()
    result = fn(leaf)
    result.sum().backward()
    assert isinstance(leaf.grad, TwoTensor)
    for inner, inner_result, inner_grad in (
        (both.a, result.detach().a, leaf.grad.a),
        (both.b, result.detach().b, leaf.grad.b),
    ):
        expected_leaf = inner.clone().requires_grad_()
        expected = fn(expected_leaf)
        expected.sum().backward()
        assert torch.equal(inner_result, expected)
        assert torch.equal(inner_grad, expected_leaf.grad)


def test_write_in_place_returns_the_tensor_that_was_written() -> None:
    both, before = _two(4, 3), _two(4, 3)
    assert both.add_(1) is both
    assert torch.equal(both, before + 1)


def test_write_into_a_slice_writes_both_inner_tensors() -> None:
    both, before = _two(4, 3), _two(4, 3)
    both[1:3].zero_()
    assert torch.equal(both.a[1:3], torch.zeros(2, 3))
    assert torch.equal(both.b[1:3], torch.zeros(2, 3))
    assert torch.equal(both[3:], before[3:])


def test_plain_tensors_meet_both_inner_tensors() -> None:
    both, plain = _two(4, 3), torch.arange(12.0).view(4, 3)
    assert torch.equal(plain * both, TwoTensor(plain * both.a, plain * both.b))
    assert both.copy_(plain) is both
    assert torch.equal(both, TwoTensor(plain, plain))


def test_equal_compares_both_inner_tensors() -> None:
    both = _two(4, 3)
    assert not torch.equal(both, TwoTensor(both.a, both.b + 1))
    assert not torch.equal(both, TwoTensor(both.a + 1, both.b))


def test_ops_on_lists_write_plain_tensors_among_them_once() -> None:
    both, step = _two(4, 3), torch.zeros(())
    torch._foreach_add_([both, step], 1.0)
    assert torch.equal(both, _two(4, 3) + 1)
    assert step.item() == 1


def test_ops_on_lists_return_a_list_with_the_class_of_each_position() -> None:
    products = torch._foreach_mul([_two(4, 3), torch.ones(2)], [2.0, 3.0])
    assert torch.equal(products[0], _two(4, 3) * 2)
    assert type(products[1]) is torch.Tensor
    assert products[1].tolist() == [3, 3]


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_adam_updates_each_inner_tensor_as_if_it_were_alone(options: dict[str, bool]) -> None:
    model = _mlp()
    models = [model, *_halves(model)]
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1, **options) for each in models]
    for step in range(3):
        x = torch.randn(7, 3, generator=torch.Generator().manual_seed(step))
        for each, optimizer in zip(models, optimizers, strict=True):
            each(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for both, a, b in zip(*(each.parameters() for each in models), strict=True):
        assert torch.equal(both.a, a)
        assert torch.equal(both.b, b)


@pytest.mark.parametrize("copied", [copy.deepcopy, torch.clone, lambda both: both.to(torch.float32, copy=True)])
def test_copies_share_no_memory(copied: Callable[[TwoTensor], TwoTensor]) -> None:
    both = _two(4, 3)[1:]  # deepcopy refuses tensors with a storage offset
    made = copied(both)
    assert torch.equal(made, both)
    made.zero_()
    assert torch.equal(both, _two(4, 3)[1:])


def test_module_is_cast_moved_and_emptied() -> None:
    model = _mlp().to(torch.float64)
    assert {parameter.a.dtype for parameter in model.parameters()} == {torch.float64}
    values = copy.deepcopy(model.state_dict())
    model.to("meta").to_empty(device="cpu").load_state_dict(values)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def test_saved_parameters_load_with_weights_only() -> None:
    file = io.BytesIO()
    torch.save(_mlp().state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(torch.equal(value, loaded[name]) for name, value in _mlp().state_dict().items())


@pytest.mark.ci
def test_compiled_block_gives_the_same_values_and_gradients() -> None:
    x, model = torch.randn(7, 3), _mlp()
    expected = model(x)
    expected.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    result = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    result.sum().backward()
    assert torch.equal(result, expected)
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), gradients, strict=True))


# Refusals


def test_inner_tensors_that_differ_are_refused() -> None:
    assert_expected_inline(
        error_of(lambda: TwoTensor(torch.zeros(2, 3), torch.zeros(3, 2).t())),
        """\
ValueError: TwoTensor: a has ((2, 3), (3, 1), torch.float32, 'cpu'), but b has ((2, 3), (1, 2),
torch.float32, 'cpu') (shape, strides, dtype, device). Pass tensors that agree in all four.""",
    )


@pytest.mark.parametrize(
    "write",
    [lambda plain, both: plain.add_(both), lambda plain, both: torch._foreach_add_([plain, plain], [both, both])],
    ids=["add_", "_foreach_add_"],
)
def test_write_of_two_values_into_a_plain_tensor_is_refused(write: Callable[..., None]) -> None:
    plain = torch.zeros(4, 3)
    with pytest.raises(TypeError, match="a plain tensor cannot hold the two results of a TwoTensor"):
        write(plain, _two(4, 3))
    assert plain.count_nonzero() == 0


def test_value_of_two_different_scalars_is_refused() -> None:
    both = TwoTensor(torch.tensor(1.0), torch.tensor(2.0))
    assert_expected_inline(
        error_of(both.item),
        """\
ValueError: aten._local_scalar_dense.default of a TwoTensor is 1.0 for a and 2.0 for b, expected one
result. Use .a or .b.""",
    )


def test_change_of_shape_in_place_is_refused() -> None:
    both = _two(4, 3)
    with pytest.raises(NotImplementedError, match=r"aten\.t_\.default changes a tensor's shape in place"):
        both.t_()
    assert both.a.shape == both.shape == (4, 3)


# Hooks


def test_unsharded_tensor_of_the_gathered_dtype_is_the_gathered_memory() -> None:
    shard = _two(4, 3)
    outputs, _ = shard.fsdp_pre_all_gather(None, shard.size(), (), nn.Module(), None)  # type: ignore[arg-type]
    made = shard.fsdp_post_all_gather(outputs, None, torch.float32)
    assert made is not None
    assert made[1] == ()
    assert [made[0].a.data_ptr(), made[0].b.data_ptr()] == [output.data_ptr() for output in outputs]
