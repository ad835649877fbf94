"""Every pipeline through two parts of a tiny cluster, generated and priced here: no bounds, no solver.

The step is put together here too, from what the plain cost model says of a pipeline that runs on one part
alone: seconds of each rank, and what follows the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, permutations
from math import inf

import numpy as np

from meshwright.constraints.registry import rules_for
from meshwright.constraints.rule import FinishedPlan
from meshwright.costmodel.data_parallel import data_parallel_traffic, exposed_s
from meshwright.costmodel.estimate import stage_memory_gib
from meshwright.costmodel.footprint import offloaded_states_gib, usable_hbm_gib
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layer_kinds import kind_times
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.rates import fabric_links
from meshwright.costmodel.states import rank_parameters
from meshwright.costmodel.step_time import (
    boundary_s,
    imbalance_s,
    make_context,
    optimizer_s,
    reference_copies_s,
    scale_share,
    tied_tables_s,
)
from meshwright.costmodel.workload import Workload
from meshwright.planner.request.plan_request import PlanRequest
from tests.planner.search.plain_oracle import layouts, splits, wanted

Stages = tuple[tuple[int, ...], ...]
Order = tuple[tuple[int, int], ...]
"""(part, pipeline ranks), along the pipeline: any number of parts."""
IN_PARTS = ("gpu-budget", "hbm-capacity", "host-memory")


def best_step_times_s(parts: list[PlanRequest]) -> list[float]:
    """Of each layout with ranks on both parts that is legal and fits, with its best split, rising."""
    gpus = sum(part.gpus for part in parts)
    everywhere = replace(
        parts[0], cluster=parts[0].cluster.model_copy(update={"gpus": gpus}), gpus=gpus
    )
    each = (
        min(step_times_s(parts, layout, order), default=inf)
        for layout in layouts(everywhere)
        if int(layout.pp) > 1
        if wanted(everywhere, layout)
        for order in orders(parts, layout)
    )
    return sorted(seconds for seconds in each if seconds < inf)


def orders(parts: list[PlanRequest], layout: Layout) -> Iterator[Order]:
    """Ranks on each part, on whole nodes, in both orders."""
    pp, stage = int(layout.pp), int(layout.gpus) // int(layout.pp)
    for first, second in permutations(range(2)):
        for ranks in range(1, pp):
            asked = (ranks * stage, (pp - ranks) * stage)
            room = (parts[first].gpus, parts[second].gpus)
            nodes = (parts[first].cluster.gpus_per_node, parts[second].cluster.gpus_per_node)
            fits = all(a <= r and a % n == 0 for a, r, n in zip(asked, room, nodes, strict=True))
            if fits:
                yield (first, ranks), (second, pp - ranks)


def step_times_s(parts: list[PlanRequest], layout: Layout, order: Order) -> Iterator[float]:
    """Seconds under every split and amount that is legal and fits."""
    return (seconds for seconds, _, _ in priced_splits(parts, layout, order))


def priced_splits(
    parts: list[PlanRequest], layout: Layout, order: Order
) -> Iterator[tuple[float, Layout, Stages]]:
    """The same with the amount, which the layout has, and the split."""
    model, stage = parts[0].model, int(layout.gpus) // int(layout.pp)
    workloads = [parts[part].workload().on(ranks * stage) for part, ranks in order]
    gpus = [parts[part].gpus for part, _ in order]
    ends = list(accumulate(ranks for _, ranks in order))
    own = [slice(end - ranks, end) for end, (_, ranks) in zip(ends, order, strict=True)]
    whatever_split: dict[int, list[OnPart]] = {}
    for stages in splits(model.layers, int(layout.pp)):
        counts = [rank[0] for rank in stages]
        for amount in amounts(layout, [counts[ranks] for ranks in own]):
            sized = replace(layout, recompute_layers=amount)
            fits = all(
                max(stage_memory_gib(w, sized, stages)[r]) <= usable_hbm_gib(w)
                and on_hosts(w, sized, stages, r)
                for w, r in zip(workloads, own, strict=True)
            )
            if fits and all(legal(w, sized, stages) for w in workloads):
                if amount not in whatever_split:
                    whatever_split[amount] = [
                        OnPart(w, sized, ranks, on_gpus)
                        for w, (_, ranks), on_gpus in zip(workloads, order, gpus, strict=True)
                    ]
                yield step_s(whatever_split[amount], sized, stages, own), sized, stages


def on_hosts(workload: Workload, layout: Layout, stages: Stages, ranks: slice) -> bool:
    """Whether a host has room for what the fullest of some ranks offloads, on every GPU of its node."""
    room_gib = workload.cluster.host_memory_gib
    if room_gib is None:
        return True
    held_gib = max(offloaded_states_gib(workload, layout, stages)[ranks])
    return bool(held_gib * workload.cluster.gpus_per_node <= room_gib)


def amounts(layout: Layout, counts_of_parts: list[list[int]]) -> list[int]:
    """Recomputed layers of a rank: on each part no more than any rank has, or no fewer."""
    if not int(layout.recompute) & Recompute.FULL:
        return [0]
    longest = max(max(counts) for counts in counts_of_parts)
    return [
        amount
        for amount in range(1, longest + 1)
        if all(amount <= min(counts) or amount >= max(counts) for counts in counts_of_parts)
    ]


def legal(workload: Workload, layout: Layout, stages: Stages) -> bool:
    """Whether no rule's own check objects, but for those on GPUs and memory together."""
    together = replace(workload, gpus=int(layout.gpus))
    plan = FinishedPlan(
        workload=together, layout=layout, stages=stages, memory_gib=(0.0,), spans={}
    )
    rules = (rule for rule in rules_for(together) if rule.name not in IN_PARTS)
    return all(rule.check(plan) is None for rule in rules)


class OnPart:
    """What the layout takes on one part under any split of its layers."""

    def __init__(self, workload: Workload, layout: Layout, ranks: int, gpus: int) -> None:
        self.context = context = on_part(workload, layout, ranks)
        self.layers, self.ends_s = layer_seconds(context)
        self.outside = hand_over(context, gpus)
        self.handed_s = float(boundary_s(self.outside)), handed_inside_s(context, ranks)
        self.share = float(np.asarray(scale_share(workload, layout, context.constants)))
        self.waits_s = float(np.asarray(imbalance_s(context)))


def step_s(on_parts: list[OnPart], layout: Layout, stages: Stages, own: list[slice]) -> float:
    """T = [1F1B, pass by pass + max DP + max optimizer + max copies + waits + overhead] (1 + scale).

    A rank sends forward what it and the passes that score make, and back its gradients, before it goes on;
    copies are those of an offloaded reference; waits are those for the slowest of unlike packs, of which each
    part's layers have their share.
    """
    workload = on_parts[0].context.workload
    model = workload.model
    passes: list[tuple[float, float]] = []
    links: list[float] = []
    for number, (on, ranks) in enumerate(zip(on_parts, own, strict=True)):
        passes += rank_seconds(on, stages)[ranks]
        if number:
            links.append(max(on.handed_s[0], on_parts[number - 1].handed_s[0]))
        links += [on.handed_s[1]] * (ranks.stop - ranks.start - 1)
    m, pp = int(layout.num_micro_batches), len(stages)
    works_s = sum(forward_s + backward_s for forward_s, backward_s in passes)
    sent = zip([*links, 0.0], [0.0, *links], strict=True)
    busy = [
        (forward_s + (1.0 + workload.scoring_passes) * on, backward_s + back)
        for (forward_s, backward_s), (on, back) in zip(passes, sent, strict=True)
    ]
    pipeline_s = workload.flushes * played_s(tuple(busy), m // workload.flushes)
    after = [
        after_pipeline(on.context, stages, ranks, works_s / pp, on.outside)
        for on, ranks in zip(on_parts, own, strict=True)
    ]
    overhead_s = max(on.context.constants.framework.step_overhead_s for on in on_parts)
    waits_s = 0.0
    for on, ranks in zip(on_parts, own, strict=True):
        waits_s += on.waits_s * sum(count for (count,) in stages[ranks]) / model.layers
    latest_s = sum(max(column) for column in zip(*after, strict=True))
    in_all: float = pipeline_s + latest_s + waits_s + overhead_s
    return (1.0 + max(on.share for on in on_parts)) * in_all


def played_s(busy: tuple[tuple[float, float], ...], micro_batches: int) -> float:
    """When the last pass ends: rank r of p begins with p - r forward passes, then takes turns.

    Every pass is asked when what it waits for has ended, the passes before it on its rank among that.
    """
    pp = len(busy)
    orders: list[list[tuple[bool, int]]] = []
    for rank in range(pp):
        ahead = min(pp - rank - 1, micro_batches)
        order = [(True, k) for k in range(ahead)]
        for k in range(micro_batches):
            if ahead + k < micro_batches:
                order.append((True, ahead + k))
            order.append((False, k))
        orders.append(order)
    ended: dict[tuple[int, bool, int], float] = {}
    free, at = [0.0] * pp, [0] * pp
    while any(at[rank] < len(orders[rank]) for rank in range(pp)):
        for rank in range(pp):
            while at[rank] < len(orders[rank]):
                is_forward, k = orders[rank][at[rank]]
                source = (rank - 1 if is_forward else rank + 1, is_forward, k)
                if not 0 <= source[0] < pp:
                    source = (rank, True, k)
                waits_for = 0.0 if is_forward and not rank else ended.get(source)
                if waits_for is None:
                    break
                free[rank] = max(free[rank], waits_for) + busy[rank][0 if is_forward else 1]
                ended[rank, is_forward, k] = free[rank]
                at[rank] += 1
    return max(free)


def handed_inside_s(context: Context, ranks: int) -> float:
    """From one rank of a part to the next: over the outermost level that its pipeline groups cross."""
    placement = nested_placement(context.workload.cluster, replace(context.layout, pp=ranks))
    inside = replace(context.placement, pp=placement.pp)
    return float(boundary_s(replace(context, placement=inside)))


def on_part(workload: Workload, layout: Layout, ranks: int) -> Context:
    """The layout on a part; pipeline groups leave the outermost level."""
    placement = nested_placement(workload.cluster, replace(layout, pp=ranks))
    leaving = np.ones_like(placement.pp)
    leaving[..., -1] = 2
    return make_context(workload, layout, replace(placement, pp=leaving))


def hand_over(context: Context, gpus: int) -> Context:
    """Between two of the part's nodes at its outermost level, though it may have but one node."""
    nodes = context.workload.on(max(gpus, 2 * context.workload.cluster.gpus_per_node))
    links = fabric_links(nodes, context.constants)
    members = np.ones(len(links.bytes_per_s), dtype=np.int64)
    members[-1] = 2
    return replace(context, links=links, placement=replace(context.placement, pp=members))


def layer_seconds(
    context: Context,
) -> tuple[list[tuple[float, float, float]], tuple[tuple[float, float], tuple[float, float]]]:
    """Of each layer in their order forward, backward, and what recomputing it adds; of the embedding, and of
    the end, forward and backward.
    """
    times, model = kind_times(context), context.workload.model
    layers = [times.dense] * model.dense_layers + [times.moe] * model.moe_layers
    if model.unlike_layers:
        names = list(dict.fromkeys(model.unlike_layers))
        kinds = dict(zip(names, times.unlike, strict=True))
        layers = [kinds[name] for name in model.unlike_layers]
    plain = []
    for kind in layers:
        assert kind is not None
        both, back, again = (
            float(np.asarray(x)) for x in (kind.seconds, kind.backward_s, kind.recompute_s)
        )
        plain.append((both - back, back, again))
    ends = []
    for end in ([(1, times.embedding)], [(1, times.head), (model.mtp_layers, times.mtp)]):
        both = sum(n * float(np.asarray(x.seconds)) for n, x in end if x is not None)
        back = sum(n * float(np.asarray(x.backward_s)) for n, x in end if x is not None)
        ends.append((both - back, back))
    return plain, (ends[0], ends[1])


def rank_seconds(on: OnPart, stages: Stages) -> list[tuple[float, float]]:
    """Seconds of each rank and micro-batch, forward and backward, were all of them on this part."""
    layout = on.context.layout
    full = bool(int(layout.recompute) & Recompute.FULL)
    amount = int(layout.recompute_layers) if full else 0
    seconds, number = [], 0
    for rank, (count,) in enumerate(stages):
        forward = backward = 0.0
        for place in range(count):
            forward_s, backward_s, again_s = on.layers[number]
            forward, backward = (
                forward + forward_s,
                backward + backward_s + again_s * (place < amount),
            )
            number += 1
        for end, at in zip(on.ends_s, (0, len(stages) - 1), strict=True):
            if rank == at:
                forward, backward = forward + end[0], backward + end[1]
        seconds.append((forward, backward))
    return seconds


def after_pipeline(
    context: Context, stages: Stages, ranks: slice, window_s: float, across: Context
) -> tuple[float, float, float]:
    """Exposed gradient traffic, a table on both ends included, optimizer and copies of a reference, of a
    part's fullest rank.
    """
    shape = (len(stages),)
    dense, expert = (
        float(np.max(np.broadcast_to(np.asarray(kind), shape)[ranks]))
        for kind in rank_parameters(context.workload.model, context.layout, stages)
    )
    traffic = data_parallel_traffic(context, dense, expert)
    exposed = float(np.asarray(exposed_s(context, traffic, window_s) + tied_tables_s(across)))
    copies_s = 0.0
    if context.workload.keeps_reference:
        copies_s = float(np.asarray(reference_copies_s(context, dense, expert)))
    return exposed, float(np.asarray(optimizer_s(context, dense, expert))), copies_s
