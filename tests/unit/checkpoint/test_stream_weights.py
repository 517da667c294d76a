"""What ``stream_full_params`` refuses, in the words of ``golden/stream_weights.txt``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import fsdp2
from tests.harness.golden import texts_beside
from tests.unit.checkpoint.weights import Refused, assert_refused, on_meta, small

TEXTS = texts_beside(__file__)
stream = fsdp2.checkpoint.stream_full_params


def _same(*tensors: Tensor) -> dict[str, Tensor]:
    return {"same": tensors[0]}


REFUSED: Refused = {
    "stream on meta": lambda folder: stream(on_meta()),
    "integers to stream": lambda folder: stream(small(), torch.int64),
    "dtype by name to stream": lambda folder: stream(small(), "bf16"),  # type: ignore[arg-type]
    "bytes of a bucket that are none": lambda folder: stream(small(), bucket_nbytes="much"),
    "receiver that is not there": lambda folder: stream(small(), to_rank=1),
    "buckets ahead that are too many": lambda folder: stream(small(), ahead=2),
    "device that is none": lambda folder: stream(small(), device="somewhere"),
    "device without values": lambda folder: stream(small(), device="meta"),
    "names that meet when streamed": lambda folder: stream(small(), rename=lambda name: "one"),
    "rename that raises when streamed": lambda folder: stream(small(), rename=lambda name: [][0]),
    "transform that is none": lambda folder: stream(small(), transform=abs),  # type: ignore[arg-type]
    "transform to no function": lambda folder: stream(small(), transform={"entry.bias": 3}),  # type: ignore[dict-item]
    "transform of a name that is not there": lambda folder: stream(small(), transform={"entry.gain": dict}),
    "transform of one name twice": lambda folder: stream(small(), transform={("entry.bias", "entry.bias"): _same}),
    "transform of one name in two": lambda folder: stream(
        small(), transform={("entry.bias", "entry.weight"): _same, "entry.weight": _same}
    ),
    "transform that makes no names": lambda folder: stream(small(), transform={"entry.bias": torch.relu}),  # type: ignore[dict-item]
    "transform that raises": lambda folder: stream(small(), transform={"entry.bias": lambda bias: bias.names_it}),
    "transform to names that are there": lambda folder: stream(
        small(), transform={"entry.bias": lambda bias: {"entry.weight": bias}}
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_call_is_refused_and_changes_no_file(case: str, tmp_path: Path) -> None:
    assert_refused(TEXTS, case, REFUSED, tmp_path)
