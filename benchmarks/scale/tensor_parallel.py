"""Tensor parallelism in detail, with async TP: what it sends, and the time that this adds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fsdp2.planner.machine import Machine, gather, ranks_of


@dataclass(frozen=True)
class Exchange:
    """Tensor parallelism gathers all activations of a group of GPUs, or sums and scatters them: ``numel`` elements.

    Attributes:
        gathers: whether it is a gather, which sends fp8 if products are in fp8. Sums are in bf16.
        product: floating-point operations of the product that reads or makes it. Async TP sends it in the parts of that
            product; zero if there is none.
    """

    numel: float
    gathers: bool
    product: float = 0.0


@dataclass(frozen=True)
class TensorParallel:
    """Groups of ``size`` neighbouring GPUs.

    Attributes:
        fp8: whether the blocks' products with weights run in fp8.
        async_tp: tensor parallelism overlaps transfers with products where it can, and hides this share of them;
            None means that transfers and products alternate.
    """

    machine: Machine
    size: int
    fp8: bool = False
    async_tp: float | None = None

    def seconds(self, exchanges: Iterable[Exchange], *, is_block: bool) -> float:
        """The time that ``exchanges`` along the sequence add to compute."""
        return sum(self._added(each, is_block=is_block) for each in exchanges)

    def _added(self, exchange: Exchange, *, is_block: bool) -> float:
        """The transfer, and a copy, since the sequence is not the first dim. Async TP overlaps a share of the transfer
        with the parts of a product, which are slower than the whole, and sums what arrives in a separate kernel."""
        machine, in_fp8 = self.machine, self.fp8 and is_block
        nbytes = exchange.numel * (1 if exchange.gathers and in_fp8 else 2)
        transfer = gather(machine, ranks_of(self.size, 1, machine.node_size), nbytes).alone
        if self.async_tp is None or not (is_block and exchange.product):
            return transfer + 2 * nbytes / machine.copy_bandwidth
        reached = (in_fp8 and machine.reached.fp8) or machine.reached.bf16
        product = exchange.product / reached
        summed = 0.0 if exchange.gathers else nbytes * (1 + 1 / self.size) / machine.copy_bandwidth
        return transfer - self.async_tp * min(transfer, product) + summed
