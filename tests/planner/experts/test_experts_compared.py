"""What a placement is held against: the start, the greedy balancer, and no groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.planner.experts.packing import greedy_placement, in_order
from meshwright.planner.experts.placements import PLACEMENT_FORMATS, READERS, count_moves
from meshwright.planner.experts.problem import SlotShape


def told(folder: Path, *more: str, load: np.ndarray | None = None) -> dict[str, Any]:
    loads = np.random.default_rng(3).lognormal(0, 1, (3, 16)) if load is None else load
    np.save(folder / "load.npy", loads)
    asked = ["experts", str(folder / "load.npy"), "--cluster", "dgx-h100", "--gpus", "16"]
    done = CliRunner().invoke(main, [*asked, "--time-limit", "0.5", "--workers", "1", *more])
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def rows_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["placement"]: row for row in document["compared"]}


def test_the_greedy_by_hand() -> None:
    """Four experts, two GPUs of three slots: 8 gets three replicas (8 / 2 ties with 4, the first wins)."""
    slots = greedy_placement(np.array([8.0, 4.0, 2.0, 1.0]), SlotShape(slots=6, gpus=2, nodes=1))
    assert sorted(slots.ravel().tolist()) == [0, 0, 0, 1, 2, 3]
    loads = np.array([8 / 3, 4.0, 2.0, 1.0])[slots].sum(axis=1)
    assert sorted(loads.tolist()) == pytest.approx([16 / 3 + 2, 4 + 8 / 3 + 1])


def test_the_greedy_keeps_groups_on_a_node() -> None:
    load = np.random.default_rng(0).lognormal(0, 1, 16)
    slots = greedy_placement(load, SlotShape(slots=32, gpus=8, nodes=2), groups=4)
    nodes = [set(slots[:4].ravel().tolist()), set(slots[4:].ravel().tolist())]
    assert nodes[0].isdisjoint(nodes[1])
    for group in range(4):
        members = set(range(4 * group, 4 * group + 4))
        assert members <= nodes[0] or members <= nodes[1]


def test_in_order_is_how_frameworks_start() -> None:
    slots = in_order(2, 6, SlotShape(slots=8, gpus=4, nodes=1))
    assert slots.tolist() == [[[0, 1], [2, 3], [4, 5], [0, 1]]] * 2


def test_ours_stands_beside_the_start_and_the_greedy(tmp_path: Path) -> None:
    document = told(tmp_path, "--slots", "32", "--json")
    rows = rows_of(document)
    assert set(rows) == {"experts in order", "greedy balancer", "this placement"}
    assert rows["experts in order"]["moves"] == 0
    ours = rows["this placement"]
    assert ours["balance_mean"] == pytest.approx(document["balance_mean"])
    assert ours["balance_mean"] <= rows["experts in order"]["balance_mean"]
    if not rows["greedy balancer"]["duplicates"]:
        assert ours["balance_mean"] <= rows["greedy balancer"]["balance_mean"] * (1 + 1e-9)
    assert ours["moves"] == sum(row["moves"] for row in document["layers"])


def test_moves_are_counted_from_the_placement_in_use(tmp_path: Path) -> None:
    first = tmp_path / "first.json"
    told(tmp_path, "--slots", "32", "--json", "-o", str(first))
    again = told(tmp_path, "--slots", "32", "--json", "--from", str(first), "--max-moves", "2")
    rows = rows_of(again)
    assert rows["in use"]["moves"] == 0
    assert rows["this placement"]["moves"] == again["from"]["moves"] <= 2
    assert "experts in order" not in rows


def test_groups_that_cost_balance_are_pointed_out(tmp_path: Path) -> None:
    load = np.ones((2, 16))
    load[:, :4] = 9.0  # one group holds most of the load
    document = told(tmp_path, "--slots", "32", "--groups", "4", "--json", load=load)
    rows = rows_of(document)
    assert rows["without groups"]["balance_mean"] < rows["this placement"]["balance_mean"]
    asked = ["experts", str(tmp_path / "load.npy"), "--cluster", "dgx-h100", "--gpus", "16"]
    asked += ["--slots", "32", "--time-limit", "0.5"]
    shown = CliRunner().invoke(main, [*asked, "--groups", "4"])
    words = " ".join(shown.stdout.split())
    figure = f"{rows['without groups']['balance_mean']:.4f}"
    assert "4 groups kept whole cost" in words
    assert f"{figure} without them" in words
    plain = CliRunner().invoke(main, [*asked, "--groups", "1"])
    assert "kept whole" not in plain.stdout


def test_count_moves_does_not_mind_the_order_of_slots() -> None:
    before = np.array([[0, 1], [2, 3]])
    assert count_moves(before, np.array([[1, 0], [3, 2]])) == 0
    assert count_moves(before, np.array([[2, 0], [3, 1]])) == 2


@pytest.mark.parametrize("form", PLACEMENT_FORMATS)
def test_the_reader_of_a_file_is_named(form: str, tmp_path: Path) -> None:
    np.save(tmp_path / "load.npy", np.ones((2, 16)))
    out = tmp_path / "out.json"
    asked = ["experts", str(tmp_path / "load.npy"), "--cluster", "dgx-h100", "--gpus", "8"]
    asked += ["--time-limit", "0.1", "--format", form, "-o", str(out)]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert READERS[form].split(":")[0].replace("FILE", str(out)) in done.stdout
