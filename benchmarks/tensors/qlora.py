"""Claim: of a frozen 4-bit base of bitsandbytes, a rank keeps 1/W, scales included; under torch's ``fully_shard``, each
rank keeps all scales. The gradients of the adapters are equal bit for bit.

The same layers and LoRA adapters on 2 gloo ranks with one thread each, in turns:

- torch's ``fully_shard`` on the same 4-bit base, which works with torch 2.13 if the bytes are not cast;
- torch's ``fully_shard`` on a base in bf16.

KiB: what a rank keeps of the base between steps, packed weights and scales, counted. ms: forward and backward.
bitsandbytes' kernels for the CPU compute; those for CUDA were not run.

    python benchmarks/tensors/qlora.py [--width 512] [--layers 4] [--rounds 15]

Needs bitsandbytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
from benchmarks.common import Table, medians_in_turns, publish, seconds_per_call

NUM_RANKS = 2
RANK_OF_ADAPTERS = 8
KIB = 1024


@dataclass(frozen=True)
class Peer:
    """A row. ``is_nested``: the scales are quantised, too."""

    name: str
    is_ours: bool
    is_4bit: bool = True
    is_nested: bool = False


PEERS = [
    Peer("fsdp2, 4 bits", True),
    Peer("torch, 4 bits", False),
    Peer("fsdp2, 4 bits, nested", True, is_nested=True),
    Peer("torch, 4 bits, nested", False, is_nested=True),
    Peer("torch, bf16 base", False, is_4bit=False),
]


class Adapted(nn.Module):
    def __init__(self, width: int, peer: Peer) -> None:
        from bitsandbytes.nn import Linear4bit

        super().__init__()
        self.base: nn.Module = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
        if peer.is_4bit:
            options = {"quant_type": "nf4", "compress_statistics": peer.is_nested, "quant_storage": torch.bfloat16}
            packed = Linear4bit(width, width, bias=False, compute_dtype=torch.bfloat16, **options)
            packed.load_state_dict(self.base.state_dict())
            self.base = packed.to("cpu")
        self.base.requires_grad_(False)
        self.a = nn.Linear(width, RANK_OF_ADAPTERS, bias=False, dtype=torch.bfloat16)
        self.b = nn.Linear(RANK_OF_ADAPTERS, width, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.b(self.a(x))
        return found


class Subject:
    def __init__(self, peer: Peer, width: int, num_layers: int) -> None:
        from torch.distributed.fsdp import fully_shard as theirs

        from fsdp2 import fully_shard as ours

        shard: Callable[..., Any] = ours if peer.is_ours else theirs
        torch.manual_seed(0)
        blocks = (nn.Sequential(*(Adapted(width, peer) for _ in range(4))) for _ in range(num_layers))
        self.model = nn.Sequential(*blocks)
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        for block in self.model:
            shard(block, mesh=mesh)
        shard(self.model, mesh=mesh)
        self.x = torch.randn(64, width, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()

    def step(self) -> None:
        self.model.zero_grad()
        self.model(self.x).float().square().mean().backward()

    def gradients(self) -> list[Tensor]:
        self.step()
        return [each.grad.full_tensor() for each in self.model.parameters() if each.requires_grad]  # type: ignore

    def base_nbytes(self) -> int:
        """Of memory that this rank keeps: shards, and states of bitsandbytes that modules hold."""
        self.model.reshard()  # type: ignore[operator]
        kept: dict[int, int] = {}
        for module in self.model.modules():
            weight = getattr(module, "weight", None)
            if weight is None or weight.requires_grad:
                continue
            tensors = _tensors_of_state(getattr(module, "quant_state", None))
            local = weight._local_tensor if isinstance(weight, DTensor) else weight
            names = local.__tensor_flatten__()[0] if hasattr(local, "__tensor_flatten__") else []
            tensors += [getattr(local, name) for name in names] if names else [local]
            kept.update({each.untyped_storage().data_ptr(): each.nbytes for each in tensors})
        return sum(kept.values())


def _tensors_of_state(state: Any) -> list[Tensor]:
    if state is None:
        return []
    own = [each for each in vars(state).values() if isinstance(each, Tensor)]
    return own + _tensors_of_state(state.state2)


def on_rank(rank: int, folder: str, width: int, num_layers: int, rounds: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=NUM_RANKS)
    subjects = {peer.name: Subject(peer, width, num_layers) for peer in PEERS}
    gradients = {name: subject.gradients() for name, subject in subjects.items()}

    def is_equal(one: str, other: str) -> bool:
        return all(map(torch.equal, gradients[one], gradients[other]))

    equal = {peer.name: is_equal(peer.name, peer.name.replace("torch", "fsdp2")) for peer in PEERS if peer.is_4bit}
    seconds = medians_in_turns({name: seconds_per_call(each.step, 2) for name, each in subjects.items()}, rounds)
    found = {name: [each.base_nbytes(), seconds[name], equal.get(name)] for name, each in subjects.items()}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if importlib.util.find_spec("bitsandbytes") is None:
        parser.exit(1, "qlora.py needs bitsandbytes. Run: pip install 'fsdp2[clients]'\n")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, options.width, options.layers, options.rounds)
        torch.multiprocessing.spawn(on_rank, arguments, nprocs=NUM_RANKS)
        found = json.loads((Path(folder) / "found.json").read_text())
    rows = []
    for peer in PEERS:
        nbytes, seconds, is_equal = found[peer.name]
        own = found["fsdp2, 4 bits, nested" if peer.is_nested else "fsdp2, 4 bits"]
        ratios = (None, None) if peer.is_ours else (own[0] / nbytes, own[1] / seconds)
        equal = "" if peer.is_ours or not peer.is_4bit else "equal" if is_equal else "differ"
        rows.append([peer.name, f"{nbytes / KIB:.0f}", f"{1e3 * seconds:.1f}", *ratios, equal])
    columns = ["", "base KiB", "ms", "fsdp2 / peer KiB", "fsdp2 / peer ms", "gradients"]
    note = "Base: what a rank keeps between steps. gradients: those of the adapters, beside fsdp2's."
    title = f"Base per rank and a step, width {options.width}, {4 * options.layers} adapted layers"
    table = Table("main", title, columns, rows, ratio="fsdp2 / peer KiB", noise=0, note=note)
    publish("tensors/qlora", "QLoRA with bitsandbytes, 2 gloo ranks", [table])


if __name__ == "__main__":
    main()
