"""What must be the same on all ranks: which parameters are trained, which units are used, which gradients exist.

A rank *claims* what it does when that has changed. ``meetings`` waits until all ranks have claimed the same. So a step
that repeats the previous one costs nothing, and a rank that diverges is detected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from fsdp2.core import DOCS
from fsdp2.extras.output import first_lines

# Either a flag for each name, or names in the order in which something happened to them.
Claim = Mapping[str, bool] | Sequence[str]

FLAGS, GRADIENTS, UNITS = "requires_grad", "gradients", "units"  # in a claim about units, the forward's name follows
UNFINISHED = "..."  # comes after the names if more may follow

_MAX_LINES = 4
_ALIKE = (
    "Let all ranks use the same units and parameters, or call set_ranks_may_differ(True) on the root.\n"
    f"See {DOCS}/advanced/ranks.md."
)


class _Kind(NamedTuple):
    """The wording for a kind of claim. ``differs`` takes a name and two lists of ranks."""

    head: str
    differs: str
    advice: str


_KINDS = {
    FLAGS: _Kind(
        "requires_grad differs between ranks:",
        "parameter '{}' requires a gradient on {}, not on {}",
        "Call requires_grad_() alike on all ranks, before the same forward or backward.",
    ),
    UNITS: _Kind("ranks use other units in the same forward:", "unit '{}' ran on {}, not on {}", _ALIKE),
    GRADIENTS: _Kind(
        "parameters have a gradient on some ranks only:", "parameter '{}' had a gradient on {}, not on {}", _ALIKE
    ),
}


def difference(claims: Mapping[int, Mapping[str, Claim]]) -> Sequence[str]:
    """The first difference between the claims of ranks, as the lines of an error; empty if there is none. Some claims
    of a rank may be missing."""
    names = dict.fromkeys(name for claim in claims.values() for name in claim)
    for name in sorted(names, key=lambda name: list(_KINDS).index(name.partition(" ")[0])):
        kind = _KINDS[name.partition(" ")[0]]
        found = {rank: claim[name] for rank, claim in claims.items() if name in claim}
        lines = [f"  {line}" for line in _differing(kind, found)]
        if lines:
            return [kind.head, *first_lines(lines, _MAX_LINES, "  and {} more"), kind.advice]
    return []


def _differing(kind: _Kind, found: Mapping[int, Claim]) -> Iterator[str]:
    lengths = [
        len(claim) - 1 for claim in found.values() if not isinstance(claim, Mapping) and claim[-1:] == [UNFINISHED]
    ]
    if lengths:
        found = {rank: list(claim)[: min(lengths)] for rank, claim in found.items()}
    is_so = {rank: claim if isinstance(claim, Mapping) else dict.fromkeys(claim, True) for rank, claim in found.items()}
    # A unit that is not in the list did not run; a parameter that is not in the mapping was not used yet.
    if_missing = {rank: None if isinstance(claim, Mapping) else False for rank, claim in found.items()}
    is_alike = True
    for name in dict.fromkeys(name for claim in is_so.values() for name in claim):
        has, lacks = (
            [rank for rank, claim in is_so.items() if claim.get(name, if_missing[rank]) is value]
            for value in (True, False)
        )
        if has and lacks:
            is_alike = False
            yield kind.differs.format(name, named_ranks(has), named_ranks(lacks))
    orders = {rank: claim for rank, claim in found.items() if not isinstance(claim, Mapping)}
    if is_alike and len(set(map(tuple, orders.values()))) > 1:
        for place in zip_longest(*orders.values(), fillvalue="none"):
            if len(set(place)) > 1:
                ran = [f"'{name}' on rank {rank}" for rank, name in zip(orders, place, strict=True)]
                yield f"the order differs: at the same place ran {', '.join(ran[:_MAX_LINES])}"
                return


def named_ranks(ranks: Sequence[int]) -> str:
    """``ranks`` in a sentence."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
