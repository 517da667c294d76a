"""A model whose blocks are divided into the stages of a pipeline, each sharded by FSDP and tensor parallelism.

The first GPU is simulated for one microbatch: it holds the most. Stages take turns: the first microbatch passes
through all of them before the last GPU is busy. So a step takes ``num_microbatches + (size - 1) / num_chunks`` times as
long as one microbatch on one GPU (Narayanan et al., arXiv 2104.04473, for both schedules), and once what FSDP exposes
and the optimizer. What stages send each other is small, and left out.

A stage stays unsharded until its last microbatch, and keeps the sum of its gradients unreduced in fp32 until then. Its
first GPU holds the activations of as many microbatches as there are GPUs, with either schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fsdp2.core.schedule.schedule import AfterForward
from fsdp2.memory.plan import Held
from fsdp2.planner.scenario import Result, Scenario, simulate
from fsdp2.planner.simulate import StepTime

GRAD_NBYTES = 4


@dataclass(frozen=True)
class Pipeline:
    """``size`` GPUs one behind the other, with ``num_chunks`` stages each: 1 for 1F1B, more if it is interleaved."""

    size: int
    num_microbatches: int
    num_chunks: int = 1

    def num_blocks(self, of_model: int) -> int:
        """Of the GPU that has the most."""
        return self.num_chunks * math.ceil(of_model / self.size / self.num_chunks)


def simulate_stages(microbatch: Scenario, pipeline: Pipeline) -> Result:
    """The step of a pipeline. ``microbatch``: one of its microbatches, on the GPUs of its first stages."""
    choice = replace(microbatch.choice, after_forward=AfterForward.KEEP)
    blocks = tuple(unit for unit in microbatch.units if unit.is_block)
    embedding = tuple(param for param in microbatch.root if param.name.startswith("tok_embeddings"))
    one = simulate(replace(microbatch, choice=choice, units=blocks, root=embedding))
    optimizer = one.grads_nbytes * microbatch.optimizer.num_moved / microbatch.machine.copy_bandwidth
    alone = one.time.compute - optimizer
    waits = alone * (pipeline.num_microbatches - 1 + (pipeline.size - 1) / pipeline.num_chunks)
    time = StepTime(one.time.step + waits, one.time.compute + waits)
    tokens = microbatch.tokens * pipeline.num_microbatches
    num_params = sum(param.numel for params in (embedding, *(unit.params for unit in blocks)) for param in params)
    memory = dict(one.memory)
    in_flight = min(pipeline.size, pipeline.num_microbatches)
    memory[Held.SAVED] += (in_flight - 1) * sum(unit.saved_nbytes for unit in blocks)
    memory[Held.GRADIENTS] += GRAD_NBYTES * num_params
    return replace(
        one,
        time=time,
        tokens_per_second=tokens / pipeline.size / time.step,
        memory=memory,
    )
