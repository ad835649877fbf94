"""Shard groups on irregular allocations: members counted rank by rank, and plans against enumeration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from meshwright.cluster_specs.allocation import fabric_levels
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.layout import Layout, Placement
from meshwright.costmodel.states import optimizer_shards
from meshwright.costmodel.workload import Workload
from meshwright.errors import InfeasibleError
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.bounds.layer_split import balanced_stages
from meshwright.planner.mapping.effective import placement_of
from meshwright.planner.mapping.joint import choice_instance
from meshwright.planner.mapping.pricing import MappedPricing
from meshwright.planner.mapping.slots import Instance, instance_of, ranks_of
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.plan.verify import faults
from meshwright.planner.request.plan_request import PlanRequest
from tests.planner.mapping.irregular import (
    assignments,
    has_parts_of_nodes,
    legal_layouts,
    priced_under,
    random_cluster,
)
from tests.soaked import some

NODE = 8


def grouped_request(seed: int) -> PlanRequest:
    """FSDP2 on slow networks, or Megatron with tp inside a node, dense or with experts."""
    rng = np.random.default_rng(1000 + seed)
    kind = ("fsdp2", "dense", "experts")[seed % 3]
    halves = kind == "dense" and bool(rng.random() < 0.3)
    cluster = random_cluster(rng, most_nodes=4 if halves or kind != "fsdp2" else 6, halves=halves)
    pins: dict[str, int | str] = {"micro_batch": 1, "recompute": "none", "cp": 1}
    model, framework = "llama-3-8b", "megatron"
    if kind == "fsdp2":
        framework = "fsdp2"
        pins |= {"tp": 1, "cp": int(rng.choice([1, 2])), "zero_stage": int(rng.choice([2, 3]))}
    else:
        pins |= {
            "vpp": 1,
            "zero_stage": 1,
            "tp": int(rng.choice([2, 4])),
            "pp": int(rng.choice([1, 2])),
        }
    if kind == "experts":
        model = "olmoe-1b-7b"
        pins |= {"ep": int(rng.choice([2, 4, 8])), "etp": 1}
    return PlanRequest(
        model=load_catalog_model(model),
        cluster=cluster,
        gpus=cluster.gpus,
        framework=framework,
        global_batch=int(rng.choice([48, 96, 192])),
        seq_len=2048,
        pins=pins,
        forbids=("optimizer-offload",),
        without=("deepep", "hybridep", "ep-overlap", "cuda-graph", "cp-a2a"),
    )


def leaf_and_pod(cluster: ClusterSpec, instance: Instance, assignment: np.ndarray) -> np.ndarray:
    """The leaf and the pod of every rank, [2, ranks]."""
    nodes = [cluster.nodes[node] for node, _ in ranks_of(instance, assignment)]
    leaves = [(node.pod or "", node.leaf or "") for node in nodes]
    pods = [(node.pod or "", "") for node in nodes]
    return np.array([[sorted(set(own)).index(name) for name in own] for own in (leaves, pods)])


def shard_groups_of(layout: Layout, where: np.ndarray, experts: bool) -> tuple[np.ndarray, ...]:
    """The blocks of each shard group, and of each set of ranks with the same shard, [groups, members]."""
    tp, cp, dp, pp = (int(getattr(layout, axis)) for axis in ("tp", "cp", "dp", "pp"))
    number, of_expert = int(layout.shard_groups), int(layout.etp) * int(layout.ep)
    rings = (
        where.reshape(pp, -1, of_expert).transpose(0, 2, 1)
        if experts
        else where.reshape(pp, dp * cp, tp).transpose(0, 2, 1)
    ).reshape(-1, tp * cp * dp // of_expert if experts else dp * cp)
    size = rings.shape[1] // number
    same = [ring[place::size] for ring in rings for place in range(size)]
    return rings.reshape(-1, size), np.array(same)


def members_of(groups: np.ndarray) -> int:
    """Of a ring in the block that paces it: GPUs in use there over the rings that leave it."""
    size = int(groups.shape[1])
    least = size
    for block in set(groups.ravel().tolist()):
        held = np.sum(groups == block, axis=1)
        cut = int(np.sum((held > 0) & (held < size)))
        if cut:
            least = min(least, max(1, int(held.sum()) // cut), size - 1)
    return max(least, 1)


def has_whole_groups(layout: Layout, slot_gpus: int, leaves: np.ndarray) -> bool:
    """Whether every shard group lies in a slot, or fills whole nodes of one leaf."""
    if int(layout.shard_groups) == 1:
        return True
    size = int(layout.tp) * int(layout.cp) * int(layout.dp) // int(layout.shard_groups)
    in_slot, in_nodes = slot_gpus % size == 0, slot_gpus == NODE and size % NODE == 0
    dense = leaves.reshape(int(layout.pp) * int(layout.shard_groups), -1)
    return (in_slot or in_nodes) and bool(np.all(dense == dense[:, :1]))


def plain_instance(pricing: MappedPricing, layout: Layout) -> Instance | None:
    work = pricing.workload.on(int(layout.gpus))
    stages = balanced_stages(work.model.layers, int(layout.pp), 1)
    try:
        return None if stages is None else instance_of(work, layout, stages)
    except InfeasibleError:
        return None


def placements(pricing: MappedPricing, layout: Layout) -> Iterator[tuple[Placement, np.ndarray]]:
    """Where groups lie under every assignment that does not cut a shard group, and the ranks' blocks."""
    instance = plain_instance(pricing, layout)
    if instance is None:
        return
    work = pricing.workload.on(int(layout.gpus))
    for assignment in assignments(instance.problem):
        blocks = leaf_and_pod(work.cluster, instance, assignment)
        if has_whole_groups(layout, instance.slots.gpus, blocks[0]):
            yield placement_of(work, instance, assignment), blocks


def least_of_all_s(request: PlanRequest, groups: bool = True) -> float:
    tables, best = legal_layouts(request), inf
    for layout in tables.layouts():
        if int(layout.shard_groups) > 1 and not groups:
            continue
        found: dict[bytes, Placement] = {}
        for placement, _ in placements(tables.pricing, layout):
            key = b"".join(np.asarray(m).tobytes() for m in vars(placement).values())
            found.setdefault(key, placement)
        prices = (priced_under(tables.pricing, layout, one) for one in found.values())
        best = min(best, min(prices, default=inf))
    return best


@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5)),
        *(pytest.param(n, marks=pytest.mark.soak) for n in some((*range(6, 90), 1, 3, 4))),
    ],
)
def test_the_plan_is_the_least_of_all_layouts_and_whole_groups(seed: int) -> None:
    request = grouped_request(seed)
    least, found = least_of_all_s(request), fastest_plan(request, explained=False)
    if least == inf:
        assert found.status == "infeasible"
        return
    assert list(faults(request, found)) == []
    price_s, bound_s = found.objective.step_time_s, found.objective.lower_bound_s
    if has_parts_of_nodes(request):
        # Slots that are parts of nodes are some of the mappings that are looked at.
        assert price_s is not None
        assert bound_s is not None
        assert bound_s <= price_s <= least * (1 + 1e-9)
        return
    assert found.status == "optimal"
    assert price_s == pytest.approx(least, rel=1e-9)


@pytest.mark.slow
def test_several_groups_are_the_fastest_somewhere() -> None:
    faster = [
        least_of_all_s(request) < 0.99 * least_of_all_s(request, groups=False)
        for request in map(grouped_request, (12, 21))
    ]
    assert any(faster)


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 6))]
)
def test_members_of_a_block_say_what_a_shard_group_has_there(seed: int) -> None:
    """min(m, s) of a group and m // s of those with the same shard, in leaves and pods."""
    tables = legal_layouts(grouped_request(seed))
    names = {"leaf": 0, "pod": 1}
    compared = 0
    for layout in tables.layouts():
        if int(layout.shard_groups) == 1 or int(layout.zero_stage) > 2:
            continue
        work = tables.pricing.workload.on(int(layout.gpus))
        for placement, blocks in list(placements(tables.pricing, layout))[::7]:
            for depth, level in enumerate(levels_of(work)):
                if level not in names or depth == len(levels_of(work)) - 1:
                    continue
                kinds = [(placement.dp_cp, optimizer_shards(layout)[0], False)]
                if work.model.moe is not None:
                    kinds.append((placement.edp, optimizer_shards(layout)[1], True))
                for members, size, experts in kinds:
                    inner, outer = shard_groups_of(layout, blocks[names[level]], experts)
                    m, s = int(members[depth]), int(size)
                    assert min(m, s) == members_of(inner), (layout, blocks)
                    assert max(m // s, 1) == members_of(outer), (layout, blocks)
                    compared += 1
    assert compared


def levels_of(work: Workload) -> tuple[str, ...]:
    return fabric_levels(work.cluster, work.gpus).names


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 6))]
)
def test_slots_of_several_nodes_lie_like_their_nodes(seed: int) -> None:
    """The same ranks read by slots of one node have the same placement."""
    tables = legal_layouts(grouped_request(seed))
    rng = np.random.default_rng(seed)
    for layout in tables.layouts():
        plain, wide = plain_instance(tables.pricing, layout), tables.pricing.instance(layout)
        if plain is None or wide is None:
            continue
        joined = wide.slots.gpus // plain.slots.gpus
        every = list(assignments(wide.problem))
        work = tables.pricing.workload.on(int(layout.gpus))
        for at in rng.choice(len(every), min(len(every), 3), replace=False).tolist():
            leaves = {
                cluster_leaf: index for index, cluster_leaf in enumerate(plain.slots.leaf_names)
            }
            moved = np.array([leaves[name] for name in wide.slots.leaf_names])
            nodes = np.repeat(moved[every[at]], joined, axis=1)
            first, second = (
                placement_of(work, instance, assignment)
                for instance, assignment in ((wide, every[at]), (plain, nodes))
            )
            assert ranks_of(wide, every[at]) == ranks_of(plain, nodes) or joined > 1
            for name, members in vars(first).items():
                assert np.array_equal(members, getattr(second, name)), (layout, name)


def test_a_group_that_fits_no_leaf_is_refused() -> None:
    request = grouped_request(0)
    cluster = request.cluster
    nodes = tuple(
        node.model_copy(update={"leaf": f"l{at}"}) for at, node in enumerate(cluster.nodes)
    )
    alone = replace(request, cluster=cluster.model_copy(update={"nodes": nodes}))
    count = len(nodes) - len(nodes) % 2
    layout = Layout(dp=8 * count, zero_stage=2, shard_groups=count // 2)
    work = alone.workload().on(8 * count)
    with pytest.raises(InfeasibleError, match="shard groups"):
        choice_instance(work, layout, ((work.model.layers,),))
