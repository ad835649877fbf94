"""What measured runs say of a device class: best utilisation, and how far predictions are off."""

from __future__ import annotations

import pytest
import yaml

from meshwright.cluster_specs.reader import device_names
from meshwright.costmodel.rates import peak_flops
from meshwright.costmodel.records import (
    GEMM_BITS,
    best_measured_mfu,
    data_table,
    device_class,
    device_classes,
    error_band,
    measured_gain,
    with_stragglers,
)
from meshwright.costmodel.stacks import framework_names
from meshwright.model_specs.parameters import flops_per_token
from meshwright.planner.runs.run_file import Run, read_rows
from tests.places import DATA
from tests.published import published_report, published_runs

RUNS = DATA / "published_runs.yaml"


@pytest.fixture(scope="module")
def runs() -> tuple[Run, ...]:
    return published_runs()


def test_every_device_and_framework_has_a_band_and_says_whose_it_is() -> None:
    for device in (*device_names(), "unheard-of"):
        for framework in (*framework_names(), "unheard-of"):
            band = error_band(device, framework)
            assert 0.5 < band.low < band.high < 2.0
            assert band.rows > 0
            assert len(band.basis) > 8


def test_the_band_of_a_pair_without_runs_is_that_of_a_wider_group() -> None:
    assert error_band("h100-sxm-80gb", "llm-foundry").basis == "h100 with llm-foundry"
    assert error_band("h200-sxm-141gb", "megatron").rows < 458


@pytest.mark.parametrize(
    ("device", "framework", "where"),
    [
        ("h100-sxm-80gb", "unheard-of", "h100 with unheard-of"),
        ("v100-sxm-32gb", "llm-foundry", "v100-sxm-32gb"),
        ("mi355x", "megatron", "mi355x"),
    ],
)
def test_a_band_says_where_nobody_has_measured(device: str, framework: str, where: str) -> None:
    band = error_band(device, framework)
    assert band.basis.endswith(f"none was measured on {where}")
    measured = error_band("h100-sxm-80gb", "megatron")
    assert band.high / band.low > measured.high / measured.low


def test_slow_nodes_widen_the_band_of_many() -> None:
    """Of 2,048 nodes at half a percent one is slow for certain: 10 %; of one in every two hundred runs."""
    band = error_band("h100-sxm-80gb", "megatron")
    assert with_stragglers(band, 2048).high == pytest.approx(1.1 * band.high, rel=1e-4)
    assert with_stragglers(band, 1).high == pytest.approx((1 + 0.1 * 0.005) * band.high)
    assert with_stragglers(band, 2048).low == band.low


def test_the_bands_hold_what_they_promise_on_the_fitted_rows() -> None:
    """90 % of runs predicted with their source left out lie inside, and so about that of fitted rows."""
    inside, rows = 0, published_report().rows
    for row in rows:
        assert row.run is not None
        assert row.predicted is not None
        assert row.measured is not None
        assert row.measured.step_time_s is not None
        band = error_band(row.run.workload.cluster.device.name, row.run.workload.framework)
        inside += band.low <= row.measured.step_time_s / row.predicted.step_time_s <= band.high
    assert inside > 0.89 * len(rows)


def test_the_best_measured_runs_are_the_best(runs: tuple[Run, ...]) -> None:
    """Of all measured rows: a warning named 19.8 % of BF16 the best with experts on Hopper, beside 38.6 %."""
    best: dict[tuple[str, bool, int], tuple[float, str]] = {}
    more = (row for path in (DATA / "more_runs").glob("*.yaml") for row in read_rows(path))
    for run in (*runs, *(row for row in more if isinstance(row, Run))):
        work = run.workload
        name = device_class(work.cluster.device.name)
        if run.suspect or name is None or run.measured is None or not run.measured.step_time_s:
            continue
        tokens_per_s = work.global_batch * work.seq_len / run.measured.step_time_s / work.gpus
        flops_per_s = tokens_per_s * flops_per_token(work.model, work.seq_len)
        mfu = flops_per_s / peak_flops(work.cluster.device, "bf16")
        key = name, work.model.moe is not None, GEMM_BITS.get(work.precision, 16)
        best[key] = max(best.get(key, (0.0, "")), (mfu, run.id))
    assert {name for name, _, _ in best} == set(device_classes())
    devices = {device_class(name): name for name in device_names()}
    for (name, experts, bits), (mfu, run_id) in best.items():
        precision = {16: "bf16", 8: "fp8", 4: "nvfp4"}[bits]
        found = best_measured_mfu(devices[name], precision, experts=experts)
        assert found is not None
        assert found.run == run_id
        assert found.mfu == pytest.approx(mfu, abs=6e-4)


def test_measured_gains_are_those_of_published_pairs() -> None:
    document = yaml.load(
        (DATA / "published_pairs.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader
    )
    pairs = {pair["id"]: pair for pair in document}
    rows = data_table("measured_gains.yaml")["gains"]
    assert len(rows) > 15
    for row in rows:
        ratio = pairs[row["id"]]["ratio"]
        expected = 1 / ratio if row.get("turned") else ratio
        assert row["ratio"] == pytest.approx(expected, abs=5e-4), row["id"]
        assert pairs[row["id"]]["knob"] == row["choice"]


def test_a_choice_is_judged_by_the_nearest_pairs() -> None:
    """Three pairs of EP overlap on H100: 0.759, 0.8494 and 0.7847, whose geometric mean is 0.7968."""
    near = measured_gain("ep_overlap", True, "h100-sxm-80gb", experts=True)
    assert near is not None
    assert (near.pairs, near.measured_on) == (3, "h100-sxm-80gb, models with experts")
    assert near.gain == pytest.approx(1 - 0.7968, abs=1e-4)
    elsewhere = measured_gain("ep_overlap", True, "b300-sxm", experts=True)
    assert elsewhere == near
    other_kind = measured_gain("cuda_graph", "partial", "h100-sxm-80gb", experts=False)
    assert other_kind is not None
    assert other_kind.measured_on == "h100-sxm-80gb, models with experts"
    assert measured_gain("cuda_graph", "unheard", "h100-sxm-80gb", experts=True) is None
