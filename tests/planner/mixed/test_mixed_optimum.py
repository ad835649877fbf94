"""Pipelines through unlike parts against a brute force of its own, and what the choice rests on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.reader import MixedClusterSpec, PartSpec, load_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.estimate import estimate_layout
from meshwright.costmodel.footprint import offloaded_states_gib
from meshwright.costmodel.layer_kinds import KindTimes
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.mixed import (
    PlacedPart,
    Segment,
    hand_overs_s,
    host_memory_gib,
    hosts_short_gib,
    mixed_memory_gib,
    mixed_step,
)
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.rank_load import chunk_passes
from meshwright.costmodel.simulator import simulate
from meshwright.costmodel.step_time import boundary_s
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.model_specs.blocks import MoeSpec
from meshwright.planner.bounds.mappings import packed_context, shared_times
from meshwright.planner.mixed import service
from meshwright.planner.mixed.document import MixedRequest, read_mixed_request
from meshwright.planner.mixed.kernel import MixedKernel
from meshwright.planner.mixed.promising import (
    KernelMaker,
    PromisingRow,
    RowBounds,
    leading_patterns,
    promising_rows,
)
from meshwright.planner.mixed.service import MixedSearch, through_parts
from meshwright.planner.request.choices import WITHOUT
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.search.space import space_of
from tests.planner.mixed.plain_oracle import Order, best_step_times_s, orders, step_times_s
from tests.planner.search.plain_oracle import layouts, wanted
from tests.planner.search.test_image_plans import with_images
from tests.planner.search.test_packed_optimum import packed
from tests.planner.search.test_planner_optimum import request as small_request
from tests.soaked import examples, some

CASES = 60
SOME = (5, 17, 0, 32, 1)
SOME_LEADING = (12, 22, 5, 0, 1)
SOME_OTHER = (26, 0, 31, 59, 5, 1)
"""Of preferences with a reference on hosts, adapters, packs of images, adapters behind dense layers, `kto`
behind them, images behind them: those that brute force takes least time for."""


def other_part(draw: random.Random, cluster: ClusterSpec) -> ClusterSpec:
    """A part with a slower or faster device, more or less memory, another network."""
    device = cluster.device
    pace = draw.choice([0.3, 0.5, 0.8, 1.3])
    scaled = {
        "name": "other",
        "hbm_gib": device.hbm_gib * draw.choice([0.6, 0.8, 1.0, 1.5]),
        "hbm_gb_per_s": device.hbm_gb_per_s * pace,
        "peak_fp16_tflops": device.peak_fp16_tflops * pace,
    }
    if device.peak_bf16_tflops is not None:
        scaled["peak_bf16_tflops"] = device.peak_bf16_tflops * pace
    return cluster.model_copy(
        update={
            "name": "other",
            "device": device.model_copy(update=scaled),
            "nic_gbps_per_gpu": cluster.nic_gbps_per_gpu * draw.choice([0.5, 1.0, 2.0]),
        }
    )


def asked(seed: int) -> MixedRequest:
    """A small problem on two parts of one or two nodes with two GPUs."""
    draw = random.Random(f"mixed {seed}")
    small = small_request(seed)
    moe = small.model.moe
    model = small.model.model_copy(
        update={
            "layers": draw.choice([4, 5, 6]),
            "tied_embeddings": False,
            "mtp_layers": 0,
            "moe": None if moe is None else moe.model_copy(update={"dense_layers": 0}),
        }
    )
    first = small.cluster.model_copy(
        update={"gpus_per_node": 2, "nvlink_domain": 2, "levels": (), "gpus": 64}
    )
    parts = (
        PartSpec(cluster=first, gpus=draw.choice([2, 4])),
        PartSpec(cluster=other_part(draw, first), gpus=draw.choice([2, 4])),
    )
    between = draw.choice([None, None, 0.25 * first.nic_gbps_per_gpu])
    pins: dict[str, int | str] = {"zero_stage": 1, "micro_batch": draw.choice([1, 2]), "cp": 1}
    if draw.random() < 0.5:
        pins["recompute"] = draw.choice(["none", "full", "full"])
    own = [
        replace(
            small,
            model=model,
            cluster=part.cluster,
            gpus=part.gpus,
            pins=pins,
            forbids=("selective-recompute",) if "recompute" not in pins else (),
            without=WITHOUT,
            global_batch=8,
        )
        for part in parts
    ]
    spec = MixedClusterSpec(parts=parts, between_gbps_per_gpu=between)
    return MixedRequest(cluster=spec, parts=tuple(own))


def asked_leading(seed: int) -> MixedRequest:
    """The same with experts behind one to three dense layers, which may be shorter or longer than others."""
    draw = random.Random(f"leading {seed}")
    moe = MoeSpec(
        experts=4,
        top_k=draw.choice([1, 2]),
        moe_ffn_hidden=draw.choice([512, 1024, 4096]),
        shared_experts=draw.choice([0, 1]),
        dense_layers=draw.choice([1, 2, 2, 3, 3]),
    )
    changes = {
        "moe": moe,
        "ffn_hidden": draw.choice([1024, 4096, 16384]),
        "layers": draw.choice([4, 5, 6]),
        "mtp_layers": draw.choice([0, 0, 1]),
    }
    request = asked(seed)
    first, other = (
        replace(part, model=part.model.model_copy(update=changes)) for part in request.parts
    )
    # The ends, which HBM paces, may be faster on one part, and layers on the other.
    device = other.cluster.device
    pace = draw.choice([0.3, 1.0, 1.0, 3.0])
    device = device.model_copy(update={"hbm_gb_per_s": device.hbm_gb_per_s * pace})
    other = replace(other, cluster=other.cluster.model_copy(update={"device": device}))
    spec = request.cluster.model_copy(
        update={
            "parts": (
                request.cluster.parts[0],
                PartSpec(cluster=other.cluster, gpus=other.gpus),
            )
        }
    )
    return replace(request, cluster=spec, parts=(first, other))


def asked_with_loads(seed: int) -> MixedRequest:
    """The same with experts that are not equally popular: the busiest rank of each degree has more to do."""
    draw = random.Random(f"loads {seed}")
    request = asked_leading(seed)
    by_ep = tuple((ep, draw.choice([1.0, 1.2, 2.0, 3.5])) for ep in (2, 4))
    parts = tuple(replace(part, expert_imbalance_by_ep=by_ep) for part in request.parts)
    return replace(request, parts=parts)


def asked_other(seed: int) -> MixedRequest:
    """The same with other training: adapters, preferences, packs of unlike samples, images, or two of these.

    Every second one has dense layers in front of those with experts.
    """
    draw = random.Random(f"training {seed}")
    request = (asked, asked_leading)[seed % 2](seed)
    changes: dict[str, Any] = {}
    kinds = draw.sample(("adapters", "preferences", "packs", "images"), draw.choice([1, 1, 2]))
    if "adapters" in kinds:
        targets = draw.choice([("all-linear",), ("q_proj", "v_proj"), ("o_proj",)])
        changes["adapters"] = AdapterSpec(rank=draw.choice([4, 64]), targets=targets)
    if "preferences" in kinds:
        changes["kind"] = draw.choice(["dpo", "kto"])
        if "adapters" not in kinds and changes["kind"] == "dpo":
            changes["reference"] = draw.choice(["resident", "offloaded"])
    elif "packs" in kinds:
        packs = packed(seed, draw.choice([1024, 4096]))
        changes |= {"lengths": packs.lengths, "seq_len": packs.seq_len}
    parts = [replace(part, **changes) for part in request.parts]
    if "images" in kinds:
        parts = [with_images(part, seed) for part in parts]
    return replace(request, parts=tuple(parts))


def asked_on_hosts(seed: int) -> MixedRequest:
    """The same in little HBM, with hosts that have little room for what is offloaded, or do not say."""
    draw = random.Random(f"hosts {seed}")
    request = (asked, asked_leading)[seed % 2](seed)
    specs, parts = [], []
    hbm = draw.choice([0.5, 0.6, 0.75])
    for part in request.parts:
        device = part.cluster.device
        cluster = part.cluster.model_copy(
            update={
                "device": device.model_copy(update={"hbm_gib": device.hbm_gib * hbm}),
                "host_memory_gib": draw.choice([0.3, 0.6, 1.2, 2.5, None]),
            }
        )
        specs.append(PartSpec(cluster=cluster, gpus=part.gpus))
        parts.append(replace(part, cluster=cluster))
    spec = request.cluster.model_copy(update={"parts": tuple(specs)})
    return replace(request, cluster=spec, parts=tuple(parts))


@cache
def best_by_brute_force(seed: int, asked_for: Callable[[int], MixedRequest]) -> list[float]:
    """Of every layout, of which several tests ask, rising."""
    return best_step_times_s(list(asked_for(seed).parts))


def compare(seed: int, asked_for: Callable[[int], MixedRequest] = asked) -> None:
    request = asked_for(seed)
    if request.cluster.between_gbps_per_gpu is not None:
        request = replace(
            request, cluster=request.cluster.model_copy(update={"between_gbps_per_gpu": None})
        )
    outcome = MixedSearch(request, inf).run()
    every_s = best_by_brute_force(seed, asked_for)
    if not every_s:
        assert outcome.status == "infeasible"
        assert outcome.best is None
        return
    best_s = every_s[0]
    assert outcome.status == "optimal"
    assert outcome.best is not None
    assert outcome.best.price is not None
    assert outcome.best.price.step_time_s == pytest.approx(best_s, rel=1e-9)
    assert outcome.lower_bound_s == pytest.approx(best_s, rel=1e-9)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.soak if number > 1 else pytest.mark.slow)
        for number, seed in enumerate(SOME)
    ],
)
def test_the_plan_is_the_best_pipeline_through_both_parts(seed: int) -> None:
    compare(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", some((n for n in range(CASES) if n not in SOME), first=22))
def test_the_plan_is_always_the_best_pipeline_through_both_parts(seed: int) -> None:
    compare(seed)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.soak if number > 0 else pytest.mark.slow)
        for number, seed in enumerate(SOME_LEADING)
    ],
)
def test_dense_layers_in_front_are_dealt_as_well_as_can_be(seed: int) -> None:
    compare(seed, asked_leading)


@pytest.mark.soak
@pytest.mark.parametrize("seed", some((n for n in range(CASES) if n not in SOME_LEADING), first=48))
def test_dense_layers_in_front_are_always_dealt_as_well_as_can_be(seed: int) -> None:
    compare(seed, asked_leading)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.soak if number > 0 else pytest.mark.slow)
        for number, seed in enumerate(SOME_OTHER)
    ],
)
def test_other_training_is_planned_as_well_as_can_be(seed: int) -> None:
    compare(seed, asked_other)


@pytest.mark.soak
@pytest.mark.parametrize("seed", some((n for n in range(CASES) if n not in SOME_OTHER), first=24))
def test_other_training_is_always_planned_as_well_as_can_be(seed: int) -> None:
    compare(seed, asked_other)


def asked_inside(seed: int) -> MixedRequest:
    """Nodes of six GPUs in domains that groups may straddle, and groups that are to stay inside."""
    draw = random.Random(f"inside {seed}")
    request = (asked, asked_leading)[seed % 2](seed)
    specs, parts = [], []
    axes = tuple(draw.sample(("tp", "cp", "ep"), draw.choice([1, 2])))
    for part, spec in zip(request.parts, request.cluster.parts, strict=True):
        size = {"gpus_per_node": 6, "nvlink_domain": draw.choice([2, 3, 6]), "gpus": 60}
        cluster = spec.cluster.model_copy(update=size)
        specs.append(PartSpec(cluster=cluster, gpus=6))
        pins = {**part.pins, "cp": 2 if "cp" in axes and seed % 3 else 1, "recompute": "none"}
        parts.append(
            replace(part, cluster=cluster, gpus=6, pins=pins, inside_domain=axes, forbids=())
        )
    return replace(request, cluster=MixedClusterSpec(parts=tuple(specs)), parts=tuple(parts))


def stay_inside(parts: list[PlanRequest], layout: Layout, order: Order) -> bool:
    """Whether groups keep to one domain each, the ranks of a part counted through its nodes in turn."""
    dense = {"tp": (1, int(layout.tp)), "cp": (int(layout.tp), int(layout.cp))}
    axes = {**dense, "ep": (int(layout.etp), int(layout.ep))}
    stage = int(layout.gpus) // int(layout.pp)
    for part, ranks in order:
        domain = parts[part].cluster.nvlink_domain
        for stride, size in (axes[axis] for axis in parts[part].inside_domain):
            for first in range(stage):
                if first // stride % size == 0:
                    for start in range(first, ranks * stage, stage):
                        members = range(start, start + stride * size, stride)
                        if len({member // domain for member in members}) > 1:
                            return False
    return True


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.slow if seed == 12 else pytest.mark.soak)
        for seed in range(20)
    ],
)
def test_groups_that_are_to_stay_in_a_domain_do(seed: int) -> None:
    request = asked_inside(seed)
    parts = list(request.parts)
    everywhere = replace(
        parts[0], cluster=parts[0].cluster.model_copy(update={"gpus": 12}), gpus=12
    )
    wanted_s = [
        step_s
        for layout in layouts(everywhere)
        if int(layout.pp) > 1 and wanted(everywhere, layout)
        for order in orders(parts, layout)
        if stay_inside(parts, layout, order)
        for step_s in step_times_s(parts, layout, order)
    ]
    found = MixedSearch(request, inf).run()
    assert found.price_s == pytest.approx(min(wanted_s, default=inf), rel=1e-9)
    assert through_parts(exhaustively(request), inf, inf).price_s == pytest.approx(
        found.price_s, rel=1e-9
    )


def exhaustively(request: MixedRequest) -> MixedRequest:
    return replace(
        request, parts=tuple(replace(part, method="exhaustive") for part in request.parts)
    )


def compare_exhaustive(seed: int, asked_for: Callable[[int], MixedRequest], top_k: int) -> None:
    """Every pipeline by itself, without bounds, and the search: the same prices."""
    request = asked_for(seed)
    spec = request.cluster.model_copy(update={"between_gbps_per_gpu": None})
    parts = tuple(replace(part, top_k=top_k) for part in request.parts)
    request = replace(request, cluster=spec, parts=parts)
    by_search = through_parts(request, inf, inf)
    by_method = through_parts(exhaustively(request), inf, inf)
    best_s = [each.price_s for each in by_method.best_priced]
    assert by_search.status == by_method.status == ("optimal" if best_s else "infeasible")
    assert [each.price_s for each in by_search.best_priced] == pytest.approx(best_s, rel=1e-9)
    assert by_method.rows >= by_search.rows
    if best_s:
        assert by_method.lower_bound_s == pytest.approx(best_s[0], rel=1e-9)
        below = through_parts(exhaustively(request), best_s[0], inf)
        assert (below.status, below.best) == ("infeasible", None)


KINDS_OF_REQUESTS = (asked, asked_leading, asked_other, asked_on_hosts)
DEAR = (asked_leading, asked_other)
"""Have the most pipelines."""


@pytest.mark.parametrize(
    "asked_for",
    [
        pytest.param(each, marks=pytest.mark.soak if each in DEAR else pytest.mark.slow)
        for each in KINDS_OF_REQUESTS
    ],
)
def test_every_pipeline_by_itself_gives_what_the_search_gives(
    asked_for: Callable[[int], MixedRequest],
) -> None:
    compare_exhaustive(0, asked_for, 1)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("asked_for", "seed"),
    some(((asked_for, seed) for asked_for in KINDS_OF_REQUESTS for seed in range(1, 12)), first=1),
)
def test_every_pipeline_by_itself_gives_what_the_search_gives_many(
    asked_for: Callable[[int], MixedRequest], seed: int
) -> None:
    compare_exhaustive(seed, asked_for, 1 + seed % 3)


def test_nothing_is_called_infeasible_where_splits_were_not_played(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None of the splits that were played fits, and others, too many to be played, may take a second."""
    unplayed = SimpleNamespace(price_s=inf, unlisted_s=1.0, best_split=lambda _: None)
    search = MixedSearch(asked(0), inf)
    maker = SimpleNamespace(keeps_inside=lambda _: True, kernel=lambda _: unplayed)
    monkeypatch.setattr(search, "_maker", maker)
    monkeypatch.setattr(service, "every_row", lambda *_: iter([None]))
    outcome = search.run_through_all(inf)
    assert (outcome.status, outcome.lower_bound_s) == ("unknown", 1.0)


def compare_several(seed: int, asked_for: Callable[[int], MixedRequest] = asked) -> None:
    """The best five, and those beside plans that are known of parts alone."""
    request = asked_for(seed)
    spec = request.cluster.model_copy(update={"between_gbps_per_gpu": None})
    parts = tuple(replace(part, top_k=5) for part in request.parts)
    request = replace(request, cluster=spec, parts=parts)
    best_s = best_by_brute_force(seed, asked_for)
    known = best_s[1:4:2]
    for rivals_s in ((), tuple(known)):
        search = MixedSearch(request, inf, rivals_s=rivals_s)
        outcome = search.run()
        assert outcome.status == ("optimal" if best_s else "infeasible")
        wanted = sorted([*best_s, *rivals_s])[:5]
        found = sorted([*(each.price_s for each in outcome.best_priced), *rivals_s])[:5]
        assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.soak if number > 1 else pytest.mark.slow)
        for number, seed in enumerate(SOME)
    ],
)
def test_the_next_best_pipelines_are_found_too(seed: int) -> None:
    compare_several(seed)


@pytest.mark.soak
@pytest.mark.parametrize("asked_for", [asked, asked_leading, asked_other])
@pytest.mark.parametrize("seed", some(range(CASES), first=17))
def test_the_next_best_pipelines_are_always_found(
    seed: int, asked_for: Callable[[int], MixedRequest]
) -> None:
    compare_several(seed, asked_for)


def check_equal_parts(
    workload: Workload, layout: Layout, stages: tuple[tuple[int, ...], ...]
) -> None:
    """Two equal halves take what one cluster does, but for the pipeline: that is played, each rank sending
    over links of its own, of which the ends have one in place of two.
    """
    whole = estimate_layout(workload, layout, nested_placement(workload.cluster, layout), stages)
    part = PlacedPart(workload=workload.on(32), layout=layout, ranks=2)
    step = mixed_step([Segment(part=part, first=0), Segment(part=part, first=2)], stages)
    parts = {name: float(np.asarray(seconds)) for name, seconds in step.parts.items()}
    played = ("pipeline_bubble", "pipeline_p2p", "scale")
    alike = {name: seconds for name, seconds in whole.breakdown_s.items() if name not in played}
    assert {name: parts[name] for name in alike} == pytest.approx(alike, rel=1e-12)
    assert parts["pipeline_p2p"] < whole.breakdown_s["pipeline_p2p"]
    step_s = float(np.asarray(step.seconds))
    assert 0.99 * whole.step_time_s < step_s < whole.step_time_s


@pytest.mark.parametrize(
    "name", ["llama-3-8b", "mixtral-8x7b", "gpt2-xl", "gpt-oss-20b", "nemotron-h-8b"]
)
def test_two_equal_parts_cost_what_one_cluster_costs(name: str) -> None:
    """The same devices and network on both sides: nothing else tells the parts from the whole."""
    request = read_request(model=name, cluster="dgx-h100", gpus=64, global_batch=64, seq_len=2048)
    layout = Layout(tp=4, pp=4, dp=4, num_micro_batches=16, sequence_parallel=True, zero_stage=1)
    layers = request.model.layers
    stages = tuple((layers // 4 + (rank < layers % 4),) for rank in range(4))
    check_equal_parts(request.workload(), layout, stages)


def test_a_step_is_what_the_event_simulator_plays() -> None:
    """Random uneven splits over three parts, each hand-over on a link of its own."""
    draw = random.Random(7)
    base = tight(80.0)
    third = other_part(draw, base.parts[1].cluster).model_copy(update={"name": "third"})
    third = third.model_copy(update={"nic_gbps_per_gpu": 100.0})
    workloads = [each.workload() for each in base.parts]
    workloads.append(replace(workloads[0], cluster=third))
    model_layers, sent = workloads[0].model.layers, set()
    for _ in range(40):
        ranks = [draw.randint(1, 3) for _ in workloads]
        pp, m = sum(ranks), draw.randint(1, 24)
        layout = Layout(tp=8, pp=pp, num_micro_batches=m, sequence_parallel=True, zero_stage=1)
        order = draw.sample(range(3), 3)
        segments, first = [], 0
        for at in order:
            on_part = workloads[at].on(8 * ranks[at])
            part = PlacedPart(workload=on_part, layout=layout, ranks=ranks[at])
            segments.append(Segment(part=part, first=first))
            first += ranks[at]
        cuts = sorted(draw.sample(range(1, model_layers), pp - 1))
        stages = tuple((end - begin,) for begin, end in pairwise([0, *cuts, model_layers]))
        passes = [vars(chunk_passes(each.part.context, stages)) for each in segments]
        out_s, back_s = hand_overs_s(segments)
        sent |= {*out_s[:-1], *back_s[1:]}
        times = [
            np.concatenate(
                [own[name][0, each.own] for own, each in zip(passes, segments, strict=True)]
            )
            for name in ("forward_s", "backward_s")
        ]
        played = simulate(
            (times[0] + out_s).tolist(), (times[1] + back_s).tolist(), pp=pp, num_micro_batches=m
        )
        step = mixed_step(segments, stages)
        parts = {name: float(np.asarray(seconds)) for name, seconds in step.parts.items()}
        after = ("dp_comm", "optimizer", "step_overhead", "scale")
        pipeline_s = sum(seconds for name, seconds in parts.items() if name not in after)
        assert pipeline_s == pytest.approx(played.seconds, rel=1e-9)
    assert len(sent) > 1


def tight(hbm_of_other_gib: float) -> MixedRequest:
    """Llama-3 8B on four nodes, two of them half as fast."""
    first = read_request(
        model="llama-3-8b",
        cluster="dgx-h100",
        gpus=16,
        global_batch=64,
        seq_len=8192,
        forbid="recompute",
        without=",".join(WITHOUT),
        pin="tp=8,pp=4,micro_batch=1",
    )
    device = first.cluster.device
    slower = device.model_copy(
        update={
            "name": "half",
            "hbm_gib": hbm_of_other_gib,
            "peak_bf16_tflops": device.peak_fp16_tflops / 2,
            "peak_fp16_tflops": device.peak_fp16_tflops / 2,
        }
    )
    other = first.cluster.model_copy(update={"name": "other", "device": slower})
    spec = MixedClusterSpec(
        parts=(PartSpec(cluster=first.cluster, gpus=16), PartSpec(cluster=other, gpus=16))
    )
    return MixedRequest(cluster=spec, parts=(first, replace(first, cluster=other)))


@cache
def best_of_tight(hbm_of_other_gib: float) -> MixedKernel:
    return best_of(tight(hbm_of_other_gib))


def best_of(request: MixedRequest) -> MixedKernel:
    outcome = MixedSearch(request, inf).run()
    assert outcome.status == "optimal"
    assert outcome.best is not None
    return outcome.best


def layers_on(kernel: MixedKernel, part: int) -> int:
    assert kernel.price is not None
    own = [
        each
        for each, (index, _) in zip(kernel.segments, kernel.composition, strict=True)
        if index == part
    ]
    return sum(kernel.price.counts[own[0].own])


def test_less_memory_on_one_part_moves_layers_to_the_other() -> None:
    roomy, small = best_of_tight(80.0), best_of_tight(11.0)
    assert layers_on(small, 1) < layers_on(roomy, 1)
    assert roomy.price is not None
    assert small.price is not None
    assert small.price.step_time_s > roomy.price.step_time_s
    sized = small.segments_of(small.price.layout)
    memory_gib = mixed_memory_gib(sized, small.price.stages)
    for segment in sized:
        assert max(memory_gib[segment.own]) <= segment.part.limit_gib


def test_the_faster_part_takes_more_layers() -> None:
    kernel = best_of_tight(80.0)
    assert layers_on(kernel, 0) > layers_on(kernel, 1) > 0


@pytest.mark.soak
def test_the_least_bound_in_place_of_the_model_is_worse_in_half_of_the_requests() -> None:
    """Were the kernel of the least bound taken and completed, the plan would be slower, or none at all."""
    feasible = worse = 0
    for seed in range(36):
        request = asked(seed)
        best = MixedSearch(request, inf).run().best
        if best is None or best.price is None:
            continue
        feasible += 1
        least = KernelMaker(request).kernel(promising_rows(request, inf, lambda: None)[0])
        price = least.best_split(inf)
        worse += price is None or price.step_time_s > best.price.step_time_s * (1 + 1e-9)
    assert feasible >= 30
    assert worse >= feasible / 2


NEAR = ((asked, 5), (asked_leading, 7))
"""Requests with rows whose bound is near their price."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (0, 3, 4, 5, 6))]
)
def test_experts_that_are_not_equally_popular_are_planned_as_well_as_can_be(seed: int) -> None:
    compare(seed, asked_with_loads)


@pytest.mark.slow
def test_unequal_loads_change_what_is_fastest() -> None:
    assert best_by_brute_force(1, asked_with_loads) != best_by_brute_force(1, asked_leading)


@pytest.mark.parametrize(
    ("asked_for", "seed"),
    [
        *NEAR,
        (asked_other, 0),
        pytest.param(asked_with_loads, 1, marks=pytest.mark.soak),
        pytest.param(asked_leading, 1, marks=pytest.mark.slow),
        *(
            pytest.param(asked_for, seed, marks=pytest.mark.soak)
            for asked_for in (asked, asked_leading, asked_other)
            for seed in (0, 2, 3)
        ),
    ],
)
def test_bounds_are_never_above_prices(asked_for: Callable[[int], MixedRequest], seed: int) -> None:
    most = most_of_price(asked_for(seed), seed)
    assert most <= 1.0
    # Where no bound is near its price, one that is too high is not noticed.
    assert most > 0.9 or (asked_for, seed) not in NEAR


def most_of_price(request: MixedRequest, seed: int) -> float:
    """The largest bound of some rows, as a share of the price of its row."""
    maker = KernelMaker(request)
    rows = promising_rows(request, inf, lambda: None)
    drawn = random.Random(seed).sample(rows, min(len(rows), examples(60)))
    prices = [(row, maker.kernel(row).best_split(inf)) for row in drawn]
    shares = (row.bound_s / price.step_time_s for row, price in prices if price is not None)
    return max(shares, default=0.0)


@pytest.mark.parametrize(
    "asked_for",
    [
        pytest.param(asked, marks=pytest.mark.slow),
        *(pytest.param(each, marks=pytest.mark.soak) for each in (asked_leading, asked_other)),
    ],
)
@pytest.mark.parametrize(
    "seed",
    [5, *(pytest.param(seed, marks=pytest.mark.soak) for seed in some((4, *range(6, 20))))],
)
def test_bounds_below_a_price_to_beat_are_never_above_prices_below_it(
    seed: int, asked_for: Callable[[int], MixedRequest]
) -> None:
    """A price to beat says how many layers ranks have time for, and so what follows at the least."""
    request, chance = asked_for(seed), random.Random(seed)
    maker = KernelMaker(request)
    rows = promising_rows(request, inf, lambda: None)
    splits = [
        maker.kernel(row).best_split(inf)
        for row in chance.sample(rows, min(len(rows), examples(60)))
    ]
    prices = sorted(split.step_time_s for split in splits if split is not None)
    for cutoff_s in prices[:: max(1, len(prices) // 3)]:
        below = promising_rows(request, cutoff_s, lambda: None)
        for row in chance.sample(below, min(len(below), examples(40))):
            price = maker.kernel(row).best_split(inf)
            if price is not None and price.step_time_s < cutoff_s:
                assert row.bound_s <= price.step_time_s


def test_a_step_loses_by_its_nodes_what_the_part_of_smaller_domains_loses() -> None:
    """In NVLink domains twice as large a part loses half of what it did on four."""
    kernel = KernelMaker(asked(3)).kernel(promising_rows(asked(3), inf, lambda: None)[0])
    split = kernel.best_split(inf)
    assert split is not None
    for wide in range(len(kernel.segments)):
        segments = list(kernel.segments)
        placed = segments[wide].part
        cluster = placed.workload.cluster
        domain = 2 * max(cluster.nvlink_domain, cluster.gpus_per_node)
        cluster = cluster.model_copy(update={"nvlink_domain": domain})
        own = replace(placed, workload=replace(placed.workload, cluster=cluster))
        segments[wide] = replace(segments[wide], part=own)
        parts = mixed_step(segments, split.stages).parts
        assert parts["scale"] / sum(parts.values()) == pytest.approx(0.014 / 1.014)


BEHIND = ("dp_comm", "optimizer", "step_overhead")
"""Parts of a step that follow the pipeline."""


@pytest.mark.parametrize(
    ("asked_for", "seed"),
    [
        (asked, 8),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((asked, 4), (asked_leading, 7))),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in ((asked, 5), (asked_leading, 8))),
    ],
)
def test_what_follows_the_pipeline_is_never_below_its_bound(
    asked_for: Callable[[int], MixedRequest], seed: int
) -> None:
    """Nor where a price to beat says how many layers ranks have time for: that of the row itself."""
    request = asked_for(seed)
    maker, rows = KernelMaker(request), promising_rows(request, inf, lambda: None)
    shares = []
    for row in random.Random(seed).sample(rows, 10):
        kernel = maker.kernel(row)
        split = kernel.best_split(inf)
        if split is None:
            continue
        parts = mixed_step(kernel.segments, split.stages).parts
        rest_s = sum(float(np.asarray(parts[name])) for name in BEHIND)
        below = promising_rows(request, split.step_time_s * (1 + 1e-6), lambda: None)
        same = [each for each in below if kernel_key(each) == kernel_key(row)]
        assert same
        shares += [each.rest_s / rest_s for each in (row, *same)]
    assert max(shares) <= 1.0
    # Where none is near, one that is too high is not noticed.
    assert max(shares) > 0.9


def kernel_key(row: PromisingRow) -> tuple[object, ...]:
    return row.execution, row.layout, row.composition


@pytest.mark.soak
@pytest.mark.parametrize("asked_for", [asked, asked_leading, asked_other])
@pytest.mark.parametrize("seed", some(range(4, CASES)))
def test_bounds_are_never_above_prices_in_any_case(
    seed: int, asked_for: Callable[[int], MixedRequest]
) -> None:
    test_bounds_are_never_above_prices(asked_for, seed)


def test_leading_layers_lie_on_the_first_ranks_in_every_way() -> None:
    assert leading_patterns(0, 4) == ((),)
    assert leading_patterns(1, 4) == ((1,),)
    assert set(leading_patterns(3, 8)) == {(3,), (1, 2), (2, 1), (1, 1, 1)}
    assert set(leading_patterns(3, 2)) == {(3,), (1, 2), (2, 1)}
    assert len(leading_patterns(6, 64)) == 2**5


USUAL = {
    "deepseek-v3": "dgx-h100",
    "kimi-k2": "dgx-b200",
    "mixtral-8x7b": "dgx-a100",
    "llama-3-8b": "dgx-h100",
}
TIERS = {
    "deepseek-v3": pytest.mark.slow,
    "kimi-k2": pytest.mark.soak,
    "mixtral-8x7b": pytest.mark.soak,
}


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        pytest.param(
            name, cluster, marks=TIERS.get(name, ()) if cluster == usual else pytest.mark.soak
        )
        for name, usual in USUAL.items()
        for cluster in ("dgx-h100", "dgx-a100", "dgx-b200")
    ],
)
def test_recomputing_makes_no_layer_shorter(name: str, cluster: str) -> None:
    """What dropping degrees before they are expanded rests on, under all executions."""
    request = read_request(
        model=name, cluster=cluster, gpus=64, global_batch=256, seq_len=4096, framework="megatron"
    )
    looked_at = 0
    for execution in request.execution_options.executions():
        space = space_of(request, execution)
        degrees = space.degrees(request.gpus, on_block=lambda: None)
        count = degrees.broadcast_shape()[0]
        if not count or not space.offloads or not space.recompute:
            continue
        looked_at += 1
        some = degrees.take(np.arange(0, count, max(1, count // 64)))
        workload = request.workload(execution)
        bounds = RowBounds([workload, workload], some, inf, is_pipeline_alone=True)
        plain = bounds.seconds_at_best(np.full((2, some.broadcast_shape()[0]), 64.0))
        variants = space.variants(some)
        each = variants.broadcast_shape()[0] // some.broadcast_shape()[0]
        grown = RowBounds([workload, workload], variants, inf, is_pipeline_alone=True)
        seconds = grown.seconds_at_best(np.full((2, variants.broadcast_shape()[0]), 64.0))
        assert np.all(np.repeat(plain, each) <= seconds * (1 + 1e-9))
    assert looked_at


def test_the_ends_may_lie_on_other_parts_than_the_layers() -> None:
    """The bound took both ends on one part, so that a price could lie below it by what they differ in."""
    request = asked_leading(0)
    layouts = Layout(
        tp=np.array([1]), pp=np.array([2]), dp=np.array([2]), num_micro_batches=np.array([4])
    )
    first = request.parts[0].workload()
    device = first.cluster.device
    other = device.model_copy(
        update={"name": "other", "hbm_gb_per_s": 3 * device.hbm_gb_per_s, "peak_bf16_tflops": 100.0}
    )
    second = replace(first, cluster=first.cluster.model_copy(update={"device": other}))
    bounds = RowBounds([first, second], layouts, inf, is_pipeline_alone=True)
    times = [shared_times(packed_context(each, layouts)) for each in (first, second)]
    embedding_s = [float(np.asarray(t.embedding.seconds)[0]) for t in times if t is not None]
    head_s = [float(np.asarray(t.head.seconds)[0]) for t in times if t is not None]
    assert embedding_s[1] < embedding_s[0]
    assert head_s[0] < head_s[1]
    split_s = float(bounds.least_ends_s[0])
    assert split_s <= embedding_s[1] + head_s[0] + 2e-12 + _leading_s(times)


def _leading_s(times: list[KindTimes | None]) -> float:
    """Of all leading layers, on the part that is fastest at them."""
    own = [float(np.asarray(t.dense.seconds)[0]) for t in times if t is not None and t.dense]
    moe = asked_leading(0).first.model.moe
    assert moe is not None
    return min(own) * moe.dense_layers


def test_a_part_of_one_node_is_left_over_its_nic() -> None:
    """It was priced over NVLink, and its bound over the NIC, where each part had ranks on one node alone."""
    request = read_request(
        model="llama-3-8b", cluster="dgx-h100", gpus=16, global_batch=64, seq_len=4096
    )
    layout = Layout(tp=8, pp=2, num_micro_batches=64, sequence_parallel=True, zero_stage=1)
    workload = request.workload().on(8)
    seconds = [
        float(
            boundary_s(PlacedPart(workload=workload, layout=layout, ranks=1, part_gpus=g).crossing)
        )
        for g in (None, 8, 16)
    ]
    assert seconds[0] == seconds[1] == seconds[2]
    payload_bytes = 2 * 4096 * 4096 / 8
    assert seconds[0] > payload_bytes / (400e9 / 8)


def test_offloading_more_makes_no_step_shorter() -> None:
    """What `offloading.py` rests on, for every device and precision of moments."""
    layout = Layout(tp=2, pp=2, dp=4, num_micro_batches=16, sequence_parallel=True, zero_stage=1)
    for cluster in ("dgx-v100", "dgx-a100", "dgx-h100", "dgx-b200", "l40s-pcie", "mi300x"):
        precision = "fp16" if cluster == "dgx-v100" else "bf16"
        request = read_request(
            model="llama-3-8b",
            cluster=cluster,
            gpus=16,
            global_batch=64,
            seq_len=4096,
            precision=precision,
        )
        seconds = []
        for share in (0, 25, 50, 75, 100):
            own = replace(layout, optimizer_offload=share)
            placed = PlacedPart(workload=request.workload().on(8), layout=own, ranks=1)
            halves = [Segment(part=placed, first=0), Segment(part=placed, first=1)]
            seconds.append(float(np.asarray(mixed_step(halves, ((16,), (16,))).seconds)))
        assert seconds == sorted(seconds)


def test_hosts_hold_what_the_fullest_rank_of_each_part_offloads() -> None:
    """On every GPU of a node; of what the hosts of one part lack the other part's say nothing."""
    layout = Layout(tp=4, pp=4, dp=2, num_micro_batches=32, zero_stage=1, optimizer_offload=100)
    whole = tight(80.0).first.workload()
    stages = ((4,), (9,), (10,), (9,))
    by_rank = offloaded_states_gib(whole, layout, stages)
    fullest = [8 * max(by_rank[:2]), 8 * max(by_rank[2:])]
    assert fullest[0] < 0.95 * fullest[1]
    parts = []
    for room_gib in (None, 0.75 * fullest[1]):
        cluster = whole.cluster.model_copy(update={"host_memory_gib": room_gib})
        on_part = replace(whole, cluster=cluster).on(16)
        parts.append(PlacedPart(workload=on_part, layout=layout, ranks=2))
    segments = [Segment(part=parts[0], first=0), Segment(part=parts[1], first=2)]
    assert host_memory_gib(segments, stages) == pytest.approx(fullest[1])
    assert hosts_short_gib(segments, stages) == pytest.approx([0.0, 0.25 * fullest[1]])
    turned = [Segment(part=parts[1], first=0), Segment(part=parts[0], first=2)]
    short_gib = max(fullest[0] - 0.75 * fullest[1], 0.0)
    assert hosts_short_gib(turned, stages) == pytest.approx([short_gib, 0.0])


@pytest.mark.slow
def test_offload_brings_a_pipeline_where_memory_is_short() -> None:
    """One node each: 70B fits together only with the optimizer on the host."""
    parts = tuple(PartSpec(cluster=load_cluster(name), gpus=8) for name in ("dgx-h100", "dgx-a100"))
    asked_for: dict[str, Any] = {
        "model": "llama-3-70b",
        "cluster": MixedClusterSpec(parts=parts),
        "global_batch": 64,
        "seq_len": 8192,
        "pin": "tp=4,pp=4,cp=1,micro_batch=1,zero_stage=1",
        "without": WITHOUT,
    }
    kernel = best_of(read_mixed_request(**asked_for))
    assert int(kernel.layout.optimizer_offload) > 0
    without = MixedSearch(read_mixed_request(**asked_for, forbid="optimizer-offload"), inf).run()
    assert without.status == "infeasible"


def tight_on_hosts(host_memory_gib: float | None) -> MixedRequest:
    """All of the optimizer on hosts, those of the slower part with so much memory."""
    first, other = (
        replace(part, pins={**part.pins, "optimizer_offload": 100}) for part in tight(80.0).parts
    )
    cluster = other.cluster.model_copy(update={"host_memory_gib": host_memory_gib})
    spec = MixedClusterSpec(
        parts=(PartSpec(cluster=first.cluster, gpus=16), PartSpec(cluster=cluster, gpus=16))
    )
    return MixedRequest(cluster=spec, parts=(first, replace(other, cluster=cluster)))


def test_less_memory_of_hosts_moves_layers_to_the_other_part() -> None:
    """Of layers on a rank, those on the host count: the fewer its hosts hold, the fewer it has."""
    free, short = best_of(tight_on_hosts(None)), best_of(tight_on_hosts(20.0))
    assert free.price is not None
    assert short.price is not None
    own = next(each for each in short.segments if each.part.workload.cluster.host_memory_gib)
    stages = short.price.stages
    states_gib = offloaded_states_gib(own.part.workload, short.price.layout, stages)[own.own]
    assert 10.0 < 8 * max(states_gib) <= 20.0
    assert layers_on(short, 1) < layers_on(free, 1)
    assert short.price_s > free.price_s
    assert MixedSearch(tight_on_hosts(5.0), inf).run().status == "infeasible"


@pytest.mark.soak
@pytest.mark.parametrize("seed", [22, 2])
def test_hosts_with_little_memory_are_kept_to(seed: int) -> None:
    compare(seed, asked_on_hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", some(range(CASES), first=4))
def test_hosts_with_little_memory_are_always_kept_to(seed: int) -> None:
    compare(seed, asked_on_hosts)


def test_layouts_that_offload_without_need_are_left_out() -> None:
    """With room for all layers everywhere, only nothing offloaded is looked at."""
    rows = promising_rows(tight(80.0), inf, lambda: None)
    assert rows
    assert {int(row.layout.optimizer_offload) for row in rows} == {0}
    rows = promising_rows(tight(11.0), inf, lambda: None)
    assert {int(row.layout.optimizer_offload) for row in rows} > {0}


def test_a_slow_link_between_parts_costs() -> None:
    request = tight(80.0)
    slow = replace(
        request, cluster=request.cluster.model_copy(update={"between_gbps_per_gpu": 10.0})
    )
    fast_s, slow_s = best_of_tight(80.0).price, best_of(slow).price
    assert fast_s is not None
    assert slow_s is not None
    assert slow_s.step_time_s > fast_s.step_time_s


def test_the_same_seed_gives_the_same_plan() -> None:
    first, second = best_of_tight(80.0), best_of(tight(80.0))
    assert (first.price, first.composition) == (second.price, second.composition)
