"""The bisection rule on a mapping: what must cross a cut within a phase of the step takes no longer than it.

A step has two phases: the micro-batches, in which tensor, context, expert and pipeline groups talk, and the
synchronisation of gradients and parameters, which may run beside the last micro-batch (all of them with
ZeRO-3) and then alone. Groups that are active in one phase share the links, so their bytes add up.

At every level two kinds of cuts: the up-link of each sub-block, and the two halves of each block, by maximum
flow over the fabric's graph. The busiest of each kind stands for its level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cluster_specs.graph import halves_cut_gb_per_s
from meshwright.cluster_specs.places import Place
from meshwright.costmodel.constants.calibrated import calibrated_constants
from meshwright.costmodel.constants.rates import links_of
from meshwright.costmodel.estimate import Estimate, Stages
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layout import Layout, Placement
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.traffic.phases import CutUse, phase_seconds
from meshwright.costmodel.workload import Workload
from meshwright.planner.mapping.crossing.flows import (
    AxisFlow,
    LevelFlow,
    axis_flows,
    between_halves,
    level_flow,
)
from meshwright.planner.mapping.crossing.positions import (
    LevelPositions,
    RankPositions,
    rank_positions,
)
from meshwright.planner.mapping.problem import FloatArray, IntArray

ROUNDING = 1.0 + 1e-9


@dataclass(frozen=True, kw_only=True)
class LevelUse:
    """One level under a mapping."""

    positions: LevelPositions
    attained: float
    """Of nominal rates."""
    detour: float
    """Links that a ring's or chain's byte takes between blocks that are joined directly; else 1."""
    bytes_per_s: float
    """What one GPU attains in a ring across the level, in one direction."""
    flows: dict[str, LevelFlow]
    """By axis; dense and expert gradients apart."""


@dataclass(frozen=True, kw_only=True)
class MappingUse:
    """What a mapping does to the fabric."""

    context: Context
    positions: RankPositions
    axes: tuple[AxisFlow, ...]
    levels: tuple[LevelUse, ...]
    cuts: tuple[CutUse, ...]


def mapping_use(
    workload: Workload,
    layout: Layout,
    stages: Stages,
    *,
    placement: Placement,
    priced: Estimate,
    places: Sequence[Place],
) -> MappingUse:
    """Every group of a layout on the GPUs `places`, level by level, and every cut that something crosses."""
    context = make_context(workload, layout, placement)
    on = rank_positions(workload.cluster, places)
    axes = axis_flows(context, stages)
    attained, shares = _rates(workload, on)
    levels = []
    for positions in on.by_level:
        depth = positions.depth
        nominal_bytes_per_s = on.levels.gb_per_s[depth] * 1e9
        use = LevelUse(
            positions=positions,
            attained=float(attained[depth]),
            detour=1.0 / float(shares[depth]) if positions.joint.direct else 1.0,
            bytes_per_s=float(nominal_bytes_per_s * attained[depth] * shares[depth]),
            flows={flow.axis: level_flow(context, flow, on, positions) for flow in axes},
        )
        levels.append(use)
    parts = {name: float(np.asarray(s)) for name, s in priced.breakdown_s.items()}
    phases = phase_seconds(context, parts)
    cuts = [
        replace(cut, others_share=_others_share(workload, use.positions.level))
        for use in levels
        for phase in phases
        for cut in _cuts(context, axes, use, phase, phases[phase])
    ]
    return MappingUse(
        context=context, positions=on, axes=tuple(axes), levels=tuple(levels), cuts=tuple(cuts)
    )


def _others_share(workload: Workload, level: str) -> float:
    """What other jobs use of the links that a level joins blocks with: the `background` of those blocks."""
    inside = [entry.background for entry in workload.cluster.levels]
    names = [entry.name for entry in workload.cluster.levels]
    below = names.index(level) - 1 if level in names else -1
    return inside[below] or 0.0 if below >= 0 else 0.0


def _rates(workload: Workload, on: RankPositions) -> tuple[FloatArray, FloatArray]:
    """(share of the nominal rate that rings attain without detours, what detours leave), by level."""
    levels = on.levels
    links = links_of(levels, calibrated_constants(workload))
    shares = np.where(np.isnan(levels.attained), levels.neighbour_share, 1.0)
    return links.bytes_per_s / (levels.gb_per_s * 1e9 * shares), shares


def _cuts(
    c: Context, axes: Sequence[AxisFlow], use: LevelUse, phase: str, phase_s: float
) -> list[CutUse]:
    phase_axes = [flow for flow in axes if flow.phase == phase]
    if not any(np.any(use.flows[flow.axis].leaving > 0) for flow in phase_axes):
        return []
    return [
        _busiest_uplink(use, phase_axes, phase, phase_s),
        *_busiest_halves(c, use, phase_axes, phase, phase_s),
    ]


def _busiest_uplink(use: LevelUse, axes: Sequence[AxisFlow], phase: str, phase_s: float) -> CutUse:
    positions, unit, links = use.positions, use.positions.unit, use.positions.links_gb_per_s
    sent, with_detours = np.zeros(len(links)), np.zeros(len(links))
    for flow in axes:
        load = np.bincount(unit, weights=use.flows[flow.axis].leaving, minlength=len(sent))
        sent += load
        with_detours += load * (use.detour if flow.kind != "all-to-all" else 1.0)
    seconds = with_detours / (links * 1e9 * use.attained)
    worst = int(np.argmax(seconds))
    return CutUse(
        level=positions.level,
        cut="uplink",
        phase=phase,
        block=positions.unit_name(worst),
        bytes_per_gpu=float(sent[worst]) / max(int(np.sum(unit == worst)), 1),
        gb_per_s=float(links[worst]),
        busy_s=float(seconds[worst]),
        phase_s=phase_s,
    )


def _busiest_halves(
    c: Context, use: LevelUse, axes: Sequence[AxisFlow], phase: str, phase_s: float
) -> list[CutUse]:
    """The block whose halves are busiest; the sum of links finds it, the graph has the cut."""
    positions, halves = use.positions, _halves(use.positions)
    crossing = np.zeros(halves.blocks)
    for flow in axes:
        crossing += between_halves(c, flow, halves.side, positions, halves.blocks)
    if not np.any(crossing > 0):
        return []
    links = positions.sub_links_gb_per_s[halves.subs]
    sums = [
        np.bincount(halves.sub_block[on], weights=links[on], minlength=halves.blocks)
        for on in (halves.sub_side == 0, halves.sub_side == 1)
    ]
    narrow = np.maximum(np.minimum(*sums), 1e-9)
    worst = int(np.argmax(crossing / narrow))
    in_worst = halves.sub_block == worst
    first, second = (
        tuple(sorted(links[in_worst & (halves.sub_side == side)].tolist())) for side in (0, 1)
    )
    capacity = halves_cut_gb_per_s(first, second, positions.joint)
    name = positions.level
    if halves.blocks > 1:
        name += f" {worst + 1} of {halves.blocks}"
    return [
        CutUse(
            level=positions.level,
            cut="bisection",
            phase=phase,
            block=name,
            bytes_per_gpu=2 * float(crossing[worst]) / int(np.sum(positions.block == worst)),
            gb_per_s=capacity,
            busy_s=float(crossing[worst]) / (capacity * 1e9 * use.attained),
            phase_s=phase_s,
        )
    ]


@dataclass(frozen=True, kw_only=True)
class _Halves:
    """Every block of a level cut in two between sub-blocks."""

    side: IntArray
    """0 or 1 by rank."""
    blocks: int
    subs: IntArray
    """The sub-blocks in use, with their side and block."""
    sub_side: IntArray
    sub_block: IntArray


def _halves(positions: LevelPositions) -> _Halves:
    """Sub-blocks go to the first half in turn while it holds at most half of the block's ranks."""
    blocks = int(positions.block.max()) + 1
    subs, first, back, counts = np.unique(
        positions.sub, return_index=True, return_inverse=True, return_counts=True
    )
    block = positions.block[first]
    order = np.lexsort((subs, block))
    total = np.bincount(block, weights=counts, minlength=blocks)
    before = np.cumsum(total) - total
    run = np.cumsum(counts[order]) - before[block[order]]
    second = np.zeros(len(subs), dtype=np.int64)
    second[order] = run > total[block[order]] / 2
    # The first sub-block of a block is never alone outside.
    second[order[np.flatnonzero(np.diff(block[order], prepend=-1))]] = 0
    return _Halves(
        side=second[back.reshape(-1)], blocks=blocks, subs=subs, sub_side=second, sub_block=block
    )


def binding_cut(cuts: Sequence[CutUse]) -> CutUse | None:
    """The cut with the highest utilisation."""
    return max(cuts, key=lambda cut: cut.utilisation, default=None)


def broken_cuts(cuts: Sequence[CutUse]) -> list[str]:
    """Cuts that what must cross them in a phase keeps busy for longer than the phase."""
    return [
        f"{cut.level}, {cut.cut} of {cut.block}: {cut.busy_s:.4g} s of traffic in the {cut.phase}, "
        f"which take {cut.phase_s:.4g} s"
        for cut in cuts
        if cut.utilisation > ROUNDING
    ]
