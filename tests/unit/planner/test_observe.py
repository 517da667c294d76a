"""What a model computes and keeps: activations, operations, and caches of keys and values."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp2
from fsdp2.extras.sizes import text_of
from fsdp2.memory.plan import Held
from fsdp2.planner import observe
from fsdp2.planner.candidates import Plan, Workload
from fsdp2.planner.work import Checkpointing
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of
from tests.harness.selection import long
from tests.unit.planner import models as planner_models
from tests.unit.planner.models import MODELS, Cache, Caching, LanguageModel, inputs_of, square, tokens
from tests.unit.planner.plans import WORKLOAD, choice_named, on_meta, work_of

TEXTS = texts_beside(__file__)


class Square(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return torch.sigmoid(super().forward(x)) * mask


class Chain(nn.ModuleList):
    """Activations that can be counted by hand: the sigmoid saves its output, the product its input."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self:
            x = layer(x, mask)
        return x


def _chain() -> nn.Module:
    return Chain(Square(32, 32, bias=False) for _ in range(3))


CHAIN = Workload(
    8, 1, precision="fp32", inputs=lambda: (torch.empty(8, 32, requires_grad=True), torch.empty(8, 32)), loss=torch.sum
)


def test_activations_are_what_autograd_saves_and_operations_are_counted_with_those_that_run_again() -> None:
    """Each storage once, without what all blocks share."""
    block = work_of(on_meta(_chain), CHAIN).kinds[0]
    size, product = 8 * 32 * 4, 2.0 * 8 * 32 * 32
    found = {kind: (work.saved_nbytes, work.forward.linear, work.backward.linear) for kind, work in block.items()}
    assert found == {
        Checkpointing.NONE: (2 * size, product, 2 * product),  # input and output of the sigmoid; not the mask
        Checkpointing.FULL: (size, product, 3 * product),  # the input
        Checkpointing.SELECTIVE: (2 * size, product, 2 * product),  # input and product, the only one, which is kept
    }
    forward = block[Checkpointing.NONE].forward
    assert forward.moved_nbytes == (1 + 1) * size + (2 + 1) * size  # the sigmoid, and its product with the mask
    assert forward.fused_nbytes == 2 * size  # one kernel reads the product and the mask


@pytest.mark.parametrize("by_name", [True, False])
def test_half_of_causal_attention_counts_and_dropout_keeps_none(by_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, attend = work_of(on_meta()).kinds, F.scaled_dot_product_attention
    block, pairs = plain[0][Checkpointing.NONE], 2 * 4 * 128 * 128  # sequences, heads, tokens
    assert block.forward.other == pairs * 2 * (16 + 16) / 2
    assert block.backward.other == 2.5 * block.forward.other

    def with_dropout(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        if by_name:
            return attend(q, k, v, dropout_p=0.1, is_causal=is_causal)
        return attend(q, k, v, None, 0.1, is_causal)

    fused = types.SimpleNamespace(scaled_dot_product_attention=with_dropout, silu=F.silu)
    monkeypatch.setattr(planner_models, "F", fused)
    assert work_of(on_meta()).kinds == plain


def test_the_order_is_that_of_forward_and_the_rest_counts_with_the_head() -> None:
    model = LanguageModel()
    before = {name: id(param) for name, param in model.named_parameters()}
    work = work_of(model)
    assert {name: id(param) for name, param in model.named_parameters()} == before
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())
    assert all(param.grad is None for param in model.parameters())
    units = work.units(Checkpointing.NONE)
    assert [unit.name for unit in units] == ["embedding", *(f"layers.{index}" for index in range(4)), "head"]
    assert units[-1].forward.linear == 2.0 * 2 * 128 * 64 * 1024
    assert [param.name for param in work.root] == ["norm.weight"]
    logits = 2 * 128 * 1024
    assert units[-1].saved_nbytes >= 4 * logits  # log-probabilities in fp32
    numels = [param.numel for params in (work.root, *(unit.params for unit in units)) for param in params]
    assert sum(numels) == sum(param.numel() for param in model.parameters())


def _saved_nbytes(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """What autograd keeps of a forward on this device, with the kernels of GPUs."""
    params = {param.untyped_storage().data_ptr() for param in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), observe._AsOnGPU():
        loss = square(model(*inputs))
    assert loss.requires_grad
    return sum(nbytes for place, nbytes in saved.items() if place not in params)


@pytest.mark.parametrize("name", MODELS)
def test_activations_are_those_of_all_calls_and_the_model_stays_as_it_is(name: str) -> None:
    model, inputs = MODELS[name](), inputs_of(name)
    before = {key: id(value) for key, value in model.named_parameters(remove_duplicate=False)}
    work = work_of(model, Workload(2, 32, precision="fp32", inputs=inputs, loss=square))
    assert {key: id(value) for key, value in model.named_parameters(remove_duplicate=False)} == before
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())
    planned = sum(unit.saved_nbytes for unit in work.units(Checkpointing.NONE))
    assert planned == _saved_nbytes(MODELS[name]().float(), inputs())
    assert not any(unit.left_nbytes for unit in work.units(Checkpointing.NONE))


# Caches


def _result(plan: Plan, name: str = "FSDP, reshard") -> tuple[Any, ...]:
    found = choice_named(plan, name).result
    return found.reserved_nbytes, found.time, plan.left_nbytes


@pytest.mark.parametrize("inputs", [None, lambda: (tokens(128),), lambda: {"tokens": tokens(128), "use_cache": False}])
def test_a_training_step_keeps_no_cache(inputs: Any) -> None:
    """Though the config asks for one; and the model's config stays as it is."""
    model = Caching()
    found = fsdp2.planner.plan(model, "H100", replace(WORKLOAD, inputs=inputs), num_gpus=8)
    assert model.config.use_cache
    model.config.use_cache = False
    plain = fsdp2.planner.plan(model, "H100", WORKLOAD, num_gpus=8)
    assert _result(found) == _result(plain)
    assert found.left_nbytes == 0
    assert not found.warnings
    assert "    model.config.use_cache = False  # training needs no cache of keys and values\n" in found.code


@pytest.mark.parametrize(
    "inputs", [lambda: {"tokens": tokens(128), "use_cache": True}, *long(lambda: (tokens(128), True, Cache()))]
)
def test_a_cache_that_inputs_ask_for_is_empty_first_kept_until_the_step_ends_and_named(inputs: Any) -> None:
    asked = fsdp2.planner.plan(Caching, "H100", replace(WORKLOAD, inputs=inputs), num_gpus=8)
    plain = fsdp2.planner.plan(Caching, "H100", WORKLOAD, num_gpus=8)
    cache = 4 * 2 * (2 * 128 * 64) * 2  # blocks; keys and values; of each token; bf16
    assert asked.left_nbytes == cache
    attention = [
        work_of(on_meta(Caching), replace(WORKLOAD, inputs=each)).kinds[0][Checkpointing.NONE].forward.other
        for each in (inputs, None)
    ]
    assert attention[0] == attention[1] > 0
    for name in ("FSDP, reshard, full checkpointing", "FSDP, reshard, selective checkpointing"):
        held, without = (choice_named(each, name).result.memory[Held.SAVED] for each in (asked, plain))
        assert held >= without + cache
    (warning,) = asked.warnings
    assert warning.startswith(f"the forward leaves {text_of(cache)} on each GPU until the step ends")


def _loss(loss: Callable[[Any], Any]) -> Any:
    return lambda: work_of(on_meta(), replace(WORKLOAD, loss=loss))


class _Idle(LanguageModel):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


WRONG: dict[str, Callable[[], object]] = {
    "model that does not call its blocks": lambda: work_of(on_meta(_Idle)),
    "loss of what there is not": _loss(lambda output: output.logits),
    "loss that is no scalar": _loss(lambda output: output),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named_with_what_is_expected(case: str) -> None:
    TEXTS.check(case, error_of(WRONG[case]), among=WRONG)
