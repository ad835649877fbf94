"""Expert placement: against enumeration, hand-worked cases, files of other systems, and the command."""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.expert_placement import greedy_balance
from meshwright.api import place_experts
from meshwright.cli import main
from meshwright.errors import InfeasibleError, InputError
from meshwright.planner.experts.bound import balance_bound, count_bound, pair_bound
from meshwright.planner.experts.inputs import Flows, Level, blocks_per_token, read_routing
from meshwright.planner.experts.less_traffic import NodeExchange, layer_caps, less_of
from meshwright.planner.experts.packing import (
    SlotPacking,
    State,
    greedy_counts,
    has_duplicates,
    pack,
)
from meshwright.planner.experts.placements import count_moves, read_placement
from meshwright.planner.experts.problem import PlacementLimits, SlotShape
from meshwright.planner.experts.recorders import token_loads
from meshwright.planner.experts.solve import Layer, PlacementEffort, place_layers, solve_exactly
from tests.planner.experts.safetensors_files import write_safetensors
from tests.soaked import examples, some

SLOW_MACHINE = settings(max_examples=examples(40), deadline=None)
README_LOAD = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
"""The example in the README of deepseek-ai/EPLB (MIT)."""


def enumerated(load: np.ndarray, slots: int, gpus: int) -> float:
    """Largest GPU load over the mean of the best placement, by trying every one."""
    experts, per_gpu = len(load), slots // gpus
    best = np.inf
    for held in product(combinations(range(experts), per_gpu), repeat=gpus):
        counts = np.bincount(np.ravel(held), minlength=experts)
        if (counts > 0).all():
            best = min(best, max(sum(load[e] / counts[e] for e in gpu) for gpu in held))
    return float(best * gpus / load.sum())


def small_cases(count: int) -> list[tuple[np.ndarray, int, int]]:
    chance = np.random.default_rng(5)
    shapes = [
        (3, 4, 2),
        (4, 4, 2),
        (4, 6, 2),
        (4, 6, 3),
        (5, 6, 2),
        (5, 6, 3),
        (3, 6, 3),
        (5, 8, 2),
    ]
    return [
        (chance.integers(1, 100, shapes[i % 8][0]).astype(float), *shapes[i % 8][1:])
        for i in range(count)
    ]


@pytest.mark.slow
@pytest.mark.hypothesis
def test_cp_sat_equals_enumeration_on_random_cases() -> None:
    for load, slots, gpus in small_cases(examples(208, 2)):
        counts = greedy_counts(load[None], slots, gpus)
        start = pack(load[None, None], counts, gpus)
        most = min(gpus, slots - len(load) + 1)
        layer = Layer(
            loads=load[None] * gpus / load.sum(),
            slots=slots,
            gpus=gpus,
            spread_nodes=1,
            least_replicas=np.ones(len(load), dtype=np.int64),
            most_replicas=np.full(len(load), most),
        )
        found = solve_exactly(layer, start.slots[0], 2.0 * gpus, work=10, seed=0)
        assert found.optimal
        assert found.slots is not None
        best = enumerated(load, slots, gpus)
        assert SlotPacking(slots=found.slots[None], loads=load[None, None]).balance()[
            0
        ] == pytest.approx(best, rel=1e-5)
        assert found.bound <= best * (1 + 1e-9)


def check_against_enumeration(cases: list[tuple[np.ndarray, int, int]]) -> None:
    for load, slots, gpus in cases:
        solved = place_layers(
            load[None, None],
            SlotShape(slots=slots, gpus=gpus, nodes=1),
            PlacementLimits(),
            PlacementEffort(gap=0.0),
        )
        best = enumerated(load, slots, gpus)
        assert solved.value[0] == pytest.approx(best, rel=1e-5)
        assert solved.bound[0] <= best * (1 + 1e-5)


@pytest.mark.slow
def test_place_is_optimal_and_its_bound_holds_on_small_cases() -> None:
    """The first two shapes."""
    check_against_enumeration(small_cases(2))


@pytest.mark.soak
def test_place_is_optimal_and_its_bound_holds_on_more_small_cases() -> None:
    check_against_enumeration(some(small_cases(40)[2:]))


@SLOW_MACHINE
@given(st.data())
def test_the_bound_without_solver_is_below_every_placement(data: st.DataObject) -> None:
    experts, slots, gpus = data.draw(
        st.sampled_from([(4, 6, 3), (5, 6, 2), (5, 6, 3), (4, 4, 2), (6, 6, 2)])
    )
    load = np.array(
        data.draw(st.lists(st.integers(1, 60), min_size=experts, max_size=experts)), dtype=float
    )
    load[0] *= data.draw(st.sampled_from([1, 5, 20]))
    load *= gpus / load.sum()
    bound = balance_bound(load[None, None], slots, gpus)
    assert bound[0] <= enumerated(load, slots, gpus) * (1 + 1e-9)


@settings(max_examples=examples(8), deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([(8, 12, 4, 2), (16, 24, 8, 2), (16, 16, 4, 1), (12, 24, 6, 3)]),
)
def test_every_placement_keeps_to_its_limits(seed: int, sizes: tuple[int, int, int, int]) -> None:
    experts, slots, gpus, nodes = sizes
    loads = np.random.default_rng(seed).lognormal(0, 1, (2, 3, experts))
    for spread in (False, True):
        solved = place_layers(
            loads,
            SlotShape(slots=slots, gpus=gpus, nodes=nodes),
            PlacementLimits(spread=spread),
            PlacementEffort(exact=False, time_limit_s=0.1),
        )
        assert not has_duplicates(solved.slots).any()
        assert (solved.value >= solved.bound * (1 - 1e-12)).all()
        for layer in solved.slots:
            counts = np.bincount(layer.ravel(), minlength=experts)
            assert counts.min() >= 1
            by_node = [
                np.bincount(node.ravel(), minlength=experts) for node in np.split(layer, nodes)
            ]
            if spread:
                assert (np.max(by_node, axis=0) <= -(-counts // nodes)).all()


@pytest.mark.soak
def test_readme_with_groups_kept_is_proven_optimal() -> None:
    loads = np.array(README_LOAD, dtype=float)[None]
    solved = place_layers(
        loads,
        SlotShape(slots=16, gpus=8, nodes=2),
        PlacementLimits(groups=4),
        PlacementEffort(gap=0.0),
    )
    assert solved.gap.max() == 0
    for layer in solved.slots.reshape(2, 2, -1):
        groups = [set((node // 3).tolist()) for node in layer]
        assert len(groups[0]) == len(groups[1]) == 2
        assert not groups[0] & groups[1]


def test_a_hot_expert_stops_at_the_bound() -> None:
    load = np.array([[[100.0, 10, 10, 10, 10, 10, 10, 10]]])
    solved = place_layers(
        load, SlotShape(slots=8, gpus=4, nodes=1), PlacementLimits(), PlacementEffort()
    )
    # The hottest fills a GPU with one of the equal others: 110 over 170 / 4.
    assert solved.value[0] == pytest.approx(110 / 42.5)
    assert solved.gap[0] == 0


def test_nodes_per_token_is_the_direct_count() -> None:
    chance = np.random.default_rng(1)
    tokens = np.argsort(chance.random((500, 16)), axis=1)[:, :4].astype(np.int32)
    load = token_loads(tokens[None], 16)
    shape = SlotShape(slots=20, gpus=4, nodes=2)
    slots = place_layers(load[None], shape, PlacementLimits(), PlacementEffort(exact=False)).slots[
        0
    ]
    where = {e: [i // 10 for i, held in enumerate(slots.ravel()) if held == e] for e in range(16)}
    turn, total = dict.fromkeys(range(16), 0), 0
    for token in tokens:
        touched = set()
        for expert in token.tolist():
            touched.add(where[expert][turn[expert] % len(where[expert])])
            turn[expert] += 1
        total += len(touched)
    assert blocks_per_token(tokens, slots, 16, 2) == pytest.approx(total / 500)


def test_exchanges_bring_experts_of_one_topic_together() -> None:
    chance = np.random.default_rng(2)
    topic = chance.integers(0, 2, 400)
    # Even experts for one topic, odd ones for the other: two nodes suffice for one each.
    tokens = (np.argsort(chance.random((400, 4)), axis=1)[:, :2] * 2 + topic[:, None]).astype(
        np.int32
    )
    load = token_loads(tokens[None], 8)[0][None]
    shape = SlotShape(slots=8, gpus=4, nodes=2)
    slots = np.arange(8).reshape(4, 2)
    search = NodeExchange(
        flows=Flows(tokens=tokens[None]),
        experts=8,
        shape=shape,
        levels=(Level(name="node", gpus=2, weight=1.0),),
        cap=1.3,
        node_cap=1.3,
        loads=load * 4 / load.sum(),
    )
    found = less_of(search, slots)
    assert blocks_per_token(tokens, slots, 8, 2) > 1.5
    assert blocks_per_token(tokens, found, 8, 2) == 1.0


def test_robust_placement_is_judged_by_its_worst_window() -> None:
    loads = np.array([[[8.0, 1, 8, 1]], [[1.0, 8, 8, 1]]])
    solved = place_layers(
        loads, SlotShape(slots=4, gpus=2, nodes=1), PlacementLimits(), PlacementEffort(gap=0.0)
    )
    # 2 cannot share a GPU with 0 or 1 in both windows: with 3 it has 9 of 18.
    assert {frozenset(gpu.tolist()) for gpu in solved.slots[0]} == {
        frozenset({2, 3}),
        frozenset({0, 1}),
    }
    assert solved.value[0] == pytest.approx(1.0)


def test_inputs_of_other_systems(tmp_path: Path) -> None:
    folder = tmp_path / "stats"
    folder.mkdir()
    (folder / "meta_info.json").write_text('{"num_experts": 2}', encoding="utf-8")
    for rank in range(2):
        data = write_safetensors({"5_3": np.array([1, 2]), "5_4": np.array([3, 4 + rank])})
        (folder / f"rank{rank}.safetensors").write_bytes(data)
    read = read_routing(folder)
    assert read.loads.tolist() == [[[2, 4], [6, 9]]]
    assert read.layer_ids == (3, 4)
    lines = [
        {"iteration": i, "layer": k, "tokens_per_expert": [i, k]} for i in (1, 2) for k in (7, 8)
    ]
    path = tmp_path / "megatron.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert read_routing(path, split=2).loads.tolist() == [[[1, 7], [1, 8]], [[2, 7], [2, 8]]]
    window = {
        "expert_load_window": [[[1, 2, 3]], [[1, 2, 3]]],
        "physical_to_logical_map": [[0, 1, 0]],
    }
    path = tmp_path / "vllm.json"
    path.write_text(json.dumps(window), encoding="utf-8")
    assert read_routing(path).loads.tolist() == [[[8, 4]]]
    path = tmp_path / "table.csv"
    path.write_text("layer,expert,load\n2,0,5\n2,1,6\n", encoding="utf-8")
    assert read_routing(path).loads.tolist() == [[[5, 6]]]


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.pkl", b"\x80\x04", "pickles are refused"),
        ("a.json", b"\x80\x04.", "this is a pickle"),
        ("a.json", b"[[1, 2], [3]]", "different lengths"),
        ("a.json", b"[[1, -2]]", r"load[0][0][1]"),
        ("a.json", b"[[0, 0]]", "all loads are zero"),
        ("a.json", b"[[NaN, 1]]", "NaN"),
        ("a.json", b"{", "line 1"),
        ("a.npz", b"junk", "not an npz file"),
        ("a.txt", b"1", "is not read"),
        ("a.csv", b"1,x", "line 1"),
    ],
)
def test_bad_inputs_are_refused_with_the_place(
    tmp_path: Path, name: str, content: bytes, part: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_routing(path)
    assert part in str(caught.value)


def test_shapes_that_no_placement_has() -> None:
    loads = np.ones((1, 1, 8))
    with pytest.raises(InputError, match="use 8 or 12"):
        place_layers(
            loads, SlotShape(slots=10, gpus=4, nodes=1), PlacementLimits(), PlacementEffort()
        )
    with pytest.raises(InputError, match=r"use 8$"):
        place_layers(
            loads, SlotShape(slots=3, gpus=4, nodes=1), PlacementLimits(), PlacementEffort()
        )
    with pytest.raises(InfeasibleError, match="at least 8"):
        place_layers(
            loads, SlotShape(slots=4, gpus=4, nodes=1), PlacementLimits(), PlacementEffort()
        )
    with pytest.raises(InfeasibleError, match="once on each"):
        place_layers(
            loads, SlotShape(slots=32, gpus=2, nodes=1), PlacementLimits(), PlacementEffort()
        )
    with pytest.raises(InfeasibleError, match="groups"):
        place_layers(
            loads, SlotShape(slots=8, gpus=4, nodes=4), PlacementLimits(groups=2), PlacementEffort()
        )


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, ["experts", *words])
    return done.exit_code, done.stdout, done.stderr


def test_the_command_end_to_end(tmp_path: Path) -> None:
    chance = np.random.default_rng(3)
    load = chance.lognormal(0, 1, (3, 32)).round(3)
    source = tmp_path / "load.npy"
    np.save(source, load)
    out = tmp_path / "out.json"
    asked = [
        str(source),
        "--cluster",
        "dgx-h100",
        "--gpus",
        "16",
        "--slots",
        "48",
        "--time-limit",
        "0.5",
    ]
    code, text, _ = run(*asked, "--json", "-o", str(out))
    assert code == 0
    document = json.loads(text)
    assert document["schema"] == 1
    slots = read_placement(out, layers=3, gpus=16, experts=32)
    value = SlotPacking(slots=slots, loads=load[:, None]).balance()
    assert [row["balance"] for row in document["layers"]] == pytest.approx(value.tolist())
    drifted = tmp_path / "drifted.npy"
    np.save(drifted, load * chance.lognormal(0, 0.3, load.shape))
    asked[0] = str(drifted)
    before = SlotPacking(slots=slots, loads=np.load(drifted)[:, None]).balance()
    code, text, _ = run(
        *asked, "--json", "--from", str(out), "--max-moves", "12", "-o", str(tmp_path / "new.json")
    )
    assert code == 0
    after = read_placement(tmp_path / "new.json", layers=3, gpus=16, experts=32)
    assert 0 < sum(count_moves(a, b) for a, b in zip(slots, after, strict=True)) <= 12
    assert json.loads(text)["balance_max"] < before.max()
    assert run(*asked, "-o", str(out))[0] == 2
    assert run(*asked[:-4], "--slots", "50")[0] == 2
    assert run(*asked[:-4], "--slots", "16")[0] == 1
    code, _, problem = run(*asked, "--format", "sglan")
    assert (code, "did you mean 'sglang'" in problem) == (2, True)


@pytest.mark.slow
def test_the_answer_does_not_depend_on_the_number_of_processes() -> None:
    loads = np.random.default_rng(8).lognormal(0, 1.5, (1, 22, 160))
    shape = SlotShape(slots=192, gpus=48, nodes=6)
    one, two = (
        place_layers(loads, shape, PlacementLimits(), PlacementEffort(time_limit_s=0.1, workers=n))
        for n in (1, 2)
    )
    assert one.slots.tolist() == two.slots.tolist()
    assert one.bound.tolist() == two.bound.tolist()


@pytest.mark.slow
def test_never_above_the_greedy_where_it_holds_no_expert_twice() -> None:
    chance = np.random.default_rng(21)
    compared = 0
    for sigma in (0.5, 1.2):
        load = chance.lognormal(0, sigma, (12, 64))
        for slots, gpus, nodes, groups in (
            (64, 16, 4, 8),
            (80, 16, 4, 8),
            (64, 16, 1, 1),
            (80, 16, 2, 1),
        ):
            shape = SlotShape(slots=slots, gpus=gpus, nodes=nodes)
            greedy = [greedy_balance(row, shape, groups) for row in load]
            found = place_layers(
                load[None],
                shape,
                PlacementLimits(groups=groups),
                PlacementEffort(exact=False, time_limit_s=0.2),
            )
            for row, (value, twice) in enumerate(greedy):
                if not twice:
                    compared += 1
                    assert found.value[row] <= value * (1 + 1e-9), (sigma, slots, groups, row)
    assert compared > 48


@pytest.mark.soak
def test_hot_experts_crowd_others_out_by_the_bound() -> None:
    # Twelve of 16 experts need a GPU each; at the value reached no counts leave room for one replica more.
    load = np.array([1.0] * 12 + [0.2] * 4)
    load *= 16 / load.sum()
    reached = place_layers(
        load[None, None],
        SlotShape(slots=32, gpus=16, nodes=1),
        PlacementLimits(),
        PlacementEffort(gap=0.0),
    )
    found = count_bound(load, 32, 16, low=1.0, high=float(reached.value[0]) * 0.999, work=1.0)
    assert 1.0 <= found.bound <= reached.value[0]


@SLOW_MACHINE
@given(st.data())
def test_bounds_by_counts_are_below_every_placement(data: st.DataObject) -> None:
    experts, slots, gpus = data.draw(
        st.sampled_from([(4, 6, 3), (5, 6, 2), (5, 6, 3), (4, 4, 2), (6, 6, 2)])
    )
    load = np.array(
        data.draw(st.lists(st.integers(1, 60), min_size=experts, max_size=experts)), dtype=float
    )
    load[0] *= data.draw(st.sampled_from([1, 5, 20]))
    best = enumerated(load, slots, gpus)
    load *= gpus / load.sum()
    assert (
        count_bound(load, slots, gpus, low=1.0, high=2.0 * gpus, work=0.2, steps=6).bound
        <= best + 1e-7
    )
    pairs = pair_bound(load, slots, gpus)
    assert (pairs is None) == (slots != 2 * gpus)
    if pairs is not None:
        assert pairs.bound <= best + 1e-9


def test_the_mean_of_the_caps_is_the_cap() -> None:
    assert layer_caps(np.array([1.0, 1.01]), 1.05).tolist() == [1.05, 1.05]
    caps = layer_caps(np.array([1.0, 1.2, 1.0]), 1.1)
    assert caps == pytest.approx([1.05, 1.2, 1.05])


def test_cross_node_bytes_are_the_direct_count_over_all_sources() -> None:
    """Two levels: nodes and leaves of two nodes. A token's copies go to every node it touches but its own."""
    chance = np.random.default_rng(4)
    tokens = np.argsort(chance.random((300, 16)), axis=1)[:, :3].astype(np.int32)
    slots = chance.permutation(16).reshape(8, 2)
    node_of = {int(e): gpu // 2 for gpu, held in enumerate(slots) for e in held}
    remote = leaves = 0
    for token in tokens.tolist():
        touched = {node_of[e] for e in token}
        leaves += len({node // 2 for node in touched})
        remote += sum(len(touched - {source}) for source in range(4))
    nodes = blocks_per_token(tokens, slots, 16, 2)
    assert nodes * 300 * 4 * (1 - 1 / 4) == pytest.approx(remote)
    assert blocks_per_token(tokens, slots, 16, 4) == pytest.approx(leaves / 300)


def test_experts_that_do_not_fit_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "load.npy"
    np.save(path, np.ones((58, 256)))
    asked = [str(path), "--cluster", "dgx-h100", "--model", "deepseek-v3", "--groups", "1"]
    code, text, problem = run(*asked, "--gpus", "8")
    assert code == 1
    # 32 experts x 58 layers x 3 x 7168 x 2048 x 2 bytes.
    assert "152.2 GiB" in text + problem


def test_the_worst_window_counts() -> None:
    """Pairs 01|23 have balance 1.5, 1, 1 over the windows; 02|13 have 1.4, 1.4, 1; 03|12 have 1, 1.1, 2."""
    loads = np.array([[[1.9, 1.1, 0.9, 0.1]], [[1.5, 0.5, 1.3, 0.7]], [[2.0, 0.0, 0.0, 2.0]]])
    shape = SlotShape(slots=4, gpus=2, nodes=1)
    found = place_layers(loads, shape, PlacementLimits(), PlacementEffort(exact=False))
    assert sorted(found.slots[0].tolist()) == [[0, 2], [1, 3]]
    assert found.value == pytest.approx([1.4])


def test_torch_files_are_refused_or_read(tmp_path: Path) -> None:
    path = tmp_path / "recorder.pt"
    path.write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(InputError, match=r"torch, which is not installed|plain pickles"):
        read_routing(path)
    torch = pytest.importorskip("torch")
    counts = np.arange(12).reshape(2, 2, 3)
    torch.save({"logical_count": torch.tensor(counts)}, path)
    assert read_routing(path).loads.tolist() == [counts.sum(axis=0).tolist()]


def test_a_first_answer_of_many_partitions_is_of_layers() -> None:
    """16 groups on 4 nodes have too many ways to be listed: what is told is no mean over the nodes."""
    loads = np.random.default_rng(0).integers(1, 100, (1, 2, 64)).astype(np.float64)
    shape = SlotShape(slots=96, gpus=32, nodes=4)
    told: list[State] = []
    effort = PlacementEffort(time_limit_s=0.5, on_first=told.append)
    solved = place_layers(loads, shape, PlacementLimits(groups=16), effort)
    (first,) = told
    assert first.value.shape == (2,)
    assert (first.value >= solved.value - 1e-9).all()
    assert (first.bound <= solved.value + 1e-9).all()


@pytest.mark.parametrize("option", [{"seed": -1}, {"weight_bytes": -1.0}])
def test_numbers_out_of_range_are_named(tmp_path: Path, option: dict[str, Any]) -> None:
    np.save(tmp_path / "loads.npy", np.ones((1, 16)))
    with pytest.raises(InputError, match="must be from 0 to"):
        place_experts(loads=tmp_path / "loads.npy", cluster="dgx-h100", gpus=8, **option)


def test_one_expert_has_as_many_replicas_as_slots() -> None:
    shape = SlotShape(slots=4, gpus=4, nodes=1)
    solved = place_layers(np.ones((1, 2, 1)), shape, PlacementLimits(), PlacementEffort())
    assert solved.slots.tolist() == [[[0]] * 4] * 2
    assert solved.value.tolist() == solved.bound.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_spread_replicas_always_find_a_place(nodes: int) -> None:
    """One or two slots a GPU, where the first packing often breaks the spread; it was called infeasible."""
    for seed in range(12):
        chance = np.random.default_rng(seed)
        experts, gpus = int(chance.integers(2, 9)), nodes * int(chance.integers(2, 5))
        slots = gpus * int(chance.integers(-(-experts // gpus), experts + 1))
        shape = SlotShape(slots=slots, gpus=gpus, nodes=nodes)
        loads = chance.integers(1, 20, (1, 2, experts)).astype(np.float64)
        effort = PlacementEffort(exact=False, time_limit_s=0.05)
        solved = place_layers(loads, shape, PlacementLimits(spread=True), effort)
        assert not has_duplicates(solved.slots).any()
        for row in solved.slots.reshape(2, nodes, -1):
            on_node = np.stack([np.bincount(node, minlength=experts) for node in row])
            assert (on_node.max(axis=0) <= -(-on_node.sum(axis=0) // nodes)).all()


def test_a_document_of_spread_replicas_is_json(tmp_path: Path) -> None:
    """A first packing that breaks the spread has no balance: its infinity is no JSON."""
    for seed in range(6):
        loads = np.random.default_rng(seed).integers(0, 9, (2, 6))
        np.save(tmp_path / "loads.npy", loads + 1)
        plan = place_experts(
            loads=tmp_path / "loads.npy", cluster="dgx-h100", gpus=16, spread=True, time_limit_s=0.2
        )
        json.dumps(plan.document, allow_nan=False)
