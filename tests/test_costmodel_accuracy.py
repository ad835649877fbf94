"""The cost model against 458 published, measured training steps: a threshold that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.prediction import validation_report
from planner.validation import ScoredRow, ValidationReport

RUNS = Path(__file__).parent / "data" / "published_runs.yaml"
ROWS = 458


@pytest.fixture(scope="module")
def report() -> ValidationReport:
    return validation_report(RUNS)


def errors(rows: list[ScoredRow]) -> list[float]:
    return [abs(row.error_pct) for row in rows if row.error_pct is not None]


def test_every_row_is_read_and_predicted(report: ValidationReport) -> None:
    assert len(report.rows) == ROWS
    assert [row.id for row in report.rows if row.failed] == []
    assert len(errors(list(report.rows))) == ROWS


def test_mean_error_over_all_rows_stays_under_12_percent(report: ValidationReport) -> None:
    found = errors(list(report.rows))
    assert sum(found) / ROWS < 12.0
    signed = [row.error_pct for row in report.rows if row.error_pct is not None]
    assert abs(sum(signed)) / ROWS < 6.0, "predictions lean to one side"


def test_steps_of_megatron_with_recomputation_lie_within_10_percent(report: ValidationReport) -> None:
    """Korthikanti et al. 2022, table 5: 22B, 175B, 530B and 1T parameters on A100."""
    rows = [row for row in report.rows if row.run is not None and "Korthikanti" in row.run.source]
    assert len(rows) == 4
    assert max(errors(rows)) < 10.0


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_neither_kind_of_model_is_sacrificed_for_the_other(report: ValidationReport, kind: str) -> None:
    rows = [
        row
        for row in report.rows
        if row.run is not None and (row.run.workload.model.moe is not None) == (kind == "moe")
    ]
    found = errors(rows)
    assert len(found) > 50
    assert sum(found) / len(found) < 15.0
