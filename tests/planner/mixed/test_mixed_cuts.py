"""Cuts used at most to a share, in pipelines through parts: against a brute force that counts them itself."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import inf

import numpy as np
import pytest

from meshwright.costmodel.layout import Layout
from meshwright.costmodel.mixed import PlacedPart, Segment, mixed_step
from meshwright.costmodel.volumes import GroupTraffic, group_traffic, phase_seconds
from meshwright.planner.mixed.document import MixedRequest
from meshwright.planner.mixed.service import MixedSearch, make_mixed_plan
from meshwright.planner.mixed.verify import mixed_faults
from tests.planner.mixed.plain_oracle import Order, Stages, orders, priced_splits
from tests.planner.mixed.test_mixed_optimum import asked
from tests.planner.search.plain_oracle import layouts, wanted
from tests.soaked import some

CASES = 40
SOME = (0,)


def dense(seed: int) -> MixedRequest:
    """A small problem without experts, whose networks are slow at times."""
    draw = random.Random(f"cuts {seed}")
    request = asked(seed)
    slower = draw.choice([1.0, 0.3, 0.1])
    parts, specs = [], []
    for part, spec in zip(request.parts, request.cluster.parts, strict=True):
        nic = spec.cluster.nic_gbps_per_gpu * slower
        cluster = spec.cluster.model_copy(update={"nic_gbps_per_gpu": nic})
        model = part.model.model_copy(update={"moe": None})
        pins = {**part.pins, "cp": 1, "micro_batch": 1}
        specs.append(spec.model_copy(update={"cluster": cluster}))
        parts.append(replace(part, model=model, cluster=cluster, pins=pins))
    changes = {"parts": tuple(specs), "between_gbps_per_gpu": None}
    return replace(request, cluster=request.cluster.model_copy(update=changes), parts=tuple(parts))


def segments_of(request: MixedRequest, layout: Layout, order: Order) -> list[Segment]:
    stage = int(layout.gpus) // int(layout.pp)
    ends = list(accumulate(ranks for _, ranks in order))
    return [
        Segment(
            part=PlacedPart(
                workload=request.parts[part].workload().on(ranks * stage),
                layout=layout,
                ranks=ranks,
                part_gpus=request.parts[part].gpus,
            ),
            first=end - ranks,
        )
        for (part, ranks), end in zip(order, ends, strict=True)
    ]


def counted_use(segments: Sequence[Segment], stages: Stages) -> float:
    """The largest share of a phase for which a link between GPUs, nodes or halves of nodes is busy.

    GPUs are counted one by one: which other GPUs each sends to, and through whose link.
    """
    step = mixed_step(segments, stages)
    seconds = {name: float(np.asarray(part)) for name, part in step.parts.items()}
    largest = 0.0
    for segment in segments:
        context = segment.part.context
        phases = phase_seconds(context, seconds)
        rates = context.links.bytes_per_s
        for phase, sent in sent_by_gpus(segment, stages).items():
            for level, node in enumerate((1, 2)[: len(rates)]):
                into = {gpu: gpu // node for pair in sent for gpu in pair if gpu is not None}
                for block in set(into.values()):
                    out = sum(
                        volume
                        for (source, target), volume in sent.items()
                        if into[source] == block and (target is None or into[target] != block)
                    )
                    busy_s = out / (node * float(rates[level]))
                    largest = max(largest, busy_s / phases[phase])
    for before, after in pairwise(segments):
        traffic = group_traffic(before.part.context, stages, ranks=before.own)
        slower = min(float(side.part.crossing.links.bytes_per_s[-1]) for side in (before, after))
        phases = phase_seconds(before.part.context, seconds)
        largest = max(largest, traffic.boundary / slower / phases["micro-batches"])
    return largest


def sent_by_gpus(
    segment: Segment, stages: Stages
) -> dict[str, dict[tuple[int, int | None], float]]:
    """Bytes of a step from GPU to GPU of one part, None for one of another part, by phase.

    A ring with several GPUs on a node leaves it once for all of them: each sends its share.
    """
    layout = segment.part.layout
    traffic: GroupTraffic = group_traffic(segment.part.context, stages, ranks=segment.own)
    tp, dp, pp = int(layout.tp), int(layout.dp), int(layout.pp)
    stage = tp * dp
    ring: dict[tuple[int, int | None], float] = {}
    gradients: dict[tuple[int, int | None], float] = {}
    for rank in range(segment.ranks):
        first = rank * stage
        for start in range(first, first + stage, tp):
            in_ring(ring, list(range(start, start + tp)), traffic.tensor)
        for start in range(first, first + tp):
            members = list(range(start, first + stage, tp))
            groups = int(layout.shard_groups)
            size = len(members) // groups
            for number in range(groups):
                in_ring(gradients, members[number * size : (number + 1) * size], traffic.gradients)
            for place in range(size):
                in_ring(gradients, members[place::size], traffic.gradients_between)
        for gpu in range(first, first + stage):
            for step, is_edge in (
                (-1, segment.first + rank > 0),
                (1, segment.first + rank < pp - 1),
            ):
                if is_edge:
                    target = gpu + step * stage
                    inside = 0 <= target < segment.ranks * stage
                    add(ring, (gpu, target if inside else None), traffic.boundary)
    return {"micro-batches": ring, "gradients": gradients}


def in_ring(sent: dict[tuple[int, int | None], float], members: list[int], volume: float) -> None:
    """Each member to the next; the members of a node stand beside each other."""
    if len(members) > 1:
        for source, target in zip(members, members[1:] + members[:1], strict=True):
            add(sent, (source, target), volume)


def add(
    sent: dict[tuple[int, int | None], float], pair: tuple[int, int | None], volume: float
) -> None:
    sent[pair] = sent.get(pair, 0.0) + volume


def fastest_splits(request: MixedRequest) -> Iterator[tuple[float, float]]:
    """Seconds and the use of the fullest cut, of each layout with ranks on both parts at its best split."""
    parts = list(request.parts)
    gpus = sum(part.gpus for part in parts)
    everywhere = replace(
        parts[0], cluster=parts[0].cluster.model_copy(update={"gpus": gpus}), gpus=gpus
    )
    for layout in layouts(everywhere):
        if int(layout.pp) > 1 and wanted(everywhere, layout):
            for order in orders(parts, layout):
                best = min(
                    priced_splits(parts, layout, order), key=lambda each: each[0], default=None
                )
                if best is not None:
                    seconds, sized, stages = best
                    yield seconds, counted_use(segments_of(request, sized, order), stages)


def sparing(request: MixedRequest, limit: float) -> MixedRequest:
    parts = tuple(replace(part, max_cut_use=limit) for part in request.parts)
    return replace(request, parts=parts)


def compare(seed: int) -> set[str]:
    request = dense(seed)
    every = sorted(fastest_splits(request))
    outcomes = set()
    uses = sorted({use for _, use in every})
    for place in (0.0, 0.2, 0.6):
        limit = min(uses[int(place * len(uses))] * 1.01, 0.999) if uses else 0.5
        outcome = MixedSearch(sparing(request, limit), inf).run()
        allowed_s = [seconds for seconds, use in every if use <= limit]
        if not allowed_s:
            assert outcome.status == "infeasible"
            outcomes.add("none")
            continue
        assert outcome.status == "optimal"
        assert outcome.best is not None
        assert outcome.best.price_s == pytest.approx(allowed_s[0], rel=1e-9)
        assert outcome.lower_bound_s == pytest.approx(allowed_s[0], rel=1e-9)
        outcomes.add("slower" if allowed_s[0] > every[0][0] * (1 + 1e-9) else "as fast")
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("seed", SOME)
def test_the_plan_is_the_best_whose_cuts_are_spared(seed: int) -> None:
    compare(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", some((n for n in range(CASES) if n not in SOME), first=5))
def test_the_plan_is_always_the_best_whose_cuts_are_spared(seed: int) -> None:
    compare(seed)


def limited(seed: int, limit: float) -> MixedRequest:
    request = dense(seed)
    pins = {**request.first.pins, "recompute": "none", "tp": 1}
    return replace(
        request,
        parts=tuple(replace(part, max_cut_use=limit, pins=pins) for part in request.parts),
    )


def test_a_plan_that_fills_a_cut_is_found_by_its_verification() -> None:
    plan = make_mixed_plan(limited(2, 0.99)).document
    assert plan.layout is not None
    assert list(mixed_faults(plan)) == []
    inputs = plan.inputs.model_copy(update={"max_cut_use": 0.01})
    faults = list(mixed_faults(plan.model_copy(update={"inputs": inputs})))
    assert any("a cut of the fabric is used to" in each for each in faults), faults


def test_where_every_pipeline_fills_a_cut_that_is_said() -> None:
    plan = make_mixed_plan(limited(2, 0.001)).document
    assert plan.status == "infeasible"
    assert "0.1% are allowed: raise --max-cut-use" in plan.warnings[0]
