"""``check_gradient_wire``, which authors of a ``GradientWire`` call in their own tests.

A case is a number of ranks and of blocks. What all ranks would send is made in one process, and decoded as it arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from fsdp2.core import ExtensionError
from fsdp2.extras.checked import AT_LEAST_1, NOT_NEGATIVE, checked
from fsdp2.extras.gradient_wires import Payload, check_hooks, keeps_residuals, with_feedback
from fsdp2.tensors import GradientWire
from fsdp2.testing.findings import Findings, check_equal

_NUM_REDUCTIONS = 64  # after which the mean of what has arrived is close to what was sent
_MAX_MEAN_LOSS = 8  # how many times closer it must be than after one reduction


@checked(tolerance=NOT_NEGATIVE, world_sizes=AT_LEAST_1, num_blocks=AT_LEAST_1)
def check_gradient_wire(
    wire: GradientWire,
    *,
    world_sizes: Sequence[int] = (1, 2, 3, 4),
    num_blocks: Sequence[int] = (1, 2, 5),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    tolerance: float = 0.02,
) -> None:
    """Check that ``wire`` can send gradients; no process group is needed.

    It checks the shapes and dtypes of payloads; that rows of different ranks can be decoded together; that the hooks
    keep and change nothing; that values arrive; that zeros and missing gradients add nothing; that a value which is not
    finite stays visible, for loss scaling; and that error feedback makes up for what payloads lose::

        def test_my_wire_carries_gradients():
            check_gradient_wire(MyWire())

    Args:
        wire: the format to check.
        world_sizes: how many ranks exchange gradients.
        num_blocks: lengths of a row, in blocks of the wire.
        dtype, device: dtype and device of the gradients.
        tolerance: how much a value may lose, as a fraction of the largest value in its block.

    Raises:
        ExtensionError: has one line for each kind of failure: the check, what was found and expected, and where.
    """
    findings = Findings("check_gradient_wire")
    findings.class_name = type(wire).__name__
    if findings.passes("zeros", {"shapes": partial(check_hooks, wire, dtype, torch.device(device))}):
        for size in world_sizes:
            for blocks in num_blocks:
                case = _Case(wire, size, blocks, dtype, torch.device(device), tolerance)
                where = f"{size} rank{'s' if size > 1 else ''} and {blocks} block{'s' if blocks > 1 else ''}"
                findings.passes(where, case.checks())
    findings.raise_if_any()


class _Case:
    """``size`` ranks that each have ``num_blocks`` blocks for every rank."""

    def __init__(
        self, wire: GradientWire, size: int, num_blocks: int, dtype: torch.dtype, device: torch.device, tolerance: float
    ) -> None:
        self._wire, self._dtype, self._tolerance = wire, dtype, tolerance
        self._block_size = getattr(wire, "block_size", 1)
        generator = torch.Generator().manual_seed(size * 31 + num_blocks)
        shape = (size, size, num_blocks * self._block_size)
        spread = torch.logspace(-3, 1, size).view(-1, 1, 1)  # gradients of ranks differ in magnitude
        self._pieces = (torch.randn(shape, generator=generator) * spread).to(device, dtype)

    def checks(self) -> dict[str, Callable[[], None]]:
        checks = {
            "payload": self._check_payload,
            "pure": self._check_pure,
            "values": self._check_values,
            "rows": self._check_rows,
            "zeros": self._check_zeros,
            "not finite": self._check_not_finite,
        }
        if keeps_residuals(self._wire):
            checks["error feedback"] = self._check_feedback
        return checks

    def _sent(self, pieces: torch.Tensor) -> Payload:
        return self._wire.fsdp_pre_reduce_scatter(pieces)

    def _decoded(self, payload: Payload) -> torch.Tensor:
        return self._wire.fsdp_post_reduce_scatter(payload, self._dtype).to(self._dtype)

    def _check_payload(self) -> None:
        kinds = [
            [(part.shape, part.dtype, part.is_contiguous()) for part in self._sent(pieces)]
            for pieces in (*self._pieces, torch.zeros_like(self._pieces[0]))
        ]
        for kind in kinds[1:]:
            if kind != kinds[0]:
                raise ExtensionError(
                    f"fsdp_pre_reduce_scatter returned {_shown(kind)} for some values and {_shown(kinds[0])} for "
                    "others. Ranks could not exchange them. Let shapes and dtypes depend on the shape of pieces only."
                )

    def _check_pure(self) -> None:
        pieces = self._pieces[0]
        before = pieces.clone()
        first = [part.clone() for part in self._sent(pieces)]
        again = self._sent(pieces)
        problem, remedy = "fsdp_pre_reduce_scatter changed its pieces", "They may be gradients: write new tensors."
        check_equal([pieces], [before], problem, remedy)
        problem = "a second call of fsdp_pre_reduce_scatter with the same pieces returned another payload"
        check_equal(again, first, problem, "Keep no state: for what is lost, set error_feedback to True.")
        self._decoded(again)
        problem = "fsdp_post_reduce_scatter changed what it has received"
        check_equal(again, first, problem, "Write a new tensor, or return the received one.")

    def _check_values(self) -> None:
        for pieces in self._pieces:
            found = self._decoded(self._sent(pieces))
            if found.shape != pieces.shape:
                raise ExtensionError(f"decoded shape {tuple(found.shape)}, expected {tuple(pieces.shape)}.")
            blocks = pieces.unflatten(1, (-1, self._block_size))
            allowed = self._tolerance * blocks.abs().amax(2, keepdim=True)
            lost = (found.unflatten(1, (-1, self._block_size)) - blocks).abs()
            if not bool((lost <= allowed).all()):
                worst = float((lost / allowed).nan_to_num(float("inf")).max()) * self._tolerance
                raise ExtensionError(
                    f"a value arrives with an error of {worst:g} of the largest value in its block, expected at most "
                    f"{self._tolerance:g}. Send more bits, or pass a tolerance."
                )

    def _check_rows(self) -> None:
        """A rank decodes rows that other ranks have encoded."""
        sent = [self._sent(pieces) for pieces in self._pieces]
        for owner in range(len(self._pieces)):
            received = tuple(torch.stack([part[owner] for part in parts]) for parts in zip(*sent, strict=True))
            expected = torch.stack([self._decoded(payload)[owner] for payload in sent])
            problem = "rows of different ranks, decoded together, have other values than each alone"
            remedy = "Encode each row by itself, and send all that is needed to decode it."
            check_equal([self._decoded(received)], [expected], problem, remedy)

    def _check_zeros(self) -> None:
        zeros = torch.zeros_like(self._pieces[0])
        problem = "zeros, which ranks send for gradients that they do not have, arrive as other values"
        check_equal([self._decoded(self._sent(zeros))], [zeros], problem, "Encode zero as zero.")

    def _check_not_finite(self) -> None:
        for value in (float("inf"), float("nan")):
            pieces = self._pieces[0].clone()
            pieces[0, 0] = value
            if bool(self._decoded(self._sent(pieces))[0].isfinite().all()):
                raise ExtensionError(
                    f"a gradient with {value} arrives as finite values. Loss scaling, and whoever looks for NaN, would "
                    "not see it. Let its block decode to values that are not finite."
                )

    def _check_feedback(self) -> None:
        pieces = self._pieces[0]
        residual, total = torch.zeros_like(pieces), torch.zeros_like(pieces)
        for _ in range(_NUM_REDUCTIONS):
            sent, residual = with_feedback(self._wire, pieces, residual)
            total += self._decoded(sent)
        once = (self._decoded(self._sent(pieces)) - pieces).abs().max()
        mean = (total / _NUM_REDUCTIONS - pieces).abs().max()
        if bool(mean * _MAX_MEAN_LOSS > once):
            raise ExtensionError(
                f"with error feedback, the mean of {_NUM_REDUCTIONS} reductions is wrong by {float(mean):g}, expected "
                f"less than {float(once) / _MAX_MEAN_LOSS:g}. What is lost must be smaller than what is sent: scale "
                "each block by its own largest value."
            )


def _shown(kind: Sequence[tuple[torch.Size, torch.dtype, bool]]) -> str:
    return ", ".join(f"{tuple(shape)} {dtype}{'' if dense else ', not contiguous'}" for shape, dtype, dense in kind)
