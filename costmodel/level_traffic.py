"""Bytes that one GPU sends across each fabric level in a step, by axis, and how long its links are busy.

A mean over the ranks of the pipeline; embedding, head and MTP modules are left out. A ring puts (P-1)/P n on
every member; of the hops of a group, those between sub-blocks cross the level, shared by the members inside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import fabric_levels
from meshwright.costmodel.collectives import Links, cross_rail_bytes, members_inside
from meshwright.costmodel.data_parallel import hiding_windows
from meshwright.costmodel.feed_forward import dispatch_links, routed_copies
from meshwright.costmodel.hybrid_context import is_dealt, samples_of_micro_batch
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.rank_load import Stages
from meshwright.costmodel.states import optimizer_shards, rank_parameters
from meshwright.costmodel.volumes import (
    RankWork,
    context_volumes,
    expert_passes,
    gathered_bytes,
    gradient_element_bytes,
    mean_rank_work,
    reduced_shard_bytes,
    routed_bytes,
    tensor_passes,
)
from meshwright.costmodel.workload import (
    GATHERS,
    HIERARCHICAL,
    gathering_members,
    inside_and_between,
    one_ring,
)

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class LevelBytes:
    """Traffic of one fabric level, per GPU and step, one direction."""

    level: str
    """Name of the level, as `fabric_levels` has it."""
    bytes_per_step: float
    """Of the mean GPU."""
    by_axis: dict[str, float]
    """`bytes_per_step` by axis of the layout."""
    busy_s: float
    """Of the GPU that sends most; where only the mean is known, of that."""
    utilisation: float
    """`busy_s` over the step time."""
    most_bytes_per_step: float
    """Of the GPU that sends most."""
    mean_busy_s: float
    """`busy_s` of the mean GPU."""


def level_traffic(c: Context, stages: Stages, step_time_s: float) -> tuple[LevelBytes, ...]:
    """Bytes that one GPU sends over each fabric level in a step, and how long that keeps its links busy.

    `ring_bytes` and `all_to_all_bytes` spread the volumes of `costmodel/volumes.py` over the levels (Thakur,
    Rabenseifner and Gropp 2005, section 4.1; docs/cost_model.md, "Collectives").

    Parameters
    ----------
    c : Context
        Workload, one layout, one placement and links.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].
    step_time_s : float
        Seconds of the step, more than 0.

    Returns
    -------
    tuple of LevelBytes
        One entry per fabric level, inside out.
    """
    names = fabric_levels(c.workload.cluster, c.workload.gpus).names
    axes = {axis: sent for axis, sent in _bytes_by_axis(c, stages).items() if np.any(sent > 0)}
    levels = []
    for level, name in enumerate(names):
        by_axis = {axis: float(sent[level]) for axis, sent in axes.items() if sent[level] > 0}
        sent_bytes = sum(by_axis.values())
        busy_s = sent_bytes / float(c.links.bytes_per_s[level])
        share = busy_s / step_time_s
        levels.append(LevelBytes(name, sent_bytes, by_axis, busy_s, share, sent_bytes, busy_s))
    return tuple(levels)


def ring_bytes(volume: float, members: NDArray[np.int64]) -> FloatArray:
    """Bytes a GPU sends over each level in one ring pass: (P-1)/P of the buffer (Thakur et al. 2005, 4.1).

    Parameters
    ----------
    volume : float
        Bytes of the buffer in all, at least 0.
    members : array of int, shape [levels]
        Members of the group inside one block of each level.

    Returns
    -------
    array of float, shape [levels]
        Bytes, shared by the members inside the sub-block; 0 where the group does not cross the level.
    """
    inside, size = members_inside(members), int(members[-1])
    return np.where(members > inside, volume * (size - 1) / size / inside, 0.0)


def all_to_all_bytes(
    sent: float, members: NDArray[np.int64], copies: FloatArray | float = 1.0
) -> FloatArray:
    """Bytes a GPU sends over each level in an all-to-all: the share (P - inside)/P leaves the sub-block.

    As `collectives.all_to_all_s` counts; docs/cost_model.md, "Collectives".

    Parameters
    ----------
    sent : float
        Bytes that the GPU sends in all, to itself too; at least 0.
    members : array of int, shape [levels]
        Members of the group inside one block of each level.
    copies : float or array, shape [levels]
        How many times over they cross each level, at least 0.

    Returns
    -------
    array of float, shape [levels]
        Bytes, at least 0.
    """
    inside, size = members_inside(members), int(members[-1])
    return np.where(members > inside, copies * sent * (size - inside) / size, 0.0)


def _rail_changes(exchanged: FloatArray, members: NDArray[np.int64], links: Links) -> FloatArray:
    """What an all-to-all also sends over the level that joins rails, to change them; shape [levels]."""
    changes = np.zeros(len(members))
    if links.rails is None or not np.any(links.rails > 1):
        return changes
    joining = int(np.flatnonzero(links.rails > 1)[-1]) + 1
    if joining < len(changes):
        up = float(cross_rail_bytes(exchanged, members, links.rails))
        changes[joining] = up - exchanged[joining]
    return changes


def _bytes_by_axis(c: Context, stages: Stages) -> dict[str, FloatArray]:
    """Bytes over each level by axis; each transfer of a layer runs once more where it is recomputed."""
    place, tp = c.placement, int(np.asarray(c.layout.tp))
    work = mean_rank_work(c, stages)
    sent = {
        "tp": ring_bytes(work.activation_bytes, place.tp) * tensor_passes(c, work),
        "cp": _context_bytes(c, work),
        "dp": _data_parallel_bytes(c, stages),
        "pp": _pipeline_bytes(c, work.activation_bytes / tp, work.micro_batches),
    }
    moe = c.workload.model.moe
    if c.workload.moe_dispatch == GATHERS:
        sent["ep"] = ring_bytes(gathered_bytes(c, work), gathering_members(place))
    elif moe is not None:
        routed = routed_bytes(c, work)
        passes = expert_passes(work)
        copies = routed_copies(c.workload, place.ep[-1:] / members_inside(place.ep), c.layout.ep)
        gathered = ring_bytes(routed * moe.top_k * int(np.asarray(c.layout.etp)), place.etp)
        exchanged = all_to_all_bytes(routed, place.ep, copies)
        changes = _rail_changes(exchanged, place.ep, dispatch_links(c))
        sent["ep"] = (exchanged + changes) * passes
        sent["etp"] = gathered * passes
    return sent


def _context_bytes(c: Context, work: RankWork) -> FloatArray:
    """Rings over the whole context group or every A-th rank of it, and swaps over the group or neighbours."""
    if is_dealt(c.workload):
        samples = samples_of_micro_batch(c)
        rings = (
            float(np.asarray(each.number))
            * ring_bytes(context_volumes(each.context, work).whole, each.context.placement.cp)
            for each in samples
        )
        return np.asarray(sum(rings))
    volumes, members = context_volumes(c, work), c.placement.cp
    neighbours, ring = inside_and_between(members, np.asarray(volumes.neighbours))

    if one_ring(c.workload):
        return ring_bytes(volumes.whole, members)
    sent = _swapped_bytes(c, volumes.whole, members)
    if c.workload.cp_comm == HIERARCHICAL:
        sent = sent + _swapped_bytes(c, volumes.swapped, neighbours)
        sent = sent + ring_bytes(volumes.ring, ring)
    return sent


def _swapped_bytes(c: Context, volume: float, members: NDArray[np.int64]) -> FloatArray:
    """Bytes over each level of an all-to-all that may have to change rails."""
    exchanged = all_to_all_bytes(volume, members)
    return exchanged + _rail_changes(exchanged, members, c.links)


def _data_parallel_bytes(c: Context, stages: Stages) -> FloatArray:
    """Of the rank with the most parameters; over groups of shards each reduces its own once more."""
    dense, expert = (float(np.max(x)) for x in rank_parameters(c.workload.model, c.layout, stages))
    element = gradient_element_bytes(c)
    groups = ((dense, c.placement.dp_cp), (expert, c.placement.edp))
    if int(np.asarray(c.layout.shard_groups)) == 1:
        return np.asarray(sum(ring_bytes(params * element, members) for params, members in groups))
    reduced = reduced_shard_bytes(c)
    sent = np.zeros(c.placement.dp_cp.shape)
    shards = (int(np.asarray(size)) for size in optimizer_shards(c.layout))
    for (parameters, members), size in zip(groups, shards, strict=True):
        sent = sent + ring_bytes(parameters * element, np.minimum(members, size))
        sent = sent + ring_bytes(parameters * reduced / size, np.maximum(members // size, 1))
    return sent


def _pipeline_bytes(c: Context, payload: float, micro_batches: int) -> FloatArray:
    """Every boundary between chunks carries an activation forward and a gradient backward; passes that score
    carry one forward each.

    Of the hops along a group, size / inside - size / members cross a level; with vpp > 1 the last rank also
    feeds the first, across the outermost level that the group spans.
    """
    members, inside = c.placement.pp, members_inside(c.placement.pp)
    size, vpp = int(members[-1]), int(np.asarray(c.layout.vpp))
    if size == 1:
        return np.zeros(members.shape)
    crossed = members > inside
    hops = np.where(crossed, size / inside - size / members, 0.0)
    outermost = np.arange(len(members)) == np.flatnonzero(crossed)[-1]
    crossing = vpp * hops + (vpp - 1) * outermost
    times = 2.0 + c.workload.scoring_passes
    sent: FloatArray = times * payload * micro_batches * crossing / size
    return sent


# Phases of a step, how busy a cut of the fabric is in one, and what kind of traffic an axis makes.


_BESIDE = ("dp_comm", "optimizer", "step_overhead")
"""Parts of a step in which no micro-batch runs."""


@dataclass(frozen=True, kw_only=True)
class CutUse:
    """One cut of one level in one phase."""

    level: str
    cut: str
    """uplink or bisection."""
    phase: str
    """micro-batches or gradients."""
    block: str
    """Whose up-link, or which block's halves: the busiest of the level."""
    bytes_per_gpu: float
    """That cross in a step, one direction: per GPU below the up-link, or per GPU of one half."""
    gb_per_s: float
    """Nominal capacity of the cut, one direction, as far as it is the job's."""
    busy_s: float
    """Seconds of a step in which the cut carries the job's bytes at its capacity."""
    phase_s: float
    """Seconds of the phase."""
    others_share: float = 0.0
    """Share of the cut's links that other jobs use, 0 to 1, where the cluster's levels state it."""

    @property
    def total_use(self) -> float:
        """Share of the whole links that this job and others use in the phase."""
        return self.others_share + (1.0 - self.others_share) * self.utilisation

    @property
    def utilisation(self) -> float:
        """Share of the phase in which the cut is busy; above 1 the phase cannot be kept."""
        if self.phase_s > 0:
            return self.busy_s / self.phase_s
        return float("inf") if self.busy_s else 0.0


def phase_seconds(c: Context, breakdown_s: dict[str, float]) -> dict[str, float]:
    """Seconds of the two phases of a step: micro-batches, and gradients.

    They overlap: gradients are reduced beside as many micro-batches as hide them (`hiding_windows` has the
    source), with ZeRO-3 beside all.

    Parameters
    ----------
    c : Context
        Workload and one layout.
    breakdown_s : dict of str to float
        Parts of the step, seconds, at least 0 (`estimate.Estimate`).

    Returns
    -------
    dict of str to float
        Seconds of `micro-batches` and of `gradients`.
    """
    layout = c.layout
    alone = sum(breakdown_s.get(name, 0.0) for name in _BESIDE)
    working = sum(breakdown_s.values()) - alone - breakdown_s.get("scale", 0.0)
    m, pp, vpp = (int(np.asarray(x)) for x in (layout.num_micro_batches, layout.pp, layout.vpp))
    beside = working
    if int(np.asarray(layout.zero_stage)) != 3:
        beside = float(hiding_windows(c)) * working / (m + (pp - 1) / vpp)
    return {"micro-batches": working, "gradients": breakdown_s.get("dp_comm", 0.0) + beside}


@dataclass(frozen=True, kw_only=True)
class AxisPattern:
    """What kind of traffic an axis makes, for people who plan or watch a network."""

    pattern: str
    fan_out: int
    """Peers that a rank sends to."""
    predictability: str
    incast: str
    """Risk that several senders meet at one receiver."""
    ecmp: str
    """How well hashing flows over equal paths (ECMP) spreads them."""
    suits_network: str
    """What a network engineer's guide says of its load on ECMP and priority flow control (PFC) together."""


_RING_ECMP = "few large flows collide: adaptive routing, or several queue pairs a connection"
_KINDS = {
    "tp": ("ring or in-switch", "every layer, fixed size", "none: one sender a receiver", _RING_ECMP),
    "cp": ("ring", "every layer, fixed size", "none: one sender a receiver", _RING_ECMP),
    "dp": ("ring", "one burst a step, fixed size", "none: one sender a receiver", _RING_ECMP),
    "edp": ("ring", "one burst a step, fixed size", "none: one sender a receiver", _RING_ECMP),
    "pp": ("chain", "every micro-batch, fixed size", "none: one sender a receiver", "few flows may collide"),
    "ep": (
        "all-to-all", "by the router, not known ahead", "hot experts: many senders meet",
        "many flows of unequal size spread well",
    ),
    "etp": ("ring", "every layer, by the router", "none: one sender a receiver", _RING_ECMP),
    "cp-swaps": (
        "all-to-all", "every layer, fixed size", "low: as much from every sender",
        "many flows of equal size spread well",
    ),
    "cp-rings": (
        "rings of groups that swap", "every layer, fixed size", "none: one sender a receiver", _RING_ECMP,
    ),
    "ep-gathers": ("ring", "every layer, fixed size", "none: one sender a receiver", _RING_ECMP),
}  # fmt: skip


_INSIDE = "no hashing inside the scale-up domain"
_GOOD = "good: steady flows of known size, few pauses"
_SUITS = {
    "ep": "poor: hot destinations overload single paths, and their pauses (PFC) spread to other flows",
    "etp": "poor: sizes follow the router",
}
"""By axis; any other is `_GOOD`."""


def axis_pattern(
    axis: str,
    layout: Layout,
    *,
    sent_as: str | None = None,
    inside_scale_up: bool = False,
    burst: bool = True,
) -> AxisPattern:
    """Pattern, fan-out, predictability, incast risk and ECMP suitability of an axis' traffic.

    A ring has one peer, a stage in the middle of a pipeline sends on to one, a member of an all-to-all to all
    others.

    Parameters
    ----------
    axis : str
        tp, cp, dp, edp, pp, ep or etp.
    layout : Layout
        One layout.
    sent_as : str, optional
        Where it is not the axis' usual traffic: cp-swaps (all-to-all), cp-rings (both) or ep-gathers.
    inside_scale_up : bool
        Whether the groups do not leave their NVLink domain, where nothing is hashed.
    burst : bool
        Whether gradients are exchanged once a step; not so with ZeRO-3.

    Returns
    -------
    AxisPattern
        In words; the fan-out is at least 0.

    Raises
    ------
    KeyError
        For an axis or a way of sending that is none of these.
    """
    pattern, when, incast, ecmp = _KINDS[sent_as or axis]
    if axis in ("dp", "edp") and not burst:
        when = "every layer and micro-batch, fixed size"
    if inside_scale_up:
        ecmp = _INSIDE
    size = int(np.asarray(getattr(layout, axis)))
    return AxisPattern(
        pattern=pattern,
        fan_out=size - 1 if pattern == "all-to-all" else 1,
        predictability=when,
        incast=incast,
        ecmp=ecmp,
        suits_network=_INSIDE if inside_scale_up else _SUITS.get(sent_as or axis, _GOOD),
    )
