"""The exact search for the split of the layers, under memory limits.

One split can win for its slowest rank, another for its evenly spread parameters: `frontier` returns every
split that can be best, and the caller prices them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Literal

from meshwright.planner.bounds.stages import FitsRank, Split, SplitCosts, even_chunks


def frontier(costs: SplitCosts, slack_s: float, fits: FitsRank | None = None) -> tuple[Split, ...]:
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
    return tuple(_Ranks(costs, fits).frontier(slack_s))


@lru_cache(maxsize=65_536)
def _unlimited(costs: SplitCosts, slack_s: float) -> tuple[Split, ...]:
    return tuple(_unlimited_ranks(costs).frontier(slack_s))


@lru_cache(maxsize=4096)
def _unlimited_ranks(costs: SplitCosts) -> _Ranks:
    return _Ranks(costs, None)


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


def _end_kind(costs: SplitCosts, rank: int) -> int:
    """0 for the first rank, 2 for the last, 1 for all others, which cost alike."""
    if rank == 0:
        return 0
    return 2 if rank == costs.pp - 1 else 1


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
    recomputed: int
    """All layers that are recomputed, where that differs between splits; else 0."""
    seconds: float
    load: float
    experts: int


@dataclass(frozen=True)
class _Caps:
    """Limits that every rank must keep, and the layers recomputed over all ranks."""

    seconds: float
    load: float
    experts: float
    again: int
    """Leading ones."""
    recomputed: int | None = None
    """All of them; None for any number."""


def _capped(caps: _Caps, name: CapName, value: float) -> _Caps:
    """The same caps with one of them replaced."""
    if name == "seconds":
        return replace(caps, seconds=value)
    return replace(caps, load=value) if name == "load" else replace(caps, experts=value)


class _Ranks:
    """Choices of every rank, and which totals they reach: states are (leading covered, leading recomputed),
    and what is reachable from a state is a bit mask: bit r W + n where n layers, r of them recomputed, can be
    on the ranks from there on. r is 0 where all splits recompute equally many.
    """

    def __init__(self, costs: SplitCosts, fits: FitsRank | None) -> None:
        self.costs = costs
        self._fits = fits
        self._options: dict[tuple[int, int], list[_Option]] = {}
        self._columns: dict[int, tuple[list[float], list[float], list[int]]] = {}
        self._width = 2 * (costs.layers + 1)
        counts = (1 << (costs.layers + 1)) - 1
        rows = costs.layers + 1 if costs.recomputed_varies else 1
        self._everything = sum(counts << (row * self._width) for row in range(rows))
        self._totals: dict[_Caps, tuple[int, ...]] = {}
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
                self._recomputed(layers),
                costs.rank_s(rank, layers, leading),
                costs.rank_load(rank, layers, leading),
                costs.rank_experts(rank, layers, leading),
            )

    def _recomputed(self, layers: int) -> int:
        """Layers of one rank that are recomputed, where their sum differs between splits."""
        if not self.costs.recomputed_varies:
            return 0
        return min(self.costs.recompute_layers * self.costs.vpp, layers)

    def _total_s(self, recomputed_leading: int, recomputed: int) -> float:
        """Sum over the ranks of any split that recomputes so many layers, so many of them leading ones."""
        costs = self.costs
        if not costs.partial:
            recomputed_leading = min(costs.recompute_layers, costs.leading)
        if not costs.recomputed_varies:
            recomputed = min(costs.recompute_layers * costs.vpp * costs.pp, costs.layers)
        total = (costs.layers - costs.leading) * costs.layer_s + costs.leading * costs.leading_s
        again = (recomputed - recomputed_leading) * costs.layer_recompute_s
        again += recomputed_leading * costs.leading_recompute_s
        return total + again + costs.first_s + costs.last_s

    def frontier(self, slack_s: float) -> Iterator[Split]:
        """See the module's `frontier`."""
        costs = self.costs
        filled = costs.bubble_share / costs.vpp
        weight = costs.num_micro_batches - filled
        starts: list[tuple[float, int, int, int]] = []
        for leading in range(costs.leading + 1) if costs.partial else (0,):
            for recomputed, low in self._slowest_ranks(leading, weight, filled, slack_s):
                total_s = self._total_s(leading, recomputed) * filled
                starts.append((weight * self._seconds[low] + total_s, leading, recomputed, low))
        if not starts:
            return
        limit = (min(starts)[0] + slack_s) * (1 + 1e-12)
        for _, leading, recomputed, low in sorted(starts):
            total_s = self._total_s(leading, recomputed) * filled
            pareto: list[tuple[int, int]] = []
            for seconds in self._seconds[low:]:
                if weight * seconds + total_s > limit:
                    break
                caps = self._only_seconds(seconds, leading, recomputed)
                if not pareto or self._improves(caps, pareto):
                    for load, experts in self._least_loads(caps):
                        pareto.append((load, experts))
                        yield self._split(
                            replace(caps, load=self._loads[load], experts=self._experts[experts])
                        )
        self._totals.clear()

    def _slowest_ranks(
        self, leading: int, weight: float, filled: float, slack_s: float
    ) -> Iterator[tuple[int, int]]:
        """(recomputed layers, index of the least seconds of the slowest rank) of each number of recomputed
        layers, as long as it can be within the slack of the fastest; `leading` of them are leading ones.
        """
        low = self._least("seconds", self._only_seconds(inf, leading))
        if low is None:
            return
        if not self.costs.recomputed_varies:
            yield 0, low
            return
        seen: set[int] = set()
        least_s = self._total_s(leading, self.costs.fewest_recomputed) * filled
        fastest_s = inf
        for index in range(low, len(self._seconds)):
            slowest_s = weight * self._seconds[index]
            if slowest_s + least_s > (fastest_s + slack_s) * (1 + 1e-12):
                return
            for recomputed in self._reached(self._only_seconds(self._seconds[index], leading)):
                if recomputed not in seen:
                    seen.add(recomputed)
                    total_s = self._total_s(leading, recomputed) * filled
                    fastest_s = min(fastest_s, slowest_s + total_s)
                    yield recomputed, index

    def _only_seconds(self, seconds: float, leading: int, recomputed: int | None = None) -> _Caps:
        """Caps on the slowest rank and on nothing else but what is recomputed."""
        return _Caps(seconds, inf, 2 * self.costs.layers, leading, recomputed)

    def _improves(self, caps: _Caps, pareto: list[tuple[int, int]]) -> bool:
        """Whether some split within the threshold has less of either kind of parameters than all known
        ones.
        """
        load, experts = min(load for load, _ in pareto), min(experts for _, experts in pareto)
        return bool(
            (load and self._reachable(replace(caps, load=self._loads[load - 1])))
            or (experts and self._reachable(replace(caps, experts=self._experts[experts - 1])))
            or (
                len(pareto) > 1
                and self._reachable(
                    replace(caps, load=self._loads[load], experts=self._experts[experts])
                )
            )
        )

    def _least_loads(self, caps: _Caps) -> Iterator[tuple[int, int]]:
        """Indices of (load, experts) within a threshold on the slowest rank that none beats in both."""
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
            if self._reachable(_capped(caps, name, values[middle])):
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

    def _reachable(self, caps: _Caps) -> bool:
        """Whether some split keeps the caps."""
        reached = self._reached(replace(caps, recomputed=None))
        return bool(reached) if caps.recomputed is None else caps.recomputed in reached

    def _reached(self, caps: _Caps) -> tuple[int, ...]:
        """Every number of recomputed layers of the splits that keep the other caps, read off one pass."""
        if caps not in self._totals:
            reached = self._masks(caps)[0].get((0, 0), 0) >> self.costs.layers
            rows = range(-(-self._everything.bit_length() // self._width))
            self._totals[caps] = tuple(r for r in rows if reached >> (r * self._width) & 1)
        return self._totals[caps]

    def _masks(self, caps: _Caps) -> list[dict[tuple[int, int], int]]:
        """Masks [rank][state] of the layer counts that the ranks from `rank` on can take."""
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
                        shift = option.layers + option.recomputed * self._width
                        mask |= after.get(state, 0) << shift
                    mask &= self._everything
                    if mask:
                        here[covered, again] = mask
            if not here:
                break
        return masks

    def _smeared(
        self, after: dict[tuple[int, int], int], choices: int
    ) -> dict[tuple[int, int], int]:
        """Masks of the states that have covered all leading layers, one rank earlier: `choices` layer
        counts from the fewest on.
        """
        masks: dict[tuple[int, int], int] = {}
        if not choices:
            return masks
        fewest = self.costs.fewest
        full = self._recomputed(self.costs.layers)
        shorter = min(max(full - fewest, 0), choices)
        for state, mask in after.items():
            if state[0] == self.costs.leading:
                grown = self._spread(
                    mask << (fewest + shorter + full * self._width), choices - shorter
                )
                for layers in range(fewest, fewest + shorter):
                    grown |= mask << (layers + layers * self._width)
                grown &= self._everything
                if grown:
                    masks[state] = grown
        return masks

    def _spread(self, mask: int, choices: int) -> int:
        """The mask with up to `choices` - 1 more layers; nothing without a choice."""
        if not choices:
            return 0
        width = 1
        while width < choices:
            step = min(width, choices - width)
            mask |= mask << step
            width += step
        return mask

    def _split(self, caps: _Caps) -> Split:
        """The most even split within the caps; there is one."""
        masks = self._masks(caps)
        costs, layers_left, covered, recomputed_leading = self.costs, self.costs.layers, 0, 0
        recomputed_left = caps.recomputed or 0
        stages: list[tuple[int, ...]] = []
        times: list[float] = []
        for rank in range(costs.pp):
            share = layers_left / (costs.pp - rank)
            option = min(
                (
                    o
                    for o in self._within(rank, covered, caps)
                    if o.layers <= layers_left
                    and o.recomputed <= recomputed_left
                    and masks[rank + 1].get((covered + o.leading, recomputed_leading + o.again), 0)
                    >> (layers_left - o.layers + (recomputed_left - o.recomputed) * self._width)
                    & 1
                ),
                key=lambda o: (abs(o.layers - share), -o.layers),
            )
            stages.append(even_chunks(rank, option.layers, costs.vpp))
            times.append(option.seconds)
            recomputed_left -= option.recomputed
            layers_left, covered, recomputed_leading = (
                layers_left - option.layers,
                covered + option.leading,
                recomputed_leading + option.again,
            )
        return Split(stages=tuple(stages), time_s=costs.time_s(times))
