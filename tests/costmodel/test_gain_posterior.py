"""Corrections of gains: against hand-worked cases, and against the settings of single layouts."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from benchmarks.gain_posterior import CORRECTED, changes_between, observations_of, spread_of
from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.measured_settings import (
    GainCorrections,
    GainObservation,
    GainShift,
    gain_corrections,
    gain_observations,
    gain_posterior,
    priced_settings,
)
from meshwright.costmodel.records import data_table
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.reader import read_model
from meshwright.planner.runs.prediction import prediction_of
from meshwright.planner.runs.run_file import read_runs
from meshwright.planner.runs.validation import Pair, measured_steps, pairs_of, score
from tests.places import DATA

SPREAD = 0.06


def observation(error: float, **changes: object) -> GainObservation:
    fields: dict[str, object] = {
        "source": "a",
        "device": "h100",
        "kind": "experts",
        "changes": {"ep_overlap": 1},
        "pairs": 2,
        "predicted": -0.3,
        "measured": error - 0.3,
    }
    return GainObservation(**fields | changes)  # type: ignore[arg-type]


def test_near_and_far_pairs_by_hand() -> None:
    """One near at +0.10, one of another class and kind at +0.04: (0.10 + 0.04 / 4) / (1 + 1 + 1 / 4)."""
    far = observation(0.04, source="b", device="a100", kind="dense")
    shift = gain_posterior([observation(0.10), far], "h100", "experts", SPREAD)["ep_overlap"]
    assert shift.mean == pytest.approx(0.11 / 2.25)
    assert shift.deviation == pytest.approx(0.06 / 1.5)
    assert shift.pairs == 4
    assert shift.factor == pytest.approx(math.exp(0.11 / 2.25))


def test_a_device_of_no_class_has_half_near_pairs_at_the_most() -> None:
    shift = gain_posterior([observation(0.10)], None, "experts", SPREAD)["ep_overlap"]
    assert shift.mean == pytest.approx(0.05 / 1.5)
    unclassed = observation(0.10, device=None)
    assert gain_posterior([unclassed], None, "dense", SPREAD)["ep_overlap"].mean == pytest.approx(
        0.025 / 1.25
    )


def test_settings_that_change_together_share_what_is_found() -> None:
    """theta_1 + theta_2 = 0.3 seen once: each takes a third of it, and what was seen of one alone counts
    for it: (I + dd' + e1e1') theta = d 0.3 + e1 0.0 gives theta = (0.06, 0.12).
    """
    both = observation(0.3, changes={"ep_overlap": 1, "cuda_graph full": 1})
    found = gain_posterior([both], "h100", "experts", SPREAD)
    assert [shift.mean for shift in found.values()] == pytest.approx([0.1, 0.1])
    alone = observation(0.0, source="b")
    found = gain_posterior([both, alone], "h100", "experts", SPREAD)
    assert found["ep_overlap"].mean == pytest.approx(0.06)
    assert found["cuda_graph full"].mean == pytest.approx(0.12)
    taken_away = observation(-0.3, changes={"ep_overlap": -1, "cuda_graph full": -1})
    turned = gain_posterior([taken_away, alone], "h100", "experts", SPREAD)
    assert turned["ep_overlap"].mean == pytest.approx(0.06)


def test_one_pair_corrects_nothing() -> None:
    assert gain_posterior([observation(0.3, pairs=1)], "h100", "experts", SPREAD) == {}
    assert gain_posterior([], "h100", "experts", SPREAD) == {}


def test_changes_are_signed_by_the_run_that_has_them() -> None:
    first, second = {"tp", "recompute full"}, {"tp", "ep_overlap", "pp"}
    assert changes_between(first, second, CORRECTED) == {"ep_overlap": 1, "recompute full": -1}


def workload(**changes: object) -> Workload:
    fields: dict[str, object] = {"gpus": 64, "seq_len": 4096, "global_batch": 256}
    cluster = read_cluster("dgx-h100", gpus=64)
    return Workload(model=read_model("qwen3-30b-a3b"), cluster=cluster, **(fields | changes))  # type: ignore[arg-type]


SHIFTS = {
    name: GainShift(mean=0.01 * 2**number - 0.3, deviation=0.05, pairs=2)
    for number, name in enumerate(CORRECTED)
}


@pytest.mark.parametrize("dispatch", ["alltoall", "allgather", "deepep", "hybridep"])
@pytest.mark.parametrize("graph", ["none", "partial", "full"])
def test_arrays_of_layouts_have_the_corrections_of_their_settings(
    dispatch: str, graph: str
) -> None:
    corrections = GainCorrections(shifts=SHIFTS)
    masks = [0, int(Recompute.CORE_ATTENTION), int(Recompute.FULL), int(Recompute.OPERATORS)]
    layouts = [
        Layout(tp=tp, ep=ep, pp=2, vpp=vpp, recompute=mask, dp=8)
        for tp, ep, vpp, mask in product((1, 2), (1, 8), (1, 3), masks)
    ]
    columns = {
        name: np.array([getattr(each, name) for each in layouts]) for name in vars(layouts[0])
    }
    for overlap in (True, False):
        run = workload(
            moe_dispatch=dispatch, cuda_graph=graph, ep_overlap=overlap, tp_overlap=not overlap
        )
        factors = corrections.factor(run, Layout(**columns))
        one_by_one = [corrections.of(priced_settings(run, each)) for each in layouts]
        assert factors == pytest.approx(one_by_one, rel=1e-12)
        undecided = corrections.factor(run, Layout(**columns), ("recompute", "vpp"))
        for position, each in enumerate(layouts):
            alike = [
                corrections.of(priced_settings(run, replace(each, recompute=mask, vpp=vpp)))
                for mask, vpp in product(masks, (1, 3))
            ]
            assert undecided[position] == pytest.approx(min(alike), rel=1e-12)


def test_no_pairs_no_correction() -> None:
    layouts = Layout(tp=np.array([1, 2]), ep=np.array([8, 1]))
    assert GainCorrections(shifts={}).factor(workload(), layouts).tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_the_observations_of_the_package_are_those_of_the_measured_rows() -> None:
    """Those of the file that no refit sees are worked out again: 32 pairs of one sweep."""
    rows = score(read_runs(DATA / "more_runs" / "aleph_alpha_layouts.yaml"), prediction_of).rows
    trusted = [row for row in rows if row.run is not None and row.run.suspect is None]
    pairs = pairs_of(measured_steps(trusted))
    recorded = [each for each in gain_observations() if each.source.startswith("Hagemann")]
    assert observations_of(pairs) == recorded
    assert recorded[0].pairs == 32


def test_the_spread_is_the_root_mean_square_of_errors() -> None:
    """By hand: errors ln 1.1 and ln 1.2."""
    rows = score(read_runs(DATA / "more_runs" / "zero_bubble.yaml"), prediction_of).rows
    steps = measured_steps(rows)[:1]
    exact = replace(steps[0], predicted_s=1.0, measured_s=1.0)
    pairs = [
        Pair(first=exact, second=replace(exact, predicted_s=ratio), knobs=("vpp",))
        for ratio in (1.1, 1.2)
    ]
    by_hand = math.sqrt((math.log(1.1) ** 2 + math.log(1.2) ** 2) / 2)
    assert spread_of(pairs) == pytest.approx(by_hand, abs=5e-5)


def test_what_is_corrected_is_known_and_never_surer_than_its_prior() -> None:
    shifts = gain_corrections(workload()).shifts
    spread = float(data_table("gain_posterior.yaml")["spread"]["value"])
    assert set(shifts) <= set(CORRECTED)
    assert "ep_overlap" in shifts
    assert all(0 < shift.deviation < spread and shift.pairs >= 2 for shift in shifts.values())
    measured = [abs(each.error) for each in gain_observations()]
    assert all(abs(shift.mean) < max(measured) for shift in shifts.values())
