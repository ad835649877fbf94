"""Several windows of loads: the CVaR by hand, what is chosen by it, and loads that were not placed on."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.planner.experts.packing import SlotPacking, has_duplicates
from meshwright.planner.experts.problem import PlacementLimits, SlotShape
from meshwright.planner.experts.rows import Solved
from meshwright.planner.experts.solve import PlacementEffort, cvar, drift_row, place_robustly
from tests.places import DATA


def test_cvar_by_hand() -> None:
    values = np.array([2.0, 4.0, 1.0, 3.0])
    assert cvar(values, 1.0) == pytest.approx(2.5)
    assert cvar(values, 0.5) == pytest.approx(3.5)
    assert cvar(values, 0.375) == pytest.approx((4 + 0.5 * 3) / 1.5)
    assert cvar(values, 0.1) == 4.0


def test_cvar_is_the_least_of_its_linear_form() -> None:
    chance = np.random.default_rng(1)
    for share in (0.2, 0.3, 0.55, 0.9):
        x = chance.lognormal(0, 1, 9)
        # Piecewise linear in t with corners at the values: the least is at one of them.
        form = [t + np.maximum(x - t, 0).sum() / (share * 9) for t in x]
        assert cvar(x, share) == pytest.approx(min(form))


def solved(loads: np.ndarray, shape: SlotShape, objective: str, share: float = 0.5) -> Solved:
    effort = PlacementEffort(exact=False, time_limit_s=0.2)
    return place_robustly(loads, shape, PlacementLimits(), effort, objective=objective, share=share)


def test_worst_and_cvar_choose_differently() -> None:
    """Pairs 01|23 have balance 1.5, 1, 1 over the windows; 02|13 have 1.4, 1.4, 1; 03|12 have 1, 1.1, 2."""
    loads = np.array([[[1.9, 1.1, 0.9, 0.1]], [[1.5, 0.5, 1.3, 0.7]], [[2.0, 0.0, 0.0, 2.0]]])
    shape = SlotShape(slots=4, gpus=2, nodes=1)
    worst, tail = solved(loads, shape, "worst"), solved(loads, shape, "cvar", 2 / 3)
    assert sorted(worst.slots[0].tolist()) == [[0, 2], [1, 3]]
    assert worst.value == pytest.approx([1.4])
    assert sorted(tail.slots[0].tolist()) == [[0, 1], [2, 3]]
    assert tail.value == pytest.approx([1.25])
    assert solved(loads, shape, "guarded").slots.tolist() == worst.slots.tolist()


def test_cvar_is_never_above_that_of_the_worst_window_and_not_below_the_bound() -> None:
    loads = np.random.default_rng(2).lognormal(0, 1, (4, 5, 24))
    shape = SlotShape(slots=32, gpus=8, nodes=2)
    known = np.swapaxes(loads * 8 / loads.sum(axis=2, keepdims=True), 0, 1)
    worst, tail = solved(loads, shape, "worst"), solved(loads, shape, "cvar")
    reached = cvar(SlotPacking(slots=worst.slots, loads=known).gpu_loads().max(axis=2), 0.5)
    assert (tail.value <= reached + 1e-12).all()
    assert tail.value.mean() < reached.mean()
    assert (tail.bound <= tail.value).all()
    assert not has_duplicates(tail.slots).any()


def olmoe() -> dict[str, np.ndarray]:
    path = DATA / "olmoe_domain_loads.json"
    return {
        name: np.array(load, dtype=float)
        for name, load in json.loads(path.read_text())["loads"].items()
    }


@pytest.mark.parametrize("gpus", [8, 16])
def test_two_domains_beat_either_alone_on_the_third_with_two_slots_per_expert(gpus: int) -> None:
    domains = olmoe()
    shape = SlotShape(slots=128, gpus=gpus, nodes=gpus // 8)
    alone = {name: solved(load[None], shape, "worst").slots for name, load in domains.items()}
    for pair in combinations(domains, 2):
        (third,) = set(domains) - set(pair)
        both = solved(np.stack([domains[name] for name in pair]), shape, "guarded")
        row = drift_row(
            third, domains[third][None], both.slots, {name: alone[name] for name in pair}
        )
        assert row["gain"] > 0.03, (third, row)


def test_the_command_reports_the_cvar(tmp_path: Path) -> None:
    path = tmp_path / "windows.npz"
    a, b = np.random.default_rng(9).lognormal(0, 1, (2, 2, 16))
    np.savez(path, a=a, b=b)
    asked = [
        "experts",
        str(path),
        "--cluster",
        "dgx-h100",
        "--gpus",
        "8",
        "--slots",
        "16",
        "--json",
    ]
    asked += ["--window", "a", "--window", "b", "--time-limit", "0.1", "--robust"]
    done = CliRunner().invoke(main, [*asked, "cvar", "--cvar-share", "1"])
    assert done.exit_code == 0, done.output
    worst = json.loads(CliRunner().invoke(main, [*asked, "worst", "--cvar-share", "1"]).stdout)
    assert json.loads(done.stdout)["cvar_mean"] <= worst["cvar_mean"]
    assert CliRunner().invoke(main, [*asked, "cvar", "--cvar-share", "2"]).exit_code == 2
