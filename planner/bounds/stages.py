"""Splits of the layers over pipeline ranks and virtual stages, and what decides between them.

A step takes `m max_r t_r + x (sum_r t_r - max_r t_r) / vpp` seconds (for m micro-batches; t_r is what rank r
computes per micro-batch, x the schedule's bubble share), plus data-parallel and optimizer seconds that grow
with the most parameters on one rank. Ranks that interleave keep in step: there m times sum_v max_r t_vr, the
virtual stages one by one, takes the place of m max_r t_r.

The space of splits of ranks in step: `level_splits`. There the first chunk may hold the embedding alone, and
the last one the head, where the framework can say so. Of all others: every virtual stage has at least one
layer, the virtual stages of one rank differ by at most one layer (the short ones next to the embedding on
rank 0, last elsewhere), and the dense layers at the front of a mixture-of-experts model lie in the first
virtual stages of the ranks. Where layers come in groups (experts in each n-th), all of this counts groups.
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
    group: int = 1
    """Layers that no virtual stage parts."""
    num_micro_batches: int
    bubble_share: float = 1.0
    in_step: bool = False
    """Whether the schedule keeps ranks with several virtual stages in step."""
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
    empty_ends: bool = False
    """Whether the first and the last chunk of ranks in step may hold no layer."""
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
        """The fewest layers a rank may have; one at an end may leave a chunk of several empty."""
        shortest = max(1, self.recompute_layers if self.partial else 1)
        may_be_empty = self.empty_ends and self.in_step and self.vpp > 1
        return (self.vpp - may_be_empty) * self.group * -(-shortest // self.group)

    @property
    def most(self) -> int:
        """The most layers a rank may have."""
        return self.layers - (self.pp - 1) * self.fewest

    def rank_s(self, rank: int, layers: int, leading: int) -> float:
        """Seconds of one rank with `layers` layers, `leading` of them in its first virtual stage."""
        recomputed = min(self.recompute_layers * self.vpp, layers)
        seconds = self._layers_s(layers, leading, recomputed)
        if rank == 0:
            seconds += self.first_s
        if rank == self.pp - 1:
            seconds += self.last_s
        return seconds

    def _layers_s(self, layers: int, leading: int, recomputed: int) -> float:
        """Seconds of some layers, `leading` and `recomputed` ones among them."""
        again_leading = min(self.recompute_layers, leading)
        return (
            (layers - leading) * self.layer_s
            + leading * self.leading_s
            + (recomputed - again_leading) * self.layer_recompute_s
            + again_leading * self.leading_recompute_s
        )

    def rank_load(self, rank: int, layers: int, leading: int) -> float:
        """Parameters outside experts on one rank."""
        load = (layers - leading) * self.layer_load + leading * self.leading_load
        if rank == 0:
            load += self.first_load
        if rank == self.pp - 1:
            load += self.last_load
        return load

    def rank_experts(self, rank: int, layers: int, leading: int) -> int:
        """Layers with experts on one rank."""
        expert_layers = layers - leading if self.experts else 0
        if rank == self.pp - 1:
            expert_layers += self.last_experts
        return expert_layers

    def time_s(self, rank_times: list[float]) -> float:
        """The part of a step that the pipeline decides."""
        slowest = max(rank_times)
        return (
            self.num_micro_batches * slowest
            + self.bubble_share * (sum(rank_times) - slowest) / self.vpp
        )

    def stages_s(self, stages: tuple[tuple[int, ...], ...]) -> float:
        """The same for ranks in step, from the layers of every [rank][virtual stage]."""
        leading_left = self.leading
        sums, slowest = [0.0] * self.pp, [0.0] * self.vpp
        for chunk in range(self.pp * self.vpp):
            level, rank = divmod(chunk, self.pp)
            layers = stages[rank][level]
            leading = min(leading_left, layers)
            leading_left -= leading
            seconds = self._layers_s(layers, leading, min(self.recompute_layers, layers))
            if chunk == 0:
                seconds += self.first_s
            if chunk == self.pp * self.vpp - 1:
                seconds += self.last_s
            sums[rank] += seconds
            slowest[level] = max(slowest[level], seconds)
        bubble = self.bubble_share * (sum(sums) - max(sums)) / self.vpp
        return self.num_micro_batches * sum(slowest) + bubble


@dataclass(frozen=True, kw_only=True)
class Split:
    """`stages[rank][virtual stage]` layers, and the seconds of a step that the pipeline spends on them."""

    stages: tuple[tuple[int, ...], ...]
    time_s: float


def even_chunks(rank: int, layers: int, vpp: int, group: int = 1) -> tuple[int, ...]:
    """The virtual stages of one rank: as even as they can be, each of whole groups of layers."""
    short, longer = divmod(layers // group, vpp)
    counts = [group * (short + 1)] * longer + [group * short] * (vpp - longer)
    return tuple(counts if rank else reversed(counts))


def balanced_stages(
    layers: int, pp: int, vpp: int, group: int = 1
) -> tuple[tuple[int, ...], ...] | None:
    """The split that is even in groups of layers, or None where some virtual stage would be empty."""
    if layers < pp * vpp * group:
        return None
    each, longer = divmod(layers // group, pp)
    sizes = [group * (each + 1)] * longer + [group * each] * (pp - longer)
    return tuple(even_chunks(rank, size, vpp, group) for rank, size in enumerate(sizes))


def default_stages(
    layers: int, pp: int, vpp: int, *, in_step: bool, group: int = 1, empty_ends: bool = False
) -> tuple[tuple[int, ...], ...] | None:
    """A split that suits a schedule where nothing is known of costs; None where a chunk would be empty."""
    if in_step and vpp > 1:
        too_few = layers < pp * vpp * group
        splits = level_splits(layers, pp, vpp, group, empty_ends=empty_ends and too_few)
        if splits:
            return splits[0]
    return balanced_stages(layers, pp, vpp, group)


def level_splits(
    layers: int, pp: int, vpp: int, group: int = 1, *, empty_ends: bool = False
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Splits for ranks in step: the same layers in the same virtual stage of every rank, as nearly as can be.

    What is missing to full rows is taken from the last virtual stage of the last rank (the head's), from the
    first of the first rank (the embedding's), and, a layer each and for fewer than pp ranks, from the last of
    the longer virtual stages. Each such split is there, with up to two layers a rank more than needed. Of
    layers in groups the same is said of groups. With `empty_ends` nothing may be left of the two ends.
    """
    if group > 1:
        return tuple(
            tuple(tuple(group * count for count in rank) for rank in stages)
            for stages in level_splits(layers // group, pp, vpp, empty_ends=empty_ends)
        )
    splits: dict[tuple[tuple[int, ...], ...], None] = {}
    fewest, kept = -(-layers // pp), 0 if empty_ends else 1
    for row in range(fewest, fewest + 3):
        caps = even_chunks(1, row, vpp)
        missing = pp * row - layers
        for last in range(min(caps[-1] - kept, missing) + 1):
            for first in range(min(caps[0] - kept, missing - last) + 1):
                stages = _with_gaps(caps, pp, first, last, missing - first - last)
                if stages is not None:
                    splits[stages] = None
    return tuple(splits)


def _with_gaps(
    caps: tuple[int, ...], pp: int, first: int, last: int, spread: int
) -> tuple[tuple[int, ...], ...] | None:
    """Full rows less the missing layers; None where a virtual stage would be empty or ranks run out."""
    level = (sum(caps) - 1) % len(caps)
    ends = {(0, 0), (pp - 1, len(caps) - 1)}
    short = [rank for rank in range(pp) if (rank, level) not in ends][:spread]
    if len(short) < spread or min(caps) < 1 or (spread and caps[level] < 2):
        return None
    rows = [[*caps] for _ in range(pp)]
    rows[0][0] -= first
    rows[-1][-1] -= last
    for rank in short:
        rows[rank][level] -= 1
    return tuple(map(tuple, rows))
