"""Traffic by hand: source ranks near their experts, and the all-to-all's slowest receiver."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from cli import main
from costmodel.traffic import all_to_all_bytes
from model_specs.reader import read_model
from planner.experts.affinity import cross_node_share, near_sources
from planner.experts.figures import traffic_row
from planner.experts.problem import Shape
from planner.experts.request import ExpertRequest, ground
from planner.experts.rows import Solved


def test_nodes_are_exchanged_so_that_choices_stay_by_hand() -> None:
    """Node 0 holds experts 0, 1 and node 1 holds 2, 3, sources choose the others: 3 of 10 stay, then 7."""
    slots = np.array([[[0], [1], [2], [3]]])
    affinity = np.array([[[1.0, 0, 2, 0], [0, 1, 0, 1], [2, 0, 1, 0], [0, 2, 0, 0]]])
    before = Solved(slots=slots, value=np.ones(1), bound=np.ones(1))
    assert cross_node_share(slots[0], affinity[0], 2) == pytest.approx(0.7)
    after = near_sources(before, affinity, Shape(slots=4, gpus=4, nodes=2))
    assert after.slots.tolist() == [[[2], [3], [0], [1]]]
    assert cross_node_share(after.slots[0], affinity[0], 2) == pytest.approx(0.3)


def test_nodes_come_in_the_order_that_keeps_the_most_choices() -> None:
    chance = np.random.default_rng(7)
    shape = Shape(slots=24, gpus=8, nodes=4)
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
    asked = ["experts", str(path), "--cluster", "dgx-h100", "--gpus", "16", "--time-limit", "0.1", "--json"]
    done = CliRunner().invoke(main, asked)
    assert 0 < json.loads(done.stdout)["cross_node_share_mean"] < 0.5


def test_the_slowest_receiver_ends_the_all_to_all(tmp_path: Path) -> None:
    """16 GPUs on 2 nodes: even choices are costmodel's bytes; half of them on one GPU take 8 times."""
    loads = tmp_path / "loads.npy"
    np.save(loads, np.ones((32, 8)))
    request = ExpertRequest(loads=loads, cluster="dgx-h100", gpus=16, slots=16, model="mixtral-8x7b")
    at = ground(request, 8)
    slots = np.concatenate([np.arange(8), np.arange(8)])[:, None]
    even = np.stack([np.arange(16) % 8, (np.arange(16) + 1) % 8], axis=1).astype(np.int32)
    sent = request.tokens_per_gpu * 2 * read_model("mixtral-8x7b").hidden * 2
    expected = float(all_to_all_bytes(sent, np.array([8, 16]))[-1]) / (at.gb_per_s * 1e9)
    assert traffic_row(even, slots, 8, at, request)["all_to_all_s"] == pytest.approx(expected)
    slots[8:, 0] = [1, 2, 3, 4, 5, 6, 7, 1]
    hot = np.stack([np.zeros(16), 1 + np.arange(16) % 7], axis=1).astype(np.int32)
    assert traffic_row(hot, slots, 8, at, request)["all_to_all_s"] == pytest.approx(8 * expected)
