"""Traffic by hand: source ranks near their experts, and the all-to-all's slowest receiver."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.costmodel.volumes import all_to_all_bytes
from meshwright.errors import InputError
from meshwright.model_specs.reader import read_model
from meshwright.planner.experts.inputs import (
    Flows,
    Level,
    blocks_per_token,
    cross_node_share,
    near_sources,
    read_flows,
    slot_choices,
)
from meshwright.planner.experts.less_traffic import (
    Apart,
    FromSources,
    NodeExchange,
    Term,
    Touched,
    less_grouped_traffic,
    less_of,
    less_traffic,
    nodes_to_leaves,
    replica_pairs,
)
from meshwright.planner.experts.packing import Solved, by_layer, has_duplicates
from meshwright.planner.experts.problem import PlacementLimits, SlotShape
from meshwright.planner.experts.recorders import Routing, token_loads
from meshwright.planner.experts.service import ExpertRequest, pairs_apart, read_ground, traffic_row
from meshwright.planner.experts.solve import PlacementEffort, place_layers


def test_nodes_are_exchanged_so_that_choices_stay_by_hand() -> None:
    """Node 0 holds experts 0, 1 and node 1 holds 2, 3, sources choose the others: 3 of 10 stay, then 7."""
    slots = np.array([[[0], [1], [2], [3]]])
    affinity = np.array([[[1.0, 0, 2, 0], [0, 1, 0, 1], [2, 0, 1, 0], [0, 2, 0, 0]]])
    before = Solved(slots=slots, value=np.ones(1), bound=np.ones(1))
    assert cross_node_share(slots[0], affinity[0], 2) == pytest.approx(0.7)
    after = near_sources(before, affinity, SlotShape(slots=4, gpus=4, nodes=2))
    assert after.slots.tolist() == [[[2], [3], [0], [1]]]
    assert cross_node_share(after.slots[0], affinity[0], 2) == pytest.approx(0.3)


def test_nodes_come_in_the_order_that_keeps_the_most_choices() -> None:
    chance = np.random.default_rng(7)
    shape = SlotShape(slots=24, gpus=8, nodes=4)
    for _ in range(20):
        slots = np.stack([np.sort(chance.permutation(12)[:3]) for _ in range(8)])
        slots[:4] = np.arange(12).reshape(4, 3)
        affinity = chance.lognormal(0, 1, (8, 12))
        start = Solved(slots=slots[None], value=np.ones(1), bound=np.ones(1))
        placed = near_sources(start, affinity[None], shape).slots[0]
        blocks = slots.reshape(4, 2, 3)
        orders = [blocks[list(order)].reshape(8, 3) for order in permutations(range(4))]
        every = [cross_node_share(order, affinity, 4) for order in orders]
        reached = cross_node_share(placed, affinity, 4)
        assert reached == pytest.approx(min(every), abs=1e-8)


def test_affinity_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "loads.npz"
    np.savez(path, load=np.ones((2, 16)), affinity=np.ones((2, 3, 16)))
    done = CliRunner().invoke(main, ["experts", str(path), "--cluster", "dgx-h100", "--gpus", "16"])
    assert done.exit_code == 2
    assert "[2, 16, 16]" in done.output.replace("\n", " ")
    affinity = np.random.default_rng(0).lognormal(0, 1, (2, 16, 16))
    np.savez(path, load=affinity.sum(axis=1), affinity=affinity)
    asked = [
        "experts",
        str(path),
        "--cluster",
        "dgx-h100",
        "--gpus",
        "16",
        "--time-limit",
        "0.1",
        "--json",
    ]
    done = CliRunner().invoke(main, asked)
    assert 0 < json.loads(done.stdout)["cross_node_share_mean"] < 0.5


def test_the_slowest_receiver_ends_the_all_to_all(tmp_path: Path) -> None:
    """16 GPUs on 2 nodes: even choices are costmodel's bytes; half of them on one GPU take 8 times."""
    loads = tmp_path / "loads.npy"
    np.save(loads, np.ones((32, 8)))
    request = ExpertRequest(
        loads=loads, cluster="dgx-h100", gpus=16, slots=16, model="mixtral-8x7b"
    )
    at = read_ground(request, 8)
    slots = np.concatenate([np.arange(8), np.arange(8)])[:, None]
    even = np.stack([np.arange(16) % 8, (np.arange(16) + 1) % 8], axis=1).astype(np.int32)
    sent = request.tokens_per_gpu * 2 * read_model("mixtral-8x7b").hidden * 2
    expected = float(all_to_all_bytes(sent, np.array([8, 16]))[-1]) / (at.gb_per_s * 1e9)
    assert traffic_row(even, slots, 8, at, request)["all_to_all_s"] == pytest.approx(expected)
    slots[8:, 0] = [1, 2, 3, 4, 5, 6, 7, 1]
    hot = np.stack([np.zeros(16), 1 + np.arange(16) % 7], axis=1).astype(np.int32)
    assert traffic_row(hot, slots, 8, at, request)["all_to_all_s"] == pytest.approx(8 * expected)


def count_directly(
    tokens: np.ndarray, slots: np.ndarray, node_slots: int, touched_first: bool
) -> int:
    """Nodes that all tokens touch, token by token, in plain Python."""
    held = slots.ravel().tolist()
    where = {e: [s for s, other in enumerate(held) if other == e] for e in set(held)}
    node = {e: [s // node_slots for s in spots] for e, spots in where.items()}
    seen: list[set[int]] = [set() for _ in tokens]
    later = [e for e in sorted(where) if touched_first and len(set(node[e])) > 1]
    turn = dict.fromkeys(where, 0)
    for number, token in enumerate(tokens.tolist()):
        for expert in token:
            if expert >= 0 and expert not in later:
                seen[number].add(node[expert][turn[expert] % len(node[expert])])
                turn[expert] += 1
    for expert in later:
        users = [i for i, token in enumerate(tokens.tolist()) if expert in token]
        share = [len(users) // len(node[expert])] * len(node[expert])
        for i in range(len(users) % len(share)):
            share[i] += 1
        left = dict.fromkeys(range(max(map(max, node.values())) + 1), 0)
        for spot, part in zip(node[expert], share, strict=True):
            left[spot] += part
        options = {i: [n for n, part in left.items() if part and n in seen[i]] for i in users}
        given: dict[int, int] = {}
        for size in sorted({len(some) for some in options.values()} - {0}):
            for spot in sorted(left):
                for i in users:
                    if (
                        i not in given
                        and len(options[i]) == size
                        and spot in options[i]
                        and left[spot]
                    ):
                        given[i] = spot
                        left[spot] -= 1
        rest = [spot for spot in sorted(left) for _ in range(left[spot])]
        for i in users:
            seen[i].add(given[i] if i in given else rest.pop(0))
    return sum(map(len, seen))


@pytest.mark.parametrize("touched_first", [False, True])
def test_blocks_touched_are_a_direct_count(touched_first: bool) -> None:
    chance = np.random.default_rng(1)
    for case in range(12):
        tokens = np.argsort(chance.random((150, 12)), axis=1)[:, :4].astype(np.int32)
        tokens[chance.random(tokens.shape) < 0.1] = -1
        slots = np.stack([np.sort(chance.permutation(12)[:4]) for _ in range(6)])
        slots[:3] = np.arange(12).reshape(3, 4)
        near = 2 if touched_first else None
        reached = blocks_per_token(tokens, slots, 12, 2, near) * len(tokens)
        assert reached == pytest.approx(count_directly(tokens, slots, 8, touched_first)), case
        shares = np.bincount(slot_choices(tokens, slots, 12, near)[tokens >= 0], minlength=24)
        for expert in range(12):
            # Whatever the rule, replicas serve even shares.
            assert np.ptp(shares[slots.ravel() == expert]) <= 1


def test_a_token_takes_the_replica_in_a_node_that_it_touches_by_hand() -> None:
    """Expert 0 on both nodes, 1 on the first, 2 on the second: 4 of 8 nodes touched where turns touch 8."""
    slots = np.array([[0, 1], [0, 2]])
    tokens = np.array([[2, 0], [1, 0], [2, 0], [1, 0]], dtype=np.int32)
    assert blocks_per_token(tokens, slots, 3, 1) == 2.0
    assert blocks_per_token(tokens, slots, 3, 1, 1) == 1.0
    # Even shares: of four tokens at node 2, two must leave.
    away = np.array([[2, 0]] * 4, dtype=np.int32)
    assert blocks_per_token(away, slots, 3, 1, 1) == 1.5


EXPERT_OF = np.array([0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3])
"""Twelve replicas of eight experts, three on each of four nodes."""


def term_of(kind: str, block: np.ndarray) -> Term:
    chance = np.random.default_rng(6)
    if kind == "tokens":
        chosen = np.argsort(chance.random((80, 12)), axis=1)[:, :4]
        chosen[chance.random(chosen.shape) < 0.2] = -1
        return Touched(chosen, block, 1.5)
    if kind == "pairs":
        pairs = chance.random((8, 8))
        pairs += pairs.T
        return Apart(replica_pairs(pairs, EXPERT_OF.reshape(4, 3)), block, 0.7)
    return FromSources(chance.random((4, 8)), EXPERT_OF, block, 2.0)


@pytest.mark.parametrize("kind", ["tokens", "pairs", "sources"])
def test_what_an_exchange_changes_is_what_a_new_count_tells(kind: str) -> None:
    chance = np.random.default_rng(5)
    block = np.repeat(np.arange(4), 3)
    term = term_of(kind, block)
    for _ in range(60):
        a, b = (int(x) for x in chance.choice(12, 2, replace=False))
        if EXPERT_OF[a] == EXPERT_OF[b]:
            continue
        change, before = term.change(), term.cost()
        assert change == pytest.approx(change.T)
        term.swap(a, b)
        block[[a, b]] = block[[b, a]]
        assert term.cost() == pytest.approx(before + change[a, b])
        assert term.cost() == pytest.approx(term_of(kind, block).cost())
        assert term.change() == pytest.approx(term_of(kind, block).change())


def test_terms_by_hand() -> None:
    """Two nodes of two experts."""
    node = np.array([0, 0, 1, 1])
    # Tokens {0, 1}, {0, 2}, {3}: 1 + 2 + 1 nodes.
    assert Touched(np.array([[0, 1], [0, 2], [3, -1]]), node, 1.0).cost() == 4
    pairs = np.array([[0.0, 5, 1, 0], [5, 0, 0, 2], [1, 0, 0, 7], [0, 2, 7, 0]])
    # Apart are 0-2 and 1-3.
    assert Apart(pairs, node, 1.0).cost() == 3
    # Of expert 0's 4 choices, 3 come from node 1; of expert 2's 6, 2 come from node 0.
    sources = np.array([[1.0, 0, 2, 0], [3, 0, 4, 0]])
    assert FromSources(sources, np.arange(4), node, 1.0).cost() == 5
    # A second replica of 0 on node 1 serves half of its choices, 2: the 3 from there cannot all stay.
    assert FromSources(sources, np.array([0, 1, 2, 0]), node, 1.0).cost() == 3


def skewed(
    shape: SlotShape, experts: int, *, near: bool = False, **flows: np.ndarray
) -> NodeExchange:
    return NodeExchange(
        flows=Flows(**flows),
        experts=experts,
        shape=shape,
        levels=(Level(name="node", gpus=shape.node_gpus, weight=1.0),),
        cap=1.2,
        node_cap=1.1,
        loads=np.full((1, experts), shape.gpus / experts),
        near=near,
    )


def test_pairs_are_brought_together_without_a_trace_by_hand() -> None:
    """Even experts go together, odd ones too: each kind on a node of its own."""
    kind = np.arange(8) % 2
    pairs = (kind[:, None] == kind[None, :]).astype(float)
    shape = SlotShape(slots=8, gpus=4, nodes=2)
    found = less_of(skewed(shape, 8, pairs=pairs[None]), np.arange(8).reshape(4, 2))
    assert {frozenset((node % 2).ravel().tolist()) for node in found.reshape(2, 4)} == {
        frozenset({0}),
        frozenset({1}),
    }
    assert pairs_apart(pairs, found, 2) == 0
    assert pairs_apart(pairs, np.arange(8).reshape(4, 2), 2) > 0.5


def test_experts_go_where_their_tokens_come_from_by_hand() -> None:
    """GPUs 0 and 1 (node 0) ask for experts 1, 3, 5, 7, the others for the rest: nothing has to leave."""
    affinity = np.zeros((4, 8))
    affinity[:2, 1::2], affinity[2:, ::2] = 5.0, 3.0
    shape = SlotShape(slots=8, gpus=4, nodes=2)
    slots = np.arange(8).reshape(4, 2)
    assert cross_node_share(slots, affinity, 2) == pytest.approx(0.5)
    found = less_of(skewed(shape, 8, sources=affinity[None]), slots)
    assert cross_node_share(found, affinity, 2) == 0
    assert (found[:2] % 2 == 1).all()


def test_replicas_go_to_the_nodes_that_ask_for_them_by_hand() -> None:
    """Expert 0 is asked for by nodes 1 and 2, its replicas are on nodes 0 and 1: one goes to node 2."""
    affinity = np.zeros((3, 5))
    affinity[1, 0] = affinity[2, 0] = 10.0
    affinity[0, 1:] = [1, 1, 0, 0]
    slots = np.array([[0, 1], [0, 2], [3, 4]])
    shape = SlotShape(slots=6, gpus=3, nodes=3)
    loads = affinity.sum(axis=0)[None]
    search = replace(
        skewed(shape, 5, sources=affinity[None]), cap=3.0, node_cap=3.0, loads=loads * 3 / 22
    )
    found = less_of(search, slots)
    assert (found == 0).any(axis=1).tolist() == [False, True, True]
    assert cross_node_share(found, affinity, 3) == pytest.approx(0.0)
    assert cross_node_share(slots, affinity, 3) == pytest.approx(11 / 22)


@pytest.mark.slow
def test_caps_and_replicas_are_kept_while_traffic_falls() -> None:
    chance = np.random.default_rng(12)
    topic = chance.integers(0, 4, 1500)
    score = chance.gumbel(size=(1500, 32)) + 2.5 * (np.arange(32) % 4 == topic[:, None])
    tokens = np.argsort(-score, axis=1)[:, :4].astype(np.int32)
    loads = token_loads(tokens[None], 32)[None]
    shape = SlotShape(slots=40, gpus=8, nodes=4)
    levels = (Level(name="node", gpus=2, weight=1.0), Level(name="leaf", gpus=4, weight=0.5))
    for spread, near in product((False, True), repeat=2):
        effort = PlacementEffort(exact=False, time_limit_s=0.5)
        solved = place_layers(loads, shape, PlacementLimits(spread=spread), effort)
        found = less_traffic(
            Flows(tokens=tokens[None]),
            by_layer(loads, 8),
            solved,
            shape=shape,
            levels=levels,
            cap=1.05,
            spread=spread,
            near=near,
            workers=1,
            time_limit_s=0.2,
        )
        assert not has_duplicates(found.slots).any()
        assert found.value[0] <= 1.05 + 1e-9
        counts = np.bincount(found.slots.ravel(), minlength=32)
        assert (counts == np.bincount(solved.slots.ravel(), minlength=32)).all()
        if spread:
            here = [
                np.bincount(node.ravel(), minlength=32) for node in found.slots[0].reshape(4, 2, 5)
            ]
            assert (np.max(here, axis=0) <= -(-counts // 4)).all()
        before, after = (
            blocks_per_token(tokens, slots[0], 32, 2, 2 if near else None)
            for slots in (solved.slots, found.slots)
        )
        assert after < before - 0.2


@pytest.mark.parametrize("groups", [8, 24])
def test_whole_groups_change_nodes_by_hand(groups: int) -> None:
    """Tokens choose from groups k and k + half: on one node they touch one, apart they touch two."""
    chance = np.random.default_rng(2)
    half, nodes = groups // 2, groups // 2
    first = chance.integers(0, half, 2000)
    tokens = np.stack([first * 2 + chance.integers(0, 2, 2000), (first + half) * 2], axis=1).astype(
        np.int32
    )
    shape = SlotShape(slots=2 * groups, gpus=2 * nodes, nodes=nodes)
    slots = np.arange(2 * groups).reshape(2 * nodes, 2)
    loads = np.ones((1, 1, 2 * groups))
    solved = Solved(slots=slots[None], value=np.ones(1), bound=np.ones(1))
    limits = PlacementLimits(groups=groups)
    levels = (Level(name="node", gpus=2, weight=1.0),)
    for flows in (Flows(tokens=tokens[None]), Flows(pairs=_together(tokens, 2 * groups))):
        found = less_grouped_traffic(
            flows,
            by_layer(loads, shape.gpus),
            solved,
            shape=shape,
            limits=limits,
            effort=PlacementEffort(exact=False, time_limit_s=1.0),
            levels=levels,
            caps=np.array([1.0]),
        )
        assert blocks_per_token(tokens, slots, 2 * groups, 2) == 2.0
        assert blocks_per_token(tokens, found.slots[0], 2 * groups, 2) == 1.0
        assert found.value[0] == pytest.approx(1.0)
        assert sorted(found.slots.ravel().tolist()) == list(range(2 * groups))


def _together(tokens: np.ndarray, experts: int) -> np.ndarray:
    pairs = np.zeros((1, experts, experts))
    np.add.at(pairs[0], (tokens[:, 0], tokens[:, 1]), 1.0)
    return pairs + np.swapaxes(pairs, 1, 2)


def test_nodes_that_tokens_join_share_a_leaf_by_hand() -> None:
    """Nodes 0 and 2 go together, 1 and 3 too; leaves are of two nodes."""
    tokens = np.array([[0, 2], [1, 3]] * 20, dtype=np.int32)
    slots = np.arange(4).reshape(4, 1)
    shape = SlotShape(slots=4, gpus=4, nodes=4)
    levels = (Level(name="node", gpus=1, weight=1.0), Level(name="leaf", gpus=2, weight=2.0))
    found = nodes_to_leaves(Flows(tokens=tokens[None]), 0, slots, shape, levels)
    assert blocks_per_token(tokens, slots, 4, 2) == 2.0
    assert blocks_per_token(tokens, found, 4, 2) == 1.0


@pytest.mark.slow
def test_the_time_limit_is_work_and_processes_do_not_matter() -> None:
    chance = np.random.default_rng(4)
    tokens = np.argsort(chance.random((2, 600, 24)), axis=2)[:, :, :3].astype(np.int32)
    loads = token_loads(tokens, 24)[None]
    shape = SlotShape(slots=24, gpus=8, nodes=4)
    solved = place_layers(
        loads, shape, PlacementLimits(), PlacementEffort(exact=False, time_limit_s=0.2)
    )

    def reached(limit_s: float, workers: int) -> tuple[float, list[object]]:
        found = less_traffic(
            Flows(tokens=tokens),
            by_layer(loads, 8),
            solved,
            shape=shape,
            levels=(Level(name="node", gpus=2, weight=1.0),),
            cap=1.3,
            spread=False,
            workers=workers,
            time_limit_s=limit_s,
        )
        pairs = zip(tokens, found.slots, strict=True)
        return float(
            np.mean([blocks_per_token(*pair, 24, 2) for pair in pairs])
        ), found.slots.tolist()

    short, long, again = reached(0.01, 1), reached(0.5, 1), reached(0.5, 2)
    assert long == again
    assert long[0] <= short[0]


def test_co_activation_files_are_read_and_refused(tmp_path: Path) -> None:
    shape = SlotShape(slots=4, gpus=2, nodes=2)
    routing = Routing(loads=np.ones((1, 2, 4)), windows=("all",))
    pairs = np.arange(32, dtype=float).reshape(2, 4, 4)
    path = tmp_path / "pairs.npz"
    np.savez(path, co_activation=pairs)
    read = read_flows(routing, path, shape).pairs
    assert read is not None
    assert read[1, 0, 2] == (18 + 24) / 2
    assert read[0].diagonal().tolist() == [0.0] * 4
    np.savez(path, topk_ids=np.array([[[0, 1]], [[2, 3]]]))
    flows = read_flows(routing, path, shape)
    assert flows.pairs is None
    assert flows.tokens is not None
    np.savez(path, co_activation=pairs[:, :3, :3])
    with pytest.raises(InputError, match=r"\[2, 4, 4\]; got \[2, 3, 3\]"):
        read_flows(routing, path, shape)
    np.savez(path, co_activation=-pairs)
    with pytest.raises(InputError, match="not negative"):
        read_flows(routing, path, shape)
    # A trace beside the loads counts before their pair counts.
    tokens = np.array([[[0, 1]], [[2, 3]]], dtype=np.int32)
    both = read_flows(replace(routing, tokens=tokens, co_activation=pairs[None]), None, shape)
    assert both.pairs is None


def test_the_command_lowers_what_the_pairs_tell(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    kind = chance.permutation(32) % 2
    pairs = np.where(kind[:, None] == kind[None, :], 9.0, 1.0) * chance.uniform(0.5, 1, (32, 32))
    np.save(tmp_path / "pairs.npy", pairs)
    np.save(tmp_path / "load.npy", chance.lognormal(0, 0.3, (1, 32)))
    asked = [
        "experts",
        str(tmp_path / "load.npy"),
        "--cluster",
        "dgx-h100",
        "--gpus",
        "16",
        "--slots",
        "32",
    ]
    asked += [
        "--co-activation",
        str(tmp_path / "pairs.npy"),
        "--balance",
        "1.4",
        "--time-limit",
        "2",
        "--json",
    ]
    told = json.loads(CliRunner().invoke(main, asked).stdout)
    assert told["pairs_apart_share_mean"] < 0.25
    assert told["balance_mean"] <= 1.4
    assert told["nodes_per_token_mean"] is None
