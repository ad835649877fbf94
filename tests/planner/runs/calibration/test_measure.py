"""Micro-benchmarks as evidence; torch itself runs them in the oracles' environment."""

from __future__ import annotations

import sys

import pytest

from meshwright.costmodel.calibration import Factors
from meshwright.errors import InputError
from meshwright.planner.runs.calibration.evidence import (
    MeasuredRates,
    benchmarks_of,
    measured_rates,
)
from tests.planner.runs.calibration.own_runs import measured_runs


def test_rates_are_set_against_what_is_usual() -> None:
    """A100: 312 TFLOP/s, 0.869 of them at best; 2,039 GB/s, 0.9 of them by a copy."""
    rates = MeasuredRates(
        gemm_flops=0.9 * 0.869 * 312e12,
        attention_flops=100e12,
        copy_bytes_per_s=0.8 * 0.9 * 2039e9,
        all_reduces=((8, 2.0**30, 1.0), (32, 2.0**30, 1.0)),
    )
    marks = benchmarks_of(rates, measured_runs(Factors(), 1))
    assert [mark.factor for mark in marks] == ["gemm", "attention", "hbm", "scale_up", "network"]
    assert marks[0].ratio == pytest.approx(0.9)
    assert marks[2].ratio == pytest.approx(0.8, rel=0.01)
    assert marks[3].ratio < marks[4].ratio < 1.0


def test_without_torch_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match="needs PyTorch"):
        measured_rates()
