"""Plans on the command line: what is printed, what is written, which exit code."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshwright import cli
from meshwright.documents import json_text
from meshwright.errors import InputError
from meshwright.planner.analysis.neighbours import neighbours
from meshwright.planner.bounds.mappings import order_name
from meshwright.planner.plan.document import (
    Binding,
    Infeasible,
    Mapping,
    Objective,
    Plan,
    SolverReport,
    with_digest,
)
from meshwright.planner.plan.texts import plan_document, plan_text, read_plan
from meshwright.planner.report.explain_view import comparison
from meshwright.planner.request.plan_request import PlanInputs, PlanRequest
from meshwright.planner.runs.prediction import places_of_run, predict_run, predicted_document
from meshwright.planner.runs.run_file import run_from_mapping
from meshwright.planner.runs.run_terms import layout_document
from tests.places import ROOT

ASK = [
    "plan",
    "llama-2-7b",
    "--cluster",
    "dgx-a100",
    "--gpus",
    "16",
    "--global-batch",
    "64",
    "--seq-len",
    "1024",
]


def sample(**settings: object) -> Plan:
    """A plan of one priced run: tp inside the node, dp across nodes, and a made-up certificate."""
    chosen: dict[str, object] = {
        "seq_len": 1024,
        "global_batch": 64,
        "micro_batch": 1,
        "tp": 8,
        "dp": 2,
        "zero_stage": 1,
    }
    chosen |= {"overlap": {"dp": True, "tp": True, "pp": True}}
    doc = {
        "model": "llama-2-7b",
        "cluster": "dgx-a100",
        "run": {**chosen, "sequence_parallel": True, **settings},
    }
    run = run_from_mapping(doc, where="sample")
    found, work = predict_run(run), run.workload
    use = found.mapping_use(work, run.layout, places_of_run(run))
    predicted = predicted_document(work, found, use)
    matrix = {"tp": [8, 1], "cp": [1, 1], "dp": [1, 2], "pp": [1, 1]}
    return Plan(
        status="optimal",
        objective=Objective(
            step_time_s=predicted.step_time_s, lower_bound_s=predicted.step_time_s, gap=0.0
        ),
        layout=layout_document(run.layout, found.stages),
        predicted=predicted,
        mapping=Mapping(
            order=list(order_name(matrix)),
            levels=["nvlink", "fabric"],
            matrix=matrix,
            ranks=[(rank // 8, rank % 8) for rank in range(16)],
        ),
        binding=[
            Binding(
                rule="scale-up-tp", value=8, limit=8, slack=0, unit="GPUs", note="a node is full"
            )
        ],
        warnings=["made up"],
        alternatives=[{"step_time_s": 2.5, "tp": 4, "dp": 4}],
        solver=SolverReport(wall_s=0.5, bound_rounds=3, workers=1, seed=0, version="9"),
        inputs=PlanInputs(
            model=work.model,
            cluster=work.cluster,
            gpus=16,
            global_batch=64,
            seq_len=1024,
            pins={"tp": 8},
        ),
    )


def without_layout(status: str) -> Plan:
    reasons = (
        Infeasible(conflict=["hbm"], smallest_changes=["give 32 GPUs"])
        if status == "infeasible"
        else None
    )
    return sample().model_copy(
        update={
            "status": status,
            "objective": Objective(step_time_s=None, lower_bound_s=None, gap=None),
            "layout": None,
            "predicted": None,
            "mapping": None,
            "binding": [],
            "infeasible": reasons,
        }
    )


Answer = Callable[[PlanRequest], Plan]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], None]:
    """Puts an answer in the place of the search."""

    # What takes more than `make_plan` from the module is there before another stands in its place.
    import_module("meshwright.planner.mixed.service")

    def put(answer: Answer) -> None:
        module = ModuleType("meshwright.planner.plan.make_plan")
        vars(module)["make_plan"] = lambda request, **_: answer(request)
        monkeypatch.setitem(sys.modules, "meshwright.planner.plan.make_plan", module)

    return put


def run(*args: object) -> Result:
    return CliRunner().invoke(cli.main, [str(arg) for arg in args], prog_name="meshwright")


def document(result: Result) -> dict[str, Any]:
    data = json.loads(result.stdout)
    assert isinstance(data, dict)
    assert data["schema"] == 1
    return data


def test_plan_yaml_holds_the_plan(tmp_path: Path) -> None:
    plan = sample()
    path = tmp_path / "plan.yaml"
    path.write_text(plan_text(plan), encoding="utf-8")
    assert read_plan(path) == read_plan(tmp_path) == plan
    saved = tmp_path / "plan.json"
    saved.write_text(json_text(plan_document(plan)), encoding="utf-8")
    assert read_plan(saved) == plan


def test_a_plan_without_layout_comes_back_too(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    for status in ("infeasible", "unknown"):
        plan = without_layout(status)
        path.write_text(plan_text(plan), encoding="utf-8")
        assert read_plan(path) == plan


def test_what_has_no_number_is_null() -> None:
    text = json_text({"a": math.nan, "b": [math.inf, {"c": -math.inf, "d": 1.5}]})
    assert json.loads(text) == {"schema": 1, "a": None, "b": [None, {"c": None, "d": 1.5}]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema: must be 1"),
        ({"status": "optimall"}, "did you mean 'optimal'"),
        ({"solvr": 1}, "did you mean 'solver'"),
        ({"solver": None}, "solver"),
    ],
)
def test_a_plan_that_is_none_is_refused_by_name(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(plan_document(sample()) | change), encoding="utf-8")
    with pytest.raises(InputError, match=r"plan\.yaml: ") as caught:
        read_plan(path)
    assert words in str(caught.value)
    result = run("explain", path, "--no-best")
    assert (result.exit_code, result.stdout) == (2, "")


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("layout", {"tp": 16}, "layout: 32 GPUs"),
        ("layout", {"ep": 3}, "layout.ep"),
        ("layout", {"num_micro_batches": 1}, "layout.num_micro_batches"),
        ("layout", {"stages": []}, "layout.stages"),
        ("layout", {"stages": [[31]]}, "32 layers"),
        ("predicted", {"memory_gib": []}, "predicted.memory_gib"),
        ("predicted", {"breakdown_s": {}}, "predicted"),
        ("mapping", {"matrix": {"tp": [8]}}, "mapping.matrix"),
        ("mapping", {"ranks": [[0, gpu] for gpu in range(7)]}, "mapping.ranks"),
        ("mapping", {"ranks": [[node, 8] for node in range(16)]}, "mapping.ranks"),
        ("inputs", {"gpus": 1_048_576}, "layout"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(
    tmp_path: Path, part: str, change: dict[str, object], words: str
) -> None:
    data = plan_document(sample())
    data[part] |= change
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(data), encoding="utf-8")
    result = run("explain", path, "--no-best")
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert "internal error" not in result.stderr


def test_a_run_file_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: gpt2-xl\n", encoding="utf-8")
    assert "this is not a plan" in run("explain", path).stderr
    assert "a plan, whose choices are all shown, or a term" in run("explain", path, "tp").stderr
    script = tmp_path / "launch.sh"
    script.write_text("torchrun pretrain_gpt.py --bf16\n", encoding="utf-8")
    assert "`estimate FILE --from-launch` reads" in run("explain", script).stderr


def test_comparison_is_second_over_first() -> None:
    one, two = sample(), sample(recompute="full")
    data = comparison((one, two))
    assert one.predicted is not None
    assert two.predicted is not None
    ratio = two.predicted.step_time_s / one.predicted.step_time_s
    assert data["second_over_first"]["step_time_s"] == pytest.approx(ratio)
    assert ratio > 1
    assert data["second_over_first"]["peak_memory_gib"] < 1
    assert data["differing_inputs"] == []


def test_a_plan_is_printed_and_written(tmp_path: Path, service: Callable[[Answer], None]) -> None:
    asked: list[PlanRequest] = []

    def answer(request: PlanRequest) -> Plan:
        asked.append(request)
        return sample()

    service(answer)
    options = [
        "--pin",
        "tp=8",
        "--pin",
        "zero_stage=1,pp=1",
        "--forbid",
        "cp",
        "--top",
        3,
        "--time-limit",
        9,
    ]
    result = run(*ASK, *options, "--full", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    request = asked[0]
    assert request.pins == {"tp": 8, "zero_stage": 1, "pp": 1}
    assert (request.gpus, request.forbids, request.top_k, request.time_limit_s) == (
        16,
        ("cp",),
        3,
        9.0,
    )
    for words in (
        "optimal: no layout in this space is faster",
        "bound = incumbent",
        "after 3 rounds",
    ):
        assert words in result.stdout
    assert "scale-up-tp" in result.stdout
    assert all(len(text) <= 80 for text in result.stdout.splitlines() if str(tmp_path) not in text)
    assert result.stderr == "warning: made up\n"
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {
        "plan.yaml",
        "hostfile.template",
        "megatron_args.json",
        "env.json",
        "launch.sh",
        "mapping",
    }
    assert read_plan(tmp_path / "out") == sample()


def test_a_plan_is_one_screen_and_five_rivals(service: Callable[[Answer], None]) -> None:
    service(lambda request: sample())
    shown, full = run(*ASK).stdout, run(*ASK, "--full").stdout
    heads = [text for text in full.splitlines() if text.startswith(("Layout", "Proof", "Memory"))]
    assert len(heads) == 3
    assert not any(head in shown.splitlines() for head in heads)
    screen, rest = shown.split("\nRivals\n")
    assert full.startswith(screen.rstrip())
    assert "--full adds" in rest
    rows = [re.match(r" *([\d.]+) s +([+-][\d.]+) +(\w+)", text) for text in rest.splitlines()]
    known = [row.groups() for row in rows if row is not None]
    assert len(known) == 5
    assert {row[2] for row in known} <= {"proven", "found", "priced"}
    assert known == sorted(known, key=lambda row: float(row[0]))
    assert len(shown.splitlines()) <= 35
    assert max(map(len, shown.splitlines())) <= 80


def test_without_a_plan_the_reasons_stand_in_the_short_answer_too(
    service: Callable[[Answer], None],
) -> None:
    service(lambda request: without_layout("infeasible"))
    shown = run(*ASK).stdout
    assert "give 32 GPUs" in shown
    assert "Rivals" not in shown
    assert "--full" not in shown


def test_plan_json_is_the_plan_document(service: Callable[[Answer], None]) -> None:
    service(lambda request: sample())
    result = run(*ASK, "--json")
    assert document(result) == plan_document(sample())
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


@pytest.mark.parametrize(("status", "code"), [("infeasible", 1), ("unknown", 3)])
def test_no_plan_has_an_exit_code_and_no_files(
    tmp_path: Path, service: Callable[[Answer], None], status: str, code: int
) -> None:
    service(lambda request: without_layout(status))
    result = run(*ASK, "-o", tmp_path / "out")
    assert result.exit_code == code
    assert f"{status}: " in result.stdout
    assert ("give 32 GPUs" in result.stdout) == (status == "infeasible")
    assert not (tmp_path / "out").exists()
    assert document(run(*ASK, "--json"))["status"] == status


def test_files_in_the_way_are_seen_before_the_search(
    tmp_path: Path, service: Callable[[Answer], None]
) -> None:
    asked: list[PlanRequest] = []

    def answer(request: PlanRequest) -> Plan:
        asked.append(request)
        return sample()

    service(answer)
    (tmp_path / "hostfile").write_text("mine\n", encoding="utf-8")
    result = run(*ASK, "-o", tmp_path)
    assert result.exit_code == 2
    assert "hostfile" in result.stderr
    assert "--force" in result.stderr
    assert asked == []
    assert (tmp_path / "hostfile").read_text(encoding="utf-8") == "mine\n"
    assert run(*ASK, "-o", tmp_path / "hostfile").exit_code == 2
    assert run(*ASK, "-o", tmp_path, "--force").exit_code == 0
    assert (tmp_path / "hostfile").read_text(encoding="utf-8") == "mine\n"
    template = (tmp_path / "hostfile.template").read_text(encoding="utf-8")
    assert template.splitlines()[2:] == ["node-00001", "node-00002"]


def test_a_folder_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, service: Callable[[Answer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    service(lambda request: sample())

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("meshwright.documents.os.open", full)
    result = run(*ASK, "-o", tmp_path / "out", "--json")
    assert result.exit_code == 2
    assert "No space left on device" in result.stderr
    assert document(result)["status"] == "optimal"
    assert list((tmp_path / "out").iterdir()) == []


def test_launch_writes_the_files_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(plan_text(sample()), encoding="utf-8")
    result = run("launch", path, "--target", "megatron", "-o", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    assert {"launch.sh", "mapping/ranks.csv"} <= set(document(result)["files"])
    args = json.loads((tmp_path / "out" / "megatron_args.json").read_text(encoding="utf-8"))
    assert args[args.index("--tensor-model-parallel-size") + 1] == "8"
    monkeypatch.chdir(tmp_path)
    told = run("launch", path, "-o", "beside").stdout.split()
    assert {"beside/launch.sh", "beside/mapping/ranks.csv"} <= set(told)
    again = run("launch", path, "-o", tmp_path / "out")
    assert again.exit_code == 2
    assert "--force" in again.stderr
    assert run("launch", path, "-o", tmp_path / "out", "--force").exit_code == 0


@pytest.mark.parametrize(
    "command", ["traffic", "map", "trace", "report", "launch", "explain", "compare"]
)
@pytest.mark.parametrize("as_json", [False, True])
def test_every_command_says_the_same_of_a_plan_without_layout(
    tmp_path: Path, command: str, as_json: bool
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(plan_text(without_layout("infeasible")), encoding="utf-8")
    out = tmp_path / "out"
    arguments = [command, path]
    if command == "compare":
        arguments += [path]
    if command in ("trace", "report", "launch"):
        arguments += ["-o", out]
    result = run(*arguments, *(["--json"] if as_json else []))
    assert result.exit_code == 1
    message = (
        f"{path}: this plan has no layout, its status is infeasible, "
        "because these exclude every layout: hbm"
    )
    assert result.stderr == f"Error: {message}\n"
    if as_json:
        assert document(result)["error"] == {"message": message, "exit_code": 1}
    else:
        assert result.stdout == ""
    assert not out.exists()


def test_explain_names_what_holds_a_plan_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(plan_text(sample()), encoding="utf-8")
    shown = run("explain", path, "--no-best").stdout
    assert "scale-up-tp" in shown
    assert "What bounds its speed" in shown
    assert "2.500 s" in shown
    data = document(run("explain", path, "--json", "--no-best"))
    assert data["binding"][0]["slack"] == 0
    assert any("of the step" in reason for reason in data["bounds"])


def test_neighbours_price_or_forbid_every_single_change() -> None:
    found = {one.change: one for one in neighbours(sample())}
    wider = found["tp 8 -> 16, dp 2 -> 1"]
    assert wider.step_time_s is None
    assert wider.broken is not None
    assert wider.broken.startswith("scale-up-tp: ")
    narrower = found["dp 2 -> 4, tp 8 -> 4"]
    nested = sample(tp=4, dp=4).predicted
    assert nested is not None
    # Of the mappings, the nested one is among those that were priced.
    assert narrower.step_time_s is not None
    assert 0 < narrower.step_time_s <= nested.step_time_s * (1 + 1e-12)
    assert neighbours(without_layout("infeasible")) == []


def test_compare_shows_what_differs(tmp_path: Path) -> None:
    paths = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    for path, plan in zip(paths, (sample(), sample(recompute="full")), strict=True):
        path.write_text(plan_text(plan), encoding="utf-8")
    shown = run("compare", *paths).stdout
    assert "full, every layer" in shown
    assert "zero stage" not in shown
    assert document(run("compare", *paths, "--json"))["plans"][0]["layout"]["tp"] == 8


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--pin", "tpp=8"], "tpp"),
        (["--pin", "tp=eight"], "tp"),
        (["--pin", "tp"], "NAME=VALUE"),
        (["--pin", "tp=2,tp=4"], "twice"),
        (["--forbid", "full-recompte"], "did you mean 'full-recompute'"),
        (["--precision", "bf17"], "did you mean 'bf16'"),
        (["--reserve-gib", "nan"], "--reserve-gib"),
        (["--time-limit", "-1"], "--time-limit"),
        (["--gpus", "9" * 40], "gpus"),
        (["--gpus", "0"], "gpus"),
        (["--top", "0"], "--top"),
        (["--global-batch", "0"], "--global-batch"),
        (["--cluster", "dgx-h1000"], "did you mean 'dgx-h100'"),
    ],
)
def test_a_bad_request_is_refused_before_the_search(
    service: Callable[[Answer], None], extra: list[str], words: str
) -> None:
    service(lambda request: pytest.fail("searched"))
    result = run(*ASK, *extra)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert "internal error" not in result.stderr
    assert result.stdout == ""


@pytest.mark.slow
def test_the_search_is_interrupted_with_130(tmp_path: Path) -> None:
    code = (
        # What starts tests in the background may have left the signal ignored.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import sys, time, types; module = types.ModuleType('meshwright.planner.plan.make_plan')\n"
        "def make_plan(request, **options):\n"
        "    print('searching', file=sys.stderr, flush=True); time.sleep(60)\n"
        "module.make_plan = make_plan; module.__getattr__ = lambda name: None\n"
        "sys.modules['meshwright.planner.plan.make_plan'] = module\n"
        f"import cli; cli.main({[*ASK, '-o', str(tmp_path / 'out')]!r}, prog_name='meshwright')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "searching\n"
        time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert (out, err.strip()) == ("", "Interrupted.")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "command", ["explain --no-best", "launch", "report", "traffic", "trace", "map"]
)
def test_a_plan_that_was_edited_is_named_as_such(command: str, tmp_path: Path) -> None:
    """Only `verify` knew, and the others told of an optimum."""
    path = tmp_path / "plan.yaml"
    text = plan_text(with_digest(sample()))
    edited = text.replace("status: optimal", "status: feasible", 1)
    assert edited != text
    name, *options = command.split()
    if name in ("launch", "report", "trace"):
        options += ["-o", str(tmp_path / "out"), "--force"]
    if name == "map":
        options += ["--cluster", "dgx-a100"]
    words = "the plan was edited after it was written"
    told = []
    for written in (text, edited):
        path.write_text(written, encoding="utf-8")
        result = run(name, path, *options)
        assert result.exit_code == 0, result.output
        told.append(words in result.stderr)
    assert told == [False, True]
