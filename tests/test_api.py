"""The public API: the same plans as the command line, and the page that shows it."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import meshwright
from meshwright.cli import main
from meshwright.planner.plan.texts import plan_document
from tests.places import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def without_times(document: Any) -> Any:
    """A document but for the seconds that its making took."""
    if isinstance(document, dict):
        kept = {key: value for key, value in document.items() if not key.endswith("wall_s")}
        return {key: without_times(value) for key, value in kept.items()}
    return [without_times(part) for part in document] if isinstance(document, list) else document


def test_the_command_prints_the_plan_of_the_function() -> None:
    options = ["--gpus", "8", "--global-batch", "64", "--seq-len", "4096", "--top", "2"]
    pins = ["--pin", "pp=1", "--pin", "recompute=none", "--forbid", "cp"]
    arguments = ["plan", "llama-3-8b", "--cluster", "dgx-h100", *options, *pins, "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    plan = meshwright.plan(
        meshwright.read_model("llama-3-8b"),
        cluster=meshwright.read_cluster("dgx-h100"),
        gpus=8,
        global_batch=64,
        seq_len=4096,
        top=2,
        pin={"pp": 1, "recompute": "none"},
        forbid=["cp"],
    )
    document = json.loads(json.dumps(plan_document(plan)))
    assert document["robustness"] is not None
    assert without_times(json.loads(result.stdout)) == without_times(document)


def test_every_option_of_the_command_is_an_argument_of_the_function() -> None:
    # A sweep is a function of its own: `meshwright.sweep`.
    of_the_terminal = {"output", "force", "as_json", "debug", "help", "sweep"}
    for name in ("plan", "recommend"):
        options = {parameter.name for parameter in main.commands[name].params}
        arguments = set(inspect.signature(getattr(meshwright, name)).parameters)
        assert options - of_the_terminal == arguments - {"progress", "robustness"}
    options = {parameter.name for parameter in main.commands["batch"].params}
    arguments = set(inspect.signature(meshwright.plan_batch).parameters)
    assert options - (of_the_terminal - {"output"}) == arguments - {"listener"}


@pytest.mark.parametrize(
    ("cluster", "model"),
    [
        (Path("no/such.yaml"), "llama-3-8b"),
        ("dgx-h1000", "llama-3-8b"),
        ("dgx-h100", "llama-3-8"),
    ],
)
def test_what_cannot_be_read_is_an_input_error(cluster: Path | str, model: str) -> None:
    with pytest.raises(meshwright.InputError, match=r"no such file|did you mean"):
        meshwright.plan(model, cluster=cluster, gpus=8, global_batch=8, seq_len=128)


def test_functions_say_units_results_and_errors() -> None:
    for name in meshwright.__all__:
        function = getattr(meshwright, name)
        if inspect.isfunction(function):
            documented = inspect.getdoc(function) or ""
            assert "Raises\n------" in documented, name
            assert "Returns\n-------" in documented, name
            for parameter in inspect.signature(function).parameters:
                assert re.search(rf"\b{parameter}\b", documented), (name, parameter)


@pytest.mark.slow
def test_the_page_of_examples_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) == 7
    names: dict[str, Any] = {}
    for block in BLOCKS:
        if "import pandas" in block and importlib.util.find_spec("pandas") is None:
            continue
        exec(compile(block, "docs/api.md", "exec"), names)
    assert [row["gpus"] for row in names["rows"]] == [8, 16, 32]
    assert (tmp_path / "scaling.svg").is_file()
    assert "did you mean 'llama-3-8b'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": 3}, "model: must be a name or a path, got 'int'"),
        ({"model": {"layers": 2}}, "model: must be a name or a path, got 'dict'"),
        ({"cluster": None}, "cluster: must be a name or a path"),
        ({"cluster": b"dgx-h100"}, "cluster: must be a name or a path, got 'bytes'"),
        ({"gpus": "8"}, "gpus: is not a whole number, got '8'"),
        ({"gpus": 8.0}, "gpus: is not a whole number, got 8.0"),
        ({"gpus": True}, "gpus: is not a whole number, got true"),
        ({"global_batch": None}, "global_batch: is not a whole number, got null"),
        ({"seq_len": 4096.5}, "seq_len: is not a whole number"),
        ({"reserve_gib": "2"}, "reserve_gib: is not a number, got '2'"),
        ({"pin": ["tp=2"]}, "pin: must be a text such as tp=8,pp=4, or a mapping"),
    ],
)
def test_values_of_a_wrong_type_are_refused_in_words(changes: dict[str, Any], words: str) -> None:
    """They ended in a TypeError of Python's own, or were taken for numbers."""
    asked: dict[str, Any] = {"model": "llama-3-8b", "cluster": "dgx-h100", "gpus": 8}
    asked |= {"global_batch": 64, "seq_len": 4096} | changes
    with pytest.raises(meshwright.InputError) as raised:
        meshwright.plan(asked.pop("model"), **asked)
    assert words in str(raised.value)


EXPERTS: dict[str, Any] = {"cluster": "dgx-h100"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: meshwright.validate(3), "runs: must be the path of a file or folder, got 3"),  # type: ignore[arg-type]
        (lambda: meshwright.estimate(None), "run: must be the path of a file or folder"),  # type: ignore[arg-type]
        (lambda: meshwright.calibrate(3), "runs: must be the path of a file or folder, got 3"),  # type: ignore[arg-type]
        (lambda: meshwright.place_experts("x", **EXPERTS, gpu=8), "gpu: is no option of"),
        (lambda: meshwright.place_experts("x", **EXPERTS, seed="a"), "seed: should be a valid int"),
        (lambda: meshwright.place_experts("x", cluster=3), "cluster: should be a valid string"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_values_of_a_wrong_type_are_named(call: Callable[[], object], words: str) -> None:
    with pytest.raises(meshwright.InputError, match=words):
        call()


NO_FUNCTION = {
    "verify": "a file's check, whose answer is its exit code",
    "topology": "writes a cluster file",
    "collective": "a calculator",
    "roofline": "a calculator",
    "pipeline": "a calculator",
    "overlap": "a calculator",
    "volumes": "a calculator",
    "compress": "a calculator",
    "memory": "a calculator",
    "catalog": "lists names",
    "schema": "prints a schema",
    "serve": "is a page",
}
OTHERWISE = {"batch": "plan_batch", "experts": "place_experts", "model": "read_model"}


def test_what_a_command_says_of_plans_a_function_says_too() -> None:
    functions = set(meshwright.__all__)
    for name in main.commands:
        assert name in NO_FUNCTION or OTHERWISE.get(name, name) in functions, name


@pytest.fixture(scope="module")
def small_plan() -> meshwright.Plan:
    return meshwright.plan(
        "llama-3-8b",
        cluster="dgx-h100",
        gpus=16,
        global_batch=64,
        seq_len=4096,
        robustness=False,
    )


def test_a_plan_is_saved_launched_and_read_back(
    small_plan: meshwright.Plan, tmp_path: Path
) -> None:
    written = meshwright.save(small_plan, tmp_path / "run")
    assert (tmp_path / "run" / "plan.yaml") in written
    again = meshwright.read_plan(tmp_path / "run")
    assert again.layout == small_plan.layout
    with pytest.raises(meshwright.InputError):
        meshwright.save(small_plan, tmp_path / "run")
    meshwright.save(small_plan, tmp_path / "run", force=True)
    files = meshwright.launch(tmp_path / "run", tmp_path / "slurm", target="slurm")
    assert any(path.suffix == ".sh" for path in files)


def test_reasons_traffic_timeline_and_page_are_those_of_the_commands(
    small_plan: meshwright.Plan, tmp_path: Path
) -> None:
    meshwright.save(small_plan, tmp_path)
    plan = str(tmp_path / "plan.yaml")
    for words, value in (
        (["explain", plan, "--no-best"], meshwright.explain(small_plan)),
        (["traffic", plan], meshwright.traffic(small_plan)),
    ):
        said = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
        assert {**json.loads(json.dumps(value)), "schema": said["schema"]} == said
    drawn = meshwright.trace(small_plan, num_micro_batches=1)
    assert drawn["traceEvents"]
    page = tmp_path / "page.html"
    assert CliRunner().invoke(main, ["report", plan, "-o", str(page)]).exit_code == 0
    assert page.read_text(encoding="utf-8") == meshwright.report(plan)


def test_ranks_are_mapped_onto_other_nodes(small_plan: meshwright.Plan) -> None:
    mapped = meshwright.map(small_plan, cluster="h100-leaf-3to1")
    assert mapped.inputs.cluster.name == "h100-leaf-3to1"
    assert mapped.layout == small_plan.layout


def test_a_cluster_is_shared_out(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.yaml"
    job = {"name": "a", "model": "llama-3-8b", "global_batch": 64, "seq_len": 4096}
    jobs.write_text(json.dumps({"schema": 1, "jobs": [job]}), encoding="utf-8")
    shared = meshwright.fleet(jobs, cluster="dgx-h100", gpus=16)
    assert len(shared.jobs) + len(shared.without_plan) == 1
    with pytest.raises(meshwright.InputError, match="is no option"):
        meshwright.fleet(jobs, cluster="dgx-h100", objektive="makespan")


def test_a_cluster_may_be_a_mapping(small_plan: meshwright.Plan) -> None:
    fields = {"base": "dgx-h100", "nic_gbps_per_gpu": 100}
    slower = meshwright.plan(
        "llama-3-8b",
        cluster=fields,
        gpus=16,
        global_batch=64,
        seq_len=4096,
        robustness=False,
    )
    assert slower.inputs.cluster.nic_gbps_per_gpu == 100
    assert slower.predicted is not None
    assert small_plan.predicted is not None
    assert slower.predicted.step_time_s > small_plan.predicted.step_time_s
    with pytest.raises(meshwright.InputError, match="cluster"):
        meshwright.read_cluster({"base": "dgx-h900"})
