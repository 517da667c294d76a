"""Ranks as threads of one process, as torch's own tests have them: a backend written in Python, and quick to start."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2.tensors import Int8AllGatherTensor, wrap_parameters
from fsdp2.tensors.int8 import dequantise, quantise
from tests.distributed.changes import assert_gradients
from tests.distributed.support import Stack, batch, seeded, shard_each, step

with warnings.catch_warnings():
    warnings.simplefilter("ignore", ImportWarning)  # that a package for tests of its own is missing
    from torch.testing._internal.common_distributed import MultiThreadedTestCase

MODEL: nn.Module = seeded(Stack)  # made once: threads share the random number generator


class TestThreadedWorld(MultiThreadedTestCase):
    @property
    def world_size(self) -> int:
        return 4

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def _sharded(self, model: nn.Module) -> nn.Module:
        return shard_each(*model.blocks, model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))  # type: ignore[misc]

    def test_gradients_are_those_of_the_unsharded_model(self) -> None:
        reference = copy.deepcopy(MODEL)
        model = self._sharded(copy.deepcopy(MODEL))
        assert torch.allclose(step(model), step(reference), atol=1e-6)
        self._compare_gradients(model, reference)

    def test_hooks_decide_what_the_threads_send(self) -> None:
        reference, model = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
        for name in wrap_parameters(model, Int8AllGatherTensor):
            with torch.no_grad():
                weight = reference.get_parameter(name)
                dequantise(*quantise(weight, 256), 256, out=weight)
        model = self._sharded(model)
        assert torch.allclose(step(model), step(reference), atol=1e-6)
        self._compare_gradients(model, reference)

    def _compare_gradients(self, model: nn.Module, reference: nn.Module) -> None:
        assert_gradients(model, reference)
        assert model(batch()).isfinite().all()
