"""A plan's step as a timeline: nothing overlaps, nothing is missing, and it ends when the price says."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
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
    OPERATORS,
    RANK,
    RECEIVES,
    SENDS,
    THREADS,
    trace_document,
    trace_of,
)
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.plan.texts import plan_text
from meshwright.planner.request.choices import WITHOUT
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
        without=WITHOUT,
    )
    return fastest_plan(request)


@pytest.fixture(scope="module")
def plain() -> Plan:
    return piped("1f1b")


def place(event: dict[str, Any]) -> tuple[int, int]:
    """The pipeline rank and the thread of an event."""
    return event["pid"] // RANK - 1, event["tid"] - event["pid"]


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
            if event["ph"] == "X" and place(event) in ((rank, COMPUTE), (rank, AFTERWARDS))
            if event["cat"] != OPERATORS
        ]
        for before, after in itertools.pairwise(mine):
            assert before["ts"] + before["dur"] <= after["ts"]
        assert mine[-1]["ts"] + mine[-1]["dur"] == pytest.approx(trace.seconds * 1e6, abs=1)


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
            assert start >= ends["forward", chunk, at]
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
    assert {event["ph"] for event in written["traceEvents"]} == {"X", "M", "C", "s", "f"}
    again = CliRunner().invoke(main, line)
    assert again.exit_code == 2
    assert "already there" in again.stderr
    assert CliRunner().invoke(main, [*line, "--force"]).exit_code == 0


NEEDED = {
    "X": {"name", "cat", "ts", "dur", "args"},
    "M": {"name", "args"},
    "C": {"name", "ts", "args"},
    "s": {"name", "cat", "id", "ts"},
    "f": {"name", "cat", "id", "ts", "bp"},
}
"""Fields that Google's "Trace Event Format" asks for, by phase; all have a process and a thread."""


class Slices:
    """A trace read as Perfetto's importer reads it, which refuses what that drops or counts as an error.

    src/trace_processor/importers/json/json_trace_parser_impl.cc and common/slice_tracker.cc of
    google/perfetto: events by their time, those of one time in the order of the file; a slice is inside the
    innermost one of its thread that is still open, and must not outlast it; both ends of a flow bind to the
    innermost open slice of their thread (the far end for `bp` of `e`), and have a category, a name and an id
    in common.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.flows: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.counters = 0
        stacks: dict[tuple[int, int], list[dict[str, Any]]] = {}
        begun: dict[tuple[str, str, int], dict[str, Any]] = {}
        timed = [event for event in document["traceEvents"] if event["ph"] != "M"]
        for event in sorted(timed, key=lambda event: event["ts"]):
            assert isinstance(event["ts"], int)
            assert event["ts"] >= 0
            stack = stacks.setdefault((event["pid"], event["tid"]), [])
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
                stack.pop()
            if event["ph"] == "X":
                assert isinstance(event["dur"], int)
                assert event["dur"] > 0
                end = event["ts"] + event["dur"]
                assert all(end <= outer["ts"] + outer["dur"] for outer in stack), event
                self.rows.append(
                    {**event, "depth": len(stack), "inside": stack[-1] if stack else None}
                )
                stack.append(event)
            elif event["ph"] == "C":
                assert all(isinstance(amount, float | int) for amount in event["args"].values())
                self.counters += 1
            else:
                key = event["cat"], event["name"], event["id"]
                assert stack, event
                if event["ph"] == "s":
                    assert key not in begun
                    begun[key] = stack[-1]
                else:
                    assert event["bp"] == "e"
                    self.flows.append((begun.pop(key), stack[-1]))
        assert begun == {}


def read_back(plan: Plan) -> tuple[dict[str, Any], Slices]:
    """The document of a plan's trace as it is after a file, and what Perfetto makes of it."""
    document = json.loads(json.dumps(trace_document(trace_of(plan)), allow_nan=False))
    return document, Slices(document)


SCHEDULES = ["1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe-v"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_is_what_viewers_read(schedule: str) -> None:
    """Every event has its fields, every thread its name, and nothing crosses what it lies in."""
    document, slices = read_back(piped(schedule))
    for event in document["traceEvents"]:
        assert NEEDED[event["ph"]] | {"pid", "tid"} <= set(event)
    named = {place(event) for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert {place(row) for row in slices.rows} <= named
    ranks = {place(event)[0] for event in document["traceEvents"]}
    # A thread of one process is none of another, and none is called as a process.
    processes = {event["pid"] for event in document["traceEvents"]}
    process_of: dict[int, int] = {}
    for event in document["traceEvents"]:
        assert process_of.setdefault(event["tid"], event["pid"]) == event["pid"]
    assert not {0, *processes} & set(process_of)
    assert {(rank, thread) for rank in ranks for thread in (COMPUTE, AFTERWARDS)} <= named
    words = {
        event["args"]["name"].split(",")[0]
        for event in document["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert words == set(THREADS.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_read_counts_as_the_plan(schedule: str) -> None:
    """A pass for each micro-batch, chunk and direction; an arrow for each border of ranks that it crosses."""
    plan = piped(schedule)
    assert plan.layout is not None
    _, slices = read_back(plan)
    m, chunks = plan.layout.num_micro_batches, plan.layout.pp * plan.layout.vpp
    passes = Counter(
        row["cat"] for row in slices.rows if place(row)[1] == COMPUTE and row["depth"] == 0
    )
    assert passes["forward"] == chunks * m
    assert passes["backward"] + passes["backward, inputs"] == chunks * m
    assert passes["backward, weights"] == passes["backward, inputs"]
    # The halves of a V meet on the last rank, where nothing is sent.
    borders = chunks - 1 - (1 if schedule in ("zbv", "dualpipe-v") else 0)
    assert len(slices.flows) == 2 * m * borders
    for sent, received in slices.flows:
        assert sent["args"] == received["args"]
        assert (sent["ts"], sent["dur"]) == (received["ts"], received["dur"])
        what = sent["name"].split()[0]
        assert sent["name"] == f"{what} to rank {place(received)[0]}"
        assert received["name"] == f"{what} from rank {place(sent)[0]}"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_operators_fill_their_pass(schedule: str) -> None:
    """Parts lie in passes one behind the other from beginning to end, to the microsecond."""
    _, slices = read_back(piped(schedule))
    inside: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in slices.rows:
        if row["cat"] == OPERATORS:
            assert row["depth"] == 1
            inside.setdefault((row["pid"], row["inside"]["ts"]), []).append(row)
    passes = [row for row in slices.rows if place(row)[1] == COMPUTE and row["depth"] == 0]
    assert len(inside) == len(passes)
    for each in passes:
        parts = inside[each["pid"], each["ts"]]
        assert parts[0]["ts"] == each["ts"]
        assert parts[-1]["ts"] + parts[-1]["dur"] == each["ts"] + each["dur"]
        for before, after in itertools.pairwise(parts):
            assert before["ts"] + before["dur"] == after["ts"]
        names = {part["name"] for part in parts}
        if each["cat"] == "backward, weights":
            assert names <= {"gemm", "head"}
        elif each["args"]["chunk"] == 1:
            assert {"gemm", "attention", "memory_bound", "tp_comm"} <= names


def test_operators_add_up_to_the_breakdown() -> None:
    """On the busiest rank of a plain pipeline each part takes what the step's breakdown says."""
    plan = piped("1f1b")
    assert plan.predicted is not None
    _, slices = read_back(plan)
    seconds: dict[int, dict[str, float]] = {}
    for row in slices.rows:
        if row["cat"] == OPERATORS:
            by_part = seconds.setdefault(row["pid"], {})
            by_part[row["name"]] = by_part.get(row["name"], 0.0) + row["dur"] / 1e6
    busiest = max(seconds.values(), key=lambda by_part: sum(by_part.values()))
    for name in ("gemm", "attention", "memory_bound", "tp_comm"):
        assert busiest[name] == pytest.approx(plan.predicted.breakdown_s[name], rel=2e-3), name


def test_experts_have_their_operators() -> None:
    request = PlanRequest(
        model=load_catalog_model("mixtral-8x7b"),
        cluster=load_cluster("dgx-h100"),
        gpus=16,
        global_batch=32,
        seq_len=4096,
        pins={"pp": 2, "tp": 2, "ep": 4, "recompute": "full", "micro_batch": 1, "zero_stage": 1},
        without=WITHOUT,
    )
    _, slices = read_back(fastest_plan(request))
    names = {
        kind: {row["name"] for row in slices.rows if row["inside"] and row["inside"]["cat"] == kind}
        for kind in ("forward", "backward")
    }
    assert {"expert_gemm", "ep_comm", "attention"} <= names["forward"] & names["backward"]
    assert "recompute" in names["backward"] - names["forward"]


def test_every_stage_but_the_last_sends_on(plain: Plan) -> None:
    trace = trace_of(plain)
    document = trace_document(trace)
    m, hops = trace.num_micro_batches, trace.pp - 1
    for thread, first, last in (
        (SENDS, "activations to rank 1", f"gradients to rank {hops - 1}"),
        (RECEIVES, "gradients from rank 1", f"activations from rank {hops - 1}"),
    ):
        slices = [
            event
            for event in document["traceEvents"]
            if event["ph"] == "X" and thread <= place(event)[1] < thread + 10
        ]
        assert len(slices) == 2 * m * hops
        assert {event["name"] for event in slices if place(event)[0] == 0} == {first}
        assert {event["name"] for event in slices if place(event)[0] == hops} == {last}
        assert all(abs(event["dur"] - trace.p2p_s * 1e6) <= 1 for event in slices)


def test_what_is_under_way_together_has_threads_of_its_own(plain: Plan) -> None:
    """Links so slow that a transfer is not over when the next begins."""
    trace = trace_of(plain)
    longest_s = max(
        end_s - start_s
        for starts, ends in zip(trace.timeline.starts_s, trace.timeline.ends_s, strict=True)
        for start_s, end_s in zip(starts, ends, strict=True)
    )
    document = trace_document(replace(trace, p2p_s=3 * longest_s))
    slices = Slices(document)
    assert len(slices.flows) == 2 * trace.num_micro_batches * (trace.pp - 1)
    names = {
        event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"
    }
    assert "to other pipeline ranks, 2" in names


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zbv"])
def test_memory_peaks_at_the_prediction_and_activations_go(schedule: str) -> None:
    plan = piped(schedule)
    assert plan.predicted is not None
    events = trace_document(trace_of(plan))["traceEvents"]
    for rank, peak_gib in enumerate(plan.predicted.memory_gib):
        amounts = [e["args"] for e in events if e["ph"] == "C" and place(e)[0] == rank]
        totals = [each["static"] + each["activations"] for each in amounts]
        assert max(totals) == pytest.approx(peak_gib)
        assert min(each["activations"] for each in amounts) >= 0
        assert amounts[-1]["activations"] == 0


def test_the_optimizer_follows_the_pipeline(plain: Plan) -> None:
    trace = trace_of(plain)
    last = [
        event
        for event in trace_document(trace)["traceEvents"]
        if event["ph"] == "X" and place(event) == (0, AFTERWARDS)
    ]
    assert "optimizer" in [event["name"] for event in last]
    assert min(event["ts"] for event in last) == pytest.approx(trace.timeline.seconds * 1e6, abs=1)
