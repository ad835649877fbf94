"""The tools of `meshwright mcp`, without the protocol: what they answer, and what they refuse."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import meshwright
from meshwright.cli import main
from meshwright.errors import InputError
from meshwright.planner.plan.texts import read_plan
from meshwright.planner.report.view import (
    Bar,
    Bullets,
    Column,
    Facts,
    Heading,
    Table,
    View,
    line,
    view_text,
)
from meshwright.serve import answers
from meshwright.serve.answers import Offer
from meshwright.serve.queue import PageLimits, QuestionQueue
from meshwright.serve.tools import MOST_BYTES, MOST_RUNS, TOOLS, PlannerTools, tool_server

QUESTION: dict[str, Any] = {
    "model": "llama-3-8b",
    "cluster": "dgx-h100",
    "gpus": 16,
    "global_batch": 64,
    "seq_len": 4096,
    "framework": "torchtitan",
}
RUN: dict[str, Any] = {
    "model": "llama-2-7b",
    "cluster": "dgx-h100",
    "run": {"gpus": 8, "seq_len": 4096, "global_batch": 64, "tp": 2, "dp": 4, "zero_stage": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("tools")
    (top / "secret.yaml").write_text("model: secret\n", encoding="utf-8")
    (top / "plans").mkdir()
    return top / "plans"


@pytest.fixture(scope="module")
def tools(folder: Path) -> Iterator[PlannerTools]:
    queue = QuestionQueue(answers.load, PageLimits(at_once=1))
    yield PlannerTools(Offer.of_files(), queue, folder)
    queue.close()


@pytest.fixture(scope="module")
def planned(tools: PlannerTools) -> dict[str, Any]:
    return tools.plan(**QUESTION)


@pytest.mark.slow
def test_a_plan_is_the_one_that_the_function_finds(
    tools: PlannerTools, planned: dict[str, Any], folder: Path
) -> None:
    plan = meshwright.plan(**QUESTION)
    assert plan.predicted is not None
    assert plan.layout is not None
    assert planned["status"] == "optimal"
    assert planned["figures"]["step_time_s"] == plan.predicted.step_time_s
    assert "## Where the step's time goes" in planned["text"]
    pinned = tools.plan(**QUESTION, pin={"tp": 8}, forbid=["cp"])
    assert pinned["layout"].startswith("tp 8")
    compared = tools.compare(planned["plan"], pinned["plan"])
    ratio = pinned["figures"]["step_time_s"] / planned["figures"]["step_time_s"]
    assert compared["second_over_first"]["step_time_s"] == pytest.approx(ratio)
    assert "tp" in tools.explain(planned["plan"])["text"]
    meshwright.save(plan, folder / "saved")
    assert read_plan(folder / "saved").digest == plan.digest
    for name in (planned["plan"], "saved", "saved/plan.yaml"):
        assert tools.verify(name)["passed"], name
    assert tools.verify("saved")["directory"] is not None, "with its launch files"
    text = (folder / "saved" / "plan.yaml").read_text("utf-8")
    stated, edited = f"zero_stage: {plan.layout.zero_stage}", "zero_stage: 0"
    assert stated != edited
    (folder / "edited.yaml").write_text(text.replace(stated, edited), "utf-8")
    assert not tools.verify("edited.yaml")["passed"]


@pytest.mark.slow
def test_the_fewest_gpus_reach_their_target(tools: PlannerTools) -> None:
    answer = tools.recommend(**QUESTION | {"gpus": 32}, step_time_s=2.0)
    assert answer["reached"]
    assert answer["figures"]["step_time_s"] <= 2.0
    assert answer["gpus"] == 16, "8 GPUs take twice the 1.6 s of 16"
    pinned = tools.recommend(**QUESTION | {"gpus": 32}, step_time_s=2.0, pin={"tp": 8})
    assert pinned["layout"].startswith("tp 8")
    with pytest.raises(InputError, match="give a target"):
        tools.recommend(**QUESTION)


@pytest.mark.slow
def test_runs_are_priced_and_compared_with_what_was_measured(
    tools: PlannerTools, folder: Path
) -> None:
    (priced,) = meshwright.estimate(RUN)
    (run,) = tools.estimate(RUN)["runs"]
    assert run["predicted"]["step_time_s"] == priced.predicted.step_time_s
    measured = {**RUN, "measured": {"step_time_s": priced.predicted.step_time_s / 1.25}}
    report = tools.validate({"runs": [measured]})
    assert report["rows"][0]["error_pct"] == pytest.approx(25.0)
    (folder / "runs.json").write_text(meshwright.documents.json_text(measured), "utf-8")
    assert tools.validate("runs.json")["rows"][0]["error_pct"] == pytest.approx(25.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda tools: tools.plan(**QUESTION | {"model": "llama-3-8c"}), "did you mean 'llama-3-8b'"),
        (lambda tools: tools.plan(**QUESTION | {"model": "/etc/passwd"}), "neither in the catalog"),
        (lambda tools: tools.plan(**QUESTION | {"cluster": "../x.yaml"}), "not in the catalog"),
        (lambda tools: tools.plan(**QUESTION | {"seq_len": 0}), "seq_len"),
        (lambda tools: tools.plan(**QUESTION, time_limit_s=1e6), "time_limit"),
        (lambda tools: tools.plan(**QUESTION, pin={"x" * 10: 3}), "pin"),
        (lambda tools: tools.explain("q999"), "no such question"),
        (lambda tools: tools.verify("../secret.yaml"), "no such file in the server's folder"),
        (lambda tools: tools.verify("/etc/passwd"), "no such file in the server's folder"),
        (lambda tools: tools.verify("a\0b"), "no such file in the server's folder"),
        (lambda tools: tools.validate("../secret.yaml"), "no such file"),
        (lambda tools: tools.estimate({**RUN, "model": "/etc/passwd"}), "not a model of the catalog"),
        (lambda tools: tools.estimate({**RUN, "cluster": "runs.yaml"}), "not a cluster of the catalog"),
        (lambda tools: tools.estimate({"runs": []}), f"1 to {MOST_RUNS} runs"),
        (lambda tools: tools.estimate({"runs": [RUN], "model": "gpt2-xl"}), "unknown field beside runs"),
        (lambda tools: tools.estimate({"runs": [RUN] * (MOST_RUNS + 1)}), f"1 to {MOST_RUNS} runs"),
        (lambda tools: tools.estimate({**RUN, "note": "x" * MOST_BYTES}), "larger than"),
        (lambda tools: tools.estimate({"runs": [3]}), "run"),
        (lambda tools: tools.validate({**RUN, "run": {"seq_len": -1}}), "seq_len"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_in_words(
    tools: PlannerTools, ask: Callable[[PlannerTools], Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        ask(tools)


def test_a_pipe_in_the_folder_is_no_file(tools: PlannerTools, folder: Path) -> None:
    os.mkfifo(folder / "pipe.yaml")
    with pytest.raises(InputError, match="this is a pipe or a device"):
        tools.explain("pipe.yaml")


@pytest.mark.slow
def test_a_link_out_of_the_folder_is_no_file_of_it(tools: PlannerTools, folder: Path) -> None:
    (folder / "link.yaml").symlink_to(folder.parent / "secret.yaml")
    with pytest.raises(InputError, match="no such file"):
        tools.verify("link.yaml")
    (folder / "linked").mkdir()
    (folder / "linked" / "plan.yaml").symlink_to(folder.parent / "secret.yaml")
    (folder / "beside").mkdir()
    (folder / "beside" / "plan.yaml").write_text("status: optimal\n", "utf-8")
    (folder / "beside" / "ranks.txt").symlink_to(folder.parent / "secret.yaml")
    for name in ("linked", "beside", "beside/plan.yaml"):
        with pytest.raises(InputError, match="is a link out of the plan's folder"):
            tools.verify(name)


def test_no_files_are_named_without_a_folder() -> None:
    alone = PlannerTools(Offer.of_files(), QuestionQueue.__new__(QuestionQueue))
    with pytest.raises(InputError, match="--folder DIR"):
        alone.verify("plan.yaml")
    term = alone.explain("memory risk")
    assert term["term"]
    assert term["meaning"]


def test_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    done = CliRunner().invoke(main, ["mcp"])
    assert done.exit_code == 2
    assert "pip install 'meshwright[mcp]'" in done.output


def test_the_server_has_the_name_and_the_version_of_the_program(
    tools: PlannerTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside its tools, each of which refuses arguments that it does not have."""

    class Offered:
        def __init__(self, function: Callable[..., Any]) -> None:
            self.name = function.__name__
            self.model_config: dict[str, str] = {}
            self.arg_model, self.fn_metadata = self, self
            self.parameters: dict[str, bool] = {}

        from_function = classmethod(lambda kind, function: kind(function))

        def model_rebuild(self, **_: bool) -> None:
            assert self.model_config["extra"] == "forbid"

    library = (lambda name, **settings: {"name": name, **settings}, Offered, RuntimeError)
    monkeypatch.setattr("meshwright.serve.tools._library", lambda: library)
    server = tool_server(tools)
    assert (server["name"], server["version"]) == ("meshwright", meshwright.__version__)
    assert [each.name for each in server["tools"]] == list(TOOLS)
    assert all(each.parameters == {"additionalProperties": False} for each in server["tools"])


def test_a_folder_that_is_none_is_refused() -> None:
    done = CliRunner().invoke(main, ["mcp", "--folder", "no/such"])
    assert done.exit_code == 2
    assert "--folder: no such folder" in done.output


def test_every_tool_says_what_it_is_for() -> None:
    for name in TOOLS:
        assert len(getattr(PlannerTools, name).__doc__) > 60, name


def test_a_view_is_markdown_for_programs() -> None:
    table = Table([Column("part"), Column("share")], [["a|b\nc", Bar(0.25)], ["d", None]])
    view: View = [
        Heading("Time"),
        line("In ", "all"),
        Facts([("x", "1 s"), ("y", "")]),
        table,
        Bullets(["z"]),
    ]
    assert view_text(view) == (
        "\n## Time\nIn all\n- x: 1 s\n"
        "| part | share |\n| --- | --- |\n| a\\|b c | 25 % |\n| d | - |\n- z"
    )
