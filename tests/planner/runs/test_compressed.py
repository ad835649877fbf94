"""Compressed gradients in the step of a run."""

from __future__ import annotations

from typing import Any

import pytest

import meshwright
from meshwright.costmodel.alpha_beta import compressions
from meshwright.planner.runs.prediction import compressed_steps


def steps(nic_gbps: float, dp: int, **run: Any) -> dict[str, dict[str, Any]]:
    """By method, of Llama-2 7B on H100 nodes with NICs of this rate."""
    settings = {"seq_len": 4096, "global_batch": dp, "micro_batch": 1, "dp": dp, "zero_stage": 0}
    cluster = {"device": "h100-sxm-80gb", "gpus": dp, "nic_gbps_per_gpu": nic_gbps}
    (priced,) = meshwright.estimate(
        {"model": "llama-2-7b", "cluster": cluster, "run": settings | run}
    )
    return {row["method"]: row for row in compressed_steps(priced)}


def test_fewer_bits_pay_on_a_slow_network() -> None:
    slow = steps(25, 64)
    assert slow["8 bits"]["pays"]
    assert slow["4 bits"]["speed_up"] > slow["8 bits"]["speed_up"] > 1


def test_what_hides_anyway_brings_little() -> None:
    hidden = steps(400, 16, global_batch=1024)
    assert all(way["speed_up"] < 1.01 for way in hidden.values())
    codec_s = hidden["8 bits"]["codec_s"]
    # Two passes over 6.74 billion gradients of 2 bytes at 500 GB/s.
    assert codec_s == pytest.approx(2 * 6.738e9 * 2 / 500e9, rel=1e-3)


def test_gathered_values_grow_with_the_ranks() -> None:
    top_k = next(way for way in compressions() if way.name == "top-k")
    # 1 % of the values with an index twice as long: 3 % of the bytes, gathered from 64 ranks.
    assert top_k.traffic_ratio(64) == pytest.approx(0.03 * 32)
    assert top_k.traffic_ratio(256) > 1


def test_nothing_is_compressed_where_nothing_is_reduced() -> None:
    assert steps(400, 1) == {}
