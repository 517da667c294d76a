"""``whole_matrices``: a plan over many sharded tensors, and ``run``, which brings each whole matrix to its owner.

Rule: messages are static. They follow from the plan, never from values or from failures on one rank: an owner whose
function raises sends zeros, all ranks learn of it after the last message, and no rank has written anything by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2.core import _torch
from fsdp2.extras import torch_names
from fsdp2.extras.checked import checked
from fsdp2.extras.output import listed
from fsdp2.extras.sizes import nbytes_of
from fsdp2.optim.matrices.circles import Circle, agreed, check_alike, circles_of, told
from fsdp2.optim.matrices.domains import Copies, Domain, Subject, domains_of, subject_of
from fsdp2.optim.matrices.exchange import Message, Source, Step, stacked, take_results
from fsdp2.optim.matrices.messages import BucketMessages, Slices, messages_of
from fsdp2.optim.matrices.planner import Cost, Matrix, newton_schulz_cost
from fsdp2.optim.matrices.rules import MatrixRule

DEFAULT_BUCKET_NBYTES = 128 * 1024 * 1024

Rule = Callable[[str, Tensor], MatrixRule | None]
OnMatrix = Callable[[Tensor, Matrix], Tensor]
OnBatch = Callable[[Tensor, Sequence[Matrix]], Tensor]

MOST_IN_FLIGHT = 2  # buckets whose shards are in flight: one is computed while the next one arrives
_MOST_NAMES = 3  # in a message


@checked()
def whole_matrices(
    tensors: Mapping[str, Tensor] | Sequence[Tensor],
    *,
    rule: Rule | None = None,
    cost: Cost = newton_schulz_cost,
    dtype: torch.dtype | None = None,
    bucket_nbytes: int | str = DEFAULT_BUCKET_NBYTES,
    copies: Copies = "cheaper",
    last_first: bool = False,
) -> WholeMatrices:
    """Plan how the matrices of sharded ``tensors`` become whole for a moment, each on one rank.

    Storage does not change. Collective: all ranks of the tensors' meshes call it with the same tensors, in the same
    order. It reads only shapes and placements.

    Args:
        tensors: DTensors, by name or in order: parameters of ``fully_shard``, of this package or of torch, or tensors
            that are placed like them.
        rule: takes a name and a tensor, and returns the matrices that it consists of. None is the default for a tensor
            with two dims, ``MatrixRule.whole()``.
        cost: the floating-point operations of the function on a matrix of so many rows and columns; by default those of
            Newton-Schulz. Owners are chosen so that all have similar loads.
        dtype: the dtype in which matrices are sent and computed; None means that of each tensor.
        bucket_nbytes: the most memory that a bucket takes on a rank, with its messages and results: bytes, or text such
            as ``"64MiB"``. There are two at a time. A matrix that takes more is alone on its owner.
        copies: how to treat tensors that are replicated (HSDP). With ``"share"``, one rank in the world computes each
            matrix and sends the result to all copies. With ``"each"``, each copy does its own work within its shard
            mesh; on a mesh with a shard axis inside a node, nothing crosses nodes. ``"cheaper"`` chooses the one that
            the plan finds cheaper.
        last_first: fill buckets with the last tensors first, in the order in which backward computes gradients.

        Raises:
            TypeError: a tensor is not a DTensor.
            ValueError: a tensor is not a matrix and has no rule; a rule does not fit; a sum is pending; ranks differ.
                All ranks raise.
    """
    max_nbytes = nbytes_of(bucket_nbytes, "whole_matrices: bucket_nbytes", "64MiB")
    named = tensors if isinstance(tensors, Mapping) else {f"tensor {i}": each for i, each in enumerate(tensors)}
    subjects = [
        subject_of(position, name, tensor, None if rule is None else rule(name, tensor))
        for position, (name, tensor) in enumerate(named.items())
    ]
    circles = circles_of(subjects)
    check_alike(circles, subjects, cost, (dtype, max_nbytes, copies, last_first))
    domains = domains_of(
        subjects, cost=cost, dtype=dtype, bucket_nbytes=max_nbytes, copies=copies, last_first=last_first
    )
    return WholeMatrices(subjects, domains, circles)


class WholeMatrices:
    """A plan: the owner and the bucket of each matrix. ``str`` describes its cost.

    Attributes:
        domains: the plan of each process group.
        steps: the steps of a run, one per bucket.
    """

    def __init__(self, subjects: Sequence[Subject], domains: Sequence[Domain], circles: Sequence[Circle]) -> None:
        self.domains = tuple(domains)
        self._subjects, self._circles = subjects, circles
        self.steps = [
            Step(domain, bucket, messages_of(domain.plan, bucket, domain.me))
            for domain in domains
            for bucket in domain.plan.buckets
        ]

    @property
    def num_tensors(self) -> int:
        return len(self._subjects)

    def positions_in(self, number: int) -> set[int]:
        """The positions of the tensors that have matrices in step ``number``."""
        step = self.steps[number]
        return {step.domain.plan.matrices[index].tensor for owned in step.bucket.of_owner for index in owned}

    @property
    def balance(self) -> float:
        """The largest share of the cost on any rank, divided by the mean; with several groups, the largest of these."""
        return max((domain.plan.balance for domain in self.domains), default=1.0)

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank sends in a run."""
        return sum(domain.plan.sent_nbytes[domain.me] for domain in self.domains)

    @property
    def temporary_nbytes(self) -> int:
        """Peak memory of messages and whole matrices on a rank, which is two buckets. Results, which are kept to the
        end, and allocations of the function are not counted."""
        return max((domain.plan.temporary_nbytes for domain in self.domains), default=0)

    @property
    def kept_nbytes(self) -> int:
        """Memory of the results on a rank, which are kept until all matrices have succeeded."""
        return sum(domain.plan.kept_nbytes for domain in self.domains)

    @cached_property
    def owners(self) -> dict[str, int]:
        """The global rank that owns each matrix, by the matrix's name."""
        return {
            matrix.name: domain.ranks[owner]
            for domain in self.domains
            for matrix, owner in zip(domain.plan.matrices, domain.plan.owners, strict=True)
        }

    def __str__(self) -> str:
        return "\n".join(str(domain.plan) for domain in self.domains)

    @torch.no_grad()
    def run(self, fn: OnMatrix, tensors: Sequence[Tensor]) -> list[DTensor]:
        """Call ``fn`` once for each whole matrix, on its owner, and return the results, placed like ``tensors``.

        Collective. While one bucket is computed, the next is in flight.

        Args:
            fn: takes a matrix ``[rows, columns]``, which it may write, and its description; returns a result of the
                same shape. It runs on the mesh's device, in the plan's dtype.
            tensors: as many as planned, with the same placements. Their values are sent.

        Raises:
            RuntimeError: ``fn`` raised or returned another shape. All ranks raise, naming the matrix, its owner and the
                cause. ``tensors`` are unchanged, unless ``fn`` has changed them.
            ValueError: a tensor is not placed as planned. The other ranks raise RuntimeError.
            CommunicationError: a rank is lost.
        """

        def on_batch(batch: Tensor, matrices: Sequence[Matrix]) -> Tensor:
            return _checked(fn(batch[0], matrices[0]), batch.shape[1:]).unsqueeze(0)

        return self._run(on_batch, tensors, max_batch=1)

    @torch.no_grad()
    def run_batched(self, fn: OnBatch, tensors: Sequence[Tensor]) -> list[DTensor]:
        """Like ``run``, but matrices of the same shape in a bucket are passed together as ``[n, rows, columns]``, with
        their descriptions."""
        return self._run(fn, tensors, max_batch=None)

    def _run(self, fn: OnBatch, tensors: Sequence[Tensor], max_batch: int | None) -> list[DTensor]:
        locals_: list[Tensor] = []
        run = Run(self, fn, lambda position, slices: locals_[position][slices], max_batch)
        try:
            locals_ += self._locals_of(tensors)
        except ValueError as error:
            run.fail(error)
        results, _ = run.finish()
        kept = [result.to(local.device) for result, local in zip(results, locals_, strict=True)]
        return _torch.dtensors_like(tensors, kept)

    def _locals_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if len(tensors) != len(self._subjects):
            raise ValueError(f"whole_matrices: got {len(tensors)} tensors, but {len(self._subjects)} were planned.")
        for tensor, planned in zip(tensors, self._subjects, strict=True):
            like = planned.tensor
            is_placed = isinstance(tensor, DTensor) and tensor.placements == like.placements
            if not is_placed or tensor.shape != like.shape:
                raise ValueError(
                    f"whole_matrices: what is given for '{planned.name}' is not placed as planned: expected a DTensor "
                    f"of shape {tuple(like.shape)} with placements {like.placements}."
                )
        return torch_names.locals_of(tensors)

    def agree(self, failures: Sequence[str], flags: Sequence[bool]) -> list[bool]:
        """Return the flags of all ranks if none has failed; else raise on all. The host waits for the device once."""
        has_failed, found = agreed(self._circles, bool(failures), flags)
        if has_failed:
            raise RuntimeError("\n".join(told(self._circles, failures)))
        return found


class Run:
    """One run of a plan, bucket by bucket.

    ``source`` makes entries of this rank's shard of a tensor, by position and slices, when their bucket is packed, on
    the all-gather stream. ``fn`` gets all matrices of one shape in a bucket, or at most ``max_batch`` of them.
    Collective: all ranks send buckets at the same points of their programs.
    """

    def __init__(self, plan: WholeMatrices, fn: OnBatch, source: Source, max_batch: int | None = None) -> None:
        self._plan, self._fn, self._source, self._max_batch = plan, fn, source, max_batch
        self._in_flight: deque[Message] = deque()
        self._failures: list[str] = []
        self._error: Exception | None = None
        self.num_sent = 0

    def send(self) -> None:
        """Send the shards of the next bucket. Two buckets may be in flight at a time."""
        source = _zeros if self._failures else self._source
        self._in_flight.append(self._plan.steps[self.num_sent].send_shards(source))
        self.num_sent += 1

    def fail(self, error: Exception) -> None:
        """Make ``finish`` raise ``error``, and raise on the other ranks even if they have no error. From now on, this
        rank sends zeros."""
        self._failures.append(f"on rank {dist.get_rank()}: {error}")
        self._error = error

    def drop(self) -> None:
        """Abandon a run before ``finish``. All ranks then have sent the same number of buckets."""
        self._failures.append("given up")
        while self.num_sent < min(MOST_IN_FLIGHT, len(self._plan.steps)):
            self.send()
        while self._in_flight:
            self._in_flight.popleft().wait()

    def finish(self, flags: Sequence[bool] = ()) -> tuple[list[Tensor], list[bool]]:
        """Compute all buckets. ``flags`` has this rank's flag for each tensor, or is empty. Returns the local part of
        the result for each tensor, and whether any rank has set the tensor's flag.

        Raises:
            RuntimeError: some rank has failed. An error that was passed to ``fail`` is raised as it is.
        """
        plan = self._plan
        results: list[Tensor | None] = [None] * plan.num_tensors
        back: tuple[BucketMessages, Message] | None = None
        for number, step in enumerate(plan.steps):
            while self.num_sent < min(number + MOST_IN_FLIGHT, len(plan.steps)):
                self.send()
            stacks = stacked(step.messages, self._in_flight.popleft().wait())
            done = [self._result(step, stacks.pop(0), matrices) for matrices in step.messages.stacks]
            if back is not None:
                take_results(back[0], back[1].wait(), results)
            back = step.messages, step.send_results(done)
            del done
        if back is not None:
            take_results(back[0], back[1].wait(), results)
        try:
            any_flags = plan.agree(self._failures, flags)
        except RuntimeError:
            if self._error is not None:
                raise self._error from None
            raise
        for domain in plan.domains:  # shards without entries
            for position, tensor in domain.plan.tensors.items():
                if results[position] is None:
                    results[position] = domain.empty(*tensor.placed.local_shape(domain.me))
        return [each for each in results if each is not None], any_flags

    def _result(self, step: Step, stack: Tensor, matrices: Sequence[Matrix]) -> Tensor:
        """The result of a stack of ``matrices``; zeros if ``fn`` fails."""
        length = self._max_batch or len(matrices)
        parts: list[Tensor] = []
        for batch, start in zip(stack.split(length), range(0, len(matrices), length), strict=True):
            mine = matrices[start : start + length]
            try:
                parts.append(_checked(self._fn(batch, mine), batch.shape))
            except Exception as error:
                names = listed((f"'{matrix.name}'" for matrix in mine), _MOST_NAMES)
                self._failures.append(
                    f"whole_matrices: the function failed on {names}, whose owner is rank "
                    f"{step.domain.ranks[step.domain.me]}: {type(error).__name__}: {error}\n"
                    "No result was written on any rank."
                )
                return torch.zeros_like(stack)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _zeros(position: int, slices: Slices) -> Tensor:
    return torch.zeros((), device="cpu")


def _checked(result: object, shape: torch.Size) -> Tensor:
    if not isinstance(result, Tensor):
        raise TypeError(f"it returned {type(result).__name__}, expected a tensor of shape {tuple(shape)}.")
    if result.shape != shape:
        raise ValueError(f"it returned shape {tuple(result.shape)}, expected {tuple(shape)}.")
    return result
