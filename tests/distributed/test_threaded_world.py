"""Ranks as threads of one process, as torch's own tests have them: a backend written in Python, and quick to start."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp2.tensors import Int8AllGatherTensor, wrap_parameters
from fsdp2.tensors.int8 import dequantise, quantise
from tests.distributed.changes import assert_gradients
from tests.distributed.support import Stack, batch, seeded, shard_each, step

with warnings.catch_warnings():
    warnings.simplefilter("ignore", ImportWarning)  # that a package for tests of its own is missing
    from torch.testing._internal.common_distributed import MultiThreadedTestCase

MODEL: Stack = seeded(Stack)  # made once: threads share the random number generator


class TestThreadedWorld(MultiThreadedTestCase):
    @property
    def world_size(self) -> int:
        return 4

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def test_gradients_are_those_of_the_unsharded_model(self) -> None:
        """Also where hooks decide what the threads send."""
        for has_hooks in (False, True):
            reference, model = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
            for name in wrap_parameters(model, Int8AllGatherTensor) if has_hooks else ():
                with torch.no_grad():
                    weight = reference.get_parameter(name)
                    dequantise(*quantise(weight, 256), 256, out=weight)
            shard_each(*model.blocks, model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
            assert torch.allclose(step(model), step(reference), atol=1e-6)
            assert_gradients(model, reference)
            assert model(batch()).isfinite().all()
