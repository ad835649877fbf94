"""What one change to a plan would cost, or which rule forbids it: the reasons behind every choice.

A neighbour differs in one choice (or trades a factor of two between two degrees), and has the best split of
its layers and the best of all mappings of the fabric. Only the plan itself is proven; these are prices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import permutations
from math import inf
from typing import Any, Literal

import numpy as np

from meshwright.cluster_specs.allocation import is_irregular
from meshwright.constraints.fabric import NvlinkDomain, binds_mappings
from meshwright.constraints.memory import HbmCapacity
from meshwright.constraints.registry import findings
from meshwright.constraints.rule import FinishedPlan
from meshwright.costmodel.estimate import Stages, stage_memory_gib
from meshwright.costmodel.layout import ROUNDING, Layout, Recompute
from meshwright.costmodel.mixed import hosts_short_gib, mixed_memory_gib, mixed_step
from meshwright.costmodel.schedules import schedule_name, schedule_named, traits
from meshwright.costmodel.step_time import exact_step
from meshwright.costmodel.workload import Execution, Workload, with_needed_syncs
from meshwright.frameworks.catalog import binding_framework, framework_of_stack, planned
from meshwright.planner.bounds.exact_cost import (
    LayoutPricing,
    MappingBounds,
    PlacedLayout,
    Priced,
    worked_out,
)
from meshwright.planner.bounds.layer_split import ALL_LAYERS, balanced_stages, suiting_stages
from meshwright.planner.bounds.mappings import Matrices, divides_into, mappings_of
from meshwright.planner.mapping.counted import seconds_in_best_order
from meshwright.planner.mixed.document import (
    AnyPlan,
    MixedPlan,
    MixedRequest,
    Pipeline,
    request_of_parts,
)
from meshwright.planner.mixed.kernel import Composition, MixedPrice
from meshwright.planner.mixed.promising import (
    ASKED_OF_PARTS,
    KernelMaker,
    PromisingRow,
    executions_on_parts,
    space_on_parts,
    with_ranks,
)
from meshwright.planner.mixed.service import best_on_parts
from meshwright.planner.plan.assemble import Claim, claim_of, is_closed, space_report
from meshwright.planner.plan.best_plan import best_plan
from meshwright.planner.plan.document import LATER_CHOICES, Plan, SpaceReport
from meshwright.planner.plan.texts import workload_of_plan
from meshwright.planner.plan.verify import wish_faults
from meshwright.planner.request.choices import BY_NAME, CHOICES, DOUBLED, NUMBERS, OF_LAYOUT
from meshwright.planner.request.plan_request import PlanInputs, PlanRequest
from meshwright.planner.runs.run_terms import LayoutDoc, layout_document, layout_from_document
from meshwright.planner.search.space import Space, space_of
from meshwright.planner.solvers.processes import side_by_side

# Whether a layout lies in the space that a plan's proof speaks of, as the plan prints it.


@dataclass(frozen=True, kw_only=True)
class PrintedSpace:
    """The layouts that a plan was chosen from: what the request wishes, and the values of its space."""

    request: PlanRequest
    space: SpaceReport | None

    @staticmethod
    def of_plan(plan: Plan) -> PrintedSpace:
        """The space of a plan; without a report of it only the wishes count.

        Parameters
        ----------
        plan
            Its inputs say what was wished, `solver.space` what was searched.
        """
        request = PlanRequest.of_inputs(plan.inputs)
        return PrintedSpace(request=request, space=plan.solver.space)

    def outside(self, layout: LayoutDoc) -> str | None:
        """Why a layout is none of them, in words.

        Parameters
        ----------
        layout
            Its `stages` are not looked at: splits of the layers are searched for by the plan's own rule.

        Returns
        -------
        str or None
            Such as `zero_stage 2 was not searched, only 0, 1`; None for a layout of the space.
        """
        wishes, space = list(wish_faults(self.request, layout)), self.space
        if wishes or space is None:
            return next(iter(wishes), None)
        kinds = {"recompute": "+".join(layout.recompute_modules) or layout.recompute}
        for choice in OF_LAYOUT:
            if choice.searched:
                value = kinds.get(choice.name, getattr(layout, choice.name))
                searched = getattr(space, choice.searched)
                if value not in searched:
                    only = ", ".join(map(str, searched))
                    return f"{choice.name} {value} was not searched, only {only}"
        stages = self._searched.virtual_stages(layout.pp)
        if layout.vpp not in stages:
            only = ", ".join(map(str, stages))
            return f"vpp {layout.vpp} was not searched with pp {layout.pp}, only {only}"
        used = layout.gpus
        return None if used <= space.gpus else f"{used} GPUs, the space has {space.gpus}"

    @cached_property
    def _searched(self) -> Space:
        """What no report has: virtual stages go by the ranks of a pipeline."""
        return space_of(self.request)


_TRADES = (("tp", "dp"), ("pp", "dp"), ("cp", "dp"), ("tp", "pp"))


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """One changed choice, and what comes of it."""

    change: str
    """Such as `tp 8 -> 4, dp 16 -> 32`."""
    step_time_s: float | None = None
    """None where a rule forbids it."""
    slower_pct: float | None = None
    """Against the plan's step time; negative where faster."""
    broken: str | None = None
    """The first rule that is broken, in words."""
    settings: dict[str, int | str] = field(default_factory=dict)
    """The choices that differ from the plan's, such as `{"tp": 4, "dp": 32}`."""
    outside: str | None = None
    """Why it is none of the layouts that the plan was chosen from, in words: it may then be faster."""


def neighbours(plan: Plan) -> list[Neighbour]:
    """Changes to a plan's layout, cheapest first, then those that a rule forbids; none without a layout.

    Parameters
    ----------
    plan
        Of any status; its own workload, calibration included, prices the changes.
    """
    if plan.layout is None or plan.predicted is None:
        return []
    workload, layout = workload_of_plan(plan), layout_from_document(plan.layout)
    space, near = PrintedSpace.of_plan(plan), _Near(workload, plan.layout)
    priced = []
    for change, changed in layout_changes(layout, workload):
        price = near.best_split(changed)
        seconds = price.step_time_s
        priced.append(
            Neighbour(
                change=change,
                step_time_s=seconds,
                slower_pct=None if seconds is None else _slower_pct(plan, seconds),
                broken=price.broken,
                settings=_settings_of(changed, layout),
                outside=space.outside(layout_document(changed, ((0,),))),
            )
        )
    return sorted(priced, key=_cheapest_first)


def _cheapest_first(neighbour: Neighbour) -> tuple[bool, float, str]:
    """Those that a rule forbids come last."""
    return neighbour.step_time_s is None, neighbour.step_time_s or 0.0, neighbour.change


def layout_changes(layout: Layout, workload: Workload) -> Iterator[tuple[str, Layout]]:
    """(words, changed layout) of each single change; none that cannot even be written down (fractions, the
    same again).

    Parameters
    ----------
    layout
        In plain numbers.
    workload
        Its batch, model and framework say which changes can be written down.
    """
    for up, down in (*_TRADES, *((b, a) for a, b in _TRADES)):
        have, give = int(getattr(layout, up)), int(getattr(layout, down))
        if give % 2 == 0:
            words = f"{up} {have} -> {2 * have}, {down} {give} -> {give // 2}"
            yield from _with(layout, workload, words, **{up: 2 * have, down: give // 2})
    scaled = ["micro_batch", "vpp"] + (["ep"] if workload.model.moe is not None else [])
    for name in scaled:
        now = int(getattr(layout, name))
        if name != "vpp" or int(layout.pp) > 1:
            yield from _with(layout, workload, f"{name} {now} -> {2 * now}", **{name: 2 * now})
        if now % 2 == 0:
            yield from _with(layout, workload, f"{name} {now} -> {now // 2}", **{name: now // 2})
    yield from _schedules(layout, workload)
    full = bool(layout.recomputes_layers)
    if int(layout.recompute):
        yield from _with(layout, workload, "recompute -> none", recompute=0, recompute_layers=0)
    if (
        not full
        or int(layout.recompute_layers) * int(layout.vpp) * int(layout.pp) < workload.model.layers
    ):
        every = {"recompute": int(Recompute.FULL), "recompute_layers": ALL_LAYERS}
        yield from _with(layout, workload, "recompute -> full, every layer", **every)
    yield from _groups(layout, workload)
    yield from _offloads(layout, workload)
    for stage in (0, 1, 2, 3):
        if abs(stage - int(layout.zero_stage)) == 1:
            yield from _with(
                layout, workload, f"zero_stage {layout.zero_stage} -> {stage}", zero_stage=stage
            )


def _groups(layout: Layout, workload: Workload) -> Iterator[tuple[str, Layout]]:
    """Twice and half as many shard groups, where the framework has them and something is sharded."""
    record = framework_of_stack(workload.framework).shard_groups
    if record is None or int(layout.zero_stage) not in record.zero_stages:
        return
    now = int(layout.shard_groups)
    numbers = [2 * now] if now % 2 else [2 * now, now // 2]
    for number in numbers:
        if divides_into(number, layout.dp, layout.cp):
            yield from _with(
                layout, workload, f"shard_groups {now} -> {number}", shard_groups=number
            )


def _offloads(layout: Layout, workload: Workload) -> Iterator[tuple[str, Layout]]:
    """The next smaller and larger share of the optimizer's states in the host's memory."""
    record = framework_of_stack(workload.framework).optimizer_offload
    if record is None or int(layout.zero_stage) not in record.zero_stages:
        return
    now = int(layout.optimizer_offload)
    smaller = [share for share in (0, *record.percents) if share < now]
    larger = [share for share in record.percents if share > now]
    for share in (*smaller[-1:], *larger[:1]):
        yield from _with(
            layout, workload, f"optimizer_offload {now} -> {share} %", optimizer_offload=share
        )


def _schedules(layout: Layout, workload: Workload) -> Iterator[tuple[str, Layout]]:
    """Other schedules that the framework has, with the virtual stages of the plan or the fewest they take."""
    framework = binding_framework(workload.framework)
    now = schedule_name(int(layout.schedule), int(layout.vpp))
    if int(layout.pp) == 1 or framework is None:
        return
    for name in planned(framework.schedules):
        schedule = schedule_named(name)
        shape = traits(schedule)
        vpp = min(
            max(int(layout.vpp), shape.fewest_chunks), shape.most_chunks or int(layout.vpp) + 1
        )
        if schedule != int(layout.schedule):
            words = f"schedule {now} -> {name}" + (f", vpp {vpp}" if vpp != int(layout.vpp) else "")
            yield from _with(layout, workload, words, schedule=int(schedule), vpp=vpp)


def _with(
    layout: Layout, workload: Workload, words: str, **fields: Any
) -> Iterator[tuple[str, Layout]]:
    changed = replace(layout, **fields)
    sequences = int(changed.micro_batch) * int(changed.dp)
    replicas = int(changed.dp) * int(changed.cp)
    if replicas % int(changed.shard_groups):
        return
    if workload.global_batch % sequences or (
        int(changed.tp) * int(changed.cp) * int(changed.dp)
    ) % int(changed.expert_group):
        return
    framework = framework_of_stack(workload.framework)
    in_sequence = int(changed.tp) > 1 and framework.sequence_parallel is not None
    yield (
        words,
        replace(
            changed,
            num_micro_batches=workload.global_batch // sequences,
            sequence_parallel=in_sequence if "tp" in fields else layout.sequence_parallel,
            vpp=1 if int(changed.pp) == 1 else changed.vpp,
            schedule=0 if int(changed.pp) == 1 else changed.schedule,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class NearPrice:
    """A layout's price under the best of all mappings."""

    step_time_s: float | None = None
    """None where a rule forbids it."""
    memory_gib: float | None = None
    """Of the fullest GPU; None where the layers cannot be split."""
    broken: str | None = None
    """The first rule that is broken, in words."""


class _UnderMappings:
    """A layout under every mapping of its fabric: what its layers take there is worked out once for all
    splits of them.
    """

    def __init__(self, workload: Workload, layout: Layout) -> None:
        self.workload, self.layout = workload.on(int(layout.gpus)), layout

    @cached_property
    def table(self) -> Matrices:
        """The mappings that keep in a domain what has to lie in one."""
        return mappings_of(self.workload, self.layout)

    @cached_property
    def pricing(self) -> LayoutPricing:
        """Of the layout."""
        return LayoutPricing(self.workload, self.layout)

    @cached_property
    def placed(self) -> PlacedLayout:
        """Under each of the mappings, of which there is one at least."""
        return self.pricing.under(self.table)

    def best_split(self, cutoff_s: float) -> Priced | None:
        """The layout with its best split and mapping; None where none fits or takes less than that.

        Parameters
        ----------
        cutoff_s
            Seconds of a step, above 0; infinite for the best there is.
        """
        count = len(self.table["tp"])
        if not count:
            return None
        bounds = MappingBounds(matrices=self.table, bound_s=np.zeros(count))
        return worked_out(self.pricing.best(bounds, self.placed, cutoff_s))

    def price(self, stages: Stages, recomputed_layers: int | None = None) -> NearPrice:
        """The layout's price under a split of its layers, perhaps with other ones of them recomputed.

        Parameters
        ----------
        stages
            Layers of each [pipeline rank][virtual stage].
        recomputed_layers
            Of each virtual stage, in place of the layout's; None for those.
        """
        layout = self.layout
        if recomputed_layers is not None:
            layout = replace(layout, recompute_layers=recomputed_layers)
        memory_gib = tuple(float(gib) for gib in stage_memory_gib(self.workload, layout, stages))
        broken = _broken(self.workload, layout, stages, memory_gib)
        step_time_s = None
        if broken is None:
            step_time_s, broken = self._best_mapping_s(layout, stages)
        return NearPrice(step_time_s=step_time_s, memory_gib=max(memory_gib), broken=broken)

    def _best_mapping_s(self, layout: Layout, stages: Stages) -> tuple[float | None, str | None]:
        """Seconds under the best mapping, or why there is none."""
        if is_irregular(self.workload.cluster):
            step_time_s = seconds_in_best_order(self.workload, layout, stages)
            return step_time_s, None if step_time_s else "its groups do not fit the free nodes"
        if not len(self.table["tp"]):
            if binds_mappings(self.workload):
                return None, "no mapping keeps groups inside that have to be in one domain"
            return None, f"tp {layout.tp} does not fit into the innermost level of the fabric"
        placed = self.placed.recomputing(int(layout.recompute_layers))
        return float(np.min(exact_step(placed.context, stages, placed.times).seconds)), None


def _in_one_domain(workload: Workload) -> Workload:
    """The same work with its GPUs as one node: what fits into one of them does not depend on where it is."""
    cluster, gpus = workload.cluster, workload.gpus
    domain = gpus if cluster.nvlink_domain > 1 else 1
    one_node = {"gpus": gpus, "gpus_per_node": gpus, "nvlink_domain": domain}
    unlisted: dict[str, object] = {"nodes": (), "blocks": (), "levels": ()}
    return replace(workload, cluster=cluster.model_copy(update=one_node | unlisted))


class _Near:
    """Prices of layouts near a plan; each is priced once.

    Parameters
    ----------
    workload
        What is trained; a layout's GPUs are the first of its cluster.
    planned
        The plan's layout: its split is tried where a layout has its ranks, virtual stages and schedule.
    """

    def __init__(self, workload: Workload, planned: LayoutDoc) -> None:
        self._workload, self._planned = workload, planned
        self._known: dict[tuple[int, ...], tuple[NearPrice, _UnderMappings | None]] = {}

    def price(self, layout: Layout) -> NearPrice:
        """A layout's price and memory, its layers split evenly or as the plan splits them, whichever is
        faster.

        Parameters
        ----------
        layout
            In plain numbers, on the cluster of the plan.
        """
        return self._priced(layout)[0]

    def _priced(self, layout: Layout) -> tuple[NearPrice, _UnderMappings | None]:
        """The same with the layout's mappings; without them where its layers cannot be split."""
        key = _key(layout)
        if key not in self._known:
            self._known[key] = self._of(layout)
        return self._known[key]

    def _of(self, layout: Layout) -> tuple[NearPrice, _UnderMappings | None]:
        even = suiting_stages(self._workload, layout)
        if even is None:
            chunks = int(layout.pp) * int(layout.vpp)
            layers = self._workload.model.layers
            words = f"pp x vpp = {chunks} virtual stages for {layers} layers"
            return NearPrice(broken=words), None
        splits, plans_own = {even}, layout_from_document(self._planned)
        if _shape(layout) == _shape(plans_own):
            splits.add(tuple(map(tuple, self._planned.stages)))
        mapped = _UnderMappings(self._workload, layout)
        return min(map(mapped.price, sorted(splits)), key=_seconds_then_gib), mapped

    def best_split(self, layout: Layout, cutoff_s: float = inf) -> NearPrice:
        """A layout's price and memory under the best split of its layers, as the search prices it.

        On irregular allocations it is the split that would be best with all GPUs in one domain, if that is
        faster than those of `price` or fits where they do not. Where no split takes less than `cutoff_s`, the
        price is that of `price`.

        Parameters
        ----------
        layout
            In plain numbers, on the cluster of the plan.
        cutoff_s
            Seconds of a step that a split has to come below to be of interest; none by default.
        """
        near, mapped = self._priced(layout)
        forbidden = near.broken is not None and not near.broken.startswith(HbmCapacity.name)
        if mapped is None or forbidden or int(layout.pp) == 1:
            return near
        if is_irregular(self._workload.cluster):
            there = _UnderMappings(_in_one_domain(mapped.workload), layout)
            priced = there.best_split(inf)
        else:
            priced = mapped.best_split(min(near.step_time_s or inf, cutoff_s))
        if priced is None:
            return near
        split = mapped.price(priced.stages, int(priced.layout.recompute_layers))
        return min(near, split, key=_seconds_then_gib)


def _shape(layout: Layout) -> tuple[int, int, int]:
    """What a split of the layers has to suit."""
    return int(layout.pp), int(layout.vpp), int(layout.schedule)


def _seconds_then_gib(price: NearPrice) -> tuple[float, float]:
    """The fastest comes first; of those that a rule forbids the one that needs least."""
    seconds, gib = price.step_time_s, price.memory_gib
    return (inf if seconds is None else seconds, inf if gib is None else gib)


def _settings_of(layout: Layout, before: Layout) -> dict[str, int | str]:
    """The choices of a layout that differ from those of another, by name."""
    changed: dict[str, int | str] = {}
    for name in NUMBERS:
        value = int(getattr(layout, name))
        if value != int(getattr(before, name)):
            changed[name] = value
    if int(layout.recompute) != int(before.recompute):
        kind = "full" if layout.recomputes_layers else "selective"
        changed["recompute"] = kind if int(layout.recompute) else "none"
    return changed


def _broken(
    workload: Workload, layout: Layout, stages: Stages, memory_gib: tuple[float, ...]
) -> str | None:
    workload = with_needed_syncs(workload, layout)
    finished = FinishedPlan(workload=workload, layout=layout, stages=stages, memory_gib=memory_gib)
    return next((f"{finding.rule}: {finding.words}" for finding in findings(finished)), None)


# Layouts near a plan's: what each takes in time and in memory, and which no other beats in both.
#
# They are reached from the plan by single changes, always from the fastest layout that was not looked at yet,
# and lie in the space that the plan's proof speaks of: nothing here is faster than a plan that is optimal.
# Their layers are split evenly, or as the plan's, under the best mapping of the fabric: prices, not proofs.


@dataclass(frozen=True, kw_only=True)
class NearLayout:
    """One layout near the optimum."""

    layout: LayoutDoc
    """Without its stages."""
    step_time_s: float
    memory_gib: float
    """Of the fullest GPU."""
    is_plan: bool
    on_front: bool
    """Whether no other layout here needs neither more time nor more memory."""


_MOST_PRICED, _SLOWEST = 160, 2.0


def near_optimal(
    plan: Plan,
    *,
    most_priced: int = _MOST_PRICED,
    slowest: float = _SLOWEST,
    kept: Collection[str] = (),
) -> list[NearLayout]:
    """The plan and layouts around it that every rule allows, of the space that the plan was chosen from.

    Parameters
    ----------
    plan
        A plan of any status.
    most_priced
        Layouts priced at most, a few milliseconds each.
    slowest
        Longest step that is listed, over the plan's.
    kept
        Names of choices that all of them make as the plan does.

    Returns
    -------
    list of NearLayout
        Fastest first; empty where the plan has no layout.
    """
    if plan.layout is None or plan.predicted is None:
        return []
    near, least_gib = [], inf
    prices = _Near(workload_of_plan(plan), plan.layout)
    for seconds, memory_gib, layout, is_plan in _walk(plan, prices, most_priced, slowest, kept):
        near.append(
            NearLayout(
                layout=layout_document(layout, ((0,),)),
                step_time_s=seconds,
                memory_gib=memory_gib,
                is_plan=is_plan,
                on_front=memory_gib < least_gib,
            )
        )
        least_gib = min(least_gib, memory_gib)
    return near


def _walk(
    plan: Plan, prices: _Near, most_priced: int, slowest: float, kept: Collection[str]
) -> list[tuple[float, float, Layout, bool]]:
    """(seconds, GiB of the fullest GPU, layout, whether it is the plan) of `near_optimal`, fastest first."""
    assert plan.layout is not None
    assert plan.predicted is not None
    workload, space = workload_of_plan(plan), PrintedSpace.of_plan(plan)
    start, start_s = layout_from_document(plan.layout), plan.predicted.step_time_s
    priced = [(start_s, max(plan.predicted.memory_gib), start, True)]
    seen, waiting = {_key(start)}, [(start_s, 0, start)]
    while waiting and len(seen) <= most_priced:
        for _, changed in layout_changes(heappop(waiting)[2], workload):
            if _key(changed) in seen or len(seen) > most_priced:
                continue
            if any(getattr(changed, name) != getattr(start, name) for name in kept):
                continue
            seen.add(_key(changed))
            if space.outside(layout_document(changed, ((0,),))) is not None:
                continue
            price = prices.price(changed)
            seconds, memory_gib = price.step_time_s, price.memory_gib
            if seconds is not None and memory_gib is not None and seconds <= start_s * slowest:
                heappush(waiting, (seconds, len(seen), changed))
                priced.append((seconds, memory_gib, changed, False))
    return sorted(priced, key=lambda each: each[:2])


def _key(layout: Layout) -> tuple[int, ...]:
    return tuple(int(value) for value in vars(layout).values())


# The few plans that come closest to a plan, whatever says so: the search's own list, the searches without a
# choice, or a price.


RIVALS_SHOWN = 5
_SPLIT_BEST = 12
"""Layouts near the plan, fastest first, whose best split is looked for: 45 ms each (Qwen3-235B, 256 GPUs)."""
_FINE = ("shard_groups", "optimizer_offload")
"""Choices whose values lie so near to one another that a list of rivals would hold nothing else."""
_ONE_AFTER_THE_OTHER = ("1f1b", "interleaved-1f1b")
"""Schedules that the number of virtual stages tells apart."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """Another plan for the same job, and how it is known."""

    differs: str
    """Such as `tp 4 -> 8, dp 4 -> 2`, from the plan's value to its own, or `without tp_overlap`."""
    step_time_s: float
    slower_pct: float
    """Against the plan's step time; negative where faster."""
    basis: Literal["proven", "found", "priced"]
    """`proven`: the search proved that no plan which is not listed comes before it, or that none of its kind
    is faster; `found`: by a search that ended before it proved as much; `priced`: a layout near the plan,
    with the best split of its layers."""


def rivals(plan: Plan, most: int = RIVALS_SHOWN) -> list[Rival]:
    """The fastest plans beside a plan that are known, fastest first.

    Parameters
    ----------
    plan
        A plan of any status.
    most
        How many are listed at most, from 0.

    Returns
    -------
    list of Rival
        Fewer where fewer are known, none for a plan without a layout. They come from `alternatives`, from
        `choices` and from the prices of layouts near the plan.
    """
    if plan.layout is None or plan.predicted is None:
        return []
    proven: Claim = "optimal"
    candidates: list[Rival] = []

    def note(differs: str, step_time_s: float, basis: Literal["proven", "found", "priced"]) -> None:
        if differs and all(differs != rival.differs for rival in candidates):
            slower_pct = _slower_pct(plan, step_time_s)
            candidates.append(
                Rival(differs=differs, step_time_s=step_time_s, slower_pct=slower_pct, basis=basis)
            )

    for alternative in plan.alternatives:
        words = _differences(plan, LATER_CHOICES | alternative) or "layers split otherwise"
        note(
            words,
            float(str(alternative["step_time_s"])),
            "proven" if plan.status == proven else "found",
        )
    for choice in plan.choices or ():
        if choice.step_time_s_without is not None:
            words = f"without {choice.choice} {_word(choice.choice, choice.value)}"
            note(words, choice.step_time_s_without, "proven" if choice.proven else "found")
    prices = _Near(workload_of_plan(plan), plan.layout)
    near = _walk(plan, prices, _MOST_PRICED, _SLOWEST, _FINE)
    for _, _, layout, is_plan in near[: 1 + _SPLIT_BEST]:
        if is_plan:
            continue
        # A slower one than those listed is left out, whatever it takes.
        listed = sorted(rival.step_time_s for rival in candidates)[:most]
        cutoff_s = listed[-1] * (1 + ROUNDING) if len(listed) == most > 0 else inf
        price = prices.best_split(layout, cutoff_s)
        if price.step_time_s is not None:
            words = _differences(plan, layout_document(layout, ((0,),)).model_dump())
            note(words, price.step_time_s, "priced")
    return sorted(candidates, key=lambda rival: (rival.step_time_s, rival.differs))[:most]


def _differences(plan: Plan, rival: Mapping[str, object]) -> str:
    """What another layout, with its execution where that is told, does otherwise than the plan; in words."""
    assert plan.layout is not None
    before = plan.layout.model_dump() | ({} if plan.execution is None else vars(plan.execution))
    words = []
    for choice in CHOICES:
        now, then = before.get(choice.name), rival.get(choice.name)
        if then is None or now is None or then == now:
            continue
        is_implied = (choice.name == "schedule" and {now, then} <= {*_ONE_AFTER_THE_OTHER}) or (
            choice.decided == "pipeline" and rival.get("pp") == 1
        )
        if not is_implied:
            words.append(f"{choice.name} {choice.word(now)} -> {choice.word(then)}")
    return ", ".join(words)


def _word(name: str, value: object) -> str:
    """A value as a pin of the choice writes it."""
    return BY_NAME[name].word(value) if name in BY_NAME else str(value)


# One choice of a plan at a time: its price with all else kept, and that of the best plan with it.


LARGEST_SPACE = 1_000_000
"""Layouts of the plan's own space beyond which the searches for single choices are made on request only."""


@dataclass(frozen=True, kw_only=True)
class SingleChoice:
    """A plan with one choice made otherwise, on the GPUs that the plan takes where nodes are listed."""

    choice: str
    """Such as `tp 8`."""
    kept_pct: float | None
    """How much slower the step is with all else kept as it can be; null where a rule forbids that."""
    rule: str | None
    """That rule, in words."""
    best_pct: float | None
    """How much slower the best plan with this choice is; null where none was found."""
    best_layout: LayoutDoc | None
    status: Claim
    """Of the search for that plan."""
    proven: bool
    """Whether no plan with this choice is faster than that."""


def searches_at_once(plan: Plan) -> bool:
    """Whether the searches are short enough to be made unasked.

    Parameters
    ----------
    plan
        With the number of layouts that its own search considered.
    """
    overlaps = len(PlanRequest.of_inputs(plan.inputs).execution_options.values["tp_overlap"])
    return plan.solver.layouts_considered <= LARGEST_SPACE * overlaps


def single_choices(
    plan: Plan, changes: list[Neighbour], progress: Callable[[str], None] | None = None
) -> list[SingleChoice]:
    """What other values of single choices cost, the least loss first.

    Parameters
    ----------
    plan
        A proven or feasible plan.
    changes
        Its neighbours, as `neighbours` gives them.
    progress
        Called with a line before each search.
    """
    if plan.layout is None or plan.predicted is None:
        return []
    tasks = [
        partial(_single_choice, plan, changes, name, value, progress)
        for name, value in _choices(
            plan.inputs, layout_from_document(plan.layout), plan.inputs.gpus
        )
    ]
    return sorted(side_by_side(tasks), key=_loss)


def _single_choice(
    plan: Plan,
    changes: list[Neighbour],
    name: str,
    value: int | str,
    progress: Callable[[str], None] | None,
) -> SingleChoice:
    """The plan with one choice made otherwise: as it stands, and the best there is."""
    if progress is not None:
        progress(f"the best plan with {name} {value}")
    pins = {**plan.inputs.pins, name: value}
    replanned = best_plan(PlanRequest.of_inputs(plan.inputs, pins=pins))
    best = replanned.outcome.best[0] if replanned.outcome.best else None
    layout = None if best is None else layout_document(best.layout, best.stages)
    best_pct = None if best is None else _slower_pct(plan, best.step_time_s)
    return SingleChoice(**_made_so((name, value), changes, replanned.claim, best_pct, layout))


def _made_so(
    choice: tuple[str, int | str],
    changes: Sequence[Neighbour],
    claim: Claim,
    best_pct: float | None,
    best_layout: LayoutDoc | None,
) -> dict[str, Any]:
    """Fields of a single choice: the neighbour that makes it, and the best plan with it."""
    all_else_kept = _kept(*choice, changes)
    return {
        "choice": "{} {}".format(*choice),
        "kept_pct": None if all_else_kept is None else all_else_kept.slower_pct,
        "rule": None if all_else_kept is None else all_else_kept.broken,
        "best_pct": best_pct,
        "best_layout": best_layout,
        "status": claim,
        "proven": is_closed(claim),
    }


def _choices(inputs: PlanInputs, layout: Layout, gpus: int) -> Iterator[tuple[str, int | str]]:
    """Choices that are neither pinned nor the plan's own, on so many GPUs at the most."""
    pins = inputs.pins
    for name in DOUBLED:
        now = int(getattr(layout, name))
        if name in pins or (name == "ep" and inputs.model.moe is None):
            continue
        if name == "vpp" and int(layout.pp) == 1:
            continue
        largest = inputs.global_batch if name == "micro_batch" else gpus
        if name == "vpp":
            largest = inputs.model.layers // int(layout.pp)
        if 2 * now <= largest:
            yield name, 2 * now
        if now % 2 == 0:
            yield name, now // 2
    if "recompute" not in pins:
        yield "recompute", "none" if int(layout.recompute) else "full"


def _kept(name: str, value: int | str, changes: Sequence[Neighbour]) -> Neighbour | None:
    """The neighbour with a choice that costs least; one that a rule forbids where there is no other."""
    fitting = [change for change in changes if change.settings.get(name) == value]
    allowed = [change for change in fitting if change.step_time_s is not None]
    return next(iter(allowed or fitting), None)


def _slower_pct(plan: AnyPlan, step_time_s: float) -> float:
    """How much slower a step is than the plan's; negative where it is faster."""
    assert plan.predicted is not None
    return 100.0 * (step_time_s / plan.predicted.step_time_s - 1.0)


def _loss(choice: SingleChoice) -> tuple[bool, float, str]:
    return choice.best_pct is None, choice.best_pct or 0.0, choice.choice


# The same of a pipeline through parts of a mixed cluster.
#
# With a change the layers are dealt anew, and how many ranks each part has, as is best: the parts stay, and
# their order along the pipeline. Virtual stages and other schedules than 1F1B are none of these pipelines.


_ON_ONE_CLUSTER = ("vpp", "schedule")
"""Choices that a pipeline through parts does not have."""


@dataclass(frozen=True, kw_only=True)
class PartsNeighbour(Neighbour):
    """One changed choice of a pipeline through parts."""

    ranks_on: dict[str, int] = field(default_factory=dict)
    """Pipeline ranks on each part; empty where a rule forbids the change."""
    layers: list[int] = field(default_factory=list)
    """Of each rank, with the same exception."""


@dataclass(frozen=True, kw_only=True)
class PartsChoice(SingleChoice):
    """A pipeline through parts with one choice made otherwise."""

    runs_on: tuple[str, ...]
    """Where the best plan with it runs; empty without one."""


def parts_neighbours(plan: MixedPlan) -> list[PartsNeighbour]:
    """Changes to a pipeline through parts, cheapest first, then those that a rule forbids.

    Parameters
    ----------
    plan
        Of any status; there is none without a layout.

    Returns
    -------
    list of PartsNeighbour
        Beside changes of the layout: one rank more on a part and one fewer on another, the other order of
        parts, and the layers dealt out evenly.
    """
    if plan.layout is None:
        return []
    near = _NearPipeline(Pipeline.of(plan))
    pipelines = [
        _with_even_layers(near.pipeline),
        *near.with_other_ranks(),
        *near.with_other_layouts(),
    ]
    return sorted((each for each in pipelines if each is not None), key=_cheapest_first)


@dataclass(frozen=True)
class _NearPipeline:
    """What is near a pipeline: priced with the best ranks on its parts and the best split of the layers."""

    pipeline: Pipeline

    @cached_property
    def request(self) -> MixedRequest:
        """What was asked, on the parts of the pipeline in its order."""
        return request_of_parts(self.pipeline.plan, self.pipeline.plan.runs_on)

    @cached_property
    def maker(self) -> KernelMaker:
        """Shares what kernels have in common."""
        return KernelMaker(self.request)

    @cached_property
    def executions(self) -> list[Execution]:
        """Those that are the plan's where they matter to its layout."""
        every = executions_on_parts(self.request)
        of_plan = self.pipeline.plan.execution
        assert of_plan is not None
        return [each for each in every if each.of_layout(self.pipeline.layout) == of_plan] or [
            of_plan
        ]

    def with_other_layouts(self) -> Iterator[PartsNeighbour]:
        """Single changes of the layout that such pipelines may have."""
        before = self.pipeline.layout
        for words, layout in layout_changes(before, self.request.first.workload()):
            settings = _settings_of(layout, before)
            is_own = _of_any_amount(layout) == _of_any_amount(before)
            is_other = layout.schedule != before.schedule or set(settings) & set(_ON_ONE_CLUSTER)
            if not is_own and not is_other:
                # As many layers are recomputed as is best, where plans on one cluster recompute all.
                change = words.removesuffix(", every layer")
                yield replace(self._changed(change, layout), settings=settings)

    def _changed(self, change: str, layout: Layout) -> PartsNeighbour:
        """A changed layout, or what forbids it."""
        rows = with_ranks(self.request, layout.with_axis())[1].tolist()
        if not rows:
            stage = int(layout.gpus) // int(layout.pp)
            words = f"the parts have no whole nodes for {layout.pp} ranks of {stage} GPUs"
            return PartsNeighbour(change=change, broken=self._pipeline_fault(layout) or words)
        compositions: list[Composition] = [tuple(enumerate(ranks)) for ranks in rows]
        return self._best(change, layout, compositions)

    def with_other_ranks(self) -> Iterator[PartsNeighbour]:
        """The same layout with a rank of one part on another, and with its parts in the other order."""
        layout = self.pipeline.layout
        ranks_on = tuple((part, each.ranks) for part, each in enumerate(self.pipeline.segments))
        possible = with_ranks(self.request, layout.with_axis())[1].tolist()
        for receiver, giver in permutations(range(len(ranks_on)), 2):
            moved = [ranks + (part == receiver) - (part == giver) for part, ranks in ranks_on]
            if moved in possible:
                names = self.request.name_of(receiver), self.request.name_of(giver)
                words = f"a rank more on {names[0]}, one fewer on {names[1]}"
                yield self._best(words, layout, [tuple(enumerate(moved))])
        yield self._best("the parts in the other order", layout, [ranks_on[::-1]])

    def _best(
        self, change: str, layout: Layout, compositions: Sequence[Composition]
    ) -> PartsNeighbour:
        """The fastest of some ways to give parts ranks; what the plan's layout leaves open is free."""
        best: tuple[Composition, MixedPrice] | None = None
        broken: list[str] = []
        leaving = f"{NvlinkDomain.name}: groups that are asked to stay in one domain leave it"
        for execution in dict.fromkeys(each.of_layout(layout) for each in self.executions):
            fault = self._pipeline_fault(layout) or self._rule_fault(layout, execution)
            if fault is not None:
                broken.append(fault)
                continue
            for composition in compositions:
                row = PromisingRow(
                    bound_s=0.0,
                    execution=execution,
                    layout=_of_any_amount(layout),
                    composition=composition,
                    rest_s=0.0,
                    scale=1.0,
                )
                if not self.maker.keeps_inside(row):
                    broken.append(leaving)
                    continue
                limit_s = inf if best is None else best[1].step_time_s
                price = self.maker.kernel(row).best_split(limit_s)
                best = best if price is None else (composition, price)
        if best is None:
            words = f"{HbmCapacity.name}: no split of the layers fits into the memory of the parts"
            return PartsNeighbour(change=change, broken=next(iter(broken), words))
        composition, price = best
        names = self.request.name_of
        ranks_on = {names(part): ranks for part, ranks in composition}
        priced = _priced(self.pipeline.plan, change, price.step_time_s, ranks_on, price.counts)
        return replace(priced, outside=self._outside(layout))

    def _pipeline_fault(self, layout: Layout) -> str | None:
        """Why no pipeline through the parts has so many ranks, in words."""
        parts, pp = len(self.request.parts), int(layout.pp)
        if pp < parts:
            return f"pp = {pp}, a pipeline through {parts} parts has a rank on each"
        model = self.pipeline.plan.inputs.model
        if pp <= model.most_stages:
            return None
        of_layers = f"the model has {model.layers} layers"
        if model.stage_begins:
            of_layers += f", at {model.most_stages} of which a stage may begin"
        return f"pp = {pp}, {of_layers}"

    def _rule_fault(self, layout: Layout, execution: Execution) -> str | None:
        """The first rule of any part that a layout breaks however its layers are dealt out, in words."""
        stages = _even_stages(self.pipeline, layout)
        full = bool(layout.recomputes_layers)
        sized = replace(layout, recompute_layers=min(min(stages)) if full else 0)
        for index, part in enumerate(self.request.parts):
            finished = FinishedPlan(
                workload=replace(part.workload(execution), gpus=int(layout.gpus)),
                layout=sized,
                stages=stages,
                memory_gib=(0.0,),
            )
            broken = next(findings(finished, without=ASKED_OF_PARTS), None)
            if broken is not None:
                return f"{broken.rule}: {broken.words}, on {self.request.name_of(index)}"
        return None

    def _outside(self, layout: Layout) -> str | None:
        """Why a layout is none of those that the pipeline was chosen from, in words."""
        space = space_on_parts(self.request, self.executions[0])
        if space is None:
            return None
        report = space_report(self.request.first, space)
        report = report.model_copy(update={"gpus": self.request.gpus})
        printed = PrintedSpace(request=self.request.first, space=report)
        return printed.outside(layout_document(layout, ((0,),)))


def _of_any_amount(layout: Layout) -> Layout:
    """The layout with its number of recomputed layers left open, as kernels have it."""
    full = bool(layout.recomputes_layers)
    return replace(layout, recompute_layers=ALL_LAYERS if full else 0)


def _priced(
    plan: MixedPlan, change: str, step_s: float, ranks_on: dict[str, int], layers: Sequence[int]
) -> PartsNeighbour:
    return PartsNeighbour(
        change=change,
        step_time_s=step_s,
        slower_pct=_slower_pct(plan, step_s),
        ranks_on=ranks_on,
        layers=list(layers),
    )


def _even_stages(pipeline: Pipeline, layout: Layout) -> Stages:
    """Layers of each rank, as even as where stages may begin lets them be."""
    model = pipeline.plan.inputs.model
    stages = balanced_stages(model.layers, int(layout.pp), 1, model.stage_begins)
    assert stages is not None
    return stages


def _with_even_layers(pipeline: Pipeline) -> PartsNeighbour | None:
    """The pipeline with as many layers on each rank; None where it has its layers so, or not all ranks would
    have room.
    """
    even = _even_stages(pipeline, pipeline.layout)
    full = bool(pipeline.layout.recomputes_layers)
    is_uniform = not full or len(set(even)) == 1
    if sorted(even) == sorted(pipeline.stages) or not is_uniform:
        return None
    amount = min(int(pipeline.layout.recompute_layers), *min(even))
    layout = replace(pipeline.layout, recompute_layers=amount)
    segments = [replace(each, part=replace(each.part, layout=layout)) for each in pipeline.segments]
    change = "as many layers on every rank"
    limits_gib = [each.part.limit_gib for each in segments for _ in range(each.ranks)]
    if np.any(mixed_memory_gib(segments, even) > limits_gib) or any(
        hosts_short_gib(segments, even)
    ):
        words = f"{HbmCapacity.name}: the layers do not fit into the memory of the parts"
        return PartsNeighbour(change=change, broken=words)
    step_s = float(np.asarray(mixed_step(segments, even).seconds))
    names = zip(pipeline.plan.runs_on, segments, strict=True)
    ranks_on = {name: each.ranks for name, each in names}
    return _priced(pipeline.plan, change, step_s, ranks_on, [count for (count,) in even])


def parts_choices(
    plan: MixedPlan,
    changes: Sequence[PartsNeighbour],
    progress: Callable[[str], None] | None = None,
) -> list[PartsChoice]:
    """What other values of single choices cost a pipeline through parts, the least loss first.

    Parameters
    ----------
    plan
        Of any status; there is none without a layout.
    changes
        Its neighbours, as `parts_neighbours` gives them.
    progress
        Called with a line before each search.
    """
    if plan.layout is None:
        return []
    request = request_of_parts(plan)
    choices = _choices(plan.inputs, layout_from_document(plan.layout), request.gpus)
    tasks = [
        partial(_parts_choice, plan, request, changes, choice, progress)
        for choice in choices
        if choice[0] not in _ON_ONE_CLUSTER
    ]
    return sorted(side_by_side(tasks), key=_loss)


def _parts_choice(
    plan: MixedPlan,
    request: MixedRequest,
    changes: Sequence[PartsNeighbour],
    choice: tuple[str, int | str],
    progress: Callable[[str], None] | None,
) -> PartsChoice:
    """The plan with one choice made otherwise: as it stands, and the best on any parts."""
    name, value = choice
    if progress is not None:
        progress(f"the best plan with {name} {value}")
    pins = {**plan.inputs.pins, name: value}
    pinned = replace(request, parts=tuple(replace(part, pins=pins) for part in request.parts))
    # A request that pins more has no faster plan.
    bounds = [inf if part.status == "infeasible" else part.lower_bound_s for part in plan.alone]
    best = best_on_parts(pinned, bounds)
    best_pct = None if best.layout is None else _slower_pct(plan, best.step_s)
    made_so = _made_so(choice, changes, claim_of(best.status), best_pct, best.layout)
    return PartsChoice(**made_so, runs_on=best.runs_on)
