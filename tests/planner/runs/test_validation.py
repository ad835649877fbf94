"""Scores against figures worked by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cluster_specs.schema import MeasuredLevelSpec
from meshwright.costmodel.layout import Recompute
from meshwright.planner.runs.run_file import Measured, Run, UnreadRow, run_from_mapping
from meshwright.planner.runs.validation import (
    Predict,
    Prediction,
    plan_regret,
    same_work,
    score,
    summarise,
)
from tests.places import DATA
from tests.published import published_runs

PUBLISHED = DATA / "published_runs.yaml"


def run(
    name: str, measured_s: float | None, *, memory_gib: float | None = None, batch: int = 64
) -> Run:
    """A run of a small dense model on 16 A100 that measured this long; first letters stand for layouts."""
    read = run_from_mapping(
        {
            "id": name,
            "source": "A paper; table 3",
            "model": {
                "name": "small",
                "layers": 8,
                "hidden": 1024,
                "ffn_hidden": 4096,
                "heads": 16,
                "kv_heads": 16,
                "vocab": 50304,
                "activation": "gelu",
            },
            "cluster": {"device": "a100-sxm-80gb", "gpus": 16, "fabric": name},
            "run": {"seq_len": 2048, "global_batch": batch, "tp": 4, "dp": 4},
        },
        where=name,
    )
    layout = replace(read.layout, recompute_layers=ord(name[0]))
    measured = (
        None if measured_s is None else Measured(step_time_s=measured_s, memory_gib=memory_gib)
    )
    return replace(read, layout=layout, measured=measured)


def predicting(seconds: dict[str, float], memory_gib: float | None = None) -> Predict:
    """A cost model that looks its answers up, and has none for rows that are not listed."""

    def predict(row: Run) -> Prediction:
        if row.id not in seconds:
            raise ValueError("no such layout")
        return Prediction(step_time_s=seconds[row.id], memory_gib=memory_gib)

    return predict


def test_sums_worked_by_hand() -> None:
    rows = [
        run(name, measured)
        for name, measured in zip("abcde", (10.0, 20.0, 5.0, 8.0, 1.0), strict=True)
    ]
    report = score(rows, predicting({"a": 11.0, "b": 18.0, "c": 6.0, "d": 8.0}))
    assert [row.error_pct for row in report.rows] == pytest.approx([10.0, -10.0, 20.0, 0.0, 100.0])
    assert [row.failed for row in report.rows] == [None, None, None, None, "no such layout"]
    summary = report.summary()
    # Absolute errors 0, 10, 10, 20, 100; the 90th percentile lies at 3.6 of 0..4: 20 + 0.6 * 80.
    assert summary["count"] == 5
    assert summary["failed"] == 1
    assert summary["mean_error_pct"] == pytest.approx(28.0)
    assert summary["median_error_pct"] == pytest.approx(10.0)
    assert summary["p90_error_pct"] == pytest.approx(68.0)
    assert summary["worst_error_pct"] == pytest.approx(100.0)
    assert summary["bias_pct"] == pytest.approx(
        5.0
    )  # (10 - 10 + 20 + 0) / 4, without the failed row


def test_suspects_count_and_are_summed_up_apart() -> None:
    odd = replace(run("b", 10.0), suspect="twice its neighbours")
    report = score([run("a", 10.0), odd], predicting({"a": 11.0, "b": 15.0}))
    summary = report.summary()
    assert summary["mean_error_pct"] == pytest.approx(30.0)
    assert summary["without_suspects"]["mean_error_pct"] == pytest.approx(10.0)
    assert summary["suspects"]["mean_error_pct"] == pytest.approx(50.0)
    assert report.as_document()["rows"][1]["suspect"] == "twice its neighbours"


def test_memory_is_scored_where_it_was_measured() -> None:
    rows = [
        run("a", 10.0, memory_gib=40.0),
        run("b", 10.0),
        run("c", 10.0, memory_gib=50.0),
        run("d", 1.0, memory_gib=1.0),
    ]
    report = score(rows, predicting({"a": 10.0, "b": 10.0, "c": 10.0}, memory_gib=45.0))
    assert [row.memory_error_pct for row in report.rows] == pytest.approx(
        [12.5, None, -10.0, 100.0]
    )
    memory = report.summary()["memory"]
    assert (memory["count"], memory["failed"]) == (3, 1)
    assert memory["mean_error_pct"] == pytest.approx(122.5 / 3)
    assert memory["bias_pct"] == pytest.approx(1.25)
    assert memory["by_device"]["a100-sxm-80gb"]["count"] == 3


def test_sums_by_kind_of_row() -> None:
    first = run("a", 10.0)
    full = replace(first.layout, recompute=int(Recompute.FULL), recompute_layers=1)
    second = replace(run("b", 10.0), layout=full, source="Another paper")
    second = replace(
        second, workload=replace(second.workload, precision="fp8", framework="megatron-lm")
    )
    summary = score([first, second], predicting({"a": 12.0, "b": 9.0})).summary()
    expected = {
        "by_source": {"A paper": 20.0, "Another paper": 10.0},
        "by_device": {"a100-sxm-80gb": 15.0},
        "by_precision": {"bf16": 20.0, "fp8": 10.0},
        "by_model_kind": {"dense": 15.0},
        "by_framework": {"megatron": 20.0, "megatron-lm": 10.0},
        "by_recompute": {"none": 20.0, "full": 10.0},
    }
    for name, means in expected.items():
        found = {kind: sums["mean_error_pct"] for kind, sums in summary[name].items()}
        assert found == pytest.approx(means)


def test_rows_that_cannot_be_read_or_predicted_count_as_failed() -> None:
    unread = UnreadRow(id="bad", reason="runs.yaml: bad: run.tp: must be at least 1", measured=None)
    report = score([run("a", 10.0), unread], predicting({"a": float("nan")}))
    assert [row.failed is not None for row in report.rows] == [True, True]
    assert report.summary()["mean_error_pct"] == 100.0
    assert report.summary()["bias_pct"] is None
    assert report.as_document()["rows"][1]["failed"] == unread.reason
    assert set(report.summary()["by_source"]) == {"A paper", "not read"}


def test_a_fault_of_the_cost_model_is_not_swallowed() -> None:
    def broken(row: Run) -> Prediction:
        raise KeyError(row.id)

    with pytest.raises(KeyError):
        score([run("a", 1.0)], broken)


def test_rows_without_measurement_are_predicted_but_not_counted() -> None:
    report = score([run("a", None)], predicting({"a": 3.0}))
    assert report.rows[0].predicted == Prediction(step_time_s=3.0)
    assert report.rows[0].error_pct is None
    assert report.summary()["count"] == 0
    assert report.summary()["mean_error_pct"] is None


MEASURED = {"a": 4.0, "b": 5.0, "c": 6.0, "d": 8.0}


def test_regret_worked_by_hand() -> None:
    rows = [run(name, seconds) for name, seconds in MEASURED.items()]
    rows += [run(f"{name}2", seconds, batch=128) for name, seconds in MEASURED.items()]
    predicted = {
        "a": 9.0,
        "b": 7.0,
        "c": 8.0,
        "d": 10.0,
        "a2": 1.0,
        "b2": 2.0,
        "c2": 3.0,
        "d2": 4.0,
    }
    report = score(rows, predicting(predicted))
    first, second = report.regret
    # b is predicted fastest: 5 s, where 4 s was to be had.
    assert (first.chosen, first.fastest, first.rows, first.tied) == ("b", "a", 4, 1)
    assert first.regret_pct == pytest.approx(25.0)
    assert second.global_batch == 128
    assert second.regret_pct == 0.0
    assert report.summary()["regret"] == {
        "groups": 2,
        "mean_pct": pytest.approx(12.5),
        "worst_pct": pytest.approx(25.0),
        "with_suspects": {
            "groups": 2,
            "mean_pct": pytest.approx(12.5),
            "worst_pct": pytest.approx(25.0),
        },
    }


def test_regret_needs_four_rows_and_leaves_suspects_out() -> None:
    rows = [run(name, seconds) for name, seconds in MEASURED.items()]
    predict = predicting({"a": 4.0, "b": 3.0, "c": 5.0, "d": 6.0})
    assert score(rows[:3], predict).regret == ()
    rows[3] = replace(rows[3], suspect="odd")
    report = score(rows, predict)
    assert report.regret == ()
    assert len(report.regret_with_suspects) == 1
    assert report.summary()["regret"]["groups"] == 0
    assert report.summary()["regret"]["mean_pct"] is None
    assert report.summary()["regret"]["with_suspects"]["mean_pct"] == pytest.approx(25.0)


def test_equal_predictions_choose_the_first_and_say_so() -> None:
    rows = [run(name, seconds) for name, seconds in MEASURED.items()]
    (group,) = score(rows, predicting({"a": 5.0, "b": 3.0, "c": 3.0, "d": 6.0})).regret
    assert (group.chosen, group.tied) == ("b", 2)


def test_failed_rows_are_never_chosen_but_may_be_the_fastest() -> None:
    rows = [run(name, seconds) for name, seconds in MEASURED.items()]
    (group,) = score(rows, predicting({"c": 5.0, "d": 6.0})).regret
    assert (group.chosen, group.fastest) == ("c", "a")
    assert group.regret_pct == pytest.approx(50.0)
    (hopeless,) = score(rows, predicting({})).regret
    assert hopeless.chosen == "d"
    assert hopeless.regret_pct == pytest.approx(100.0)


def test_the_document_is_plain_json() -> None:
    rows = [run(name, seconds, memory_gib=10.0) for name, seconds in MEASURED.items()]
    document = json.loads(
        json.dumps(
            score(rows, predicting({"a": 4.0}, memory_gib=11.0)).as_document(), allow_nan=False
        )
    )
    assert document["schema"] == 1
    assert document["rows"][0] == {
        "id": "a",
        "predicted": {"step_time_s": 4.0, "memory_gib": 11.0, "fit_probability": None},
        "measured": {
            "step_time_s": 4.0,
            "memory_gib": 10.0,
            "out_of_memory": False,
            "first_rank": False,
            "allocated": False,
            "from_driver": False,
        },
        "error_s": 0.0,
        "error_pct": 0.0,
        "memory_error_pct": pytest.approx(10.0),
        "failed": None,
        "suspect": None,
        "remarks": [],
    }
    assert document["regret"][0]["regret_pct"] == 0.0


def measured_step_s(row: Run) -> float:
    assert row.measured is not None
    assert row.measured.step_time_s is not None
    return row.measured.step_time_s


def test_tied_rows_count_by_their_mean() -> None:
    """Regression: the first in file order counted, so that regret hung on the order of the file."""
    rows = [
        run(name, seconds) for name, seconds in zip("abcd", (10.0, 14.0, 8.0, 20.0), strict=True)
    ]
    report = score(rows, predicting({"a": 7.0, "b": 7.0, "c": 9.0, "d": 9.0}))
    assert report.regret[0].tied == 2
    assert report.regret[0].regret_pct == pytest.approx(50.0)  # (10 + 14) / 2 over 8
    other = score(rows, predicting({"a": 7.0, "b": 7.0, "c": 5.0, "d": 5.0})).regret[0]
    assert other.regret_pct == pytest.approx(75.0)  # (8 + 20) / 2 over 8
    assert other.least_pct == pytest.approx(50.0)


def test_repeats_of_a_layout_count_by_their_mean() -> None:
    """Regression: the best of several releases of one layout counted as a choice, as 6.8 % of regret."""
    rows = [run(name, seconds) for name, seconds in {"a": 9.0, "a2": 11.0, "b": 12.0}.items()]
    rows += [run("b2", 7.0)]
    (group,) = score(rows, predicting({"a": 3.0, "a2": 3.0, "b": 4.0, "b2": 4.0})).regret
    # 10 s, the mean of a, where 9.5 s, the mean of b, were to be had; no layout is known for 7 s.
    assert (group.chosen, group.fastest, group.rows, group.tied) == ("a", "b", 4, 1)
    assert group.regret_pct == pytest.approx(100.0 * (10.0 / 9.5 - 1.0))
    releases = [replace(run(f"a{i}", 5.0 + i), framework_words=f"release {i}") for i in range(4)]
    assert score(releases, predicting({f"a{i}": 3.0 for i in range(4)})).regret == ()


def test_what_was_measured_of_links_makes_no_other_machine() -> None:
    first, second = run("a", 9.0), run("b", 9.0)
    level = {"level": "fabric", "collective": "all_gather", "gpus": 16, "bus_gb_per_s": 20.0}
    entry = MeasuredLevelSpec.model_validate(level | {"attained_fraction": 0.5})
    cluster = second.workload.cluster.model_copy(update={"measured": (entry,)})
    measured = replace(second, workload=replace(second.workload, cluster=cluster))
    assert same_work(first) == same_work(measured)


def test_rows_that_ran_out_of_memory_are_told_or_not() -> None:
    ran, full = run("a", 10.0), run("b", None)
    burst = replace(full, measured=Measured(step_time_s=None, out_of_memory=True))
    chances = {"a": 0.9, "b": 0.2, "c": 0.8}
    rows = [ran, burst, replace(burst, id="c"), replace(burst, id="d")]

    def predict(row: Run) -> Prediction:
        if row.id not in chances:
            raise ValueError("no such layout")
        return Prediction(step_time_s=10.0, memory_gib=70.0, fit_probability=chances[row.id])

    summary = score(rows, predict).summary()
    assert summary["feasibility"] == {
        "ran": 1, "ran_told_fit": 1, "out_of_memory": 3, "out_of_memory_told": 1,
    }  # fmt: skip
    assert summary["count"] == 1, "rows without a step have no error of it"
    assert summary["memory"]["count"] == 0


@pytest.mark.slow
def test_published_groups() -> None:
    rows = published_runs()
    perfect = score(rows, lambda row: Prediction(step_time_s=measured_step_s(row)))
    assert perfect.summary()["mean_error_pct"] == 0.0
    assert (len(perfect.regret_with_suspects), len(perfect.regret)) == (31, 30)
    assert all(group.regret_pct == 0.0 for group in perfect.regret)
    worst = score(rows, lambda row: Prediction(step_time_s=1.0 / measured_step_s(row)))
    assert min(group.regret_pct for group in worst.regret) > 0.0


@given(
    st.lists(st.tuples(st.floats(0.1, 1e4), st.floats(0.1, 1e4)), min_size=1, max_size=8),
    st.floats(0.01, 100.0),
)
def test_scores_do_not_depend_on_the_unit_of_time(
    times: list[tuple[float, float]], factor: float
) -> None:
    def scored(scale: float) -> tuple[float | None, float | None]:
        rows = [
            replace(TEMPLATE, id=str(i), measured=Measured(step_time_s=m * scale))
            for i, (m, _) in enumerate(times)
        ]
        report = score(rows, predicting({str(i): p * scale for i, (_, p) in enumerate(times)}))
        sums = summarise(report.rows)
        assert sums.worst_error_pct is not None
        assert sums.mean_error_pct is not None
        assert sums.median_error_pct is not None
        assert sums.p90_error_pct is not None
        assert sums.median_error_pct <= sums.p90_error_pct <= sums.worst_error_pct
        assert sums.mean_error_pct <= sums.worst_error_pct * (1 + 1e-12)
        assert all(group.regret_pct >= 0 for group in plan_regret(report.rows))
        return sums.mean_error_pct, sums.bias_pct

    assert scored(factor) == pytest.approx(scored(1.0), rel=1e-6, abs=1e-6)


TEMPLATE = run("template", 1.0)
