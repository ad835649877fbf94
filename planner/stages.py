"""Splits of the layers over pipeline ranks and virtual stages, and what decides between them.

A step takes `m max_r t_r + (sum_r t_r - max_r t_r) / vpp` seconds (closed form of 1F1B and interleaved 1F1B
for m micro-batches; t_r is what rank r computes per micro-batch), plus data-parallel and optimizer seconds
that grow with the most parameters on one rank.

The space of splits: every virtual stage has at least one layer, the virtual stages of one rank differ by at
most one layer (the short ones next to the embedding on rank 0, last elsewhere), and the dense layers at the
front of a mixture-of-experts model lie in the first virtual stages of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ALL_LAYERS = 1_000_000
"""`recompute_layers` that means every layer."""

FitsRank = Callable[[int, int, int], bool]
"""(rank, layers, leading layers among them) -> whether that rank fits in memory."""


@dataclass(frozen=True, kw_only=True)
class SplitCosts:
    """What decides a split. Seconds per micro-batch, forward and backward, on one rank; loads are
    parameters.
    """

    pp: int
    vpp: int
    layers: int
    leading: int = 0
    """Layers at the front that cost `leading_s`: the dense ones of a mixture-of-experts model."""
    num_micro_batches: int
    layer_s: float
    leading_s: float = 0.0
    first_s: float = 0.0
    """Extra work of the first rank: the embedding."""
    last_s: float = 0.0
    """Extra work of the last rank: the head, the loss, the multi-token-prediction modules."""
    layer_recompute_s: float = 0.0
    leading_recompute_s: float = 0.0
    recompute_layers: int = 0
    """Layers of every virtual stage that are computed again: 0, at most the shortest stage, or ALL_LAYERS."""
    layer_load: float = 0.0
    leading_load: float = 0.0
    first_load: float = 0.0
    last_load: float = 0.0
    experts: bool = False
    """Whether the layers behind the leading ones hold experts."""
    last_experts: int = 0
    """Layers with experts in the multi-token-prediction modules, on the last rank."""

    @property
    def partial(self) -> bool:
        """Whether some layers of a stage are recomputed and some are not."""
        return 0 < self.recompute_layers < self.layers

    @property
    def fewest(self) -> int:
        """The fewest layers a rank may have."""
        return self.vpp * max(1, self.recompute_layers if self.partial else 1)

    @property
    def most(self) -> int:
        """The most layers a rank may have."""
        return self.layers - (self.pp - 1) * self.fewest

    def rank_s(self, rank: int, layers: int, leading: int) -> float:
        """Seconds of one rank with `layers` layers, `leading` of them in its first virtual stage."""
        again = min(self.recompute_layers * self.vpp, layers)
        again_leading = min(self.recompute_layers, leading)
        return (
            (layers - leading) * self.layer_s
            + leading * self.leading_s
            + (again - again_leading) * self.layer_recompute_s
            + again_leading * self.leading_recompute_s
            + (self.first_s if rank == 0 else 0.0)
            + (self.last_s if rank == self.pp - 1 else 0.0)
        )

    def rank_load(self, rank: int, layers: int, leading: int) -> float:
        """Parameters outside experts on one rank."""
        load = (layers - leading) * self.layer_load + leading * self.leading_load
        return (
            load + (self.first_load if rank == 0 else 0.0) + (self.last_load if rank == self.pp - 1 else 0.0)
        )

    def rank_experts(self, rank: int, layers: int, leading: int) -> int:
        """Layers with experts on one rank."""
        own = layers - leading if self.experts else 0
        return own + (self.last_experts if rank == self.pp - 1 else 0)

    def time_s(self, rank_times: list[float]) -> float:
        """The part of a step that the pipeline decides."""
        slowest = max(rank_times)
        return self.num_micro_batches * slowest + (sum(rank_times) - slowest) / self.vpp


@dataclass(frozen=True, kw_only=True)
class Split:
    """`stages[rank][virtual stage]` layers, and the seconds of a step that the pipeline spends on them."""

    stages: tuple[tuple[int, ...], ...]
    time_s: float


def chunk_layers(rank: int, layers: int, vpp: int) -> tuple[int, ...]:
    """The virtual stages of one rank: as even as they can be."""
    short, longer = divmod(layers, vpp)
    counts = [short + 1] * longer + [short] * (vpp - longer)
    return tuple(counts if rank else reversed(counts))


def balanced_stages(layers: int, pp: int, vpp: int) -> tuple[tuple[int, ...], ...] | None:
    """The split that is even in layers, or None where some virtual stage would be empty."""
    if layers < pp * vpp:
        return None
    return tuple(chunk_layers(r, layers // pp + (r < layers % pp), vpp) for r in range(pp))
