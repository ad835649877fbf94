"""From a placement in use: moves counted, limited, spent as well as can be."""

from __future__ import annotations

import json
from functools import cache
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cli import main
from meshwright.errors import InputError
from meshwright.planner.experts.packing import has_duplicates
from meshwright.planner.experts.placements import Moved, bound_curve, count_moves, improve_from
from meshwright.planner.experts.problem import PlacementLimits, SlotShape
from meshwright.planner.experts.solve import PlacementEffort, place_layers
from tests.soaked import examples

SIZES = ((5, 2, 3), (4, 3, 2), (4, 2, 3), (3, 2, 3))
"""Experts, slots of a GPU, GPUs: few enough to try every placement."""


@cache
def every_placement(experts: int, per_gpu: int, gpus: int) -> tuple[np.ndarray, ...]:
    """All placements that hold every expert and none twice on a GPU."""
    held = product(combinations(range(experts), per_gpu), repeat=gpus)
    return tuple(np.array(slots) for slots in held if len(set(np.ravel(slots).tolist())) == experts)


def best_by_moves(load: np.ndarray, current: np.ndarray) -> dict[int, float]:
    """Least balance of one layer for each number of moves, by trying every placement."""
    gpus, per_gpu = current.shape
    best: dict[int, float] = {}
    for slots in every_placement(len(load), per_gpu, gpus):
        counts = np.bincount(slots.ravel(), minlength=len(load))
        value = float((load / counts)[slots].sum(axis=1).max() * gpus / load.sum())
        used = count_moves(current, slots)
        best[used] = min(best.get(used, np.inf), value)
    return best


def small_case(
    chance: np.random.Generator, number: int
) -> tuple[np.ndarray, np.ndarray, SlotShape]:
    experts, per_gpu, gpus = SIZES[number % len(SIZES)]
    load = chance.lognormal(0, 1, (2, experts))
    choices = every_placement(experts, per_gpu, gpus)
    current = np.stack([choices[i] for i in chance.integers(0, len(choices), 2)])
    return load, current, SlotShape(slots=per_gpu * gpus, gpus=gpus, nodes=1)


def fewest(load: np.ndarray, current: np.ndarray, moves: int) -> float:
    """Least mean balance of both layers within the moves."""
    curves = [best_by_moves(*pair).items() for pair in zip(load, current, strict=True)]
    return min((a + b) / 2 for (m, a), (n, b) in product(*curves) if m + n <= moves)


@pytest.mark.slow
def test_moves_are_nearly_as_good_as_enumeration_and_the_bound_holds() -> None:
    chance = np.random.default_rng(4)
    over = []
    for number in range(60):
        load, current, shape = small_case(chance, number)
        moves = int(chance.integers(1, 6))
        found = improve_from(load[None], current, shape, moves)
        best = fewest(load, current, moves)
        assert found.mean_bound <= best * (1 + 1e-9)
        assert found.moves.sum() == sum(map(count_moves, current, found.solved.slots)) <= moves
        over.append(found.solved.value.mean() / best)
    assert min(over) >= 1 - 1e-9
    assert np.mean(over) <= 1.01, np.mean(over)


def test_bounds_by_hand() -> None:
    """GPUs of 9 + 1 and 1 + 1: a move onto the first takes at most the 9, or half of it as a new replica."""
    load, slots = np.array([[9.0, 1, 1, 1]]), np.array([[0, 1], [2, 3]])
    # One: 10 - 9. Two: a move puts out at most 9 and takes 9 / 2 from holders: below the mean, so `least`.
    assert bound_curve(load, slots, 1, 0.5).tolist() == [10.0, 1.0]
    # Nothing is known without a move: the current balance.
    assert bound_curve(load, slots, 0, 0.0).tolist() == [10.0]
    # Eight alike GPUs of 2 + 2: a move puts out 2 and takes 1, so the sum above T falls by 3 a move.
    even = bound_curve(np.full((1, 16), 2.0), np.arange(16).reshape(8, 2), 2, 0.0)
    assert even.tolist() == pytest.approx([4.0, 4 - 3 / 8, 4 - 6 / 8])


def test_a_slot_of_a_replicated_expert_is_the_cheaper_move() -> None:
    """Experts of 6, 1, 1; GPUs {0, 1} and {1, 2}. One move makes room for 0 on the second: 4 and 4 of 8."""
    load, current = np.array([[[6.0, 1, 1]]]), np.array([[[0, 1], [1, 2]]])
    found = improve_from(load, current, SlotShape(slots=4, gpus=2, nodes=1), 1)
    assert found.solved.slots.tolist() == [[[0, 1], [0, 2]]]
    assert found.moves.tolist() == [1]
    assert found.before.tolist() == [6.5 / 4]
    assert found.solved.value[0] == pytest.approx(1.0)


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 60), st.sampled_from(["plain", "spread", "groups"]))
def test_the_limits_hold_whatever_the_moves(seed: int, moves: int, kind: str) -> None:
    chance = np.random.default_rng(seed)
    shape = SlotShape(slots=32, gpus=8, nodes=2)
    limits = PlacementLimits(spread=kind == "spread", groups=4 if kind == "groups" else 1)
    effort = PlacementEffort(exact=False, time_limit_s=0.1)
    current = place_layers(chance.lognormal(0, 1, (1, 3, 24)), shape, limits, effort).slots
    loads = chance.lognormal(0, 1, (2, 3, 24))
    found = improve_from(loads, current, shape, moves, limits=limits, time_limit_s=0.05)
    slots = found.solved.slots
    assert sum(map(count_moves, current, slots)) <= moves
    assert not has_duplicates(slots).any()
    assert found.solved.value.mean() <= found.before.mean() * (1 + 1e-12)
    assert found.mean_bound <= found.solved.value.mean() * (1 + 1e-12)
    for layer in slots:
        nodes = layer.reshape(2, -1)
        counts = np.bincount(layer.ravel(), minlength=24)
        assert counts.min() >= 1
        if kind == "spread":
            here = np.stack([np.bincount(node, minlength=24) for node in nodes])
            assert (here.max(axis=0) <= -(-counts // 2)).all()
        if kind == "groups":
            assert not set((nodes[0] // 6).tolist()) & set((nodes[1] // 6).tolist())


def reached(moves: int) -> Moved:
    chance = np.random.default_rng(9)
    shape = SlotShape(slots=80, gpus=16, nodes=2)
    loads = chance.lognormal(0, 1, (1, 4, 64))
    current = place_layers(
        loads, shape, PlacementLimits(), PlacementEffort(exact=False, time_limit_s=0.5)
    ).slots
    drifted = loads * chance.lognormal(0, 0.5, loads.shape)
    return improve_from(drifted, current, shape, moves, time_limit_s=1.0)


@pytest.mark.soak
def test_more_moves_are_never_worse_and_enough_make_it_even() -> None:
    values = [reached(moves).solved.value.mean() for moves in (0, 4, 32, 10**6)]
    assert values == sorted(values, reverse=True)
    assert values[1] < values[0]
    assert values[-1] < 1.01


def test_a_placement_that_breaks_what_is_asked_is_refused() -> None:
    loads, shape = np.ones((1, 1, 4)), SlotShape(slots=8, gpus=4, nodes=2)
    current = np.array([[[0, 1], [0, 2], [1, 3], [2, 3]]])
    with pytest.raises(InputError, match="share a node"):
        improve_from(loads, current, shape, 2, limits=PlacementLimits(spread=True))
    with pytest.raises(InputError, match="group 0 is on several nodes"):
        improve_from(loads, current, shape, 2, limits=PlacementLimits(groups=2))
    with pytest.raises(InputError, match="8 slots on 4 GPUs"):
        improve_from(loads, current, SlotShape(slots=12, gpus=4, nodes=2), 2)
    with pytest.raises(InputError, match="twice"):
        improve_from(loads, np.array([[[0, 0], [1, 2], [1, 3], [2, 3]]]), shape, 2)


def test_the_report_tells_moves_and_balance_before(tmp_path: Path) -> None:
    chance = np.random.default_rng(3)
    load = chance.lognormal(0, 1, (3, 32)).round(3)
    source, out = tmp_path / "load.npy", tmp_path / "out.json"
    np.save(source, load)
    asked = ["experts", str(source), "--cluster", "dgx-h100", "--gpus", "16", "--slots", "48"]
    asked += ["--time-limit", "0.5"]
    first = json.loads(CliRunner().invoke(main, [*asked, "--json", "-o", str(out)]).stdout)
    assert first["from"] is None
    np.save(source, load * chance.lognormal(0, 0.5, load.shape))
    asked += ["--from", str(out), "--max-moves", "9"]
    told = json.loads(CliRunner().invoke(main, [*asked, "--json"]).stdout)
    assert 0 < told["from"]["moves"] <= told["from"]["max_moves"] == 9
    assert told["from"]["moves"] == sum(row["moves"] for row in told["layers"])
    assert (
        told["from"]["balance_bound_mean"]
        <= told["balance_mean"]
        < told["from"]["balance_before_mean"]
    )
    text = CliRunner().invoke(main, asked).stdout
    assert "9 of 9 allowed" in text
    assert "bound within the moves" in text
