"""The exact price of a layout: every mapping, every split that can be best.

What a price asks of the cost model is put as questions, lists of them at a time (`Pricing`). A search that
prices one layout answers them as they come (`worked_out`); one that prices many answers those of all layouts
together, equal splits in one array operation each (`worked_out_together`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.activations import saved_activations
from meshwright.costmodel.data_parallel import hiding_windows
from meshwright.costmodel.estimate import LayerCosts, costs_of_times, stage_memory_gib
from meshwright.costmodel.footprint import GIB, layer_bytes, offloaded_states_gib, usable_hbm_gib
from meshwright.costmodel.hybrid_context import is_dealt
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layer_kinds import KindTimes, kind_times
from meshwright.costmodel.layout import ROUNDING, Floats, Layout, Placement
from meshwright.costmodel.placement import placement_on
from meshwright.costmodel.rank_load import chunk_loads
from meshwright.costmodel.step_time import (
    StepTime,
    exact_step,
    in_step_s,
    is_fast_in_closed_form,
    is_played,
    least_played_s,
    make_context,
    optimistic_step,
    useful_work_s,
)
from meshwright.costmodel.workload import Execution, Workload
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.planner.bounds.layer_split import (
    BackwardSeconds,
    FitsRank,
    Split,
    SplitCosts,
    any_stages,
    balanced_stages,
    frontier,
    least_busiest_rank_s,
    level_splits,
    splits_by_place,
)
from meshwright.planner.bounds.mappings import Matrices, pick, rows_of_context
from meshwright.planner.bounds.paces import MemoryFit

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Stages = tuple[tuple[int, ...], ...]
Matrix = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Priced:
    """The best that one layout can do."""

    layout: Layout
    """With `recompute_layers` decided."""
    matrix: Matrix
    stages: Stages
    step_time_s: float
    ranks: tuple[tuple[int, int], ...] | None = None
    """On an irregular allocation, (node, local GPU) of every rank; the matrix is empty then."""
    stage_ep: tuple[tuple[int, ...], ...] | None = None
    """`StagedPlacement.stage_ep`, where stages are priced apart."""
    execution: Execution = field(default_factory=Execution)
    """How it is run."""
    cut_uses: tuple[tuple[str, float], ...] = ()
    """Cuts of the fabric with the share of each that is used, where the workload limits that."""


@dataclass(frozen=True, kw_only=True)
class MappingBounds:
    """Bounds of one layout under each of its mappings."""

    matrices: Matrices
    bound_s: FloatArray
    """Shape [k]; k is 0 where no mapping exists, and a bound infinite where a mapping is out."""
    outside_s: FloatArray | None = None
    """Bounds of the mappings that are out because a group leaves its domain, [k]; infinite for others."""

    @property
    def least_s(self) -> float:
        """The bound of the layout; infinite without a mapping."""
        return float(self.bound_s.min()) if len(self.bound_s) else float("inf")

    @property
    def least_of_all_s(self) -> float:
        """The least bound, mappings among them that are out because a group leaves its domain."""
        outside_s = self.outside_s if self.outside_s is not None else np.zeros(0)
        return min(self.least_s, float(outside_s.min(initial=inf)))


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedLayouts:
    """Layouts under their mappings, a row each, and what their layers take there: computed once for all uses.

    What they take does not depend on how many of them are recomputed.
    """

    context: Context
    """Placements [r, levels]; an array field of the layouts gives every part of a step its axis of r."""
    times: KindTimes
    """Seconds, [r]."""

    @cached_property
    def costs(self) -> FloatArray:
        """Columns of `LayerCosts`, then what layers take on each stage where stages differ, [columns, r]."""
        size = (len(self.context.placement.tp),)
        costs = costs_of_times(self.context, self.times.with_own_ends())
        columns = [np.broadcast_to(np.asarray(column), size) for column in vars(costs).values()]
        if self.times.by_stage is not None:
            for kind in self.times.by_stage.layers:
                columns += [*np.asarray(kind.seconds).T, *np.asarray(kind.recompute_s).T]
        return np.stack(columns)

    def by_stage_s(self, row: int) -> list[list[tuple[float, float]]]:
        """`kinds_s` of a row on each stage; empty where stages are alike.

        Parameters
        ----------
        row
            Of the layouts under their mappings, from 0.

        Returns
        -------
        list of list of tuple of float
            For [stage][kind] the seconds of a micro-batch and what recomputation adds.
        """
        if self.times.by_stage is None:
            return []
        kinds = [
            zip(
                np.asarray(kind.seconds)[row].tolist(),
                np.asarray(kind.recompute_s)[row].tolist(),
                strict=True,
            )
            for kind in self.times.by_stage.layers
        ]
        stages = [list(stage) for stage in zip(*kinds, strict=True)]
        return [] if all(stage == stages[0] for stage in stages) else stages

    def kinds_s(self, row: int) -> list[tuple[float, float]]:
        """Seconds of each kind of layers in a row, and what recomputing one adds.

        Parameters
        ----------
        row
            Of the layouts under their mappings, from 0.

        Returns
        -------
        list of tuple of float
            For a micro-batch, forward and backward; kinds in the order of `KindTimes.layers`.
        """
        return [
            (self._at(kind.seconds, row), self._at(kind.recompute_s, row))
            for kind in self.times.layers
        ]

    def backward_s(self, row: int) -> BackwardSeconds:
        """What backward passes of each kind of layers, and of the ends, take in a row.

        Parameters
        ----------
        row
            Of the layouts under their mappings, from 0.

        Returns
        -------
        BackwardSeconds
            For a micro-batch; by stage too where stages lie differently.
        """
        times, modules = self.times.with_own_ends(), self.context.workload.model.mtp_layers
        last_s = self._at(times.head.backward_s, row)
        if times.mtp is not None:
            last_s += modules * self._at(times.mtp.backward_s, row)
        by_stage = () if times.by_stage is None else times.by_stage.unlike
        of_ranks = zip(
            *(np.asarray(kind.backward_s)[row].tolist() for kind in by_stage), strict=True
        )
        return BackwardSeconds(
            self._at(times.embedding.backward_s, row),
            last_s,
            tuple(self._at(kind.backward_s, row) for kind in times.layers),
            tuple(of_ranks),
        )

    def _at(self, seconds: Floats, row: int) -> float:
        size = (len(self.context.placement.tp),)
        return float(np.broadcast_to(np.asarray(seconds), size)[row])


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedLayout:
    """One layout under some of its mappings, k of them."""

    layout: Layout
    """In plain numbers."""
    among: PlacedLayouts
    """That layout, and perhaps others, under all mappings."""
    index: IntArray
    """Its rows there, [k]."""

    @cached_property
    def context(self) -> Context:
        """Placements [k, levels]."""
        every, own = self.among.context, self.index
        size = np.full(len(own), int(self.layout.micro_batch), dtype=np.int64)
        layout = replace(self.layout, micro_batch=size)
        return replace(every, layout=layout, placement=every.placement.take(own))

    @cached_property
    def times(self) -> KindTimes:
        """Seconds, [k]."""
        return self.among.times.rows(self.index, len(self.among.context.placement.tp))

    def rows(self, rows: IntArray) -> PlacedLayout:
        """Under some of the mappings.

        Parameters
        ----------
        rows
            Positions among its k mappings, 0 to k - 1.
        """
        return replace(self, index=self.index[rows])

    def recomputing(self, layers: int) -> PlacedLayout:
        """With so many layers of each virtual stage recomputed.

        Parameters
        ----------
        layers
            From 0; more than a virtual stage has, such as `ALL_LAYERS`, means all of them.
        """
        return replace(self, layout=replace(self.layout, recompute_layers=layers))


# What a price asks of the cost model, and the answers: one by one, or those of many layouts together.


class StepQuestion(NamedTuple):
    """What a step takes under each of a layout's mappings."""

    placed: PlacedLayout
    stages: Stages | None
    """The split of its layers; None for what no split is below (`optimistic_step`)."""
    busiest_s: float = 0.0
    """Without a split, what the slowest rank takes at the least."""
    played: bool = True
    """As `exact_step` has it."""


class MemoryQuestion(NamedTuple):
    """What each rank of a split holds, in GiB."""

    workload: Workload
    layout: Layout
    stages: Stages


class LayerQuestion(NamedTuple):
    """What layers hold, `layer_bytes` in GiB."""

    workload: Workload
    layout: Layout


class StepSeconds(NamedTuple):
    """A step by mapping, arrays [k]."""

    seconds: FloatArray
    charged_s: FloatArray
    """What of the seconds the most parameters on a rank decide: exposed traffic and the update."""
    update_s: FloatArray
    """What of `charged_s` is no traffic."""
    scale: FloatArray
    """What the part in proportion to all others multiplies them by."""


Question = StepQuestion | MemoryQuestion | LayerQuestion
T = TypeVar("T")
Asking = Generator[Sequence[Question], Sequence[Any], T]
"""Yields questions, is sent their answers, and returns what comes of them."""


def worked_out(work: Asking[T]) -> T:
    """What comes of some work, its questions answered as they come."""
    return worked_out_together([work])[0]


def worked_out_together(works: Sequence[Asking[T]], deadline: float = inf) -> dict[int, T]:
    """What comes of some works, the questions of all answered together.

    Parameters
    ----------
    works
        Each yields questions, and is sent their answers.
    deadline
        On the clock of `time.monotonic`; works that are not done by then are given up. None by default.

    Returns
    -------
    dict
        What comes of each that is done, by its number in `works`.
    """
    results: dict[int, T] = {}
    waiting: dict[int, Sequence[Question]] = {}

    def go_on(number: int, answers: Sequence[Any] | None) -> None:
        try:
            work = works[number]
            waiting[number] = next(work) if answers is None else work.send(answers)
        except StopIteration as end:
            results[number] = end.value

    for number in range(len(works)):
        go_on(number, None)
    while waiting and time.monotonic() <= deadline:
        now, waiting = waiting, {}
        answers = iter(_answers([question for questions in now.values() for question in questions]))
        for number, questions in now.items():
            go_on(number, [next(answers) for _ in questions])
    return results


def _answers(questions: Sequence[Question]) -> list[Any]:
    """The answer to each question: alike ones in one array operation."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, question in enumerate(questions):
        groups.setdefault(_alike(question), []).append(number)
    answers: list[Any] = [None] * len(questions)
    for rows in groups.values():
        together: Any = [questions[row] for row in rows]
        answer = _ANSWERS[type(together[0])]
        for row, result in zip(rows, answer(together), strict=True):
            answers[row] = result
    return answers


def _alike(question: Question) -> tuple[Any, ...]:
    """Equal for questions that one operation answers."""
    if isinstance(question, LayerQuestion):
        return (LayerQuestion, id(question.workload))
    if isinstance(question, MemoryQuestion):
        return (id(question.workload), *_of_split(question.layout), question.stages)
    placed, model = question.placed, question.placed.among.context.workload.model
    if question.stages is None:
        return (id(placed.among),)
    # What is played is so with one number of micro-batches, and samples are dealt to ranks of one layout.
    plays = bool(model.unlike_layers) and int(placed.layout.pp) > 1
    apart = int(placed.layout.num_micro_batches) if plays else 0
    if is_dealt(placed.among.context.workload):
        apart = id(placed)
    of_split = (*_of_split(placed.layout), question.stages, question.played)
    return (id(placed.among), apart, *of_split)


def _of_split(layout: Layout) -> tuple[int, int]:
    """What decides, beside the split itself, what each of its ranks has."""
    return int(layout.schedule), int(layout.recompute_layers) if layout.recomputes_layers else 0


def _memory_gib(questions: Sequence[MemoryQuestion]) -> Iterable[FloatArray]:
    workload, layout, stages = questions[0]
    if len(questions) == 1:
        return [stage_memory_gib(workload, layout, stages)]
    layouts = _with_one_split(_joined([each.layout for each in questions]).with_axis(), layout)
    return stage_memory_gib(workload, layouts, stages)


def _layers_gib(questions: Sequence[LayerQuestion]) -> Iterable[tuple[float, ...]]:
    workload, layout = questions[0]
    if len(questions) > 1:
        layout = _joined([each.layout for each in questions])
    columns = layer_bytes(workload, layout, saved_activations(workload, layout))
    return zip(*((np.atleast_1d(column) / GIB).tolist() for column in columns), strict=True)


def _joined(layouts: Sequence[Layout]) -> Layout:
    """Layouts in plain numbers as arrays [n]."""
    columns = zip(*(vars(layout).values() for layout in layouts), strict=True)
    return Layout(**dict(zip(vars(layouts[0]), map(np.array, columns), strict=True)))


def _with_one_split(layouts: Layout, one: Layout) -> Layout:
    """Layouts that agree with one in what ranks of a split have, as plain numbers."""
    return replace(
        layouts,
        pp=one.pp,
        vpp=one.vpp,
        schedule=one.schedule,
        recompute_layers=one.recompute_layers,
    )


def _steps(questions: Sequence[StepQuestion]) -> list[StepSeconds]:
    """Answers to questions about one split, or about no split."""
    placed, stages, busiest_s, played = questions[0]
    if len(questions) == 1:
        context, times = placed.context, placed.times
        if stages is not None:
            step = exact_step(context, stages, times, played=played)
            return [_seconds_of(step, len(placed.index))]
        return [_seconds_of(optimistic_step(context, times, busiest_s), len(placed.index))]
    counts = [len(question.placed.index) for question in questions]
    index = np.concatenate([question.placed.index for question in questions])
    context = rows_of_context(placed.among.context, index)
    times = placed.among.times.rows(index, len(placed.among.context.placement.tp))
    if stages is not None:
        layouts = _with_one_split(context.layout, placed.layout)
        every = exact_step(replace(context, layout=layouts), stages, times, played=played)
    else:
        recomputed = [int(question.placed.layout.recompute_layers) for question in questions]
        layouts = replace(context.layout, recompute_layers=np.repeat(recomputed, counts))
        slowest_s = np.repeat([question.busiest_s for question in questions], counts)
        every = optimistic_step(replace(context, layout=layouts), times, slowest_s)
    ends = np.cumsum(counts)[:-1]
    columns = zip(*(np.split(each, ends) for each in _seconds_of(every, len(index))), strict=True)
    return [StepSeconds(*column) for column in columns]


_ANSWERS: dict[type, Callable[[Any], Iterable[Any]]] = {
    StepQuestion: _steps,
    MemoryQuestion: _memory_gib,
    LayerQuestion: _layers_gib,
}


def _seconds_of(step: StepTime, size: int) -> StepSeconds:
    seconds = np.broadcast_to(np.asarray(step.seconds, dtype=np.float64), (size,))
    update_s = np.broadcast_to(np.asarray(step.parts["optimizer"], dtype=np.float64), (size,))
    charged_s = np.broadcast_to(np.asarray(step.parts["dp_comm"]), (size,)) + update_s
    scale = seconds / (seconds - np.asarray(step.parts["scale"]))
    return StepSeconds(seconds, charged_s, update_s, np.asarray(scale))


_WHATEVER_THE_SPLIT = ("pipeline_p2p", "optimizer", "step_overhead")
"""Parts of `optimistic_step` that no split of the layers has less of, whatever is hidden under its work."""


PricedSplit = tuple[Split, FloatArray]
"""A split, and its seconds under each mapping, [k]."""


class LayoutPricing:
    """Prices one layout, its recomputed layers given, on the allocation that it uses."""

    def __init__(self, workload: Workload, layout: Layout) -> None:
        self._workload, self._layout = workload, layout
        self._limit_gib = usable_hbm_gib(workload)
        self._fit = MemoryFit(workload, layout)
        self._peaks_gib: dict[Stages, FloatArray] = {}
        self.memory_limits = False
        """Whether memory kept some mapping from its fastest split."""
        self.nothing_fits = False
        """Whether no split at all was found to fit."""
        self.undecided_s = inf
        """No split that was not looked at is faster than this, nor than what was found."""

    def best(
        self, mappings: MappingBounds, every: PlacedLayout, cutoff_s: float
    ) -> Asking[Priced | None]:
        """The best mapping and split of the layout.

        Parameters
        ----------
        mappings
            With bounds, minus infinity where nothing is to be left out for its bound.
        every
            The layout as `under` has all of these mappings, with any number of recomputed layers.
        cutoff_s
            Seconds of a step; only what is faster is looked for.

        Returns
        -------
        Priced or None
            None where nothing fits or beats the cutoff.
        """
        keep = np.flatnonzero(mappings.bound_s < cutoff_s)
        bound_s, recomputed = mappings.bound_s[keep], int(self._layout.recompute_layers)
        if not len(keep):
            return None
        own = every.rows(keep).recomputing(recomputed)
        if recomputed and np.isfinite(bound_s).any():
            seconds = yield from self._bound(own)
            better = np.flatnonzero(seconds < cutoff_s)
            keep, bound_s, own = keep[better], seconds[better], own.rows(better)
        if not len(keep):
            return None
        table = pick(mappings.matrices, keep)
        best_s, where, stages = yield from self._best_of(own, bound_s, cutoff_s)
        if stages is None:
            return None
        longest = max(max(rank) for rank in stages)
        recomputed_layers = min(int(self._layout.recompute_layers), longest)
        return Priced(
            layout=replace(self._layout, recompute_layers=recomputed_layers),
            matrix={axis: tuple(rows[where].tolist()) for axis, rows in table.items()},
            stages=stages,
            step_time_s=best_s,
        )

    def _best_of(
        self, every: PlacedLayout, bound_s: FloatArray, cutoff_s: float
    ) -> Asking[tuple[float, int, Stages | None]]:
        """(seconds, number of the mapping, stages) of the fastest; mappings with equal layer costs share
        their splits.
        """
        even = any_stages(self._workload, self._layout)
        if even is not None:
            memory = MemoryQuestion(self._workload, self._layout, even)
            asked = LayerQuestion(self._workload, self._layout)
            self._peaks_gib[even], self._fit.layer_gib = yield [memory, asked]
            self._fit.even_gib = self._peaks_gib[even]
        rooms = self._fit.rooms(self._workload.model.layers)
        groups = _rows_with_equal_costs(every.among.costs[:, every.index])
        groups.sort(key=lambda group: float(np.min(bound_s[group[1]])))
        best: tuple[float, int, Stages | None] = (cutoff_s, -1, None)
        for group_costs, rows in groups:
            members = rows[bound_s[rows] < best[0]]
            if not len(members):
                continue
            row = int(every.index[rows[0]])
            split_costs = self._fit.split_costs(
                group_costs,
                every.among.kinds_s(row),
                every.among.backward_s(row),
                every.among.by_stage_s(row),
            )
            busiest_s = least_busiest_rank_s(split_costs, rooms)
            if not np.isfinite(busiest_s):
                self.memory_limits = self.nothing_fits = True
                return best
            # Splits by place are bounded one by one, each no worse than the bound of all.
            by_place = split_costs.in_step and split_costs.vpp > 1 and split_costs.order_of_ranks
            if best[0] < inf and not (by_place and not self._workload.model.unlike_layers):
                bound = yield from self._bound(every.rows(members), busiest_s)
                faster = bound < best[0]
                # Memory decides here: with more layers recomputed, a mapping may be faster than it allows.
                self.memory_limits = self.memory_limits or not faster.all()
                members = members[faster]
            if not len(members):
                continue
            placed = every.rows(members)
            priced_splits = yield from self._splits(placed, split_costs, best[0])
            for split, seconds in priced_splits:
                fastest = int(np.argmin(seconds))
                if seconds[fastest] < best[0]:
                    best = float(seconds[fastest]), int(members[fastest]), split.stages
        return best

    def _splits(
        self, placed: PlacedLayout, costs: SplitCosts, cutoff_s: float
    ) -> Asking[list[PricedSplit]]:
        """Every split that can be best, with its seconds [k]. Memory is asked only where the free splits
        break it.
        """
        in_step = costs.in_step and costs.vpp > 1
        even = costs.begins and costs.vpp > 1 and not in_step
        if even or not framework_of_stack(self._workload.framework).uneven_stages:
            return (yield from self._even_split(placed, costs))
        if in_step:
            splits_of = self._level_splits
            if costs.order:
                is_unlike = bool(self._workload.model.unlike_layers)
                splits_of = self._played_splits if is_unlike else self._splits_by_place
            return (yield from splits_of(placed, costs, cutoff_s))
        windows = hiding_windows(placed.context)
        if costs.order and (costs.partial or costs.order_of_ranks):
            costs = replace(costs, hides=float(np.max(windows)) / costs.pp)
        fits: FitsRank | None = None
        for fits in (None, self._fit.fits):
            if fits is not None:
                self.memory_limits = True
            parts = self._fit.fits_part if fits is not None and costs.order_loads else None
            fastest = frontier(costs, 0.0, fits, parts)
            if not fastest:
                self.nothing_fits = fits is not None
                return []
            first, slack_s = yield from self._with_slack(placed, fastest[0].stages, costs)
            less_s = slack_s + fastest[0].gap_s
            if np.all(first.seconds - less_s * first.scale >= cutoff_s):
                return []
            if fits is None and not (yield from self._fit_memory(fastest[:1])):
                continue  # memory matters: the free splits say nothing more
            splits = frontier(costs, _round_up(slack_s), fits, parts)
            fitting = yield from self._fit_memory(splits)
            if len(fitting) == len(splits):
                break
        fresh = [split for split in fitting if split.stages != fastest[0].stages]
        seconds = yield from self._seconds(placed, fresh)
        seconds[fastest[0].stages] = first.seconds
        between_s = _between_s(placed, fitting, costs)
        for split in fitting:
            faster_by_s = split.gap_s + windows * split.more_work_s / costs.pp
            faster_by_s = faster_by_s + between_s.get(split.stages, 0.0)
            if np.any(faster_by_s):
                least_s = np.min(seconds[split.stages] - faster_by_s * first.scale)
                self.undecided_s = min(self.undecided_s, float(least_s))
        return [(split, seconds[split.stages]) for split in fitting]

    def _even_split(self, placed: PlacedLayout, costs: SplitCosts) -> Asking[list[PricedSplit]]:
        """The only split of a framework that deals layers out by itself."""
        stages = balanced_stages(costs.layers, costs.pp, costs.vpp, costs.begins)
        if stages is None or (costs.partial and min(map(min, stages)) < costs.recompute_layers):
            return []
        split = Split(stages=stages, time_s=costs.stages_s(stages))
        if not (yield from self._fit_memory([split])):
            self.memory_limits = self.nothing_fits = True
            return []
        seconds = yield from self._seconds(placed, [split])
        return [(split, seconds[stages])]

    def _level_splits(
        self, placed: PlacedLayout, costs: SplitCosts, cutoff_s: float
    ) -> Asking[list[PricedSplit]]:
        """Splits of ranks in step, few enough to look at one by one, that fit and may beat the cutoff."""
        splits = []
        for stages in level_splits(costs.layers, costs.pp, costs.vpp, empty_ends=costs.empty_ends):
            if not costs.partial or min(map(min, stages)) >= costs.recompute_layers:
                splits.append(Split(stages=stages, time_s=costs.stages_s(stages)))
        splits.sort(key=lambda split: split.time_s)
        fastest: Split | None = None
        for split in splits:
            if (yield from self._fit_memory([split])):
                fastest = split
                break
            self.memory_limits = True
        if fastest is None:
            return []
        first, slack_s = yield from self._with_slack(placed, fastest.stages, costs, played=False)
        if np.all(first.seconds - slack_s * first.scale >= cutoff_s):
            return []
        priced_splits = yield from self._in_turn(placed, {fastest: first.seconds}, cutoff_s)
        best_s = min([cutoff_s, *(float(np.min(seconds)) for _, seconds in priced_splits)])
        # What is played may take longer: further splits are faster than that then.
        slower_s = np.max((best_s - first.seconds) / first.scale, initial=0.0)
        limit_s = (fastest.time_s + slack_s + slower_s) * (1 + 1e-12)
        further = [
            split for split in splits[splits.index(fastest) + 1 :] if split.time_s <= limit_s
        ]
        fitting = yield from self._fit_memory(further)
        self.memory_limits = self.memory_limits or len(fitting) < len(further)
        seconds = yield from self._seconds(placed, fitting, played=False)
        unplayed = {split: seconds[split.stages] for split in fitting}
        return [*priced_splits, *(yield from self._in_turn(placed, unplayed, best_s))]

    def _in_turn(
        self, placed: PlacedLayout, unplayed: dict[Split, FloatArray], cutoff_s: float
    ) -> Asking[list[PricedSplit]]:
        """Those of some splits that may beat the cutoff, with their seconds, from lower bounds that are these
        where nothing is played.
        """
        priced_splits: list[PricedSplit] = []
        for split in sorted(unplayed, key=lambda split: float(np.min(unplayed[split]))):
            seconds = unplayed[split]
            if np.min(seconds) >= cutoff_s:
                break
            if _is_played(placed, split.stages):
                seconds = (yield from self._seconds(placed, [split]))[split.stages]
            cutoff_s = min(cutoff_s, float(np.min(seconds)))
            priced_splits.append((split, seconds))
        return priced_splits

    def _holds(self, stages: Stages, costs: SplitCosts) -> bool:
        """Whether a split of ranks in step fits, and has a layer for each that is recomputed."""
        if not self._fit.fits_stages(stages):
            self.memory_limits = True
            return False
        return not costs.partial or min(map(min, stages)) >= costs.recompute_layers

    def _level_stages(self, costs: SplitCosts) -> list[Stages]:
        """Level splits of unlike layers, or of layers at unlike places, that may fit."""
        every = level_splits(
            costs.layers, costs.pp, costs.vpp, empty_ends=costs.empty_ends, begins=costs.begins
        )
        return [stages for stages in every if self._holds(stages, costs)]

    def _played_splits(
        self, placed: PlacedLayout, costs: SplitCosts, cutoff_s: float
    ) -> Asking[list[PricedSplit]]:
        """The same where chunks of ranks in step have unlike layers: those that may beat the cutoff are
        played.
        """
        context, times = placed.context, placed.times
        bounded = [
            (float(np.min(least_played_s(context, times, stages))), stages)
            for stages in self._level_stages(costs)
        ]
        beside_s = _least_beside_s(optimistic_step(context, times))
        return (yield from self._one_by_one(placed, bounded, cutoff_s, beside_s))

    def _splits_by_place(
        self, placed: PlacedLayout, costs: SplitCosts, cutoff_s: float
    ) -> Asking[list[PricedSplit]]:
        """The same where stages of ranks in step lie at unlike places: level splits, and those with fewer
        layers on the slow ranks.
        """
        level = self._level_stages(costs)
        by_place = [
            stages
            for stages in (splits_by_place(costs) if level else ())
            if all(self._fit.fits(rank, *n) for rank, n in enumerate(costs.counts_of(stages)))
            and self._holds(stages, costs)
        ]
        bounded, pace_s = [], inf
        for stages in (*level, *by_place):
            chunks_s = chunk_loads(placed.context, placed.times, stages)
            pace_s = min(pace_s, float(np.min(chunks_s.max(axis=-1).sum(axis=-1))))
            bounded.append(
                (float(np.min(in_step_s(placed.context, placed.times, chunks_s))), stages)
            )
        slowest_s = pace_s * (1 - ROUNDING) if bounded else 0.0
        bound = optimistic_step(placed.context, placed.times, slowest_s)
        if np.min(bound.seconds) >= cutoff_s:
            return []
        beside_s = _least_beside_s(bound)
        return (yield from self._one_by_one(placed, bounded, cutoff_s, beside_s, level))

    def _one_by_one(
        self,
        placed: PlacedLayout,
        bounded: Sequence[tuple[float, Stages]],
        cutoff_s: float,
        beside_s: float,
        level: Sequence[Stages] = (),
    ) -> Asking[list[PricedSplit]]:
        """Splits that may beat the cutoff, in the order of what their pipeline takes at the least; those that
        are not level only as far as bounds hold for them.
        """
        priced_splits: list[PricedSplit] = []
        for pipeline_s, stages in sorted(bounded):
            if pipeline_s + beside_s >= cutoff_s:
                break
            if level and stages not in level and not _no_faster_if_alike(placed, stages, level):
                continue
            split = Split(stages=stages, time_s=pipeline_s)
            unplayed = yield from self._seconds(placed, [split], played=False)
            if np.min(unplayed[stages]) >= cutoff_s:
                continue
            if not (yield from self._fit_memory([split])):
                self.memory_limits = True
                continue
            priced = yield from self._in_turn(placed, {split: unplayed[stages]}, cutoff_s)
            cutoff_s = min([cutoff_s, *(float(np.min(seconds)) for _, seconds in priced)])
            priced_splits += priced
        return priced_splits

    def _seconds(
        self, placed: PlacedLayout, splits: Sequence[Split], *, played: bool = True
    ) -> Asking[dict[Stages, FloatArray]]:
        """Seconds of some splits under each mapping, [k]."""
        steps = yield [StepQuestion(placed, split.stages, played=played) for split in splits]
        return {split.stages: step.seconds for split, step in zip(splits, steps, strict=True)}

    def _with_slack(
        self, placed: PlacedLayout, stages: Stages, costs: SplitCosts, *, played: bool = True
    ) -> Asking[tuple[StepSeconds, float]]:
        """A split's step, and how much one with its parameters spread evenly could save over it, at most."""
        own = StepQuestion(placed, stages, played=played)
        first, even = yield [own, StepQuestion(placed, None)]
        # What hides communication depends on the split in these cases.
        is_hidden = (costs.partial and (costs.leading or costs.order)) or costs.order_of_ranks
        least_s = even.update_s if is_hidden else even.charged_s
        return first, float(np.max(np.maximum(first.charged_s - least_s, 0.0)))

    def _bound(self, placed: PlacedLayout, busiest_s: float = 0.0) -> Asking[FloatArray]:
        """Bounds [k] that know how slow the slowest rank must be."""
        (step,) = yield [StepQuestion(placed, None, busiest_s)]
        seconds: FloatArray = step.seconds
        return seconds

    def _placed(self, table: Matrices) -> Placement:
        """The placements of some mappings, arrays [k, levels]."""
        return placement_on(self._workload.cluster, self._layout, table)

    def under(self, table: Matrices) -> PlacedLayout:
        """The layout under some mappings, at least one.

        Parameters
        ----------
        table
            By axis how many ways it is spread at each level, [k, levels], k at least 1.
        """
        placement = self._placed(table)
        size = np.full(len(placement.tp), int(self._layout.micro_batch), dtype=np.int64)
        context = make_context(self._workload, replace(self._layout, micro_batch=size), placement)
        every = PlacedLayouts(context=context, times=kind_times(context))
        return PlacedLayout(layout=self._layout, among=every, index=np.arange(len(size)))

    def _fit_memory(self, splits: Sequence[Split]) -> Asking[list[Split]]:
        """The splits among some that memory holds."""
        fresh = [split.stages for split in splits if split.stages not in self._peaks_gib]
        gib = yield [MemoryQuestion(self._workload, self._layout, stages) for stages in fresh]
        self._peaks_gib |= dict(zip(fresh, gib, strict=True))
        return [split for split in splits if self._fits(split.stages)]

    def _fits(self, stages: Stages) -> bool:
        peak_gib = np.max(self._peaks_gib[stages])
        return bool(peak_gib <= self._limit_gib) and self._fits_host(stages)

    def _fits_host(self, stages: Stages) -> bool:
        if self._fit.host_limit_gib == inf:
            return True
        held = offloaded_states_gib(self._workload, self._layout, stages)
        return bool(np.max(held) <= self._fit.host_limit_gib)


def _between_s(
    placed: PlacedLayout, splits: Sequence[Split], costs: SplitCosts
) -> dict[Stages, FloatArray]:
    """How much less than a split of most work those between it and one of least work may take, at most, [k].

    Derived here from `exposed_s`. At equal limits on the slowest rank and on parameters a step is concave in
    the work of all ranks, up to that which hides all traffic: there one between two is no faster than the
    faster of them. Beyond, a step grows by the bubble and by what slows down beside traffic: none is faster
    than the split of most work by more than that, and where even the least work hides all, none than the
    split of least.
    """
    ends = {split.stages: split.work_range_s for split in splits if any(split.work_range_s)}
    if not ends:
        return {}
    context = placed.context
    hidden_s, all_hidden_s = useful_work_s(context, [split.stages for split in splits])
    slow_down = context.constants.framework.dp_interference * hiding_windows(context) / costs.pp
    rise = costs.bubble_share / costs.vpp + slow_down
    between_s = {}
    for stages, (least_s, most_s) in ends.items():
        beyond_s = np.maximum(most_s - np.maximum(least_s, hidden_s), 0.0)
        between_s[stages] = rise * np.where(all_hidden_s <= least_s, 0.0, beyond_s)
    return between_s


def _least_beside_s(bound: StepTime) -> float:
    """What a bound under some mappings has beside the pipeline at the least, whatever the split."""
    return float(np.min(sum(np.asarray(bound.parts[name]) for name in _WHATEVER_THE_SPLIT)))


def _is_played(placed: PlacedLayout, stages: Stages) -> bool:
    """Whether some mapping's price of a split is that of its schedule as it is played."""
    context = placed.context
    return bool(is_played(context) or is_fast_in_closed_form(context, placed.times, stages).any())


def _no_faster_if_alike(placed: PlacedLayout, stages: Stages, level: Sequence[Stages]) -> bool:
    """Whether ranks of a split would be no faster than those of level splits if all stages lay best.

    Only such splits by place are looked at, so that bounds which know level splits alone hold for them.
    """
    best = placed.times.on_best_stage()

    def pace_s(split: Stages) -> float:
        chunks_s = chunk_loads(placed.context, best, split)
        return float(np.min(chunks_s.max(axis=-1).sum(axis=-1)))

    return pace_s(stages) >= min(map(pace_s, level)) * (1 - ROUNDING)


def _rows_with_equal_costs(columns: FloatArray) -> list[tuple[LayerCosts, IntArray]]:
    """Each different set of layer costs, columns [columns, k], with the rows that have it."""
    number = len(fields(LayerCosts))
    if (columns == columns[:, :1]).all():
        return [(LayerCosts(*columns[:number, 0].tolist()), np.arange(columns.shape[1]))]
    unique, back = np.unique(columns.T, axis=0, return_inverse=True)
    groups = []
    for group, values in enumerate(unique.tolist()):
        groups.append((LayerCosts(*values[:number]), np.flatnonzero(back.reshape(-1) == group)))
    return groups


def _round_up(seconds: float) -> float:
    """To the next power of two: a little more slack costs little, and shared slacks share their splits."""
    return float(2.0 ** np.ceil(np.log2(seconds))) if seconds > 0 else 0.0
