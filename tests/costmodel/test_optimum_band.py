"""The band of an optimum: how near measured runs lie, and what plans promised against the fastest of them."""

from __future__ import annotations

import pytest

from benchmarks.optimum_bands import PlannedGroup, bands, coverage, document
from benchmarks.recipes import BANDS, compared, measured_runs, planned_groups, recipes
from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.measured_settings import (
    Support,
    measured_settings,
    optimum_band,
    priced_settings,
    support_of,
)
from meshwright.costmodel.records import ErrorBand, error_band
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.reader import read_model

RUNS = [
    (frozenset({"precision bf16", "tp", "pp"}), 3),
    (frozenset({"precision bf16", "cuda_graph full"}), 3),
    (frozenset({"precision fp8", "tp"}), 2),
]


@pytest.mark.parametrize(
    ("settings", "support", "runs"),
    [
        ({"precision bf16", "tp"}, "together", 3),
        ({"precision bf16", "tp", "cuda_graph full"}, "apart", 0),
        ({"precision fp8", "tp"}, "unmeasured", 2),
        ({"precision bf16", "ep_overlap"}, "unmeasured", 0),
    ],
)
def test_support_counts_runs_that_had_every_setting(
    settings: set[str], support: str, runs: int
) -> None:
    assert support_of(frozenset(settings), RUNS) == (support, runs)


def workload(device: str = "dgx-h100", **changes: object) -> Workload:
    fields: dict[str, object] = {"gpus": 64, "seq_len": 4096, "global_batch": 256}
    cluster = read_cluster(device, gpus=64)
    return Workload(model=read_model("qwen3-30b-a3b"), cluster=cluster, **(fields | changes))  # type: ignore[arg-type]


def test_settings_name_what_has_a_price_beside_the_sizes_of_groups() -> None:
    run = workload(ep_overlap=True, tp_overlap=True, cuda_graph="partial")
    layout = Layout(tp=1, pp=2, ep=8, dp=32, num_micro_batches=8, zero_stage=1)
    words = {"precision bf16", "recompute none", "pp", "moe_dispatch deduplicated", "ep_overlap"}
    # Without tensor parallelism its overlap has no price.
    assert priced_settings(run, layout) == words | {"cuda_graph partial"}


def test_bands_lean_on_the_next_wider_set() -> None:
    """By hand, for ten groups at 2 on H100 with ten elsewhere at 1: all end at ln 2 and 0 but for what the
    percentiles cut; half of each step goes to the own groups.
    """

    def group(device: str, ratio: float) -> PlannedGroup:
        return PlannedGroup(
            source="a", device=device, kind="dense", settings=frozenset(), ratio=ratio
        )

    of_groups: list[Support] = ["together"] * 20
    table = bands([group("h100", 2.0)] * 10 + [group("a100", 1.0)] * 10, of_groups)
    # Of all and of the kind: 0 and 1, times ln 2. Then a half, a quarter, an eighth is left of the distance.
    own = table["h100"]["dense"]["together"]
    assert own["low"] == pytest.approx(2 ** (1 - 1 / 8), abs=1e-3)
    assert (own["high"], own["groups"]) == (2.0, 10)
    assert own["basis"].endswith("settings measured together")
    # Nobody measured apart: the band of class and kind, an end less.
    assert table["h100"]["dense"]["apart"]["low"] == pytest.approx(2 ** (1 - 1 / 4), abs=1e-3)
    assert table["other"]["experts"]["apart"]["high"] == 2.0


def test_an_optimum_is_never_surer_than_measured_runs() -> None:
    layout = Layout(tp=8, pp=8, dp=1, num_micro_batches=256, zero_stage=1)
    of_runs = error_band("h100-sxm-80gb", "megatron")
    band = optimum_band(workload(), layout, of_runs)
    assert band.low <= of_runs.low
    assert band.high > of_runs.high
    wide = ErrorBand(low=0.1, high=9.0, rows=1, basis="one run")
    assert optimum_band(workload(), layout, wide).high == 9.0


def test_a_device_without_measured_runs_has_no_support() -> None:
    assert measured_settings(None, "dense") == []
    band = optimum_band(
        workload("mi300x"), Layout(dp=64, num_micro_batches=4), error_band("mi300x", "megatron")
    )
    assert band.basis.endswith("models with experts on any device")


@pytest.mark.soak
def test_the_fastest_measured_step_lies_in_the_band_nine_times_in_ten() -> None:
    """Bands and settings of other sources than the group's own."""
    comparisons = [compared(group, runs, 60.0, free=False) for group, runs in recipes().items()]
    groups, runs = planned_groups(comparisons), measured_runs()
    lows = {
        number: error_band(each.group[1], "megatron").low
        for number, each in enumerate(comparisons)
        if each.plan_s is not None
    }
    inside, every = coverage(groups, runs, lows)
    assert every >= 130
    assert inside >= 0.9 * every
    ordered = planned_groups(sorted(comparisons, key=lambda each: each.group))
    assert document(ordered, runs) == document(groups, runs) == BANDS.read_text(encoding="utf-8")
