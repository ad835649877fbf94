"""How far kinds of groups reach at once on parts of nodes: all orders of tiny cases, counted here."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations, product
from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.reader import cluster_from_mapping
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.layout import Layout
from meshwright.planner.mapping import counted
from meshwright.planner.mapping.counted import (
    ASKED,
    Row,
    _of_a_ring,
    _Room,
    counted_mappings,
    cover_of,
)
from meshwright.planner.mapping.effective import _expert_members
from meshwright.planner.plan.best_plan import best_plan
from meshwright.planner.request.reader import read_request
from tests.soaked import some


def on_nodes(nodes: list[tuple[str, int]], base: str = "dgx-h100") -> ClusterSpec:
    """Nodes given as (leaf, free GPUs)."""
    return cluster_from_mapping(
        {
            "name": "parts",
            "base": base,
            "levels": [
                {"name": "leaf", "gpus": 32, "oversubscription": 1},
                {"name": "core", "gpus": 256, "oversubscription": 2},
            ],
            "nodes": [
                {"name": f"n{at}", "leaf": leaf, "free_gpus": free}
                for at, (leaf, free) in enumerate(nodes)
            ],
        },
        "parts",
    )


def groups_of(layout: Layout) -> dict[str, list[list[int]]]:
    """Ranks of every group, by kind; ranks count tp, cp, dp, pp from the inside."""
    tp, cp, dp, pp = (int(getattr(layout, axis)) for axis in ("tp", "cp", "dp", "pp"))
    etp, ep, stage = int(layout.etp), int(layout.ep), tp * cp * dp
    found: dict[str, dict[tuple[int, ...], list[int]]] = {kind: {} for kind in ASKED}
    for rank in range(stage * pp):
        s, at = divmod(rank, stage)
        t, d = at % tp, at // tp // cp
        x, e, g = at % etp, at // etp % ep, at // etp // ep
        for kind, key in (
            ("cp", (s, d, t)),
            ("dp_cp", (s, t)),
            ("pp", (at,)),
            ("etp", (s, g, e)),
            ("ep", (s, g, x)),
            ("edp", (s, e, x)),
        ):
            found[kind].setdefault(key, []).append(rank)
    return {kind: list(groups.values()) for kind, groups in found.items()}


def reached(kind: str, groups: list[list[int]], block_of: list[int]) -> int:
    """Members of a group in the block that paces it, as the cost model defines them."""
    used = Counter(block_of)
    size = len(groups[0])
    parts = [Counter(block_of[rank] for rank in group) for group in groups]
    if kind == "ep":
        return min(min(part.values()) for part in parts)
    if kind == "pp":
        turns = (sum(block_of[a] != block_of[b] for a, b in pairwise(group)) for group in groups)
        return size // (1 + max(turns))
    cuts = Counter(block for part in parts for block, held in part.items() if held < size)
    if not cuts:
        return size
    return max(1, min(size - 1, *(used[block] // rings for block, rings in cuts.items())))


def row_reached(groups: dict[str, list[list[int]]], by_level: list[list[int]]) -> list[int]:
    """Members of each kind in the blocks of each level, or of one inside it that holds more."""
    row = []
    for kind in ASKED:
        inner = 1
        for block_of in by_level:
            inner = max(inner, reached(kind, groups[kind], block_of))
            row.append(inner)
    return row


def every_row(cluster: ClusterSpec, layout: Layout) -> set[Row]:
    """What each order of tensor groups on nodes reaches, at every level that the allocation has."""
    tp, world = int(layout.tp), int(layout.gpus)
    nodes = [(at, node.leaf) for at, node in enumerate(cluster.nodes)]
    slots = [
        at for at, node in enumerate(cluster.nodes) for _ in range((node.free_gpus or 0) // tp)
    ]
    levels = cover_of(cluster, layout).reach.levels
    groups, found = groups_of(layout), set()
    for order in set(permutations(slots, world // tp)):
        node_of = [node for node in order for _ in range(tp)]
        leaf_of = [hash(nodes[node][1]) % 1000 for node in node_of]
        by_level = [node_of, leaf_of, [0] * world] if levels == 3 else [node_of, [0] * world]
        row = row_reached(groups, by_level)
        found.add(tuple(row))
    return found


def random_case(seed: int) -> tuple[ClusterSpec, Layout]:
    """Up to seven tensor groups on two to four nodes of one leaf or two."""
    chance = random.Random(seed)
    while True:
        tp = chance.choice([1, 1, 1, 2, 4])
        nodes = [
            (f"l{chance.randrange(2)}", chance.randint(1, 8)) for _ in range(chance.randint(2, 4))
        ]
        units = sum(free // tp for _, free in nodes)
        wanted = chance.choice([4, 4, 6, 6])
        if wanted <= units <= 7:
            break
    cp = chance.choice([1, 1, 2])
    pp = chance.choice([p for p in (1, 2, 3) if wanted // cp % p == 0])
    dp = wanted // cp // pp
    etp = chance.choice([1, 1, tp])
    fits = [e for e in range(1, tp * cp * dp // etp + 1) if tp * cp * dp % (e * etp) == 0]
    return on_nodes(nodes), Layout(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=chance.choice(fits))


@pytest.mark.parametrize(
    "seed",
    [
        *range(6),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 14)),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in some(range(14, 40))),
    ],
)
def test_what_is_impossible_is_reached_by_no_order(seed: int) -> None:
    """Questions at random, all decided; then all that is impossible leaves parts that hold every order."""
    cluster, layout = random_case(seed)
    rows, cover = every_row(cluster, layout), cover_of(cluster, layout)
    reach, chance = cover.reach, np.random.default_rng(seed)
    most = np.array(reach.row(reach.most))
    assert reach.can_be_asked
    for row in rows:
        assert np.all(np.array(row) <= most)
    for _ in range(12):
        asked = chance.integers(1, most + 1)
        is_reached = any(np.all(np.array(row) >= asked) for row in rows)
        gpus = reach.find(tuple(asked.tolist()))
        assert (gpus is not None) == is_reached
        assert reach.is_impossible(tuple(asked.tolist())) == (not is_reached)
        if gpus is not None:
            members = reach.members(gpus)
            assert tuple(int(x) for kind in ASKED for x in members[kind]) in rows
    for _ in range(40):
        for row in rows:
            assert any(all(a <= b for a, b in zip(row, most, strict=True)) for most in cover.rows)
        refuted = [row for row in cover.rows if reach.find(row) is None]
        if not refuted:
            break
        cover.split(refuted[int(chance.integers(len(refuted)))])
    else:
        return
    # What is left is reached: the rows are the orders that no other one is ahead of, and no more.
    assert set(cover.rows) <= rows


@pytest.mark.parametrize(
    "seed",
    [
        *range(40, 46),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in some(range(46, 100))),
    ],
)
def test_every_order_is_one_of_the_ways_within_a_row(seed: int) -> None:
    """Below the most of all kinds, and below what some orders reach."""
    cluster, layout = random_case(seed)
    reach = cover_of(cluster, layout).reach
    rows = np.array(sorted(every_row(cluster, layout)))
    chance = np.random.default_rng(seed)
    limits = [np.array(reach.row(reach.most)), *rows[chance.integers(len(rows), size=3)]]
    pp, chains = int(layout.pp), ASKED.index("pp") * reach.levels
    as_priced = rows.copy()
    as_priced[:, chains:][rows[:, chains:] < pp] = 1
    for limit in limits:
        ways = reach.ways_within(tuple(limit.tolist()), 10**6)
        assert ways is not None
        within = as_priced[np.all(as_priced <= limit, axis=1)]
        assert set(map(tuple, within.tolist())) <= set(map(tuple, ways.tolist()))
        assert np.all(ways <= limit)
    assert reach.ways_within(reach.row(reach.most), 0) is None


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in some(range(2, 30)))]
)
def test_faster_outer_links_close_as_all_orders_priced(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes with PCIe alone: what one listed mapping and questions prove, against all mappings priced."""
    chance = random.Random(seed)
    nodes = [(f"l{chance.randrange(2)}", chance.choice([2, 3, 4])) for _ in range(3)]
    cluster = on_nodes(nodes, "l40s-pcie")
    degrees = chance.choice([(1, 2, 2), (1, 4, 1), (2, 2, 1), (1, 1, 4), (2, 1, 2), (1, 2, 1)])
    cp, dp, pp = degrees
    pins = {"tp": 1, "cp": cp, "pp": pp, "ep": chance.choice([1, cp * dp]), "micro_batch": 1}
    request = read_request(
        model="olmoe-1b-7b",
        cluster="dgx-h100",
        gpus=8,
        global_batch=4 * dp,
        seq_len=2048,
        pin=pins | {"dp": dp},
        without=("deepep", "hybridep", "ep-overlap", "cuda-graph", "tp-overlap"),
    )
    request = replace(request, cluster=cluster, gpus=cluster.gpus)
    exact = best_plan(request).outcome
    monkeypatch.setattr(counted, "MOST_IN_FULL", 0)
    monkeypatch.setattr(counted, "FEWEST_COUNTED", 1)
    monkeypatch.setattr(counted, "MOST_COUNTED", 1)
    for known in (counted._counted, counted._with_groups, counted._cover):
        known.cache_clear()
    closed = best_plan(request).outcome
    for known in (counted._counted, counted._with_groups, counted._cover):
        known.cache_clear()
    assert exact.status == "optimal"
    assert closed.status == "optimal"
    assert closed.best[0].step_time_s == pytest.approx(exact.best[0].step_time_s, rel=1e-9)


def test_an_exchange_inside_nodes_leaves_no_ring_there() -> None:
    """8 experts on 8 GPUs of a node: each of its 8 rings has one member there, or experts lie apart."""
    cluster = on_nodes([("a", 8), ("a", 8), ("b", 8), ("b", 8)])
    rows = cover_of(cluster, Layout(tp=1, dp=32, ep=8)).reach.joint_rows()
    exchange, ring = ASKED.index("ep") * 3, ASKED.index("edp") * 3
    # Parts of 4 GPUs, or of 3, touch that many rings at least; a ring has 4 members in all.
    assert {(row[exchange], row[ring]) for row in rows} == {(8, 1), (4, 4)}


@pytest.mark.parametrize(
    "seed",
    [
        *range(6),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 14)),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in some(range(14, 60))),
    ],
)
def test_joint_rows_hold_every_order_of_ranks(seed: int) -> None:
    """Orders at random, and runs of ranks moved about, which keep more of a group together."""
    chance = random.Random(seed)
    while True:
        nodes = [
            (f"l{chance.randrange(3)}", chance.randint(1, 8)) for _ in range(chance.randint(2, 6))
        ]
        free = sum(gpus for _, gpus in nodes)
        world = free - chance.choice([0, 0, 0, 1, 2, 5])
        degrees = [d for d in range(2, world + 1) if world % d == 0]
        if world >= 4 and degrees:
            break
    cp, pp = chance.choice([1, 1, 2]), chance.choice([1, 1, 2])
    if world % (cp * pp):
        cp = pp = 1
    dp = world // cp // pp
    sizes = [(e, t) for e in range(2, cp * dp + 1) for t in (1, 1, 2) if cp * dp % (e * t) == 0]
    ep, etp = chance.choice(sizes or [(1, 1)])
    cluster, layout = on_nodes(nodes), Layout(tp=1, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp)
    reach = cover_of(cluster, layout).reach
    rows, groups = np.array(reach.joint_rows()), groups_of(layout)
    slots = [at for at, (_, gpus) in enumerate(nodes) for _ in range(gpus)]
    for turn in range(60):
        order = slots.copy()
        if turn % 3 == 0:
            chance.shuffle(order)
        else:
            run = chance.choice([1, 2, ep, etp * ep])
            pieces = [order[start : start + run] for start in range(0, len(order), run)]
            chance.shuffle(pieces)
            order = [at for piece in pieces for at in piece]
        order = order[:world]
        leaves = [int(nodes[at][0][1:]) for at in order]
        by_level = [order, leaves, [0] * world] if reach.levels == 3 else [order, [0] * world]
        row = row_reached(groups, by_level)
        assert np.any(np.all(np.array(row) <= rows, axis=1)), (nodes, layout, order, row)


def order_with_pipelines(
    chance: random.Random, nodes: list[tuple[str, int]], layout: Layout
) -> list[int] | None:
    """The node of every tensor group: pipelines whole in nodes, in leaves or nowhere, stage after stage
    inside them, some room left out; None where they do not fit.
    """
    tp, pp = int(layout.tp), int(layout.pp)
    replicas = int(layout.gpus) // tp // pp
    rooms = {at: free // tp for at, (_, free) in enumerate(nodes)}
    if chance.random() < 0.5:
        rooms[chance.choice(sorted(rooms))] = 0
    kind = chance.choice(["node", "leaf", "all"])
    blocks: dict[object, list[int]] = {}
    for at in chance.sample(sorted(rooms), len(rooms)):
        key = {"node": at, "leaf": nodes[at][0], "all": 0}[kind]
        blocks.setdefault(key, []).extend([at] * rooms[at])
    by_stage: list[list[int]] = [[] for _ in range(pp)]
    for slots in chance.sample(list(blocks.values()), len(blocks)):
        count = min(len(slots) // pp, replicas - len(by_stage[0]))
        if chance.random() < 0.3:
            count = min(count, chance.randint(0, count))
        for stage in range(pp):
            by_stage[stage] += slots[stage * count : (stage + 1) * count]
    return None if len(by_stage[0]) < replicas else [at for stage in by_stage for at in stage]


@pytest.mark.parametrize(
    "seed",
    [
        *range(8),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 24)),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in some(range(24, 120))),
    ],
)
def test_joint_rows_hold_every_order_of_pipelines(seed: int) -> None:
    """What a pipeline is cut into has no price, and counts as one stage in a block."""
    chance = random.Random(seed)
    while True:
        tp, pp = chance.choice([1, 1, 2]), chance.choice([2, 2, 3, 4])
        nodes = [
            (f"l{chance.randrange(3)}", chance.randint(1, 8)) for _ in range(chance.randint(3, 8))
        ]
        units = sum(free // tp for _, free in nodes)
        dp = units // pp - chance.choice([0, 0, 1, 2])
        if dp >= 2:
            break
    etp = chance.choice([1, tp])
    fits = [e for e in (1, 1, 2, 4, dp) if tp * dp % (e * etp) == 0]
    cluster, layout = on_nodes(nodes), Layout(tp=tp, dp=dp, pp=pp, etp=etp, ep=chance.choice(fits))
    reach = cover_of(cluster, layout).reach
    rows, groups = np.array(reach.joint_rows()), groups_of(layout)
    chains, tried = ASKED.index("pp") * reach.levels, 0
    while tried < 40:
        order = order_with_pipelines(chance, nodes, layout)
        if order is None:
            continue
        tried += 1
        node_of = [at for at in order for _ in range(tp)]
        leaf_of = [int(nodes[at][0][1:]) for at in node_of]
        top = [0] * len(node_of)
        by_level = [node_of, leaf_of, top] if reach.levels == 3 else [node_of, top]
        row = row_reached(groups, by_level)
        of_chains = row[chains : chains + reach.levels]
        row[chains : chains + reach.levels] = [held if held == pp else 1 for held in of_chains]
        assert np.any(np.all(np.array(row) <= rows, axis=1)), (nodes, layout, order, row)


@pytest.mark.soak
def test_separate_best_cases_leave_no_gap() -> None:
    """Pipelines and replicas were bounded each on their own, and a gap of 12 % stayed."""
    cluster = on_nodes([("a", 2), ("b", 6), ("b", 2)])
    asked: dict[str, Any] = {"model": "gpt2-xl", "seq_len": 1024, "global_batch": 40}
    request = replace(
        read_request(cluster="dgx-h100", gpus=2, **asked), cluster=cluster, gpus=cluster.gpus
    )
    found = best_plan(request)
    assert found.outcome.status == "optimal"
    assert found.outcome.lower_bound_s == found.step_time_s


def test_what_counting_rules_out_is_decided() -> None:
    """32 ranks on two leaves of 19 GPUs: not both use 17. Rank by rank that took longer than any limit."""
    nodes = [("a", 7), ("a", 5), ("a", 3), ("a", 4), ("b", 2), ("b", 6), ("b", 3), ("b", 8)]
    reach = cover_of(on_nodes(nodes), Layout(tp=1, cp=8, dp=4)).reach
    row = [1] * len(reach.row(reach.most))
    row[ASKED.index("dp_cp") * reach.levels + 1] = 17
    assert reach.find(tuple(row)) is None
    assert reach.is_impossible(tuple(row))
    row[ASKED.index("dp_cp") * reach.levels + 1] = 16
    assert reach.find(tuple(row)) is not None


def test_large_allocations_are_not_asked_about() -> None:
    cluster = on_nodes([("a", 7)] * 36)
    reach = cover_of(cluster, Layout(tp=1, dp=252)).reach
    assert not reach.can_be_asked
    row = reach.row(reach.most)
    assert reach.find(row) is None
    assert not reach.is_impossible(row)


def test_the_smallest_part_of_an_expert_group_paces_it() -> None:
    """Eight ranks on four slots, of which one is in another block, and three in the next group."""
    lone = np.array([[[0, 0, 0, 1], [0, 0, 1, 1]]])
    assert _expert_members(lone, 2, 8) == 2
    assert _expert_members(np.array([[[0, 0, 1, 1], [1, 1, 0, 0]]]), 2, 8) == 4
    assert _expert_members(np.zeros((1, 2, 4), dtype=np.int64), 2, 8) == 8


def most_of_rings(rooms: tuple[int, ...], size: int, groups: int) -> int:
    """The best that rings larger than any block reach, over all ways to deal their members out."""
    best = 0
    dealt = {
        (size,) * groups: 10**6
    }  # what is left of each ring, and the best that blocks before reach
    for room in rooms:
        following: dict[tuple[int, ...], int] = {}
        for left, reached_before in dealt.items():
            for taken in product(*(range(min(room, rest) + 1) for rest in left)):
                if sum(taken) > room:
                    continue
                cuts = sum(members > 0 for members in taken)
                reach = min(reached_before, sum(taken) // cuts) if cuts else reached_before
                key = tuple(
                    sorted(rest - members for rest, members in zip(left, taken, strict=True))
                )
                following[key] = max(following.get(key, 0), reach)
        dealt = following
    best = dealt.get((0,) * groups, 0)
    return best


@pytest.mark.parametrize("seed", range(4))
def test_rings_larger_than_any_block_against_all_ways_to_deal_them_out(seed: int) -> None:
    chance, equal = random.Random(seed), 0
    for _ in range(40):
        rooms = tuple(chance.choice([8, 8, 6, 4, 3]) for _ in range(chance.randint(4, 6)))
        groups = chance.choice([1, 2, 2])
        size = sum(rooms) // groups - chance.choice([0, 0, 1, 2])
        if size <= max(rooms):
            continue
        best = most_of_rings(rooms, size, groups)
        room = _Room(blocks=np.array(rooms), idle=sum(rooms) - size * groups)
        assert best <= _of_a_ring(room, size, groups), (rooms, size, groups)
        equal += best == _of_a_ring(room, size, groups)
    assert equal > 10


def test_stages_on_nodes_of_their_own_are_among_those_listed() -> None:
    """27 replicas on four nodes of eight give 6 to each at least; 8, 8, 8 and 3 would be slower."""
    cluster = on_nodes([("a", 8)] * 4 + [("b", 8)] * 4 + [("c", 8)] * 4 + [("d", 5)])
    counted = counted_mappings(cluster, Layout(dp=27, pp=3), experts=False)
    assert counted is not None
    chains = counted.placement.pp.tolist(), counted.placement.dp_cp.tolist()
    # Each stage in a leaf, or nine pipelines in each leaf, three stages on three nodes.
    assert ([1, 1, 3], [6, 27, 27]) in list(zip(*chains, strict=True))
    assert ([1, 3, 3], [3, 9, 27]) in list(zip(*chains, strict=True))
    for gpus in counted.gpus:
        assert len(set(gpus.tolist())) == 81


def test_a_ring_that_leaves_its_block_has_a_rank_less_inside() -> None:
    """Three rings of four on two blocks of six: one of them has two on either side, or three and one."""
    assert _of_a_ring(_Room(blocks=np.array([6, 6]), idle=2), 4, 3) == 3
    assert _of_a_ring(_Room(blocks=np.array([6, 6]), idle=0), 4, 3) == 3
    assert _of_a_ring(_Room(blocks=np.array([8, 4]), idle=0), 4, 3) == 4
    assert _of_a_ring(_Room(blocks=np.array([2, 2, 2]), idle=0), 4, 1) == 2
