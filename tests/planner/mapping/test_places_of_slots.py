"""What slots on leaves say of groups, against counting ranks one by one; nodes are whole slots."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.cluster_specs.schema import ClusterSpec, FabricLevelSpec, NodeSpec
from meshwright.costmodel.layout import GROUPS, Layout
from meshwright.errors import InfeasibleError
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.mapping.counted import counted_placement
from meshwright.planner.mapping.effective import placement_of
from meshwright.planner.mapping.joint import choice_instance
from meshwright.planner.mapping.profiles import profiles_of
from meshwright.planner.mapping.slots import inside_slot, ranks_of, slot_sizes
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.plan_request import PlanRequest


def on_leaves(leaves: list[int], per_node: int = 8) -> ClusterSpec:
    """Nodes by the leaves that they are on."""
    nodes = tuple(NodeSpec(name=f"n{at}", leaf=f"l{leaf}") for at, leaf in enumerate(leaves))
    sizes = (("leaf", 16, 1.0), ("core", 64, 4.0))
    return read_cluster("dgx-h100").model_copy(
        update={
            "nodes": nodes,
            "gpus": per_node * len(nodes),
            "gpus_per_node": per_node,
            "nvlink_domain": per_node,
            "levels": tuple(
                FabricLevelSpec(name=name, gpus=gpus, oversubscription=over)
                for name, gpus, over in sizes
            ),
        }
    )


def request_of(cluster: ClusterSpec, **pins: int | str) -> PlanRequest:
    """A model of 48 experts: their groups may have 3, 6, 12 ranks."""
    model = load_catalog_model("olmoe-1b-7b")
    assert model.moe is not None
    experts = model.moe.model_copy(update={"experts": 48})
    return PlanRequest(
        model=model.model_copy(update={"moe": experts}),
        cluster=cluster,
        gpus=cluster.gpus,
        global_batch=24,
        seq_len=2048,
        pins=pins,
        without=("deepep", "hybridep", "ep-overlap", "cuda-graph", "cp-a2a"),
    )


@pytest.mark.parametrize("seed", range(3))
def test_members_of_groups_are_those_of_the_ranks(seed: int) -> None:
    """Degrees of all kinds, 3 and 6 among them, on nodes of 4, 6 and 8 in any order of leaves."""
    chance, rng = random.Random(seed), np.random.default_rng(seed)
    workload = request_of(on_leaves([0, 1])).workload()
    compared = refused = 0
    while compared < 60:
        per_node = chance.choice([8, 8, 6, 4])
        cluster = on_leaves([chance.randrange(3) for _ in range(chance.randint(2, 6))], per_node)
        degrees: dict[str, Any] = {
            "tp": chance.choice([1, 2, 4, 8]),
            "cp": chance.choice([1, 1, 2, 4]),
        }
        degrees |= {"pp": chance.choice([1, 2, 3]), "dp": chance.choice([1, 2, 3, 4, 6, 12])}
        stage = degrees["tp"] * degrees["cp"] * degrees["dp"]
        if stage * degrees["pp"] > cluster.gpus or degrees["tp"] > per_node:
            continue
        etp = chance.choice([1, 1, degrees["tp"]])
        fitting = [ep for ep in range(1, stage // etp + 1) if stage % (ep * etp) == 0]
        layout = Layout(**degrees, etp=etp, ep=chance.choice(fitting))
        run = replace(workload, cluster=cluster, gpus=int(layout.gpus))
        try:
            instance = choice_instance(run, layout, ((5,),) * degrees["pp"])
        except InfeasibleError:
            refused += 1
            continue
        if instance.slots.gpus < per_node:
            continue  # such mappings are counted rank by rank
        problem = instance.problem
        free = np.repeat(np.arange(len(problem.leaf_slots)), problem.leaf_slots)
        assignment = rng.permutation(free)[: problem.needed].reshape(problem.stages, problem.slots)
        placement = placement_of(run, instance, assignment)
        counted = counted_placement(cluster, layout, ranks_of(instance, assignment))
        for group in GROUPS:
            if group not in ("pp", "dp"):  # the one is a mean, the other goes with context groups
                told, true = getattr(placement, group), getattr(counted, group)
                assert told.tolist() == true.tolist(), (group, layout, assignment)
        compared += 1
    assert refused


def test_slots_cut_no_expert_group_that_does_not_fill_them() -> None:
    """Twelve ranks on slots of eight are one and a half: nothing says where the half lies."""
    with pytest.raises(InfeasibleError, match="ep 12"):
        inside_slot(Layout(tp=8, dp=3, ep=12), 8)
    assert inside_slot(Layout(tp=8, dp=6, ep=24), 8).gpus == 8
    assert inside_slot(Layout(tp=2, dp=12, ep=4), 8).dp == 4


def test_a_plan_whose_expert_groups_fill_one_and_a_half_tensor_groups() -> None:
    """Groups of 6 ranks on slots of 4 were priced inside one slot, at less than half of the step."""
    plan = fastest_plan(request_of(on_leaves([0, 0, 1]), tp=4, pp=2, ep=6))
    assert plan.status == "optimal"
    assert plan.layout is not None
    assert (plan.layout.dp, plan.layout.ep) == (3, 6)


def test_tensor_groups_of_several_nodes_share_slots_with_expert_groups_beside_them() -> None:
    """Three tensor groups of two nodes hold four expert groups of six: all six nodes are one slot then."""
    cluster = on_leaves([0] * 7 + [1] * 5, per_node=4)
    assert slot_sizes(cluster, Layout(tp=8, dp=3, ep=6)) == [24]
    assert slot_sizes(cluster, Layout(tp=8, dp=4, ep=16)) == [8]
    assert slot_sizes(cluster, Layout(tp=8, dp=3)) == [8]


def test_pods_are_told_apart_where_leaves_are_nodes() -> None:
    """Four leaves of a node each in two pods: prices see no leaf, and a stage may have a pod to itself."""
    cluster = on_leaves([0, 3, 1, 2])
    pods = tuple(
        node.model_copy(update={"pod": f"p{at in (0, 3)}"}) for at, node in enumerate(cluster.nodes)
    )
    sizes = (("leaf", 16, 1.0), ("pod", 32, 2.0), ("core", 64, 4.0))
    levels = tuple(FabricLevelSpec(name=n, gpus=g, oversubscription=o) for n, g, o in sizes)
    cluster = cluster.model_copy(update={"nodes": pods, "levels": levels})
    run = request_of(cluster).workload()
    layout = Layout(tp=1, cp=2, pp=2, dp=8, ep=8)
    instance = choice_instance(run, layout, ((8,), (8,)))
    placement = placement_of(run, instance, np.array([[0, 3], [2, 1]]))
    profiles = profiles_of(run, instance)
    assert placement.dp_cp.tolist() == [8, 16, 16]
    assert np.any(np.all(profiles.placement.dp_cp >= placement.dp_cp, axis=1))
