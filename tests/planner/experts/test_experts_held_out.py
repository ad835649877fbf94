"""`experts --hold-out`: nothing of the second half is known where the first is placed for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.planner.experts.inputs import cross_node_share
from meshwright.planner.experts.service import ExpertPlan, ExpertRequest, plan_experts
from tests.planner.experts.safetensors_files import write_safetensors

GPUS, EXPERTS, STEPS = 16, 32, 4
"""Two nodes of a DGX, two experts a GPU."""


def counts(second_half: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Choices of each step, rank and expert: the ranks of each node have experts that they like."""
    draw = np.random.default_rng(0)
    table = np.empty((STEPS, GPUS, EXPERTS), dtype=np.int32)
    for step in range(STEPS):
        seed = 1 if step < STEPS // 2 else second_half
        liked = np.random.default_rng(seed).permutation(EXPERTS)[: EXPERTS // 2]
        table[step] = draw.integers(1, 4, (GPUS, EXPERTS))
        table[step][:8, liked] += 40
        table[step][8:, np.setdiff1d(np.arange(EXPERTS), liked)] += 40
    return table


def recorded(folder: Path, table: np.ndarray[Any, np.dtype[np.int32]]) -> Path:
    """As TensorRT-LLM writes it."""
    folder.mkdir()
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": EXPERTS}), encoding="utf-8")
    for rank in range(GPUS):
        tensors = {f"{step}_0": table[step, rank] for step in range(STEPS)}
        path = folder / f"rank{rank}.safetensors"
        path.write_bytes(write_safetensors(tensors))
    return folder


def placed(loads: Path, **changes: Any) -> ExpertPlan:
    asked: dict[str, Any] = {"cluster": "dgx-h100", "gpus": GPUS, "time_limit_s": 5.0}
    return plan_experts(ExpertRequest(loads=loads, **asked | changes))


def test_the_half_held_out_does_not_steer(tmp_path: Path) -> None:
    """Where the second half's sources like other experts, the placement stays and its own figure tells."""
    alike, other = (
        placed(recorded(tmp_path / str(seed), counts(seed)), split=2, hold_out=True)
        for seed in (1, 2)
    )
    assert alike.placed.slots.tolist() == other.placed.slots.tolist()
    row = other.document["layers"][0]
    assert row["cross_node_share"] < 0.1
    second = counts(2)[STEPS // 2 :].sum(axis=0).astype(float)
    by_hand = cross_node_share(other.placed.slots[0], second, 2)
    assert row["held_out_cross_node_share"] == pytest.approx(by_hand)
    assert alike.document["held_out_cross_node_share_mean"] < 0.1 < by_hand
    assert not other.warnings


def test_what_a_file_tells_of_both_halves_is_left_out(tmp_path: Path) -> None:
    table = counts(2)
    path = tmp_path / "loads.npz"
    np.savez(path, load=table.sum(axis=1)[:, None], affinity=table.sum(axis=0)[None])
    plan = placed(path, hold_out=True)
    assert plan.document["cross_node_share_mean"] is None
    assert any("where tokens come from of both halves" in line for line in plan.warnings)
    assert placed(path).document["cross_node_share_mean"] is not None


def test_halves_of_a_trace_have_their_own_sources(tmp_path: Path) -> None:
    """Raw choices name their rank: each half's sources are those of its tokens."""
    folder = recorded(tmp_path / "stats", counts(2))
    draw = np.random.default_rng(3)
    for rank in range(GPUS):
        raw = {f"{step}_0": draw.integers(0, EXPERTS, (8, 2), dtype=np.int32) for step in range(4)}
        (folder / f"rank{rank}_raw.safetensors").write_bytes(write_safetensors(raw))
    plan = placed(folder, hold_out=True)
    row = plan.document["layers"][0]
    assert row["cross_node_share"] is not None
    assert row["held_out_cross_node_share"] is not None
    assert row["held_out_nodes_per_token"] is not None
