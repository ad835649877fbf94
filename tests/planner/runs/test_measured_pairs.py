"""Ratios of times between measured runs of the same work, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from meshwright.planner.runs.run_file import run_from_mapping
from meshwright.planner.runs.validation import MeasuredStep, Pair, gains_of, pair_sums, pairs_of


def timed(
    predicted_s: float, measured_s: float, source: str = "a paper", **settings: Any
) -> MeasuredStep:
    """A run of Llama-2-7B on 8 H100 with other settings."""
    run = {"gpus": 8, "seq_len": 4096, "global_batch": 64, "micro_batch": 1, "tp": 2} | settings
    row = {"model": "llama-2-7b", "cluster": "dgx-h100", "source": source, "run": run}
    read = run_from_mapping(row, where="run")
    return MeasuredStep(run=read, predicted_s=predicted_s, measured_s=measured_s)


def test_a_pair_is_named_by_what_differs_and_starts_at_the_lower_value() -> None:
    (pair,) = pairs_of([timed(4.0, 5.0, tp=4), timed(2.0, 4.0, tp=2)])
    assert pair.knobs == ("tp",)
    assert (pair.predicted, pair.measured) == (2.0, 1.25)
    assert pair.error == pytest.approx(math.log(2.0 / 1.25))
    assert pair.right


def test_other_work_sources_and_equal_times_are_no_pair() -> None:
    base = timed(4.0, 5.0)
    assert not pairs_of([base, timed(3.0, 4.0, seq_len=2048, tp=4)])
    assert not pairs_of([base, timed(3.0, 4.0, source="another paper", tp=4)])
    assert not pairs_of([base, timed(3.0, 5.05, tp=4)])
    assert not pairs_of([base, timed(3.0, 4.0)])
    assert not pairs_of([base, timed(3.0, 4.0, precision="fp8", tp=4)])
    assert not pairs_of([base, timed(3.0, 4.0, framework="Megatron-LM 2024")])


def test_words_after_a_semicolon_do_not_part_a_source() -> None:
    assert pairs_of(
        [timed(4.0, 5.0, "a paper; table 1"), timed(3.0, 4.0, "a paper; table 2", tp=4)]
    )


def test_sums_are_means_of_logarithms_and_shares() -> None:
    rows = [timed(1.0, 1.0, tp=1), timed(2.0, 2.0, tp=2), timed(1.5, 4.0, tp=4)]
    pairs = pairs_of(rows)
    sums = pair_sums(pairs)
    assert sums["n"] == 3
    # Between the first two nothing is off; the last is told 1.5 s instead of 4, and faster than the second.
    assert sums["error"] == pytest.approx((0.0 + 2 * math.log(4.0 / 1.5)) / 3)
    assert sums["direction"] == pytest.approx(2 / 3)
    assert pair_sums([]) == {"n": 0, "error": None, "direction": None}


def test_gains_are_geometric_means_by_setting_and_device() -> None:
    rows = [timed(1.0, 1.0, tp=1), timed(2.0, 4.0, tp=2), timed(8.0, 16.0, tp=4, micro_batch=2)]
    gains = {row["knob"]: row for row in gains_of(pairs_of(rows))}
    assert set(gains) == {"tp", "micro_batch and tp"}
    assert gains["tp"]["pairs"] == 1
    assert gains["tp"]["device"] == "h100-sxm-80gb"
    assert gains["tp"]["predicted"] == pytest.approx(2.0)
    assert gains["tp"]["measured"] == pytest.approx(4.0)
    assert gains["micro_batch and tp"]["measured"] == pytest.approx(math.sqrt(16.0 * 4.0))


def test_a_setting_turned_on_comes_after_it_turned_off() -> None:
    off, on = timed(2.0, 2.0, recompute="none"), timed(2.6, 2.5, recompute="full")
    (pair,) = pairs_of([on, off])
    assert isinstance(pair, Pair)
    assert pair.first is off
    assert "recompute" in pair.knobs
