"""The least expected step by measured pairs through parts: that of enumeration, and what a plan says."""

from __future__ import annotations

import random
from dataclasses import replace
from math import exp, inf
from pathlib import Path

import pytest
import yaml

import meshwright
from meshwright.costmodel.calibration import Factors
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.measured_settings import GainCorrections, GainShift
from meshwright.errors import InputError
from meshwright.planner.mixed.document import MixedPlan, read_mixed_request
from meshwright.planner.mixed.service import MixedSearch, most_corrected
from meshwright.planner.mixed.verify import mixed_faults
from meshwright.planner.report.mixed_view import mixed_view
from meshwright.planner.report.view import view_text
from tests.planner.mixed.conftest import PIN
from tests.planner.mixed.plain_oracle import orders, step_times_s
from tests.planner.mixed.test_mixed_optimum import asked, asked_leading
from tests.planner.runs.calibration.own_runs import stack
from tests.planner.search.plain_oracle import layouts, wanted
from tests.soaked import some

CASES = 40
SOME = (0,)
DRAWS = 4
SETTINGS = ("recompute full", "recompute selective", "recompute none", "tp")


def drawn(draw: random.Random) -> dict[str, float]:
    """Logarithms of what settings multiply a step by."""
    return {name: draw.uniform(-0.4, 0.4) for name in SETTINGS if draw.random() < 0.8}


def corrections_of(means: dict[str, float]) -> GainCorrections:
    return GainCorrections(
        shifts={name: GainShift(mean=mean, deviation=0.1, pairs=2) for name, mean in means.items()}
    )


def factor_of(layout: Layout, means: dict[str, float]) -> float:
    """By hand: the settings that a layout has, on a part."""
    mask = int(layout.recompute)
    recompute = "none" if not mask else "full" if mask & Recompute.FULL else "selective"
    total = means.get(f"recompute {recompute}", 0.0)
    return exp(total + (means.get("tp", 0.0) if int(layout.tp) > 1 else 0.0))


def compare(seed: int) -> int:
    """In how many draws another pipeline than the fastest is expected to be."""
    request = (asked, asked_leading)[seed % 2](seed)
    cluster = request.cluster.model_copy(update={"between_gbps_per_gpu": None})
    pins = {key: value for key, value in request.first.pins.items() if key != "recompute"}
    parts = [replace(part, pins=pins, forbids=()) for part in request.parts]
    request = replace(request, cluster=cluster, parts=tuple(parts))
    gpus = sum(part.gpus for part in parts)
    everywhere = replace(
        parts[0], cluster=parts[0].cluster.model_copy(update={"gpus": gpus}), gpus=gpus
    )
    every = [
        (min(step_times_s(parts, layout, order), default=inf), layout)
        for layout in layouts(everywhere)
        if int(layout.pp) > 1 and wanted(everywhere, layout)
        for order in orders(parts, layout)
    ]
    least_s, moved = min(seconds for seconds, _ in every), 0
    for number in range(DRAWS):
        draw = random.Random(f"expected {seed} {number}")
        means = [drawn(draw) for _ in parts]
        search = MixedSearch(request, inf, corrections=[corrections_of(each) for each in means])
        outcome = search.run()
        expected_s = min(
            seconds * max(factor_of(layout, each) for each in means) for seconds, layout in every
        )
        if expected_s == inf:
            assert outcome.status == "infeasible"
            continue
        assert outcome.status == "optimal"
        assert outcome.lower_bound_s == pytest.approx(expected_s, rel=1e-9)
        best = outcome.best
        assert best is not None
        factor, _ = most_corrected(request, search.corrections, best.execution, best.layout)
        assert best.price_s * factor == pytest.approx(expected_s, rel=1e-9)
        moved += best.price_s > least_s * 1.001
    return moved


@pytest.mark.slow
@pytest.mark.parametrize("seed", SOME)
def test_the_least_expected_step_is_that_of_enumeration(seed: int) -> None:
    compare(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", some((n for n in range(CASES) if n not in SOME), first=4))
def test_the_least_expected_step_is_always_that_of_enumeration(seed: int) -> None:
    compare(seed)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> MixedPlan:
    return meshwright.plan_mixed(
        "llama-3-8b",
        cluster=cluster_file(tmp_path_factory.mktemp("expected")),
        global_batch=64,
        seq_len=4096,
        pin=PIN,
        objective="expected",
        choices=False,
    ).document


def cluster_file(folder: Path) -> Path:
    parts = [{"cluster": "dgx-h100", "gpus": 16}, {"cluster": "dgx-a100", "gpus": 16}]
    path = folder / "mixed.yaml"
    path.write_text(yaml.safe_dump({"name": "old-and-new", "parts": parts}))
    return path


def test_a_plan_says_what_it_and_the_fastest_promise(plan: MixedPlan) -> None:
    told = plan.expected_by_pairs
    assert told is not None
    assert told.proven
    assert told.chosen.step_time_s == plan.objective.step_time_s
    assert told.chosen.plan.endswith("through dgx-h100 then dgx-a100")
    assert "by measured pairs of runs" in view_text(mixed_view(plan))
    document = plan.model_dump(mode="json", by_alias=True)
    assert MixedPlan.model_validate(document) == plan


def test_edits_by_hand_are_found(plan: MixedPlan) -> None:
    told = plan.expected_by_pairs
    assert told is not None
    assert list(mixed_faults(plan)) == []
    slower = told.chosen.model_copy(update={"expected_step_time_s": 9.0})
    for update, words in (
        ({"chosen": slower}, "times its corrections"),
        ({"lower_bound_s": 9.0}, "above the expected step"),
    ):
        edited = plan.model_copy(update={"expected_by_pairs": told.model_copy(update=update)})
        assert any(words in fault for fault in mixed_faults(edited)), words


def test_a_posterior_of_one_kind_of_device_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="posterior is of one kind of device"):
        read_mixed_request(
            model="llama-3-8b",
            cluster=cluster_file(tmp_path),
            global_batch=64,
            seq_len=4096,
            objective="expected",
            calibration=stack(Factors()),
        )
