"""The rank list of a plan against its price, by a counter of its own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from meshwright.cluster_specs.allocation import (
    allocated_places,
    allocation_of,
    fabric_levels,
    full_levels,
)
from meshwright.cluster_specs.reader import cluster_names, load_cluster
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.recount import blocks_left, recounted_placement
from meshwright.errors import InternalError
from meshwright.planner.audit import ListedRank, recount_faults
from meshwright.planner.bounds.mappings import ranks_on
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.plan.texts import setup_of, workload_of_plan
from meshwright.planner.plan.verify import verify
from meshwright.planner.report.prediction_view import more_blocks_text
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.run_terms import layout_from_document
from tests.scattered import scattered_cluster
from tests.soaked import some

Place = tuple[int, int]


def most_in_one_block(groups: Sequence[Sequence[int]], block_of: Sequence[int]) -> list[int]:
    """The most members that a group has in one block, group by group."""
    return [max(Counter(block_of[rank] for rank in group).values()) for group in groups]


def ranks_of_plan(plan: Plan) -> list[Place]:
    assert plan.mapping is not None
    if plan.mapping.ranks is not None:
        return list(plan.mapping.ranks)
    matrix = {axis: tuple(row) for axis, row in plan.mapping.matrix.items()}
    return ranks_on(plan.inputs.cluster, matrix)


def differences(plan: Plan) -> list[str]:
    """Axes of which the price assumes other members in a block than the rank list has."""
    assert plan.layout is not None
    layout = layout_from_document(plan.layout)
    workload = workload_of_plan(plan).on(int(layout.gpus))
    priced = setup_of(plan).placement
    counted = recounted_placement(workload.cluster, layout, ranks_of_plan(plan))
    axes = [axis for axis in vars(counted) if axis not in ("dp", "pp")]
    return [
        f"{axis}: priced {getattr(priced, axis).tolist()}, is {getattr(counted, axis).tolist()}"
        for axis in axes
        if not np.array_equal(getattr(priced, axis), getattr(counted, axis))
    ]


@pytest.mark.slow
def test_a_rack_gives_each_expert_group_64_of_its_72_gpus() -> None:
    """144 GPUs, expert groups of 64: one group a rack, and 8 GPUs of both racks idle."""
    asked = read_request(
        model="deepseek-v3",
        cluster="gb200-nvl72",
        gpus=144,
        global_batch=1024,
        seq_len=4096,
        pin="ep=64,tp=1,pp=2,micro_batch=1,schedule=1f1b",
    )
    plan = fastest_plan(asked)
    ranks = ranks_of_plan(plan)
    racks = [node // 18 for node, _ in ranks]
    groups = [range(first, first + 64) for first in range(0, len(ranks), 64)]
    assert most_in_one_block(groups, racks) == [64] * len(groups)
    assert Counter(racks) == {0: 64, 1: 64}
    assert plan.idle is not None
    assert plan.idle.nodes == ["node-00017", "node-00018", "node-00035", "node-00036"]
    assert differences(plan) == []


@pytest.mark.parametrize(
    ("cluster", "gpus", "nodes_of_a_block", "used_of_each"),
    [
        ("gb200-nvl72", 128, 18, [64, 64]),
        ("superpod-a100", 1000, 20, [160] * 6 + [40]),
        ("superpod-a100", 1024, 20, [160] * 6 + [64]),
        ("superpod-a100", 1024, 140, [1024]),
        ("superpod-h100", 1200, 32, [256] * 4 + [176]),
        ("gb200-nvl72", 100, 18, [60, 40]),
        ("llama3-24k", 4096, 384, [2048, 2048]),
        ("h100-leaf-3to1", 720, 32, [240, 240, 240]),
    ],
)
def test_parts_fill_blocks_and_neighbours_where_crossing_costs_nothing(
    cluster: str, gpus: int, nodes_of_a_block: int, used_of_each: list[int]
) -> None:
    places = allocated_places(load_cluster(cluster), gpus)
    held = Counter(node // nodes_of_a_block for node, _ in places)
    assert list(held.values()) == used_of_each
    assert len(set(places)) == gpus


def test_blocks_share_a_block_of_the_machine_only_where_it_has_too_few() -> None:
    """20,000 GPUs are 50 parts of 400, and there are 8 pods; 16,384 are 8 parts of 2,048."""
    cluster = load_cluster("llama3-24k")
    assert not allocation_of(cluster, 20_000).even
    assert allocation_of(cluster, 16_384).even
    assert len({node for node, _ in allocated_places(cluster, 20_000)}) == 2500


@pytest.mark.parametrize("cluster", cluster_names())
def test_no_level_of_the_cluster_file_is_left_unseen(cluster: str) -> None:
    """The level that a price takes for the whole allocation holds it; without an oversubscribed level the
    ranks are in the fewest blocks of each."""
    spec = load_cluster(cluster)
    per_node, rng = spec.gpus_per_node, random.Random(cluster)
    flat = all(level.oversubscription <= 1 for level in spec.levels)
    for _ in range(12):
        gpus = per_node * rng.randint(1, min(600, spec.gpus // per_node))
        ranks = allocated_places(spec, gpus)
        assert list(blocks_left(spec, ranks)) == [], (cluster, gpus)
        for level in spec.levels[:-1]:
            if flat and level.joined != "direct":
                touched = len({node * per_node // level.gpus for node, _ in ranks})
                assert touched == -(-gpus // level.gpus), (cluster, gpus, level.name)


def test_ranks_in_several_superpods_that_are_priced_in_one_fail_the_verification() -> None:
    asked = read_request(
        model="llama-2-7b",
        cluster="superpod-a100",
        gpus=320,
        global_batch=320,
        seq_len=2048,
        pin="tp=2,pp=1,cp=1,micro_batch=1,recompute=none",
    )
    plan = fastest_plan(asked)
    assert plan.mapping is not None
    assert plan.mapping.ranks is not None
    verify(asked, plan)
    # The second scalable unit of another SuperPOD: levels of the plan alone see no difference.
    apart = [(node + 140 if node >= 20 else node, gpu) for node, gpu in plan.mapping.ranks]
    workload = workload_of_plan(plan)
    layout = layout_from_document(plan.layout) if plan.layout is not None else Layout()
    counted = [
        recounted_placement(workload.cluster, layout, of) for of in (plan.mapping.ranks, apart)
    ]
    assert counted[0].dp.tolist() == counted[1].dp.tolist()
    assert list(blocks_left(workload.cluster, apart)) == [
        "the ranks are in 2 blocks of superpod, the price assumes that one holds them all"
    ]
    listed = [
        ListedRank(rank=rank, place=place, coordinates=coordinates(plan, rank))
        for rank, place in enumerate(apart)
    ]
    assert any("2 blocks of superpod" in fault for fault in recount_faults(plan, listed))


def coordinates(plan: Plan, rank: int) -> dict[str, int]:
    """The position of a rank on the dense axes, counted tp, cp, dp, pp."""
    assert plan.layout is not None
    at = {}
    for axis in ("tp", "cp", "dp", "pp"):
        rank, at[axis] = divmod(rank, int(getattr(plan.layout, axis)))
    return at


def test_rings_and_exchanges_worked_by_hand() -> None:
    """Nodes of 8 hold 8, 8 and 4 of 20 ranks; dp 10 of pairs: the last node has 2 members of each ring."""
    cluster = load_cluster("dgx-h100")
    layout = Layout(tp=2, dp=10)
    counted = recounted_placement(cluster, layout, allocated_places(cluster, 20))
    assert counted.tp.tolist() == [2, 2]
    assert counted.dp_cp.tolist() == [2, 10]
    # Experts in 2 groups of 10: the middle node has 2 of the first and 6 of the second group.
    layout = Layout(dp=20, ep=10)
    counted = recounted_placement(cluster, layout, allocated_places(cluster, 20))
    # Parts: 8 and 2 of the first group, 6 and 4 of the second; the 2 send 8/10 outside.
    assert counted.ep.tolist() == [2, 10]
    assert counted.edp.tolist() == [1, 2]


def test_a_rank_list_that_is_not_what_was_priced_is_an_internal_error() -> None:
    asked = read_request(
        model="llama-3-8b",
        cluster="dgx-h100",
        gpus=32,
        global_batch=64,
        seq_len=4096,
        pin="tp=2,pp=2,cp=1",
    )
    plan = fastest_plan(asked)
    assert plan.mapping is not None
    assert plan.mapping.ranks is not None
    pairs = [plan.mapping.ranks[first : first + 2] for first in range(0, 32, 2)]
    turned = [place for start in range(4) for pair in pairs[start::4] for place in pair]
    moved = plan.mapping.model_copy(update={"ranks": turned})
    verify(asked, plan)
    with pytest.raises(InternalError, match="by its rank list"):
        verify(asked, plan.model_copy(update={"mapping": moved}))


def fewest_in_one_block(groups: Sequence[Sequence[int]], block_of: Sequence[int]) -> int:
    """The fewest members of a group in a block that it touches."""
    return min(min(Counter(block_of[rank] for rank in group).values()) for group in groups)


def uneven_request(rng: random.Random) -> PlanRequest:
    """A catalog cluster and a number of its nodes that may divide no block of it."""
    cluster = rng.choice(cluster_names())
    spec = load_cluster(cluster)
    gpus = spec.gpus_per_node * rng.randint(2, min(60, spec.gpus // spec.gpus_per_node))
    replicas = gpus // spec.gpus_per_node
    return read_request(
        model=rng.choice(("llama-3-8b", "llama-2-7b", "qwen3-30b-a3b", "olmoe-1b-7b")),
        cluster=cluster,
        gpus=gpus,
        global_batch=replicas * rng.choice((8, 16, 24)),
        seq_len=2048,
        pin="micro_batch=1,vpp=1,cp=1",
        without="deepep,hybridep,ep-overlap,tp-overlap,cuda-graph,full-graph,cp-a2a",
    )


def held_against_ranks(plan: Plan) -> None:
    """The price's members against the rank list, and where blocks are even, against a count of its own."""
    if plan.layout is None:
        return
    assert differences(plan) == []
    layout = layout_from_document(plan.layout)
    workload = workload_of_plan(plan).on(int(layout.gpus))
    cluster = workload.cluster
    if cluster.nodes or not allocation_of(cluster, workload.gpus).even:
        return
    priced = setup_of(plan).placement
    ranks = ranks_of_plan(plan)
    tp, dp = int(layout.tp), int(layout.dp) * int(layout.cp)
    stages = [range(first, first + tp * dp) for first in range(0, len(ranks), tp * dp)]
    rings = [stage[part::tp] for stage in stages for part in range(tp)]
    full = full_levels(cluster)
    for depth, name in enumerate(fabric_levels(cluster, len(ranks)).names[:-1]):
        size = int(full.blocks[full.names.index(name)])
        block_of = [(node * cluster.gpus_per_node + gpu) // size for node, gpu in ranks]
        assert fewest_in_one_block(rings, block_of) == int(priced.dp_cp[depth]), name


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_ranks_are_where_their_price_says(seed: int) -> None:
    held_against_ranks(fastest_plan(uneven_request(random.Random(seed))))


@pytest.mark.soak
@pytest.mark.parametrize("seed", some([*range(4, 203), 3]))
def test_ranks_are_where_their_price_says_on_any_size(seed: int) -> None:
    held_against_ranks(fastest_plan(uneven_request(random.Random(seed))))


@pytest.mark.soak
@pytest.mark.parametrize("seed", some([*range(1, 30), 0]))
def test_ranks_are_where_their_price_says_on_scattered_nodes(seed: int) -> None:
    rng = random.Random(seed)
    cluster = scattered_cluster(rng, leaves=rng.choice((3, 5)), per_leaf=4)
    request = read_request(
        model=rng.choice(("llama-3-8b", "olmoe-1b-7b")),
        cluster=cluster,
        gpus=cluster.gpus,
        global_batch=cluster.gpus * 2,
        seq_len=2048,
        pin="micro_batch=1,vpp=1,cp=1",
    )
    held_against_ranks(fastest_plan(request))


@pytest.mark.parametrize(
    ("cluster", "gpus", "more"),
    [
        ("gb200-nvl72", 1024, {"nvlink": (16, 15)}),
        ("h100-leaf-3to1", 640, {"leaf": (4, 3)}),
        ("superpod-a100", 1024, {}),
    ],
)
def test_a_plan_says_what_more_blocks_than_needed_bring(
    cluster: str, gpus: int, more: dict[str, tuple[int, int]]
) -> None:
    asked = read_request(
        model="llama-2-7b",
        cluster=cluster,
        gpus=gpus,
        global_batch=gpus,
        seq_len=2048,
        pin="tp=2,pp=1,cp=1,micro_batch=1,recompute=none",
    )
    plan = fastest_plan(asked)
    assert plan.mapping is not None
    assert plan.predicted is not None
    said = plan.mapping.more_blocks
    if not more:
        assert said is None
        return
    assert said is not None
    assert {name: (said.used[name], said.fewest[name]) for name in said.used} == more
    assert said.step_time_s_on_fewest >= plan.predicted.step_time_s * (1 - 1e-9)
    assert "more blocks than needed" in more_blocks_text(said, plan.predicted.step_time_s)
