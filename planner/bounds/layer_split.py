"""The exact search for the split of the layers, under memory limits.

One split can win for its slowest rank, another for its evenly spread parameters: `frontier` returns every
split that can be best, and the caller prices them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, floor, inf
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.pipeline import may_have_empty_ends
from meshwright.costmodel.layout import ROUNDING, Layout
from meshwright.costmodel.rank_load import Stages, layer_counts, least_busiest_in_order_s
from meshwright.costmodel.schedules import forward_first_s, longest_way_s, traits
from meshwright.costmodel.simulator import one_f_one_b_s
from meshwright.costmodel.workload import Workload

# Splits of the layers over pipeline ranks and virtual stages, and what decides between them.
#
# A step takes `m max_r t_r + x (sum_r t_r - max_r t_r) / vpp` seconds (for m micro-batches; t_r is what rank
# r computes per micro-batch, x the schedule's bubble share), plus data-parallel and optimizer seconds that
# grow with the most parameters on one rank. Ranks that interleave keep in step: there m times sum_v max_r
# t_vr, the virtual stages one by one, takes the place of m max_r t_r. 1F1B with one virtual stage each and
# unlike layers is played, and GPipe takes what it does (`_PlayedRanks`).
#
# The space of splits of ranks in step: `level_splits`. There the first chunk may hold the embedding alone,
# and the last one the head, where the framework can say so. Of all others: every virtual stage has at least
# one layer, the virtual stages of one rank differ by at most one layer (the short ones next to the embedding
# on rank 0, last elsewhere), and the dense layers at the front of a mixture-of-experts model lie in the
# first virtual stages of the ranks.


Seconds = TypeVar("Seconds", float, NDArray[np.float64])
ALL_LAYERS = 1_000_000
"""`recompute_layers` that means every layer."""

Order = tuple[tuple[float, float], ...]
"""Of every layer its seconds, and what recomputing it adds."""
FitsRank = Callable[[int, int, int], bool]
"""(rank, layers, leading layers among them) -> whether that rank fits in memory."""
FitsPart = Callable[[int], NDArray[np.bool_]]
"""rank -> whether the part of the layers from one place to another fits there, [begin, end]."""


class BackwardSeconds(NamedTuple):
    """What of some seconds backward passes take, per micro-batch."""

    first_s: float
    last_s: float
    layers: tuple[float, ...]
    """In order."""
    of_ranks: tuple[tuple[float, ...], ...] = ()
    """The same on each rank, where these differ."""


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
    flushes: int = 1
    """Times that the pipeline runs empty, each with as many of the micro-batches."""
    bubble_share: float = 1.0
    hides: float = 0.0
    """Seconds of traffic that one second more of all ranks' work for a micro-batch may hide, at most, where
    that work differs between splits of layers in order."""
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
    order: tuple[tuple[float, float], ...] = ()
    """Of unlike layers, in their order: seconds of each, and what recomputing it adds. `layer_s` and
    `leading_s` are means then, and decide nothing but what `stages_s` says."""
    order_of_ranks: tuple[Order, ...] = ()
    """The same on each rank; empty where a layer takes as long on all of them. It takes longer behind the
    first rank where it runs forward alone there, and on stages that lie further apart. No layer takes less
    than in `order`."""
    order_loads: tuple[tuple[float, int], ...] = ()
    """Of layers with unlike bytes, in their order: parameters outside experts of each, and whether it has
    experts. `layer_load` is their mean then."""
    begins: tuple[int, ...] = ()
    """`ModelSpec.stage_begins`, of unlike layers alone."""
    backward: BackwardSeconds | None = None
    """Of unlike layers in 1F1B with one virtual stage each, and of any in GPipe: then a step takes what these
    do, not what the head of this module says."""
    forward_first: bool = False
    """Whether it is GPipe that runs."""

    @property
    def partial(self) -> bool:
        """Whether some layers of a stage are recomputed and some are not."""
        return 0 < self.recompute_layers < self.layers

    @property
    def fewest(self) -> int:
        """The fewest layers a rank may have; one at an end may leave a chunk of several empty."""
        shortest = max(1, self.recompute_layers if self.partial else 1)
        may_be_empty = self.empty_ends and self.in_step and self.vpp > 1
        return (self.vpp - may_be_empty) * shortest

    @property
    def most(self) -> int:
        """The most layers a rank may have."""
        return self.layers - (self.pp - 1) * self.fewest

    def rank_s(self, rank: int, layers: int, leading: int) -> float:
        """Seconds of one rank for a micro-batch, forward and backward.

        Parameters
        ----------
        rank
            Of the pipeline, from 0.
        layers
            Of all its virtual stages together.
        leading
            Those among them that cost `leading_s`, 0 to `layers`; all lie in its first virtual stage.
        """
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
        """Layers with experts on one rank.

        Parameters
        ----------
        rank
            Of the pipeline, from 0; the last one has `last_experts` layers besides.
        layers
            Of all its virtual stages together.
        leading
            Those among them without experts, 0 to `layers`.

        Returns
        -------
        int
            0 in a model without experts.
        """
        expert_layers = layers - leading if self.experts else 0
        if rank == self.pp - 1:
            expert_layers += self.last_experts
        return expert_layers

    def time_s(self, rank_times: list[float]) -> float:
        """The part of a step that the pipeline decides.

        Parameters
        ----------
        rank_times
            Seconds of every rank for a micro-batch, forward and backward, where each waits for the slowest.

        Returns
        -------
        float
            Seconds of all micro-batches with the bubble.
        """
        return self.pipeline_s(max(rank_times), sum(rank_times))

    def pipeline_s(self, slowest_s: Seconds, work_s: Seconds) -> Seconds:
        """The part of a step that the pipeline decides, by the slowest rank and by all ranks.

        Parameters
        ----------
        slowest_s
            Seconds of the slowest rank for a micro-batch; a number, or an array of many splits.
        work_s
            Those of all ranks together, shaped likewise, at least `slowest_s`.

        Returns
        -------
        float or array
            Seconds of all micro-batches with the bubble.
        """
        bubble_s = self.bubble_share * (work_s - slowest_s) / self.vpp
        return self.num_micro_batches * slowest_s + bubble_s

    def stages_s(self, stages: tuple[tuple[int, ...], ...]) -> float:
        """The part of a step that the pipeline decides where ranks are in step.

        Each virtual stage takes as long as on the rank where it is slowest.

        Parameters
        ----------
        stages
            Layers of every [rank][virtual stage].

        Returns
        -------
        float
            Seconds of all micro-batches with the bubble.
        """
        leading_left = self.leading
        sums, slowest = [0.0] * self.pp, [0.0] * self.vpp
        of_chunks: dict[tuple[int, int], float] = {}
        for chunk in range(self.pp * self.vpp):
            level, rank = divmod(chunk, self.pp)
            layers = stages[rank][level]
            leading = min(leading_left, layers)
            leading_left -= leading
            known_s = of_chunks.get((layers, leading))
            if known_s is None:
                known_s = self._layers_s(layers, leading, min(self.recompute_layers, layers))
                of_chunks[layers, leading] = known_s
            seconds = known_s
            if chunk == 0:
                seconds += self.first_s
            if chunk == self.pp * self.vpp - 1:
                seconds += self.last_s
            sums[rank] += seconds
            slowest[level] = max(slowest[level], seconds)
        bubble = self.bubble_share * (sum(sums) - max(sums)) / self.vpp
        return self.num_micro_batches * sum(slowest) + bubble

    def counts_of(self, stages: tuple[tuple[int, ...], ...]) -> list[tuple[int, int]]:
        """(layers, leading ones among them) of each rank.

        Parameters
        ----------
        stages
            Layers of every [rank][virtual stage].
        """
        leading = layer_counts(self.leading, stages, 0).dense
        return [(sum(row), int(own)) for row, own in zip(stages, leading, strict=True)]

    def at_the_cheapest(self) -> SplitCosts:
        """The costs with every layer as cheap as the cheapest kind; themselves where layers are alike."""
        if not self.order:
            return self
        layer_s, again_s = (min(column) for column in zip(*self.order, strict=True))
        return replace(
            self,
            layer_s=layer_s,
            leading_s=layer_s,
            layer_recompute_s=again_s,
            leading_recompute_s=again_s,
            order=(),
            order_of_ranks=(),
            order_loads=(),
            begins=(),
            backward=None,
        )


@dataclass(frozen=True, kw_only=True)
class Split:
    """`stages[rank][virtual stage]` layers, and the seconds of a step that the pipeline spends on them."""

    stages: tuple[tuple[int, ...], ...]
    time_s: float
    gap_s: float = 0.0
    """How much less another split with no more parameters on a rank may take, at most."""
    more_work_s: float = 0.0
    """How much more all its ranks may work for a micro-batch, at most, which hides traffic."""
    work_range_s: tuple[float, float] = (0.0, 0.0)
    """Of the splits it stands for because none of them hides as much traffic: what all ranks of one work for
    a micro-batch at the least, and its own."""


def even_chunks(rank: int, layers: int, vpp: int) -> tuple[int, ...]:
    """The virtual stages of one rank, as even as they can be.

    Parameters
    ----------
    rank
        Of the pipeline, from 0. The longer stages of rank 0 stand last, as its first one has the embedding
        besides; those of all others stand first.
    layers
        Of this rank, or runs of them, from 0.
    vpp
        Virtual stages of a rank, at least 1.

    Returns
    -------
    tuple of int
        Layers of each virtual stage, in their order.
    """
    short, longer = divmod(layers, vpp)
    counts = [short + 1] * longer + [short] * (vpp - longer)
    return tuple(counts if rank else reversed(counts))


def balanced_stages(
    layers: int, pp: int, vpp: int, begins: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], ...] | None:
    """The split that is even in layers, or in runs of them from one begin of a stage to the next.

    Parameters
    ----------
    layers
        Of the model.
    pp
        Ranks of the pipeline.
    vpp
        Virtual stages of each.
    begins
        Layers, from 0, at which a stage may begin (`ModelSpec.stage_begins`); at any by default.

    Returns
    -------
    tuple of tuple of int, or None
        Layers of every [rank][virtual stage]; None where some virtual stage would be empty.
    """
    number = len(begins) or layers
    if number < pp * vpp:
        return None
    each, longer = divmod(number, pp)
    sizes = [each + 1] * longer + [each] * (pp - longer)
    stages = tuple(even_chunks(rank, size, vpp) for rank, size in enumerate(sizes))
    return _layers_of_runs(stages, begins, layers) if begins else stages


def _layers_of_runs(stages: Stages, begins: tuple[int, ...], layers: int) -> Stages:
    """The layers of each [rank][virtual stage] that holds so many runs, each from one begin to the next."""
    places, at = (*begins, layers), 0
    counted = [[0] * len(rank) for rank in stages]
    for level in range(len(stages[0])):
        for rank, of_rank in enumerate(stages):
            end = at + of_rank[level]
            counted[rank][level] = places[end] - places[at]
            at = end
    return tuple(map(tuple, counted))


def default_stages(
    layers: int,
    pp: int,
    vpp: int,
    *,
    in_step: bool,
    empty_ends: bool = False,
    begins: tuple[int, ...] = (),
) -> tuple[tuple[int, ...], ...] | None:
    """A split that suits a schedule where nothing is known of costs.

    Parameters
    ----------
    layers
        Of the model.
    pp
        Ranks of the pipeline.
    vpp
        Virtual stages of each.
    in_step
        Whether the schedule keeps ranks in step: the same virtual stage of each should be as long.
    empty_ends
        Whether the first and the last virtual stage may have no layer, where there are too few for all.
    begins
        Layers, from 0, at which a stage may begin (`ModelSpec.stage_begins`); at any by default.

    Returns
    -------
    tuple of tuple of int, or None
        Layers of every [rank][virtual stage]; None where a virtual stage would be empty that may not be.
    """
    if in_step and vpp > 1:
        too_few = (len(begins) or layers) < pp * vpp
        splits = level_splits(layers, pp, vpp, empty_ends=empty_ends and too_few, begins=begins)
        if splits:
            return splits[0]
    return balanced_stages(layers, pp, vpp, begins)


@lru_cache(maxsize=256)
def level_splits(
    layers: int, pp: int, vpp: int, *, empty_ends: bool = False, begins: tuple[int, ...] = ()
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Splits for ranks in step: the same layers in the same virtual stage of every rank, as nearly as can be.

    What is missing to full rows is taken from the last virtual stage of the last rank (the head's), from the
    first of the first rank (the embedding's), and, a layer each and for fewer than pp ranks, from the last of
    the longer virtual stages. Each such split is there, with up to two layers a rank more than needed.

    Parameters
    ----------
    layers
        Of the model.
    pp
        Ranks of the pipeline.
    vpp
        Virtual stages of each.
    empty_ends
        Whether nothing may be left of the two ends.
    begins
        Layers, from 0, at which a stage may begin (`ModelSpec.stage_begins`), at any by default. With these
        all of this is of runs of layers from one begin to the next, in place of layers.

    Returns
    -------
    tuple of splits
        Layers of every [rank][virtual stage] of each; empty where there is none.
    """
    if begins:
        of_runs = level_splits(len(begins), pp, vpp, empty_ends=empty_ends)
        return tuple(_layers_of_runs(stages, begins, layers) for stages in of_runs)
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


def splits_by_place(costs: SplitCosts) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Splits for ranks in step of which some are slower than others: `level_splits` of the fast ones, and
    fewer layers on the slow ones, evenly.

    Any share of the ranks may count as slow that is slower than all others. They get about as many layers as
    take them as long as the others; none where all are as fast, or stages begin at some layers alone.

    Parameters
    ----------
    costs
        With `order_of_ranks`, the layers' seconds on each rank; without them there is no such split.

    Returns
    -------
    tuple of splits
        Layers of every [rank][virtual stage] of each.
    """
    if costs.begins or not costs.order_of_ranks:
        return ()
    seconds = [sum(each for each, _ in order) for order in costs.order_of_ranks]
    splits: dict[tuple[tuple[int, ...], ...], None] = {}
    for limit_s in sorted(set(seconds))[:-1]:
        fast = [rank for rank, each_s in enumerate(seconds) if each_s <= limit_s]
        slow = [rank for rank in range(costs.pp) if rank not in fast]
        pace = sum(1.0 / each_s for each_s in seconds)
        mean = costs.layers * sum(1.0 / seconds[rank] for rank in slow) / pace / len(slow)
        for layers_of_slow in range(max(costs.vpp, floor(mean) - 1), ceil(mean) + 2):
            rest = costs.layers - layers_of_slow * len(slow)
            if rest < len(fast) * costs.vpp:
                break
            for rows_of_fast in level_splits(rest, len(fast), costs.vpp):
                rows = dict(zip(fast, rows_of_fast, strict=True))
                rows |= dict.fromkeys(slow, even_chunks(1, layers_of_slow, costs.vpp))
                splits[tuple(rows[rank] for rank in range(costs.pp))] = None
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


def frontier(
    costs: SplitCosts,
    slack_s: float,
    fits: FitsRank | None = None,
    fits_part: FitsPart | None = None,
) -> tuple[Split, ...]:
    """Splits among which a best one is, whatever the rest of the step charges for parameters.

    Parameters
    ----------
    costs
        What decides a split.
    slack_s
        At least what the rest of the step takes for the split with the least pipeline seconds. The rest
        must not fall when the most parameters on a rank (outside experts, or in experts) rise.
    fits
        Whether a rank fits in memory; None where memory is no limit.
    fits_part
        Whether a part of the layers fits on a rank, where `costs.order_loads` says that layers hold unlike
        bytes and memory is a limit.

    Returns
    -------
    tuple[Split, ...]
        Empty where no split fits.

    Raises
    ------
    ValueError
        For ranks in step with virtual stages: these have `level_splits`.
    """
    if costs.layers < costs.pp * costs.fewest:
        return ()
    if costs.in_step and costs.vpp > 1:
        raise ValueError("ranks in step take one of level_splits")
    if fits is None:
        return _unlimited(costs, slack_s)
    if costs.order and costs.vpp == 1:
        return tuple(_ordered_ranks(costs, fits, fits_part).frontier(slack_s))
    return tuple(_Ranks(costs, fits).frontier(slack_s))


@lru_cache(maxsize=1024)
def _unlimited(costs: SplitCosts, slack_s: float) -> tuple[Split, ...]:
    return tuple(_free_ranks(costs).frontier(slack_s))


@lru_cache(maxsize=1024)
def _free_ranks(costs: SplitCosts) -> _Ranks:
    """Unlike layers are dealt out in their order where a rank holds one part of it."""
    if costs.order and costs.vpp == 1:
        return _ordered_ranks(costs, None)
    return _Ranks(costs, None)


def _ordered_ranks(
    costs: SplitCosts, fits: FitsRank | None, fits_part: FitsPart | None = None
) -> _OrderedRanks:
    """Ranks with one part each of unlike layers, priced as the schedule is."""
    ranks = _OrderedRanks if costs.backward is None else _PlayedRanks
    return ranks(costs, fits, fits_part)


def least_busiest_rank_s(costs: SplitCosts, rooms: Sequence[Sequence[int]]) -> float:
    """A lower bound on the slowest rank of every split that fits; infinite where there is none.

    Parameters
    ----------
    costs
        What decides a split.
    rooms
        `rooms[r][l]`: the most layers of rank r where l of them are leading ones.

    Returns
    -------
    float
        Seconds for one micro-batch, forward and backward.
    """
    if costs.order and costs.vpp == 1 and costs.pp > 1:
        in_order_s = _in_order_s(costs, rooms)
        return max(in_order_s, least_busiest_rank_s(costs.at_the_cheapest(), rooms))
    costs = costs.at_the_cheapest()
    kinds = [_end_kind(costs, rank) for rank in range(costs.pp)]
    counts = range(max(max(row) for row in rooms) + 1)
    most_leading = max(len(row) for row in rooms)
    seconds: dict[tuple[int, int], list[float]] = {}
    for kind in set(kinds):
        rank = kinds.index(kind)
        for leading in range(most_leading):
            seconds[kind, leading] = [costs.rank_s(rank, layers, leading) for layers in counts]

    def most_layers(rank: int, leading: int, limit_s: float) -> float:
        fitting = bisect_right(seconds[kinds[rank], leading], limit_s) - 1
        layers = min(rooms[rank][leading], fitting)
        return layers if layers >= max(costs.fewest, leading) else -inf

    def holds(limit_s: float) -> bool:
        totals = [0.0] + [-inf] * costs.leading  # most layers, by leading layers placed so far
        for rank, row in enumerate(rooms):
            most = [most_layers(rank, leading, limit_s) for leading in range(len(row))]
            totals = _longest_sums(totals, most)
        return totals[-1] >= costs.layers

    steps = sorted({value for row in seconds.values() for value in row})
    first = bisect_left(steps, True, key=holds)
    return steps[first] if first < len(steps) else inf


def _in_order_s(costs: SplitCosts, rooms: Sequence[Sequence[int]]) -> float:
    """`least_busiest_rank_s` of unlike layers, of which each rank holds one part."""
    seconds, again = (np.concatenate([[0.0], np.cumsum(x)]) for x in zip(*costs.order, strict=True))
    places = np.arange(0, costs.layers + 1)
    to = np.minimum(places + min(costs.recompute_layers, costs.layers), costs.layers)
    again_s = again[to] - again[places]
    if costs.recompute_layers >= costs.layers:
        seconds, again_s = seconds + again, 0.0 * again_s
    most = np.array([[min(max(row), costs.layers) for row in rooms]], dtype=np.float64)
    bound_s = least_busiest_in_order_s(
        seconds[None, places],
        np.array([costs.first_s]),
        np.array([costs.last_s]),
        costs.pp,
        rooms=most,
        again_s=again_s[None] if again_s.any() else None,
        begins=costs.begins,
    )
    return float(bound_s[0])


def _end_kind(costs: SplitCosts, rank: int) -> int:
    """0 for the first rank, 1 for the last, from 2 on for the others, which cost alike if their layers do."""
    if rank in (0, costs.pp - 1):
        return int(rank > 0)
    orders = costs.order_of_ranks
    return 2 + (orders.index(orders[rank]) if orders else 0)


def _longest_sums(totals: Sequence[float], most: Sequence[float]) -> list[float]:
    """Largest totals[i - k] + most[k] over k, for every i."""
    sums = []
    for placed in range(len(totals)):
        choices = range(min(placed + 1, len(most)))
        sums.append(max(totals[placed - leading] + most[leading] for leading in choices))
    return sums


CapName = Literal["seconds", "load", "experts"]


@dataclass(frozen=True)
class _Option:
    """One choice for one rank."""

    layers: int
    leading: int
    again: int
    """Leading layers that are recomputed, where that changes the sum over the ranks."""
    seconds: float
    load: float
    experts: int


@dataclass(frozen=True)
class _Caps:
    """Limits that every rank must keep, and the leading layers recomputed over all ranks."""

    seconds: float
    load: float
    experts: float
    again: int


def _capped(caps: _Caps, name: CapName, value: float) -> _Caps:
    """Some caps with one of them replaced."""
    if name == "seconds":
        return replace(caps, seconds=value)
    return replace(caps, load=value) if name == "load" else replace(caps, experts=value)


class _Ranks:
    """Choices of every rank, and which totals they reach: states are (leading covered, leading recomputed),
    and the layer counts reachable from a state are a bit mask.
    """

    def __init__(self, costs: SplitCosts, fits: FitsRank | None) -> None:
        self.costs = costs
        self._fits = fits
        self._options: dict[tuple[int, int], list[_Option]] = {}
        self._columns: dict[int, tuple[list[float], list[float], list[int]]] = {}
        self._all_counts = (1 << (costs.layers + 1)) - 1
        """A mask of all layer counts from 0."""
        options = [
            option for rank, covered in self._classes() for option in self._of(rank, covered)
        ]
        self._seconds = sorted({option.seconds for option in options})
        self._loads = sorted({option.load for option in options})
        self._experts: list[float] = sorted({option.experts for option in options})

    def _classes(self) -> Iterator[tuple[int, int]]:
        """(rank, leading layers before it), one for each kind of rank; every rank takes at least one
        leading layer.
        """
        leading, seen = self.costs.leading, set()
        for rank in range(self.costs.pp):
            for covered in range(min(rank, leading), (leading if rank else 0) + 1):
                if (self._kind(rank), covered) not in seen:
                    seen.add((self._kind(rank), covered))
                    yield rank, covered

    def _of(self, rank: int, covered: int) -> list[_Option]:
        """Choices of a rank when `covered` leading layers lie before it, in rising order of layers."""
        kind = self._kind(rank)
        options = self._options.get((kind, covered))
        if options is None:
            options = self._options[kind, covered] = list(self._choices(rank, covered))
        return options

    def _kind(self, rank: int) -> int:
        """Ranks of one kind have the same choices."""
        return rank if self._fits else _end_kind(self.costs, rank)

    def _choices(self, rank: int, covered: int) -> Iterator[_Option]:
        costs = self.costs
        for layers in range(costs.fewest, costs.most + 1):
            first_chunk = even_chunks(rank, layers, costs.vpp)[0]
            leading = min(costs.leading - covered, first_chunk)
            if self._fits is not None and not self._fits(rank, layers, leading):
                return  # memory grows with the layers
            yield _Option(
                layers,
                leading,
                min(costs.recompute_layers, leading) if costs.partial else 0,
                costs.rank_s(rank, layers, leading),
                costs.rank_load(rank, layers, leading),
                costs.rank_experts(rank, layers, leading),
            )

    def _total_s(self, recomputed_leading: int) -> float:
        """Sum over the ranks of any split that recomputes so many leading layers."""
        costs = self.costs
        if not costs.partial:
            recomputed_leading = min(costs.recompute_layers, costs.leading)
        recomputed = min(costs.recompute_layers * costs.vpp * costs.pp, costs.layers)
        total = (costs.layers - costs.leading) * costs.layer_s + costs.leading * costs.leading_s
        again = (recomputed - recomputed_leading) * costs.layer_recompute_s
        again += recomputed_leading * costs.leading_recompute_s
        return total + again + costs.first_s + costs.last_s

    def frontier(self, slack_s: float) -> Iterator[Split]:
        """See the module's `frontier`."""
        most_recomputed = self.costs.leading if self.costs.partial else 0
        starts: list[tuple[float, int, int]] = []
        for recomputed_leading in range(most_recomputed + 1):
            low = self._least("seconds", self._only_seconds(recomputed_leading=recomputed_leading))
            if low is not None:
                pipeline_s = self._pipeline_s(self._seconds[low], recomputed_leading)
                starts.append((pipeline_s, recomputed_leading, low))
        if not starts:
            return
        limit_s = (min(starts)[0] + slack_s) * (1 + 1e-12)
        for _, recomputed_leading, low in sorted(starts):
            yield from self._pareto(low, recomputed_leading, limit_s)

    def _pipeline_s(self, slowest_s: float, recomputed_leading: int) -> float:
        """Seconds of the pipeline whose slowest rank takes so long for a micro-batch."""
        return self.costs.pipeline_s(slowest_s, self._total_s(recomputed_leading))

    def _pareto(self, low: int, recomputed_leading: int, limit_s: float) -> Iterator[Split]:
        """Splits that no other one within the limit beats in seconds, load and experts."""
        pareto: list[tuple[int, int]] = []
        for seconds in self._seconds[low:]:
            if self._pipeline_s(seconds, recomputed_leading) > limit_s:
                break
            if not pareto or self._improves(seconds, recomputed_leading, pareto):
                for load, experts in self._least_loads(seconds, recomputed_leading):
                    pareto.append((load, experts))
                    caps = _Caps(
                        seconds, self._loads[load], self._experts[experts], recomputed_leading
                    )
                    yield self._split(caps)

    def _only_seconds(self, seconds: float = inf, recomputed_leading: int = 0) -> _Caps:
        """Caps on the slowest rank and on nothing else."""
        return _Caps(seconds, inf, 2 * self.costs.layers, recomputed_leading)

    def _improves(
        self, seconds: float, recomputed_leading: int, pareto: list[tuple[int, int]]
    ) -> bool:
        """Whether a split within the threshold has less of a kind of parameters than all known ones."""
        caps = self._only_seconds(seconds, recomputed_leading)
        return any(self._reachable(trial) is not None for trial in self._lighter(caps, pareto))

    def _lighter(self, caps: _Caps, pareto: list[tuple[int, int]]) -> list[_Caps]:
        """Caps that only a split with less of a kind of parameters than all known ones keeps."""
        load = min(load for load, _ in pareto)
        experts = min(experts for _, experts in pareto)
        trials = []
        if load:
            trials.append(replace(caps, load=self._loads[load - 1]))
        if experts:
            trials.append(replace(caps, experts=self._experts[experts - 1]))
        if len(pareto) > 1:
            both = replace(caps, load=self._loads[load], experts=self._experts[experts])
            trials.append(both)
        return trials

    def _least_loads(self, seconds: float, recomputed_leading: int) -> Iterator[tuple[int, int]]:
        """Indices of (load, experts) within a threshold on the slowest rank that none beats in both."""
        caps = self._only_seconds(seconds, recomputed_leading)
        lightest, first = self._least("load", caps), self._least("experts", caps)
        if lightest is None or first is None:
            return
        best = len(self._loads)
        for index in range(first, len(self._experts)):
            lightest_here = self._least("load", replace(caps, experts=self._experts[index]), best)
            if lightest_here is not None:
                best = lightest_here
                yield lightest_here, index
            if best <= lightest:
                return

    def _least(self, name: CapName, caps: _Caps, below: int | None = None) -> int | None:
        """Index of the least value of one cap under which some split keeps the others, or None."""
        values = {"seconds": self._seconds, "load": self._loads, "experts": self._experts}[name]
        low, high = 0, len(values) if below is None else below
        end = high
        while low < high:
            middle = (low + high) // 2
            if self._reachable(_capped(caps, name, values[middle])) is not None:
                high = middle
            else:
                low = middle + 1
        return low if low < end else None

    def _within(self, rank: int, covered: int, caps: _Caps) -> Iterator[_Option]:
        for option in self._of(rank, covered):
            parameters_fit = option.load <= caps.load and option.experts <= caps.experts
            if parameters_fit and option.seconds <= caps.seconds:
                yield option
            elif option.leading == self.costs.leading - covered:
                return  # longer choices only add layers that are not leading ones

    def _longest(self, rank: int, caps: _Caps) -> int:
        """How many choices of a rank without leading layers keep the caps; they are the shortest ones."""
        kind = self._kind(rank)
        columns = self._columns.get(kind)
        if columns is None:
            options = self._of(rank, self.costs.leading)
            columns = self._columns[kind] = (
                [option.seconds for option in options],
                [option.load for option in options],
                [option.experts for option in options],
            )
        return min(
            bisect_right(columns[0], caps.seconds),
            bisect_right(columns[1], caps.load),
            bisect_right(columns[2], caps.experts),
        )

    def _reachable(self, caps: _Caps) -> list[dict[tuple[int, int], int]] | None:
        """Masks [rank][state] of layer counts that the ranks from there on can take; None if not all."""
        costs = self.costs
        masks: list[dict[tuple[int, int], int]] = [{} for _ in range(costs.pp + 1)]
        masks[costs.pp] = {(costs.leading, caps.again): 1}
        for rank in reversed(range(costs.pp)):
            after, here = masks[rank + 1], masks[rank]
            here.update(self._smeared(after, self._longest(rank, caps)))
            end = costs.leading if rank else min(1, costs.leading)
            for covered in range(min(rank, costs.leading), end):
                options = list(self._within(rank, covered, caps))
                for again in range(min(covered, caps.again) + 1):
                    mask = 0
                    for option in options:
                        state = (covered + option.leading, again + option.again)
                        mask |= after.get(state, 0) << option.layers
                    mask &= self._all_counts
                    if mask:
                        here[covered, again] = mask
            if not here:
                return None
        all_layers = masks[0].get((0, 0), 0) >> costs.layers & 1
        return masks if all_layers else None

    def _smeared(
        self, after: dict[tuple[int, int], int], choices: int
    ) -> dict[tuple[int, int], int]:
        """Masks of the states that have covered all leading layers, one rank earlier: `choices` layer
        counts from the fewest on.
        """
        masks: dict[tuple[int, int], int] = {}
        if not choices:
            return masks
        for state, mask in after.items():
            if state[0] == self.costs.leading:
                grown, width = mask << self.costs.fewest, 1
                while width < choices:
                    step = min(width, choices - width)
                    grown |= grown << step
                    width += step
                grown &= self._all_counts
                if grown:
                    masks[state] = grown
        return masks

    def _split(self, caps: _Caps) -> Split:
        """The most even split within the caps; there is one."""
        masks = self._reachable(caps)
        assert masks is not None
        costs = self.costs
        layers_left, covered, again = costs.layers, 0, 0
        stages: list[tuple[int, ...]] = []
        times: list[float] = []
        for rank in range(costs.pp):
            share = layers_left / (costs.pp - rank)
            options = []
            for option in self._within(rank, covered, caps):
                rest = layers_left - option.layers
                state = (covered + option.leading, again + option.again)
                if rest >= 0 and masks[rank + 1].get(state, 0) >> rest & 1:
                    options.append((abs(option.layers - share), -option.layers, option))
            _, _, option = min(options, key=lambda entry: entry[:2])
            stages.append(even_chunks(rank, option.layers, costs.vpp))
            times.append(option.seconds)
            layers_left -= option.layers
            covered += option.leading
            again += option.again
        return Split(stages=tuple(stages), time_s=costs.time_s(times))


class Parts(NamedTuple):
    """What a rank takes that holds the layers from one place to another, arrays [begin, end]."""

    seconds: NDArray[np.float64]
    """Of both passes of a micro-batch."""
    load: NDArray[np.float64]
    """Parameters outside experts."""
    experts: NDArray[np.float64]
    """Layers with experts, or parameters of theirs."""
    may_be: NDArray[np.bool_]
    """Whether there is such a part, and memory holds it."""
    backward_s: NDArray[np.float64] = np.zeros((0, 0))
    """Those of `seconds` in which gradients are made; empty where nobody asks."""

    def turned(self) -> Parts:
        """By their end and their begin."""
        return Parts(self.seconds.T, self.load.T, self.experts.T, self.may_be.T)

    def within(self, caps: _Caps) -> NDArray[np.bool_]:
        """The parts that keep to all caps."""
        slow, heavy = self.seconds > caps.seconds, self.load > caps.load
        return np.asarray(self.may_be & ~slow & ~heavy & (self.experts <= caps.experts))


def may_begin(begins: tuple[int, ...], layers: int) -> NDArray[np.bool_]:
    """Whether a stage of a pipeline may begin at each place of a sequence of layers.

    Parameters
    ----------
    begins
        Layers, from 0, at which one may (`ModelSpec.stage_begins`); where empty, at any.
    layers
        Of the sequence.

    Returns
    -------
    array of bool, shape [layers + 1]
        The last place is the end.
    """
    places = np.arange(layers + 1)
    return np.isin(places, begins) if begins else places >= 0


def parts_of(costs: SplitCosts, rank: int) -> Parts:
    """What one rank takes of a sequence of layers, in one virtual stage, memory aside.

    Parameters
    ----------
    costs
        With the order of the layers.
    rank
        Of the pipeline.
    """
    in_front, at_end = rank == 0, rank == costs.pp - 1
    place = np.arange(0, costs.layers + 1)
    begin, end = place[:, None], place[None, :]
    layers = end - begin
    may_be = layers >= costs.fewest
    may_be &= (begin == 0) if in_front else (begin >= costs.fewest)
    may_be &= (end == costs.layers) if at_end else (end <= costs.layers - costs.fewest)
    may_be &= may_begin(costs.begins, costs.layers)[:, None]
    to = np.maximum(np.minimum(begin + min(costs.recompute_layers, costs.layers), end), begin)
    seconds = np.full(layers.shape, costs.first_s * in_front + costs.last_s * at_end)
    # Sums of numbers of layers, so that parts with equal layers take equal seconds to the digit.
    order = costs.order_of_ranks[rank] if costs.order_of_ranks else costs.order
    for kind_s, again_s in dict.fromkeys(order):
        own = [each == (kind_s, again_s) for each in order]
        before = np.concatenate([[0.0], np.cumsum(own)])
        seconds += kind_s * (before[end] - before[begin]) + again_s * (before[to] - before[begin])
    leading = np.clip(costs.leading - begin, 0, np.maximum(layers, 0))
    load = (layers - leading) * costs.layer_load + leading * costs.leading_load
    experts = (layers - leading) * float(costs.experts)
    if costs.order_loads:
        load, experts = np.zeros(layers.shape), np.zeros(layers.shape)
        for own_load, has_experts in dict.fromkeys(costs.order_loads):
            is_of_kind = [each == (own_load, has_experts) for each in costs.order_loads]
            before = np.concatenate([[0.0], np.cumsum(is_of_kind)])
            load += own_load * (before[end] - before[begin])
            experts += has_experts * (before[end] - before[begin])
    load = load + costs.first_load * in_front + costs.last_load * at_end
    experts = experts + costs.last_experts * at_end
    return Parts(seconds, load, np.asarray(experts, dtype=np.float64), may_be)


def partitions_of(within: Sequence[NDArray[np.bool_]], most: int) -> tuple[NDArray[np.int64], bool]:
    """Every way to give each rank one part, from the first place to one where the last rank's may end.

    Parameters
    ----------
    within
        For each rank: whether it may hold the layers from one place to another, [begin, end]. The ends of a
        rank are the begins of the next one; the first rank begins at position 0.
    most
        Of more partitions so many are listed, spread over them all.

    Returns
    -------
    tuple of array of int, shape [k, ranks + 1], and bool
        Positions of the places in `within`, and whether these are all partitions.
    """
    counts = [np.ones(within[-1].shape[1])]
    for may_be in reversed(within):
        counts.append(may_be @ counts[-1])
    cuts = np.zeros((1, 1), dtype=np.int64)
    for may_be, behind in zip(within, counts[-2::-1], strict=True):
        row, end = np.nonzero(may_be[cuts[:, -1]] & (behind > 0))
        if len(row) > most:
            some = np.linspace(0, len(row) - 1, most).astype(np.int64)
            row, end = row[some], end[some]
        cuts = np.concatenate([cuts[row], end[:, None]], axis=1)
    return cuts, bool(counts[-1][0] <= most)


class _Summed(NamedTuple):
    """A split, and what decides whether another one may be better."""

    split: Split
    slowest_s: float
    sum_s: float
    """Below 0 where the most counts."""
    load: float
    experts: float

    def is_no_worse(self, other: _Summed) -> bool:
        """Whether this split has no more of anything than another one."""
        return all(own <= others for own, others in zip(self[1:], other[1:], strict=True))


class _OrderedRanks(_Ranks):
    """Ranks that hold one part each of a sequence of unlike layers: a path from its begin to its end."""

    def __init__(
        self, costs: SplitCosts, fits: FitsRank | None, fits_part: FitsPart | None = None
    ) -> None:
        self.costs = costs
        self._fits = fits
        self._fits_part = fits_part
        self._tables: dict[int, Parts] = {}
        self._without_memory: dict[int, Parts] = {}
        kinds = {self._kind(rank): rank for rank in reversed(range(costs.pp))}
        held = [self._parts(rank) for rank in kinds.values()]
        columns = zip(*(part[:3] for part in held), strict=True)
        fitting = [part.may_be for part in held]
        self._seconds, self._loads, self._experts = (
            np.unique(
                np.concatenate([x[own] for x, own in zip(each, fitting, strict=True)])
            ).tolist()
            for each in columns
        )

    def _parts(self, rank: int) -> Parts:
        """The parts that one rank may hold, by the layers in front of a part and those to its end."""
        kind = self._kind(rank)
        if kind not in self._tables:
            table = self._in_any_room(rank)
            self._tables[kind] = (
                table if self._fits is None else self._fitting(rank, table, self._fits)
            )
        return self._tables[kind]

    def _in_any_room(self, rank: int) -> Parts:
        """The parts of one rank, memory aside."""
        alike = _end_kind(self.costs, rank)
        if alike not in self._without_memory:
            self._without_memory[alike] = parts_of(self.costs, rank)
        return self._without_memory[alike]

    def _fitting(self, rank: int, table: Parts, fits: FitsRank) -> Parts:
        """The parts that memory holds on a rank."""
        costs = self.costs
        if self._fits_part is not None:
            return table._replace(may_be=table.may_be & self._fits_part(rank))
        place = np.arange(0, costs.layers + 1)
        layers = np.maximum(place[None, :] - place[:, None], 0)
        leading = np.minimum(np.maximum(costs.leading - place[:, None], 0), layers)
        key = layers * (costs.leading + 1) + leading
        holds = np.zeros((costs.layers + 1) * (costs.leading + 1), dtype=bool)
        for own in np.flatnonzero(np.bincount(key[table.may_be])).tolist():
            holds[own] = fits(rank, *divmod(own, costs.leading + 1))
        return table._replace(may_be=table.may_be & holds[key])

    def _total_s(self, recomputed_leading: int) -> float:
        """At the least, where a part of each rank's layers is recomputed."""
        costs = self.costs
        total = sum(seconds for seconds, _ in costs.order) + costs.first_s + costs.last_s
        recomputed = min(costs.recompute_layers * costs.pp, costs.layers)
        return total + sum(sorted(again for _, again in costs.order)[:recomputed])

    def frontier(self, slack_s: float) -> Iterator[Split]:
        """See the module's `frontier`."""
        low = self._least("seconds", self._only_seconds())
        if low is None:
            return
        if self.costs.partial or self.costs.order_of_ranks:
            yield from self._by_sums(low, slack_s)
            return
        limit_s = (self._pipeline_s(self._seconds[low], 0) + slack_s) * (1 + 1e-12)
        yield from self._pareto(low, 0, limit_s)

    def _by_sums(self, low: int, slack_s: float) -> list[Split]:
        """The frontier where partitions differ in which kinds of layers they recompute, or in how many run
        forward alone, fastest first.

        The sum over the ranks, which the bubble has, is not the same for all then: for each limit on the
        slowest rank and on parameters it is the least one that counts. Where more work may hide more traffic
        than it adds to the bubble, the most counts too, and what lies between is no faster than both, but
        for work beyond what hides all traffic (`exact_cost._between_s`).
        """
        first = self._of_one_sum(self._only_seconds(self._seconds[low]))
        assert first is not None
        found = [first]
        self._add_within(first.split.time_s * (1 + 1e-12), low, found)
        limit_s = (min(each.split.time_s for each in found) + slack_s) * (1 + 1e-12)
        hides_more = self.costs.hides > self.costs.bubble_share / self.costs.vpp
        if hides_more:
            within = (s for s in self._seconds[low:] if self._pipeline_s(s, 0) <= limit_s)
            every = self._listed(max(within, default=self._seconds[low]))
            if every is not None:
                return list(self._one_by_one(every, limit_s))
        self._add_within(limit_s, low, found)
        splits = {each.split.stages: each.split for each in found if each.split.time_s <= limit_s}
        if hides_more:
            busiest: list[_Summed] = []
            self._add_within(limit_s, low, busiest, most=True)
            least_s = min(each.sum_s for each in found)
            for each in busiest:
                own = replace(each.split, work_range_s=(least_s, -each.sum_s))
                splits[own.stages] = own
        return sorted(splits.values(), key=lambda split: split.time_s)

    def _add_within(
        self, limit_s: float, low: int, found: list[_Summed], *, most: bool = False
    ) -> None:
        """Those of least sums, or of most, that no other one beats in all that counts."""
        for seconds in self._seconds[low:]:
            if self._pipeline_s(seconds, 0) > limit_s:
                break
            for each in self._lighter_and_lighter(seconds, most=most):
                if not any(known.is_no_worse(each) for known in found):
                    found.append(each)

    def _lighter_and_lighter(self, seconds: float, *, most: bool) -> Iterator[_Summed]:
        """Within a limit on the slowest rank, by least sums or most, under every limit on parameters."""
        caps = self._only_seconds(seconds)
        while (first := self._of_one_sum(caps, most=most)) is not None:
            most_experts, own, each = first.experts, caps, first
            while True:
                yield each
                own = replace(own, load=np.nextafter(each.load, -inf))
                lighter = self._of_one_sum(own, most=most)
                if lighter is None:
                    break
                each = lighter
                most_experts = max(most_experts, each.experts)
            if not self.costs.experts:
                return
            caps = replace(caps, experts=most_experts - 1)

    def _of_one_sum(self, caps: _Caps, *, most: bool = False) -> _Summed | None:
        """The split within the caps whose ranks work least in all, or most; None without any."""
        costs, sign = self.costs, -1.0 if most else 1.0
        least = np.full(costs.layers + 1, inf)
        least[-1] = 0.0
        ends = []
        kinds = {self._kind(rank): rank for rank in range(costs.pp)}
        tables = {kind: self._parts(rank) for kind, rank in kinds.items()}
        within = {
            kind: np.where(table.within(caps), sign * table.seconds, inf)
            for kind, table in tables.items()
        }
        for rank in reversed(range(costs.pp)):
            sums = within[self._kind(rank)] + least
            ends.append(np.argmin(sums, axis=1))
            least = sums.min(axis=1)
        if not np.isfinite(least[0]):
            return None
        begin, stages, held = 0, [], []
        for rank, end_of in enumerate(reversed(ends)):
            end, table = int(end_of[begin]), tables[self._kind(rank)]
            stages.append((end - begin,))
            held.append([float(column[begin, end]) for column in table[:3]])
            begin = end
        times, loads, experts = (list(column) for column in zip(*held, strict=True))
        split = Split(stages=tuple(stages), time_s=costs.time_s(times))
        return _Summed(split, max(times), sign * sum(times), max(loads), max(experts))

    def _one_by_one(self, cuts: NDArray[np.int64], limit_s: float) -> Iterator[Split]:
        """Of partitions [n, pp + 1] within the limit on the pipeline those that no other one beats, whatever
        traffic their work hides, fastest first.
        """
        each = [(table.load[part], table.experts[part]) for table, part in self._by_rank(cuts)]
        loads, experts = (np.max(column, axis=0) for column in zip(*each, strict=True))
        seconds, work_s = self._pipelines_s(cuts)
        # What is exposed differs by no more than what the difference of the work may hide.
        may_hide_s = self.costs.hides * work_s
        counted = np.stack([seconds + may_hide_s, seconds - may_hide_s, loads, experts], axis=1)
        nearly = counted + ROUNDING * np.abs(counted)
        better: list[int] = []
        for row in np.argsort(seconds, kind="stable").tolist():
            if seconds[row] > limit_s:
                return
            if not np.any(np.all(counted[better] <= nearly[row], axis=1)):
                better.append(row)
                yield Split(stages=_stages_of(cuts[row]), time_s=float(seconds[row]))

    def _pipelines_s(self, cuts: NDArray[np.int64]) -> tuple[NDArray[np.float64], ...]:
        """What the pipeline takes for partitions [n, pp + 1], and all their ranks for a micro-batch, [n]."""
        works_s = np.array([table.seconds[part] for table, part in self._by_rank(cuts)])
        work_s = works_s.sum(axis=0)
        return self.costs.pipeline_s(works_s.max(axis=0), work_s), work_s

    def _listed(self, limit_s: float) -> NDArray[np.int64] | None:
        """Every partition of parts that take no longer each, [n, pp + 1]; None where these are many."""
        caps = self._only_seconds(limit_s * (1 + ROUNDING))
        within = [self._parts(rank).within(caps) for rank in range(self.costs.pp)]
        cuts, is_every = partitions_of(within, MOST_LISTED)
        return cuts if is_every else None

    def _by_rank(self, cuts: NDArray[np.int64]) -> Iterator[tuple[Parts, Places]]:
        """The parts of each rank, and where partitions [n, pp + 1] have theirs."""
        for rank in range(self.costs.pp):
            yield self._parts(rank), (cuts[:, rank], cuts[:, rank + 1])

    def _behind(self, caps: _Caps) -> list[NDArray[np.bool_]] | None:
        """Places from which each rank and those behind it can hold the rest; None where rank 0 cannot."""
        kinds = {self._kind(rank): rank for rank in range(self.costs.pp)}
        within = {kind: self._parts(rank).within(caps) for kind, rank in kinds.items()}
        reached = np.zeros(self.costs.layers + 1, dtype=bool)
        reached[-1] = True
        places = [reached]
        for rank in reversed(range(self.costs.pp)):
            reached = np.any(within[self._kind(rank)][:, reached], axis=1)
            places.append(reached)
        return places[::-1] if places[-1][0] else None

    def _reachable(self, caps: _Caps) -> list[dict[tuple[int, int], int]] | None:
        return None if self._behind(caps) is None else []

    def _least(self, name: CapName, caps: _Caps, below: int | None = None) -> int | None:
        values = {"seconds": self._seconds, "load": self._loads, "experts": self._experts}[name]
        caps = _capped(caps, name, inf)
        least = np.full(self.costs.layers + 1, inf)
        least[-1] = -inf
        for rank in reversed(range(self.costs.pp)):
            table = self._parts(rank)
            most = np.maximum(getattr(table, name), least)
            least = np.min(np.where(table.within(caps), most, inf), axis=1)
        if least[0] == inf:
            return None
        index = bisect_left(values, least[0])
        return index if below is None or index < below else None

    def _split(self, caps: _Caps) -> Split:
        """The most even split within the caps; there is one."""
        places, costs = self._behind(caps), self.costs
        assert places is not None
        begin = 0
        stages: list[tuple[int, ...]] = []
        times: list[float] = []
        for rank in range(costs.pp):
            parts = self._parts(rank)
            ends = np.flatnonzero(parts.within(caps)[begin] & places[rank + 1])
            left_s = self._total_s(0) - sum(times)
            seconds = parts.seconds[begin, ends]
            nearest = int(np.argmin(np.abs(seconds - left_s / (costs.pp - rank))))
            stages.append((int(ends[nearest] - begin),))
            times.append(float(seconds[nearest]))
            begin = int(ends[nearest])
        return Split(stages=tuple(stages), time_s=costs.time_s(times))


Places = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Begins and ends of parts, [n]."""
MOST_LISTED = 1000
"""Partitions of the layers that are played one by one, about as long as a few bounds take."""


class _PlayedRanks(_OrderedRanks):
    """Ranks with one part each under 1F1B or GPipe as they are played.

    What takes the place of a part's seconds is the longest way of a step that turns round at its rank
    (`schedules.longest_way_s`), which no split with that part is below.
    """

    def __init__(
        self, costs: SplitCosts, fits: FitsRank | None, fits_part: FitsPart | None = None
    ) -> None:
        backward = of_backward(costs)
        ends = {_end_kind(costs, rank): rank for rank in range(costs.pp)}
        tables = {end: parts_of(costs, rank) for end, rank in ends.items()}
        self._own_s = {end: table.seconds for end, table in tables.items()}
        self._backward_s = {end: parts_of(backward, rank).seconds for end, rank in ends.items()}
        each = [tables[_end_kind(costs, rank)] for rank in range(costs.pp)]
        seconds = [np.where(table.may_be, table.seconds, inf) for table in each]
        self._ahead_s = _least_joined(seconds)
        self._behind_s = _least_joined([own.T[::-1, ::-1] for own in reversed(seconds)])[::-1, ::-1]
        longest = [
            _least_joined(
                [
                    np.where(own.may_be, each_s[_end_kind(costs, rank)], inf)
                    for rank, own in enumerate(each)
                ],
                np.maximum,
            )
            for each_s in (
                {end: self._own_s[end] - self._backward_s[end] for end in ends},
                self._backward_s,
            )
        ]
        self._longest_s = [float(each_s[-1, -1]) for each_s in longest]
        self._most_s = float(self._ahead_s[-1, -1])
        super().__init__(costs, fits, fits_part)

    def _kind(self, rank: int) -> int:
        return rank

    def _in_any_room(self, rank: int) -> Parts:
        table = super()._in_any_room(rank)
        backward_s = self._backward_s[_end_kind(self.costs, rank)]
        if self.costs.forward_first:
            return self._in_two_halves(rank, table, backward_s)
        way_s = longest_way_s(
            table.seconds - backward_s,
            backward_s,
            ahead_s=self._ahead_s[rank][:, None],
            behind_s=self._behind_s[rank + 1][None, :],
            warm_up=self.costs.pp - 1 - rank,
            num_micro_batches=self.costs.num_micro_batches // self.costs.flushes,
        )
        way_s *= self.costs.flushes
        return table._replace(seconds=way_s, may_be=table.may_be & np.isfinite(way_s))

    def _in_two_halves(self, rank: int, table: Parts, backward_s: NDArray[np.float64]) -> Parts:
        """Of GPipe: all ranks' work, and the slowest pass of either kind, this rank's or one that some rank
        cannot avoid.
        """
        each_m = self.costs.num_micro_batches // self.costs.flushes
        longest_s = sum(
            np.maximum(own_s, least_s)
            for own_s, least_s in zip(
                (table.seconds - backward_s, backward_s), self._longest_s, strict=True
            )
        )
        work_s = self._ahead_s[rank][:, None] + table.seconds + self._behind_s[rank + 1][None, :]
        way_s = self.costs.flushes * (work_s + (each_m - 1) * longest_s)
        return table._replace(seconds=way_s, may_be=table.may_be & np.isfinite(way_s))

    def frontier(self, slack_s: float) -> Iterator[Split]:
        """See the module's `frontier`. Where few partitions may be fast enough, each is played."""
        low = self._least("seconds", self._only_seconds())
        if low is None:
            return
        first = self._split(self._only_seconds(self._seconds[low]))
        limit_s = (first.time_s + slack_s) * (1 + ROUNDING)
        if self.costs.partial or self.costs.order_of_ranks:
            self._most_s = self._most_work_s(limit_s)
        listed = self._listed(limit_s)
        if listed is None:
            yield from self._pareto(low, 0, limit_s)
        else:
            yield from self._one_by_one(listed, limit_s)

    def _most_work_s(self, limit_s: float) -> float:
        """The most that all ranks work for a micro-batch in partitions with no way longer than the limit."""
        caps, less = self._only_seconds(limit_s * (1 + ROUNDING)), []
        for rank in range(self.costs.pp):
            own_s = self._own_s[_end_kind(self.costs, rank)]
            less.append(np.where(self._parts(rank).within(caps), -own_s, inf))
        return -float(_least_joined(less)[-1, -1])

    def _pipelines_s(self, cuts: NDArray[np.int64]) -> tuple[NDArray[np.float64], ...]:
        """See `_OrderedRanks`; as they are played."""
        return self._played_s(cuts), np.sum(self._of_ranks(self._own_s, cuts), axis=0)

    def _pareto(self, low: int, recomputed_leading: int, limit_s: float) -> Iterator[Split]:
        """`_one_by_one`, going from one limit on seconds under which parameters can be fewer to the next."""
        pareto: list[tuple[int, int]] = []
        at: int | None = low
        while at is not None and self._seconds[at] <= limit_s:
            seconds = self._seconds[at]
            for load, experts in self._least_loads(seconds, recomputed_leading):
                pareto.append((load, experts))
                caps = _Caps(seconds, self._loads[load], self._experts[experts], 0)
                yield self._split(caps)
            trials = self._lighter(self._only_seconds(), pareto)
            further = [self._least("seconds", trial) for trial in trials]
            at = min((each for each in further if each is not None and each > at), default=None)

    def _split(self, caps: _Caps) -> Split:
        """The fastest of those within the caps that single moves of layers reach."""
        places, costs = self._behind(caps), self.costs
        assert places is not None
        cuts = [0]
        total_s = self._total_s(0)
        for rank in range(costs.pp):
            begin, of_rank = cuts[-1], self._own_s[_end_kind(costs, rank)]
            ends = np.flatnonzero(self._parts(rank).within(caps)[begin] & places[rank + 1])
            taken_s = of_rank[begin, ends]
            nearest = int(np.argmin(np.abs(taken_s - total_s / (costs.pp - rank))))
            total_s -= float(taken_s[nearest])
            cuts.append(int(ends[nearest]))
        cut_places, least_s = np.array(cuts), caps.seconds
        step_s = float(self._played_s(cut_places[None])[0])
        anywhere = replace(caps, seconds=inf)
        while step_s > least_s * (1 + ROUNDING):
            near = self._keeping(self._near(cut_places), anywhere)
            seconds = self._played_s(near) if len(near) else np.array([inf])
            best = int(np.argmin(seconds))
            if seconds[best] >= step_s * (1 - ROUNDING):
                break
            cut_places, step_s = near[best], float(seconds[best])
        every = self._listed(step_s) if step_s > least_s * (1 + ROUNDING) else None
        if every is not None:
            least_s = float(np.min(self._played_s(every)))
            every = self._keeping(every, anywhere)
            seconds = self._played_s(every)
            cut_places, step_s = every[np.argmin(seconds)], float(np.min(seconds))
        work_s = float(np.sum(self._of_ranks(self._own_s, cut_places[None])))
        return Split(
            stages=_stages_of(cut_places),
            time_s=step_s,
            gap_s=max(step_s - least_s * (1 + ROUNDING), 0.0),
            more_work_s=max(self._most_s - work_s * (1 + ROUNDING), 0.0),
        )

    def _near(self, cuts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Partitions with some neighbouring cuts moved by a layer, or one by two, [n, pp + 1]."""
        near = []
        for first in range(1, self.costs.pp):
            for last in range(first, self.costs.pp):
                for by in (-2, -1, 1, 2) if last == first else (-1, 1):
                    moved = cuts.copy()
                    moved[first : last + 1] += by
                    near.append(moved)
        moves = np.array(near).reshape(-1, self.costs.pp + 1)
        return moves[np.all(np.diff(moves, axis=1) > 0, axis=1)]

    def _keeping(self, cuts: NDArray[np.int64], caps: _Caps) -> NDArray[np.int64]:
        """Those of some partitions that keep to the caps."""
        keep = [table.within(caps)[part] for table, part in self._by_rank(cuts)]
        return cuts[np.all(keep, axis=0)]

    def _of_ranks(
        self, by_end: Mapping[int, NDArray[np.float64]], cuts: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Seconds of every rank and micro-batch, [pp, n], from those of parts by `_end_kind`."""
        parts = enumerate(part for _, part in self._by_rank(cuts))
        return np.array([by_end[_end_kind(self.costs, rank)][part] for rank, part in parts])

    def _played_s(self, cuts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of partitions [n, pp + 1] under the schedule, [n]."""
        backward_s = self._of_ranks(self._backward_s, cuts)
        forward_s, flushes = self._of_ranks(self._own_s, cuts) - backward_s, self.costs.flushes
        m = self.costs.num_micro_batches // flushes
        step_s = forward_first_s if self.costs.forward_first else one_f_one_b_s
        return np.asarray(flushes * step_s(forward_s.T, backward_s.T, m))


def _stages_of(cuts: NDArray[np.int64]) -> Stages:
    """One virtual stage on each rank, from one place to the next."""
    return tuple((int(layers),) for layers in np.diff(cuts))


def _least_joined(
    seconds: Sequence[NDArray[np.float64]], join: np.ufunc = np.add
) -> NDArray[np.float64]:
    """The least sum of what some ranks take which hold the layers in front of a place, or the least of their
    longest (`join`), [ranks, place], from the seconds of each rank by begin and end.
    """
    joined = [np.full(seconds[0].shape[0], inf)]
    joined[0][0] = 0.0
    for rank_s in seconds:
        joined.append(np.min(join(joined[-1][:, None], rank_s), axis=0))
    return np.array(joined)


def of_backward(costs: SplitCosts) -> SplitCosts:
    """The costs of backward passes alone, of unlike layers under a schedule that is played.

    Parameters
    ----------
    costs
        Of both passes, with what backward ones take.
    """
    backward = costs.backward
    assert backward is not None
    return replace(
        costs,
        first_s=backward.first_s,
        last_s=backward.last_s,
        order=_with_seconds(costs.order, backward.layers),
        order_of_ranks=tuple(
            _with_seconds(order, layers_s)
            for order, layers_s in zip(
                costs.order_of_ranks,
                backward.of_ranks or [backward.layers] * len(costs.order_of_ranks),
                strict=True,
            )
        ),
    )


def _with_seconds(
    order: tuple[tuple[float, float], ...], seconds: tuple[float, ...]
) -> tuple[tuple[float, float], ...]:
    """Layers that take other seconds, and as much to recompute."""
    return tuple((own_s, again_s) for own_s, (_, again_s) in zip(seconds, order, strict=True))


# Some split of the layers that a layout can have, where no split was chosen yet.


def any_stages(workload: Workload, layout: Layout) -> Stages | None:
    """The split that is even in layers, or one with empty ends where ranks in step may have them.

    Parameters
    ----------
    workload
        Its model and framework.
    layout
        One layout, in plain numbers.

    Returns
    -------
    tuple of tuple of int
        Layers of each [rank][virtual stage]; None where another virtual stage would be empty.
    """
    model, pp, vpp = workload.model, int(layout.pp), int(layout.vpp)
    even = balanced_stages(model.layers, pp, vpp, model.stage_begins)
    return even or suiting_stages(workload, layout)


def suiting_stages(workload: Workload, layout: Layout) -> Stages | None:
    """A split that suits the schedule of a layout; None where a virtual stage would be empty that must not.

    Parameters
    ----------
    workload
        Its model and framework.
    layout
        One layout, in plain numbers.
    """
    model = workload.model
    return default_stages(
        model.layers,
        int(layout.pp),
        int(layout.vpp),
        in_step=traits(int(layout.schedule)).in_step,
        empty_ends=may_have_empty_ends(workload),
        begins=model.stage_begins,
    )
