"""Orders of tensor groups on part-filled nodes: the list leaves out none that blocks tell apart."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from meshwright.cluster_specs.schema import NodeSpec
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.placement import members_by_level
from meshwright.planner.mapping.counted import counted_mappings
from meshwright.planner.mapping.effective import free_gpus_of
from tests.planner.mapping.irregular import random_cluster
from tests.soaked import some

Members = frozenset[tuple[int, ...]]


def members(where: np.ndarray, degrees: tuple[int, int, int, int], ep: int) -> tuple[int, ...]:
    found = members_by_level(where, degrees, 1, ep)
    return tuple(int(count) for name in sorted(found) for count in found[name])


@pytest.mark.parametrize(
    "seed",
    [
        1,
        pytest.param(0, marks=pytest.mark.slow),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in some(range(2, 12))),
    ],
)
def test_every_order_has_the_members_of_every_permutation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cluster = random_cluster(rng, most_nodes=4, halves=True)
    free = free_gpus_of(cluster)
    tp, units = 4, min(5, int((free.free // 4).sum()))
    degrees = (tp, 1, units, 1) if seed % 2 else (tp, 1, 1, units)
    world, ep = tp * units, (tp if seed % 2 else 1)
    blocks = free.blocks(world)
    orders = free.every_order(tp, units, world, 1000)
    assert orders is not None
    listed = {members(blocks[:, gpus], degrees, ep) for gpus in orders}
    slots = [node for node, held in enumerate(free.free // tp) for _ in range(held)]
    wanted = set()
    for order in set(permutations(slots, units)):
        first = [int(np.flatnonzero(free.places[:, 0] == node)[0]) for node in order]
        gpus = np.repeat(first, tp)  # a node is one block at every level
        wanted.add(members(blocks[:, gpus], degrees, ep))
    assert listed == wanted
    assert len(orders) <= len(set(permutations(slots, units)))
    for gpus in orders:
        assert len(set(gpus.tolist())) == world


def test_a_list_without_gaps_leaves_no_bound_of_others() -> None:
    cluster = random_cluster(np.random.default_rng(3), most_nodes=4, halves=True)
    counted = counted_mappings(cluster, Layout(tp=4, cp=1, dp=4, pp=1), experts=False)
    assert counted is not None
    assert len(counted.most.tp) == 0
    assert counted.most_is_reached


def test_too_many_orders_are_not_listed() -> None:
    cluster = random_cluster(np.random.default_rng(3), most_nodes=4, halves=True)
    assert free_gpus_of(cluster).every_order(1, 16, 16, 500) is None


def test_large_lists_are_not_ordered() -> None:
    """A unit was a call deep: a thousand of them ended in an error of the interpreter."""
    nodes = tuple(NodeSpec(name=f"n{at}", free_gpus=4) for at in range(1500))
    cluster = random_cluster(np.random.default_rng(3), most_nodes=4, halves=True)
    large = cluster.model_copy(update={"nodes": nodes, "gpus": 6000})
    assert free_gpus_of(large).every_order(4, 1200, 4800, 500) is None
    counted = counted_mappings(large, Layout(tp=4, cp=1, dp=1200, pp=1), experts=False)
    assert counted is not None
    assert len(counted.most.tp) == 1
