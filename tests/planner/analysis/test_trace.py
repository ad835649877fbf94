"""A plan's step as a timeline: nothing overlaps, nothing is missing, and it ends when the price says."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.cluster_specs.catalog import load_cluster
from meshwright.errors import InputError
from meshwright.model_specs.catalog import load_catalog_model
from meshwright.planner.analysis.timeline import MOST_PASSES, trace_document, trace_of
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.plan.texts import plan_text
from meshwright.planner.request.plan_request import PlanRequest


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
            if event["pid"] == rank and event["ph"] == "X"
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
    assert {event["ph"] for event in written["traceEvents"]} == {"X", "M"}
    again = CliRunner().invoke(main, line)
    assert again.exit_code == 2
    assert "already there" in again.stderr
    assert CliRunner().invoke(main, [*line, "--force"]).exit_code == 0
