"""What a step can do beyond torch's, on the device with one rank: (9) of ``acceptance.py``.

Nothing travels to other ranks, so values must stay the same bits. What formats do to gradients that travel is part of
(2) and (4), where there are other ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.gpu.checks import (
    NUM_STEPS,
    WIRES,
    Net,
    batch,
    collectives_of_one_rank,
    ensure_equal,
    loss_of,
    net,
    sent_in,
    sharded,
    train,
)
from benchmarks.gpu.device import REDUCE, Device, device
from benchmarks.gpu.groups import real_group
from benchmarks.gpu.verdicts import Report, attempt, ensure
from fsdp2.memory import offload_activations

MiB = 1 << 20
NUM_ROWS = {"cuda": 8192, "sim": 1024}  # of a batch, so that activations are most of the memory
SAVED_BY_LAYER = 4  # as many tensors of the size of its input: the input, its product with the gain, and tanh's output


def features(report: Report, name: str) -> None:
    on = device(name)
    with real_group(on):
        for wire in WIRES:
            attempt(report, f"gradients sent in {wire}", partial(_check_wire, on, wire))
        for text, num_kept in (("all activations", 0), ("activations beyond those of a layer", SAVED_BY_LAYER)):
            attempt(report, f"{text} wait on the host", partial(_check_activations, on, num_kept))


def _check_wire(on: Device, wire: str) -> str:
    """With one rank, a wire sends nothing: neither rounds it, nor does it lose what it should keep."""
    found = []
    for each in (None, wire):
        with collectives_of_one_rank(on) as launches:
            model = _model(on, mp_policy=sent_in(each, torch.bfloat16))
            found.append(train(model, lambda step: batch(on.dim, on.type, step), on.finish))
        ensure(REDUCE in launches, "nothing was reduced")
    return f"{NUM_STEPS} steps as without it, {ensure_equal(found[1], found[0])}"


def _check_activations(on: Device, num_kept: int) -> str:
    """The same bits as without it, and less memory at the peak: that of what is on the host by then."""
    nbytes = NUM_ROWS[on.type] * on.dim * 4  # of an activation
    found, peaks, sent = [], [], 0
    for offloads in (False, True):
        model = _model(on)
        offload = offload_activations(model, num_kept * nbytes, min_nbytes=nbytes) if offloads else None
        found.append(train(model, partial(_large_batch, on), on.finish))
        peaks.append(_peak_nbytes(on, model))
        if offload is not None:
            sent = sum(each.sent for each in offload.units)
    ensure(sent > 0, "nothing was sent to the host")
    without, with_it = peaks
    text = (
        f"{NUM_STEPS} steps as without it, {ensure_equal(found[1], found[0])}; {sent / MiB:.1f} MiB were sent, the "
        f"peak of a step is {with_it / MiB:.1f} MiB, and {without / MiB:.1f} without it"
    )
    ensure(without - with_it >= sent / 3, text)  # backward holds what two of the four layers have saved
    return text


def _peak_nbytes(on: Device, model: Net) -> int:
    """What a forward and a backward hold at most, beyond what is there before."""
    module = torch.get_device_module(on.type)
    x = _large_batch(on, 0)
    on.finish()
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    loss_of(model, x).backward()
    on.finish()
    return module.max_memory_allocated() - before


def _model(on: Device, **options: Any) -> Net:
    return sharded(net(on.dim, on.type), init_device_mesh(on.type, (1,)), **options)


def _large_batch(on: Device, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(NUM_ROWS[on.type], on.dim, generator=generator).to(on.type)
