"""What one dispatch exchanges, against dispatches drawn at random."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.planner.experts.service import (
    ExpertRequest,
    inside_share,
    permutation_density,
    read_ground,
)


def drawn_density(share: np.ndarray, choices: int, dispatches: int) -> float:
    """Share of ordered pairs that exchange, counted over random dispatches."""
    chance = np.random.default_rng(3)
    gpus = len(share)
    pairs = 0
    for _ in range(dispatches * gpus):
        pairs += len(np.unique(chance.choice(gpus, size=choices, p=share)))
    return pairs / (dispatches * gpus * gpus)


@pytest.mark.parametrize("choices", [1, 7, 64])
def test_density_is_that_of_random_dispatches(choices: int) -> None:
    share = np.arange(1, 17) / np.arange(1, 17).sum()
    assert permutation_density(share, choices) == pytest.approx(
        drawn_density(share, choices, 40), rel=0.03
    )


def test_density_of_the_worked_case() -> None:
    assert permutation_density(np.full(64, 1 / 64), 64) == pytest.approx(0.635, abs=5e-4)
    assert permutation_density(np.full(4, 0.25), 1) == 0.25


def test_inside_share() -> None:
    assert inside_share(8, 64) == 0.125
    assert inside_share(72, 64) == 1.0


def test_the_straggler_takes_as_much_longer_as_its_gpu_is_fuller(tmp_path: Path) -> None:
    loads = tmp_path / "loads.csv"
    loads.write_text("\n".join([",".join(["300"] + ["100"] * 7)] * 32), encoding="utf-8")
    words = f"experts {loads} --cluster dgx-h100 --gpus 8 --model mixtral-8x7b --json"
    done = CliRunner().invoke(main, words.split())
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)["layers"][0]
    assert row["even_all_to_all_s"] == 0.0  # one node: nothing leaves it
    words = words.replace("--gpus 8", "--gpus 16").replace("--json", "--slots 16 --json")
    row = json.loads(CliRunner().invoke(main, words.split()).stdout)["layers"][0]
    # Half of 4,096 tokens x 2 choices x 4,096 values of 2 bytes cross a NIC of 50 GB/s.
    assert row["even_all_to_all_s"] == pytest.approx(4096 * 4096 * 2 / 50e9)
    over_even = row["straggler_all_to_all_s"] / row["even_all_to_all_s"]
    assert over_even == pytest.approx(row["balance"])


def test_nothing_inside_a_rack_crosses_the_network(tmp_path: Path) -> None:
    """Two nodes of four GPUs in one NVLink domain of 72: their NICs carry no token."""
    loads = tmp_path / "loads.npz"
    tokens = np.random.default_rng(0).integers(0, 8, (1, 64, 1), dtype=np.int32)
    np.savez(loads, topk_ids=tokens, num_experts=8)
    words = f"experts {loads} --cluster gb200-nvl72 --gpus 8 --model mixtral-8x7b --json"
    row = json.loads(CliRunner().invoke(main, words.split()).stdout)["layers"][0]
    assert row["cross_node_bytes"] > 0
    seconds = [row[name] for name in row if name.endswith("_s") and "all_to_all" in name]
    assert seconds == [0.0] * 4
    ground = read_ground(ExpertRequest(loads=loads, cluster="gb200-nvl72", gpus=144), 8)
    assert ground.domain_gpus == 72
    assert [(level.gpus, level.weight) for level in ground.levels] == [(4, 50 / 900), (72, 1.0)]
    plain = read_ground(ExpertRequest(loads=loads, cluster="dgx-h100", gpus=16), 8)
    assert (plain.domain_gpus, plain.levels[0].weight) == (8, 1.0)
