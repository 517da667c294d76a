"""Who owns what, in which bucket, and what that costs. Plans are in ``golden/planner.txt``."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from fsdp2.optim.matrices.planner import least_largest_load, newton_schulz_cost, plan_matrices
from fsdp2.optim.matrices.regions import AxisCut, Placed
from tests.harness.golden import texts_beside
from tests.harness.selection import in_ci
from tests.unit.optim.matrices.placed import MIB, Shape, fsdp, placed, planned

TEXTS = texts_beside(__file__)


def _llama(width: int, kv: int, mlp: int, num_layers: int) -> list[Shape]:
    return [*[(rows, width) for rows in (width, kv, kv, width, mlp, mlp)], (width, mlp)] * num_layers


MODELS: dict[str, list[Shape]] = {
    "Llama 8B": _llama(4096, 1024, 14336, 32),
    "Llama 70B": _llama(8192, 1024, 28672, 80),
    "128 experts": [(8192, 4096), (512, 4096), (4096, 8192), (128, 1536, 4096), (128, 1536, 4096), (128, 4096, 1536)]
    * 8,
}


@pytest.mark.parametrize("num_ranks", [8, 64, 128, *in_ci(256, 512)])
@pytest.mark.parametrize("model", MODELS)
def test_owners_of_large_models_are_balanced_and_send_little(model: str, num_ranks: int) -> None:
    plan = plan_matrices(
        planned([fsdp(shape, num_ranks) for shape in MODELS[model]]), num_ranks, bucket_nbytes=64 * MIB
    )
    assert plan.distance_from_best <= 1.05
    ideal = 2 * sum(math.prod(shape) for shape in MODELS[model]) * 2 / num_ranks
    assert sum(plan.sent_nbytes) / num_ranks <= ideal


WHOLE, TWICE = fsdp((8, 8), 2), placed((8, 8), AxisCut(2, None), AxisCut(2, 0))
BY_AREA = {"cost": lambda rows, columns: rows * columns}
# Tensors, the number of ranks, and options. Buckets of 1 MiB, unless said otherwise.
PLANS: dict[str, tuple[list[Placed], int, dict[str, Any]]] = {
    "Llama 8B": ([fsdp(shape, 8) for shape in MODELS["Llama 8B"]], 8, {"bucket_nbytes": 256 * MIB}),
    "two buckets are the most memory": ([WHOLE] * 40, 2, {"bucket_nbytes": 1000}),
    "two buckets are the most memory, in two copies": ([TWICE] * 40, 4, {"bucket_nbytes": 1000}),
    "one that takes more than a bucket is alone": ([*[WHOLE] * 6, fsdp((100, 100), 2)], 2, {"bucket_nbytes": 1000}),
    "buckets begin with the last tensors": (
        [fsdp((8, 8 + index % 2), 2) for index in range(6)],
        2,
        {"bucket_nbytes": 1, "last_first": True},
    ),
    "a matrix goes to the rank that has it whole": ([fsdp((8, 16, 16), 4)], 4, {}),
    # To the owner: half a matrix from the other rank of its copy. Back: half a matrix to each of three ranks.
    "copies share the work": ([TWICE] * 4, 4, {}),
    "what ranks have to do already counts": ([WHOLE] * 3, 2, {"before": [2 * newton_schulz_cost(8, 8), 0.0]}),
    # Longest first alone gives 7: 3 + 2 + 2 and 3 + 2.
    "the busiest rank is relieved": ([fsdp((1, size), 2) for size in (3, 3, 2, 2, 2)], 2, BY_AREA),
}


@pytest.mark.parametrize("case", PLANS)
def test_plan_of(case: str) -> None:
    """What it costs; who owns what, and what that takes; and each bucket, with the matrices of each owner."""
    where, num_ranks, options = PLANS[case]
    plan = plan_matrices(planned(where), num_ranks, **{"bucket_nbytes": MIB, **options})
    across = [sum(each.across) for each in plan.traffic]
    said = [str(plan), f"loads {plan.loads}, sent {plan.sent_nbytes}, {plan.temporary_nbytes} bytes for a moment"]
    said += [f"{of.of_owner}, {nbytes} bytes across" for of, nbytes in zip(plan.buckets, across, strict=True)]
    TEXTS.check(case, "\n".join(said), among=PLANS)


BOUNDS = {
    "mean": ([1.0] * 8, 4, 2.0),
    "largest": ([9.0, 1.0, 1.0], 3, 9.0),
    "three on two": ([2.0, 2.0, 2.0], 2, 4.0),
    "small ones have no room beside large ones": ([16.0] * 3 + [6.0] * 4, 4, 22.0),
}


@pytest.mark.parametrize("case", BOUNDS)
def test_no_assignment_is_below_the_bound(case: str) -> None:
    costs, num_members, expected = BOUNDS[case]
    assert least_largest_load(costs, num_members) == pytest.approx(expected)
    best = min(
        max(sum(cost for cost, at in zip(costs, owners, strict=True) if at == member) for member in range(num_members))
        for owners in itertools.product(range(num_members), repeat=len(costs))
    )
    assert least_largest_load(costs, num_members) <= best * (1 + 1e-9)
