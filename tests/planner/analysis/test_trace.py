"""A plan's step as a timeline: nothing overlaps, nothing is missing, and it ends when the price says."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.cluster_specs.reader import load_cluster
from meshwright.errors import InputError
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.analysis.timeline import (
    AFTERWARDS,
    COMPUTE,
    MOST_PASSES,
    THREADS,
    TRANSFERS,
    WAITS,
    trace_document,
    trace_of,
)
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.plan.texts import plan_text
from meshwright.planner.request.plan_request import PlanRequest


@cache
def piped(schedule: str, layers_pp: int = 4) -> Plan:
    request = PlanRequest(
        model=load_catalog_model("llama-3-8b"),
        cluster=load_cluster("dgx-h100"),
        gpus=32,
        global_batch=64,
        seq_len=4096,
        framework="torchtitan",
        pins={"pp": layers_pp, "tp": 2, "schedule": schedule},
    )
    return fastest_plan(request)


@pytest.fixture(scope="module")
def plain() -> Plan:
    return piped("1f1b")


@pytest.mark.parametrize(
    "schedule", ["1f1b", "gpipe", "interleaved-1f1b", "breadth-first", "zb-h1", "zbv", "dualpipe-v"]
)
def test_what_is_drawn_takes_as_long_as_the_price(schedule: str) -> None:
    trace = trace_of(piped(schedule))
    assert trace.seconds == pytest.approx(trace.step_time_s, rel=0.05)
    document = trace_document(trace)
    passes = [event for event in document["traceEvents"] if "chunk" in event.get("args", {})]
    chunks = {event["args"]["chunk"] for event in passes}
    assert chunks == set(range(len(chunks)))
    forward = [
        (event["args"]["chunk"], event["args"]["micro_batch"])
        for event in passes
        if event["cat"] == "forward"
    ]
    assert sorted(forward) == [
        (chunk, at) for chunk in sorted(chunks) for at in range(trace.num_micro_batches)
    ]
    for rank in range(trace.pp):
        mine = [
            event
            for event in document["traceEvents"]
            if (event["pid"], event["ph"]) == (rank, "X") and event["tid"] in (COMPUTE, AFTERWARDS)
        ]
        for before, after in itertools.pairwise(mine):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
        assert mine[-1]["ts"] + mine[-1]["dur"] == pytest.approx(trace.seconds * 1e6)


def test_backward_follows_forward_and_the_next_stage_its_input(plain: Plan) -> None:
    events = [
        e for e in trace_document(trace_of(plain))["traceEvents"] if "chunk" in e.get("args", {})
    ]
    ends = {
        (e["cat"], e["args"]["chunk"], e["args"]["micro_batch"]): e["ts"] + e["dur"] for e in events
    }
    starts = {(e["cat"], e["args"]["chunk"], e["args"]["micro_batch"]): e["ts"] for e in events}
    for (kind, chunk, at), start in starts.items():
        if kind == "backward":
            assert start >= ends["forward", chunk, at] - 1e-6
            if chunk < 3:
                assert start > ends["backward", chunk + 1, at]
        elif chunk:
            assert start > ends["forward", chunk - 1, at]


def test_the_first_micro_batches_alone(plain: Plan) -> None:
    few = trace_of(plain, 4)
    assert few.num_micro_batches == 4
    assert few.seconds < trace_of(plain).seconds
    for wrong in (0, 17):
        with pytest.raises(InputError, match="give 1 to that many"):
            trace_of(plain, wrong)


def test_too_much_to_draw_says_how_much_would_do(plain: Plan) -> None:
    assert plain.layout is not None
    many = MOST_PASSES // 8 + 1
    layout = plain.layout.model_copy(update={"num_micro_batches": many})
    with pytest.raises(InputError, match=f"draw the first {MOST_PASSES // 8} or fewer"):
        trace_of(plain.model_copy(update={"layout": layout}))


def test_a_plan_without_layout_has_nothing_to_draw(plain: Plan) -> None:
    with pytest.raises(InputError, match="no layout"):
        trace_of(plain.model_copy(update={"layout": None, "status": "infeasible"}))


def test_the_command_writes_a_file_once(plain: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(plan_text(plain), encoding="utf-8")
    line = ["trace", str(tmp_path / "plan.yaml"), "-o", str(tmp_path / "trace.json")]
    done = CliRunner().invoke(main, [*line, "--json"])
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    told = json.loads(done.stdout)
    assert told["schema"] == 1
    assert told["events"] == len(written["traceEvents"])
    assert {event["ph"] for event in written["traceEvents"]} == {"X", "M", "C"}
    again = CliRunner().invoke(main, line)
    assert again.exit_code == 2
    assert "already there" in again.stderr
    assert CliRunner().invoke(main, [*line, "--force"]).exit_code == 0


def of_thread(document: dict[str, Any], thread: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = document["traceEvents"]
    return [event for event in events if event["ph"] == "X" and event["tid"] == thread]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv"])
def test_it_is_what_viewers_read(schedule: str) -> None:
    """The fields that Google's "Trace Event Format" asks for, by phase."""
    document = json.loads(json.dumps(trace_document(trace_of(piped(schedule))), allow_nan=False))
    needed = {"X": {"name", "cat", "ts", "dur"}, "M": {"name", "args"}, "C": {"name", "ts", "args"}}
    for event in document["traceEvents"]:
        assert needed[event["ph"]] | {"pid", "tid"} <= set(event)
        assert event.get("ts", 0.0) >= 0
        assert event.get("dur", 0.0) >= 0
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in document["traceEvents"]
        if event["name"] == "thread_name"
    }
    ranks = {event["pid"] for event in document["traceEvents"]}
    assert named == {(rank, thread): name for rank in ranks for thread, name in THREADS.items()}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv"])
def test_communication_lies_inside_its_pass_and_adds_up(schedule: str) -> None:
    trace = trace_of(piped(schedule))
    document = trace_document(trace)
    waits = of_thread(document, WAITS)
    assert {event["name"] for event in waits} == {"tp_comm"}
    expected_s = sum(trace.waits_s["tp_comm"]) * trace.num_micro_batches
    assert sum(event["dur"] for event in waits) == pytest.approx(expected_s * 1e6)
    passes = of_thread(document, COMPUTE)
    for wait in waits:
        inside = [
            each
            for each in passes
            if each["pid"] == wait["pid"]
            and each["ts"] - 1e-3 <= wait["ts"]
            and wait["ts"] + wait["dur"] <= each["ts"] + each["dur"] + 1e-3
        ]
        assert inside


def test_every_stage_but_the_last_sends_on(plain: Plan) -> None:
    trace = trace_of(plain)
    sent = of_thread(trace_document(trace), TRANSFERS)
    m, hops = trace.num_micro_batches, trace.pp - 1
    assert len(sent) == 2 * m * hops
    assert {event["name"] for event in sent if event["pid"] == 0} == {"activations to rank 1"}
    last = {event["name"] for event in sent if event["pid"] == hops}
    assert last == {f"gradients to rank {hops - 1}"}
    assert [event["dur"] for event in sent] == [trace.p2p_s * 1e6] * len(sent)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zbv"])
def test_memory_peaks_at_the_prediction_and_activations_go(schedule: str) -> None:
    plan = piped(schedule)
    assert plan.predicted is not None
    events = trace_document(trace_of(plan))["traceEvents"]
    for rank, peak_gib in enumerate(plan.predicted.memory_gib):
        amounts = [e["args"] for e in events if e["ph"] == "C" and e["pid"] == rank]
        totals = [each["static"] + each["activations"] for each in amounts]
        assert max(totals) == pytest.approx(peak_gib)
        assert min(each["activations"] for each in amounts) >= 0
        assert amounts[-1]["activations"] == 0


def test_the_optimizer_follows_the_pipeline(plain: Plan) -> None:
    trace = trace_of(plain)
    last = [e for e in of_thread(trace_document(trace), AFTERWARDS) if e["pid"] == 0]
    assert "optimizer" in [event["name"] for event in last]
    assert min(event["ts"] for event in last) == pytest.approx(trace.timeline.seconds * 1e6)
