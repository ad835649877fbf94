"""The step of a pipeline whose ranks run on parts of a cluster that differ in devices, nodes or networks.

Every part holds consecutive pipeline ranks, with the same tensor, context, data and expert parallelism on
each. Rank r runs its layers forward and backward as its own part does, and hands each micro-batch on over the
link that lies between it and its neighbour; 1F1B is played with these seconds (`simulator.one_f_one_b_s`).

What follows the pipeline lasts as long as in the part that needs longest: the step ends when all ranks have,
and the groups that reduce gradients each lie in one part. Packs of unlike samples add what ranks wait for the
slowest one (`step_time.imbalance_s`), each layer at the pace of its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.footprint import offloaded_gib, stage_memory_gib, usable_hbm_gib
from meshwright.costmodel.layer_context import Context, Parts, total
from meshwright.costmodel.layer_kinds import KindTimes, kind_times
from meshwright.costmodel.layout import Floats, Layout
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.rank_load import Stages, chunk_passes, split_parts
from meshwright.costmodel.rates import fabric_links
from meshwright.costmodel.simulator import one_f_one_b_s
from meshwright.costmodel.states import rank_parameters
from meshwright.costmodel.step_time import (
    RankParameters,
    StepTime,
    boundary_s,
    imbalance_s,
    make_context,
    scale_share,
    step_of_loads,
)
from meshwright.costmodel.workload import Workload


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedPart:
    """The pipeline ranks that one part of a cluster runs, wherever they lie along the pipeline."""

    workload: Workload
    """On the part's cluster, and as many GPUs of it as the ranks use."""
    layout: Layout
    """Of the whole pipeline, in plain numbers."""
    ranks: int
    """Pipeline ranks on this part, at least 1."""
    part_gpus: int | None = None
    """GPUs of the whole part, those without ranks too; None where all have ranks."""
    between_gbps_per_gpu: float | None = None
    """What a GPU may send to another part, Gbit/s; None for what its NIC has."""

    @property
    def own_layout(self) -> Layout:
        """The layout with the pipeline ranks of this part alone."""
        return replace(self.layout, pp=self.ranks)

    @cached_property
    def context(self) -> Context:
        """The layout on this part, ranks in Megatron's order."""
        placement = nested_placement(self.workload.cluster, self.own_layout)
        # Hand-overs leave the part: pipeline groups cross its outermost level.
        leaving = replace(placement, pp=_members_of_two(np.shape(placement.pp)))
        return make_context(self.workload, self.layout, leaving)

    @cached_property
    def times(self) -> KindTimes:
        """Seconds of a layer of each kind on this part."""
        return kind_times(self.context)

    @cached_property
    def crossing(self) -> Context:
        """The layout on this part with the links of hand-overs: out of the whole part, or between parts."""
        gpus = self.workload.gpus if self.part_gpus is None else self.part_gpus
        return crossing_context(self.context, gpus, self.between_gbps_per_gpu)

    @cached_property
    def inside(self) -> Context:
        """The layout on this part with the links of hand-overs between two of its own ranks."""
        placement = nested_placement(self.workload.cluster, self.own_layout)
        return replace(self.context, placement=replace(self.context.placement, pp=placement.pp))

    @property
    def limit_gib(self) -> float:
        """What the peak of memory on one of its GPUs may reach, GiB."""
        return usable_hbm_gib(self.workload)


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Consecutive pipeline ranks on one part of a cluster."""

    part: PlacedPart
    first: int
    """The segment's first pipeline rank, from 0."""

    @property
    def ranks(self) -> int:
        """Its pipeline ranks."""
        return self.part.ranks

    @property
    def own(self) -> slice:
        """Positions of the segment's ranks among all pipeline ranks."""
        return slice(self.first, self.first + self.ranks)

    def layers(self, stages: Stages) -> int:
        """Layers of all its ranks.

        Parameters
        ----------
        stages : tuple of tuple of int
            Layers of each [pipeline rank][virtual stage] of the whole pipeline.

        Returns
        -------
        int
            At least 1.
        """
        return sum(sum(rank) for rank in stages[self.own])


class SegmentHolds(NamedTuple):
    """What the ranks of a segment hold, for one split or k of them: floats, or arrays of shape [k]."""

    dense: Floats
    """Parameters outside experts on the rank that has most of them, before data-parallel sharding."""
    expert: Floats
    """Parameters of experts on the rank that has most of them."""
    layers: Floats
    """Of all its ranks together."""


def _members_of_two(shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Members, by level, of groups of two that lie in two blocks of the level below the outermost."""
    members = np.ones(shape, dtype=np.int64)
    members[..., -1] = 2
    return members


def crossing_context(
    context: Context, gpus: int, between_gbps_per_gpu: float | None = None
) -> Context:
    """The context in which the hand-overs of a pipeline through parts are priced, as far as one part decides.

    What leaves a part crosses the outermost level of all its GPUs, or the NIC where the part is one scale-up
    domain (docs/cost_model.md, "Mixed clusters").

    Parameters
    ----------
    context : Context
        Layouts on the part.
    gpus : int
        Of the whole part, at least 1.
    between_gbps_per_gpu : float or None
        What a GPU may send to another part, Gbit/s, above 0; None for what its NIC has.

    Returns
    -------
    Context
        With the links of the whole part, and pipeline groups that cross the outermost of them.
    """
    cluster = context.workload.cluster
    domain = max(cluster.nvlink_domain, cluster.gpus_per_node)
    changes: dict[str, object] = {}
    if gpus <= domain:
        gpus = 2 * domain
        changes |= {"gpus": gpus, "levels": (), "nodes": ()}
    if between_gbps_per_gpu is not None and between_gbps_per_gpu < cluster.slowest_nic_gbps_per_gpu:
        changes |= {"nic_gbps_per_gpu": between_gbps_per_gpu, "measured": ()}
    workload = replace(context.workload, cluster=cluster.model_copy(update=changes), gpus=gpus)
    links = fabric_links(workload, context.constants)
    members = _members_of_two(np.shape(links.bytes_per_s))
    return replace(context, links=links, placement=replace(context.placement, pp=members))


def hand_overs_s(segments: Sequence[Segment]) -> NDArray[np.float64]:
    """What each rank takes to send a micro-batch on, forward and backward.

    A rank waits for what it sends: Megatron's 1F1B has each pass followed by an exchange with a neighbour, in
    both directions at once, that ends before the next pass begins (megatron/core/pipeline_parallel/
    schedules.py, `send_forward_recv_backward`). Passes that score go forward alone. Between two ranks of a
    part lies the level that its pipeline groups cross, between two parts the slower of both ways out.

    Parameters
    ----------
    segments : sequence of Segment
        In the order of the pipeline.

    Returns
    -------
    array of float, shape [2, pp]
        Seconds; 0 of the last rank forward, and of the first backward.
    """
    each_s: list[float] = []
    for before, segment in zip([None, *segments], segments, strict=False):
        if before is not None:
            ways_out = (before.part.crossing, segment.part.crossing)
            each_s.append(max(float(np.asarray(boundary_s(out))) for out in ways_out))
        each_s += [float(np.asarray(boundary_s(segment.part.inside)))] * (segment.ranks - 1)
    scoring = segments[0].part.workload.scoring_passes
    return np.array([[*((1.0 + scoring) * np.array(each_s)), 0.0], [0.0, *each_s]])


def played_pipeline_s(
    segments: Sequence[Segment], forward_s: NDArray[np.float64], backward_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Seconds of all micro-batches through the ranks, played as 1F1B runs them.

    Parameters
    ----------
    segments : sequence of Segment
        In the order of the pipeline.
    forward_s, backward_s : array of float, shape [..., pp]
        Seconds of each rank and micro-batch, hand-overs among them.

    Returns
    -------
    array of float, shape [...]
        Of all flushes together.
    """
    flushes = segments[0].part.workload.flushes
    each_m = int(segments[0].part.layout.num_micro_batches) // flushes
    return np.asarray(flushes * one_f_one_b_s(forward_s, backward_s, each_m))


def mixed_step(segments: Sequence[Segment], stages: Stages) -> StepTime:
    """The step of one layout under a split of its layers over the ranks of several parts.

    Parameters
    ----------
    segments : sequence of Segment
        In the order of the pipeline; together they hold every rank once.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage], one virtual stage each.

    Returns
    -------
    StepTime
        Seconds by part, plain numbers.
    """
    model, layout = segments[0].part.workload.model, segments[0].part.layout
    by_segment: list[dict[str, NDArray[np.float64]]] = []
    passes = []
    for segment in segments:
        part = segment.part
        parts = split_parts(part.context, part.times, stages)
        by_segment.append({name: np.asarray(row)[segment.own] for name, row in parts.items()})
        each = chunk_passes(part.context, stages, part.times)
        passes.append(np.stack([each.forward_s[0, segment.own], each.backward_s[0, segment.own]]))
    names = dict.fromkeys(name for parts in by_segment for name in parts)
    by_rank = {
        name: np.concatenate(
            [parts.get(name, np.zeros_like(parts["head"])) for parts in by_segment]
        )
        for name in names
    }
    work_s = float(np.sum(list(by_rank.values())))
    sent_s = hand_overs_s(segments)
    by_rank["pipeline_p2p"] = sent_s.sum(axis=0)
    loads = np.sum(list(by_rank.values()), axis=0)
    busiest = int(np.argmax(loads))
    dense, expert = (
        np.broadcast_to(np.asarray(kind, dtype=np.float64), loads.shape)
        for kind in rank_parameters(model, layout, stages)
    )
    forward_s, backward_s = np.concatenate(passes, axis=1) + sent_s
    return mixed_step_of_loads(
        segments,
        {name: float(row[busiest]) for name, row in by_rank.items()},
        PipelineLoad(work_s, float(played_pipeline_s(segments, forward_s, backward_s))),
        [
            SegmentHolds(np.max(dense[each.own]), np.max(expert[each.own]), each.layers(stages))
            for each in segments
        ],
        layout=layout,
    )


class PipelineLoad(NamedTuple):
    """What all ranks do, for one split or k of them: floats, or arrays of shape [k]."""

    work_s: Floats
    """Seconds of all ranks and a micro-batch, hand-overs apart."""
    played_s: Floats
    """Seconds of all micro-batches, as they are played."""


def mixed_step_of_loads(
    segments: Sequence[Segment],
    worst: Parts,
    load: PipelineLoad,
    holdings: Sequence[SegmentHolds],
    *,
    layout: Layout,
) -> StepTime:
    """`mixed_step` from the loads and parameters of its ranks, for one split or k of them.

    Parameters
    ----------
    segments : sequence of Segment
        In the order of the pipeline.
    worst : dict of str to float or array, shape [k]
        Seconds of the busiest rank of all and a micro-batch, by part, at least 0.
    load : PipelineLoad
        Of all ranks.
    holdings : sequence of SegmentHolds
        What the ranks of each segment hold.
    layout : Layout
        Of the segments, with the number of recomputed layers that loads are of.

    Returns
    -------
    StepTime
        Seconds by part, floats or arrays of shape [k].
    """
    slowest: Parts = {}
    micro_batches = int(layout.num_micro_batches)
    waits_s = load.played_s - micro_batches * total(worst)
    for segment, holds in zip(segments, holdings, strict=True):
        part = segment.part
        rank = RankParameters(holds.dense, holds.expert, part.crossing)
        step = step_of_loads(part.context, part.times, worst, load.work_s, rank)
        for name, seconds in step.parts.items():
            slowest[name] = np.maximum(slowest.get(name, seconds), seconds)
    if "length_imbalance" in slowest:
        slowest["length_imbalance"] = _waits_for_packs_s(segments, holdings, layout)
    slowest["pipeline_bubble"] = waits_s
    slowest["pipeline_p2p"] = micro_batches * worst.get("pipeline_p2p", 0.0)
    slowest.pop("scale")
    slowest["scale"] = total(slowest) * slower_on_nodes(segments)
    return StepTime(slowest)


def slower_on_nodes(segments: Sequence[Segment]) -> float:
    """What a step loses on many nodes, as a share of all its other parts: the most on any part.

    Parameters
    ----------
    segments : sequence of Segment
        In the order of the pipeline.

    Returns
    -------
    float
        At least 0; `scale_share` of the part that loses most.
    """
    shares = [
        scale_share(part.workload, part.layout, part.context.constants)
        for part in (each.part for each in segments)
    ]
    return max(float(np.asarray(share)) for share in shares)


def _waits_for_packs_s(
    segments: Sequence[Segment], holdings: Sequence[SegmentHolds], layout: Layout
) -> Floats:
    """What ranks wait for the slowest of unlike packs: each segment's layers at its own part's attention.

    `imbalance_s` takes the mean rank of a pipeline, whose layers all run on one part: those of a segment are
    their share of it.
    """
    model_layers = segments[0].part.workload.model.layers
    waits_s: Floats = 0.0
    for segment, holds in zip(segments, holdings, strict=True):
        of_all_s = imbalance_s(replace(segment.part.context, layout=layout))
        waits_s = waits_s + of_all_s * np.asarray(holds.layers) / model_layers
    return waits_s


def mixed_memory_gib(segments: Sequence[Segment], stages: Stages) -> NDArray[np.float64]:
    """Peak memory of each pipeline rank, as `footprint.stage_memory_gib` counts it on the rank's own part.

    Parameters
    ----------
    segments : sequence of Segment
        In the order of the pipeline.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].

    Returns
    -------
    array of float, shape [pp]
        GiB.
    """
    return np.concatenate(
        [
            stage_memory_gib(each.part.workload, each.part.layout, stages)[each.own]
            for each in segments
        ]
    )


def host_memory_gib(segments: Sequence[Segment], stages: Stages) -> float:
    """What a node's host holds of what is offloaded, as if all its GPUs were of the rank that holds most.

    `footprint.offloaded_gib` has the sources.

    Parameters
    ----------
    segments : sequence of Segment
        In the order of the pipeline.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].

    Returns
    -------
    float
        GiB, of the part whose hosts hold most; 0 where nothing is offloaded.
    """
    return max(_hosts_gib(segments, stages))


def _hosts_gib(segments: Sequence[Segment], stages: Stages) -> list[float]:
    """What the fullest host of each segment holds."""
    held_gib: list[float] = []
    for each in segments:
        by_rank = offloaded_gib(each.part.workload, each.part.layout, stages)[each.own]
        held_gib.append(float(np.max(by_rank)) * each.part.workload.cluster.gpus_per_node)
    return held_gib


def hosts_short_gib(segments: Sequence[Segment], stages: Stages) -> list[float]:
    """What the hosts of each part lack for what is offloaded to them.

    Parameters
    ----------
    segments : sequence of Segment
        In the order of the pipeline.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].

    Returns
    -------
    list of float
        GiB of each segment; 0 where its hosts have enough, or their memory is not known.
    """
    clusters = [each.part.workload.cluster for each in segments]
    if all(each.host_memory_gib is None for each in clusters):
        return [0.0] * len(clusters)
    limits = [inf if each.host_memory_gib is None else each.host_memory_gib for each in clusters]
    held_gib = _hosts_gib(segments, stages)
    return [max(on_host - limit, 0.0) for on_host, limit in zip(held_gib, limits, strict=True)]
