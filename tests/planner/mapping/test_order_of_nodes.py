"""Nodes with unequal free GPUs: their order in the list decides nothing, and free links never cost time."""

from __future__ import annotations

from functools import cache
from itertools import permutations

import pytest

from meshwright.cluster_specs.allocation import expand_nodes, first_gpus, is_irregular
from meshwright.cluster_specs.reader import read_cluster
from meshwright.cluster_specs.schema import BlockSpec, ClusterSpec, FabricLevelSpec, NodeSpec
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.plan.make_plan import make_plan
from meshwright.planner.request.plan_request import PlanRequest
from tests.soaked import some

PART_FILLED = [("a", "leaf-0", 2), ("b", "leaf-0", 8), ("c", "leaf-1", 2), ("d", "leaf-1", 8)]


def cluster(nodes: list[tuple[str, str, int]], blocks: tuple[BlockSpec, ...] = ()) -> ClusterSpec:
    """Nodes of 8, each (name, leaf, free GPUs), under leaves of 64 with a core oversubscribed 3 to 1."""
    return read_cluster("dgx-h100").model_copy(
        update={
            "name": "part-filled",
            "elastic": False,
            "levels": (
                FabricLevelSpec(name="leaf", gpus=64),
                FabricLevelSpec(name="core", gpus=512, oversubscription=3),
            ),
            "nodes": tuple(
                NodeSpec(name=name, leaf=leaf, pod="pod", free_gpus=free)
                for name, leaf, free in nodes
            ),
            "blocks": blocks,
            "gpus": sum(free for _, _, free in nodes),
        }
    )


def step_time_s(listed: ClusterSpec, gpus: int) -> float:
    """Of the plan for a small model."""
    model = ModelSpec(layers=4, hidden=2048, ffn_hidden=8192, heads=16, kv_heads=16, vocab=32000)
    plan = make_plan(
        PlanRequest(
            model=model,
            cluster=listed,
            gpus=gpus,
            global_batch=16,
            seq_len=2048,
            pins={"recompute": "none", "zero_stage": 1, "cp": 1, "micro_batch": 1},
        ),
        robustness=False,
        choices=False,
    )
    assert plan.objective is not None
    assert plan.objective.lower_bound_s is not None
    assert plan.objective.step_time_s is not None
    return plan.objective.step_time_s


@cache
def part_filled_s(gpus: int) -> float:
    return step_time_s(cluster(PART_FILLED), gpus)


@pytest.mark.parametrize(
    "gpus",
    [
        pytest.param(8, marks=pytest.mark.slow),
        *(pytest.param(gpus, marks=pytest.mark.soak) for gpus in some((20, 16))),
    ],
)
def test_the_order_of_nodes_decides_nothing(gpus: int) -> None:
    turned = step_time_s(cluster(PART_FILLED[::-1]), gpus)
    assert turned == pytest.approx(part_filled_s(gpus), rel=1e-12)


@pytest.mark.soak
@pytest.mark.parametrize("order", some(permutations(PART_FILLED)))
def test_no_order_of_nodes_decides_anything(order: tuple[tuple[str, str, int], ...]) -> None:
    found_s = step_time_s(cluster(list(order)), 8)
    assert found_s == pytest.approx(part_filled_s(8), rel=1e-12)


@pytest.mark.soak
def test_a_part_filled_node_does_not_split_the_others() -> None:
    whole = [node for node in PART_FILLED if node[2] == 8]
    assert part_filled_s(20) <= step_time_s(cluster(whole), 16) * (1 + 1e-9)


@pytest.mark.soak
def test_background_traffic_makes_no_plan_faster() -> None:
    busy = (BlockSpec(leaf="leaf-0", pod="pod", background=0.3),)
    assert part_filled_s(20) <= step_time_s(cluster(PART_FILLED, busy), 20) * (1 + 1e-9)


def test_unequal_nodes_of_one_leaf_are_irregular() -> None:
    one_leaf = [("a", "leaf", 8), ("b", "leaf", 8), ("c", "leaf", 2)]
    assert is_irregular(cluster(one_leaf))
    assert not is_irregular(cluster(one_leaf[:2]))


def test_an_allocation_takes_the_fullest_nodes() -> None:
    listed = cluster(PART_FILLED)
    assert expand_nodes(listed, 16) == [("b", 8), ("d", 8)]
    assert [node.free_gpus for node in first_gpus(listed, 16).nodes] == [0, 8, 0, 8]
    assert expand_nodes(listed, 18) == [("a", 2), ("b", 8), ("d", 8)]


@pytest.mark.parametrize(
    ("nodes", "gpus"),
    [
        ([("a", None, 8), ("b", "leaf", 0)], 4),
        ([("a", "leaf", 0), ("b", None, 8), ("c", "leaf", 4)], 8),
        ([("a", None, 8), ("b", "leaf", 8), ("c", None, 8), ("d", None, 2)], 26),
        ([("a", "leaf", 7), ("b", None, 6), ("c", "leaf", 2), ("d", None, 8)], 23),
    ],
)
def test_lists_of_which_only_some_nodes_name_a_leaf_are_planned(
    nodes: list[tuple[str, str | None, int]], gpus: int
) -> None:
    """As a list that gives each of the others a leaf of its own; plans check themselves by their ranks."""

    def planned_s(lists: list[NodeSpec]) -> float:
        fields = cluster(PART_FILLED).model_dump() | {
            "nodes": [node.model_dump() for node in lists],
            "gpus": sum(free for *_, free in nodes),
        }
        return step_time_s(ClusterSpec.model_validate(fields), gpus)

    in_part = [NodeSpec(name=name, leaf=leaf, free_gpus=free) for name, leaf, free in nodes]
    every = [node.model_copy(update={"leaf": node.leaf or f"of-{node.name}"}) for node in in_part]
    assert planned_s(in_part) == pytest.approx(planned_s(every))
