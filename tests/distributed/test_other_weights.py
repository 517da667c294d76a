"""``weights_of``: a model computes with other weights for a while, and has its own again afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import fsdp2
from tests.distributed.support import Stack, batch, seeded, shard_each
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of, one_line


def model_and_others() -> tuple[nn.Module, nn.Module, Tensor]:
    model = shard_each(seeded(Stack))
    others = copy.deepcopy(model)
    with torch.no_grad():
        for param in others.parameters():
            param.mul_(0.5)
    return model, others, batch()


@pytest.mark.parametrize("form", ["module", "mapping", "list"])
@distributed(2, 4)
def test_a_model_computes_with_other_weights_and_gets_its_own_back(ctx: RankContext, form: str) -> None:
    model, others, x = model_and_others()
    weights = {"module": others, "mapping": dict(others.named_parameters()), "list": list(others.parameters())}[form]
    mine, theirs = model(x), others(x)
    with torch.no_grad(), fsdp2.weights_of(model, weights):
        assert torch.equal(model(x), theirs)
        assert torch.equal(others(x), mine)
    assert torch.equal(model(x), mine)
    assert torch.equal(others(x), theirs)


@distributed(2)
def test_an_exception_in_a_forward_brings_the_weights_back(ctx: RankContext) -> None:
    model, others, x = model_and_others()
    mine, theirs = model(x), others(x)
    with pytest.raises(RuntimeError, match="shapes"), fsdp2.weights_of(model, others):
        model(x[:, :3])
    assert torch.equal(model(x), mine)
    assert torch.equal(others(x), theirs)


@distributed(2)
def test_a_step_after_an_evaluation_is_that_of_a_model_without_one(ctx: RankContext) -> None:
    found = []
    for evaluates in (True, False):
        model, others, x = model_and_others()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            if evaluates:
                with torch.no_grad(), fsdp2.weights_of(model, others):
                    model(x)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([param.full_tensor() for param in model.parameters()])
    assert all(map(torch.equal, *found))


@distributed(2)
def test_averaged_models_of_torch_are_taken(ctx: RankContext) -> None:
    model, _, x = model_and_others()
    average = AveragedModel(model)
    with torch.no_grad():
        for param in average.parameters():
            param.mul_(0.5)
        expected = average(x)
        with fsdp2.weights_of(model, average.module):
            assert torch.equal(model(x), expected)


@distributed(2)
def test_other_layouts_are_refused_and_nothing_changes(ctx: RankContext) -> None:
    model, others, x = model_and_others()
    mine = model(x)
    refused = {
        "no parameter 'other'": {"other": x},
        "1 tensors, expected": [x],
        "for parameter 'entry.weight', expected Tensor": {"entry.bias": others.entry.bias, "entry.weight": x},
    }
    for text, weights in refused.items():

        def enter(weights: object = weights) -> None:
            with fsdp2.weights_of(model, weights):
                pass

        assert text in one_line(error_of(enter))
    assert torch.equal(model(x), mine)


@distributed(2)
def test_a_write_into_an_unsharded_root_is_refused_at_the_next_forward(ctx: RankContext) -> None:
    model, _, x = model_and_others()
    model(x)
    mine = model(x)  # reads parameters that the first forward has left unsharded
    with torch.no_grad():
        model.entry.weight.mul_(2)
    found = one_line(error_of(lambda: model(x)))
    assert found.startswith("ScheduleError: parameter 'entry.weight' was written since the last forward")
    assert "its unit '(root)' binds whole parameters" in found
    assert one_line(error_of(lambda: model(x))) == found
    model.reshard()
    assert torch.equal(model(x), mine)
    model.reshard()
    with torch.no_grad():
        model.entry.weight.mul_(2)
    assert not torch.equal(model(x), mine)
