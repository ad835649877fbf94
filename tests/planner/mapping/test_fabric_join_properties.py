"""Plans on irregular allocations: what must not change the optimum, and what must not worsen it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.plan_request import PlanRequest
from tests.planner.mapping.irregular import random_request
from tests.soaked import some

SEEDS = [
    2,
    pytest.param(23, marks=pytest.mark.slow),
    *(
        pytest.param(seed, marks=pytest.mark.soak)
        for seed in some((*range(8, 23), *range(24, 40), 0, 1, 7))
    ),
]


def least_s(request: PlanRequest, *, proven: bool = True) -> float:
    found: Plan = fastest_plan(request, explained=False)
    assert found.status in ("optimal", "infeasible") or not proven
    return float("inf") if found.objective.step_time_s is None else found.objective.step_time_s


def on(request: PlanRequest, cluster: ClusterSpec) -> PlanRequest:
    return replace(request, cluster=cluster, gpus=cluster.gpus)


@pytest.mark.parametrize("seed", SEEDS)
def test_relabelling_nodes_of_equal_position_changes_no_cost(seed: int) -> None:
    """Nodes change places in the list and on their leaves, and leaves and pods their names."""
    request = random_request(seed)
    rng, cluster = np.random.default_rng(seed), request.cluster
    names = rng.permutation([node.name for node in cluster.nodes]).tolist()
    leaves = sorted({node.leaf or "" for node in cluster.nodes})
    called = dict(zip(leaves, rng.permutation(leaves).tolist(), strict=True))
    nodes = [
        node.model_copy(
            update={"name": name, "leaf": called[node.leaf or ""], "pod": f"x{node.pod}"}
        )
        for node, name in zip(cluster.nodes, names, strict=True)
    ]
    shuffled = [nodes[at] for at in rng.permutation(len(nodes))]
    other = cluster.model_copy(update={"nodes": tuple(shuffled)})
    assert least_s(on(request, other)) == pytest.approx(least_s(request), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_more_bandwidth_never_worsens_the_optimum(seed: int) -> None:
    request = random_request(seed)
    cluster, base_s = request.cluster, least_s(request)
    faster = cluster.model_copy(update={"nic_gbps_per_gpu": 2 * cluster.nic_gbps_per_gpu})
    assert least_s(on(request, faster)) <= base_s * (1 + 1e-12)
    for at, level in enumerate(cluster.levels):
        eased = level.model_copy(update={"oversubscription": max(1.0, level.oversubscription / 2)})
        levels = (*cluster.levels[:at], eased, *cluster.levels[at + 1 :])
        assert least_s(on(request, cluster.model_copy(update={"levels": levels}))) <= base_s * (
            1 + 1e-12
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_another_node_never_worsens_the_optimum(seed: int) -> None:
    """Among whole nodes: beside parts of nodes one more whole node can mean larger slots, another space."""
    request = random_request(seed)
    nodes = tuple(node.model_copy(update={"free_gpus": None}) for node in request.cluster.nodes)
    cluster = request.cluster.model_copy(update={"nodes": nodes, "gpus": 8 * len(nodes)})
    more = (*nodes, nodes[0].model_copy(update={"name": "one-more"}))
    larger = cluster.model_copy(update={"nodes": more, "gpus": 8 * len(more)})
    # On fewer GPUs than there are, a plan may leave any of them idle, which few bounds close.
    more_s = least_s(on(request, larger), proven=False)
    assert more_s <= least_s(on(request, cluster)) * (1 + 1e-12)
