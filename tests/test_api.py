"""The public API: the same plans as the command line, and the page that shows it."""

from __future__ import annotations

import html
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
from click.testing import CliRunner

import meshwright
from meshwright import api
from meshwright.cli import main
from meshwright.documents import json_text
from meshwright.planner.drawing import rounded_seconds
from meshwright.planner.experts.service import ExpertRequest
from meshwright.planner.many.fleet import FleetOptions
from meshwright.planner.plan import make_plan as making
from meshwright.planner.plan.texts import plan_document
from tests.commands.test_documented_commands import SCRIPT
from tests.places import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def without_times(document: Any) -> Any:
    """A document but for the seconds that its making took."""
    if isinstance(document, dict):
        kept = {key: value for key, value in document.items() if not key.endswith("wall_s")}
        return {key: without_times(value) for key, value in kept.items()}
    return [without_times(part) for part in document] if isinstance(document, list) else document


@pytest.mark.slow
def test_the_command_prints_the_plan_of_the_function() -> None:
    options = ["--gpus", "8", "--global-batch", "64", "--seq-len", "4096", "--top", "2"]
    options += ["--framework", "fsdp2"]
    pins = ["--pin", "pp=1,micro_batch=1,zero_stage=3", "--pin", "recompute=none", "--forbid", "cp"]
    pins += ["--without", "compile"]
    arguments = ["plan", "llama-3-8b", "--cluster", "dgx-h100", *options, *pins, "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    plan = meshwright.plan(
        meshwright.read_model("llama-3-8b"),
        cluster=meshwright.read_cluster("dgx-h100"),
        gpus=8,
        global_batch=64,
        seq_len=4096,
        framework="fsdp2",
        top=2,
        pin={"pp": 1, "micro_batch": 1, "zero_stage": 3, "recompute": "none"},
        forbid=["cp"],
        without=["compile"],
    )
    document = json.loads(json.dumps(plan_document(plan)))
    assert document["robustness"] is not None
    assert without_times(json.loads(result.stdout)) == without_times(document)


def test_every_option_of_the_command_is_an_argument_of_the_function() -> None:
    # A sweep is a function of its own: `meshwright.sweep`.
    of_the_terminal = {"output", "full", "force", "as_json", "debug", "help", "sweep"}
    for name in ("plan", "recommend"):
        options = {parameter.name for parameter in main.commands[name].params}
        arguments = set(inspect.signature(getattr(meshwright, name)).parameters)
        assert options - of_the_terminal == arguments - {"progress", "robustness"}
    options = {parameter.name for parameter in main.commands["batch"].params}
    arguments = set(inspect.signature(meshwright.plan_batch).parameters)
    assert options - (of_the_terminal - {"output", "force"}) == arguments - {"listener"}


class ReachedError(Exception):
    """What a reader of requests was handed."""


_BESIDE = {
    *(
        "top",
        "robustness",
        "baseline",
        "tokens",
        "days",
        "gpu_hour_price",
        "export_model",
        "progress",
    ),
}
"""Arguments of `plan` that its request does not hold under their names."""


@pytest.mark.parametrize(
    ("function", "reader", "beside"),
    [
        (meshwright.plan, "planner.request.reader.read_request", _BESIDE),
        (
            meshwright.plan_mixed,
            "planner.mixed.document.read_mixed_request",
            _BESIDE | {"choices"},
        ),
    ],
)
def test_every_argument_reaches_the_request(
    function: Callable[..., Any],
    reader: str,
    beside: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reached(**arguments: Any) -> Any:
        raise ReachedError(arguments)

    monkeypatch.setattr(f"meshwright.{reader}", reached)
    parameters = inspect.signature(function).parameters
    names = [name for name in parameters if name not in beside]
    values: dict[str, Any] = {}
    for number, name in enumerate(names, start=5):
        is_number = str(parameters[name].annotation).startswith(("int", "float"))
        values[name] = number if is_number else f"value of {name}"
    with pytest.raises(ReachedError) as handed:
        function(values["model"], **{name: values[name] for name in names if name != "model"})
    (arguments,) = handed.value.args
    assert {name: str(arguments[name]) for name in names} == {n: str(v) for n, v in values.items()}
    assert arguments.keys() - set(names) <= {"top_k"}


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


@pytest.mark.soak
def test_the_page_of_examples_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # No block looks at how robust a plan is, nor at what its choices bring.
    monkeypatch.setattr(api, "plan", partial(api.plan, robustness=False))
    monkeypatch.setattr(making, "make_plan", partial(making.make_plan, choices=False))
    assert len(BLOCKS) == 7
    names: dict[str, Any] = {}
    for block in BLOCKS:
        if "to_frame" in block and importlib.util.find_spec("pandas") is None:
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
        ({"forbid": 5}, "forbid: must be a text, or several, got 5"),
        ({"without": [1]}, "without: must be a text, or several, got a list of 1 items"),
        ({"nodes": [1]}, "nodes: must be a text, or several"),
        ({"train": "lora", "lora_targets": [1]}, "lora_targets: must be a text, or several"),
        ({"time_limit_s": "1"}, "time_limit_s: is not a number, got '1'"),
        ({"tokens": "1e9"}, "tokens: is not a number, got '1e9'"),
        ({"without": [None]}, "without: must be a text, or several, got a list of 1 items"),
        ({"allow": b"all"}, "allow: must be a text, or several, got a bytes"),
        ({"inside_domain": [1]}, "inside_domain: must be a text, or several"),
        ({"nodes": 5}, "nodes: must be a text, or several, got 5"),
    ],
)
def test_values_of_a_wrong_type_are_refused_in_words(changes: dict[str, Any], words: str) -> None:
    """They ended in a TypeError of Python's own, or were taken for numbers."""
    asked: dict[str, Any] = {"model": "llama-3-8b", "cluster": "dgx-h100", "gpus": 8}
    asked |= {"global_batch": 64, "seq_len": 4096} | changes
    with pytest.raises(meshwright.InputError) as raised:
        meshwright.plan(asked.pop("model"), **asked)
    assert words in str(raised.value)


QUESTION: dict[str, Any] = {"cluster": "dgx-h100", "gpus": 8, "global_batch": 64, "seq_len": 4096}
WITHOUT = ["cuda-graph", "tp-overlap"]
"""Leaves plans one execution to search."""


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: meshwright.read_plan(None), "plan: must be the path of a file"),  # type: ignore[arg-type]
        (lambda: meshwright.explain(5), "plan: must be the path of a file"),  # type: ignore[arg-type]
        (lambda: meshwright.compare([], "x"), "plan: must be the path of a file"),  # type: ignore[arg-type]
        (lambda: meshwright.compare("x", "x", tokens="1e9"), "tokens: is not a number"),  # type: ignore[arg-type]
        (lambda: meshwright.sweep("gpt2-xl", over=5, **QUESTION), "--sweep: must be a text such as"),  # type: ignore[arg-type]
        (lambda: meshwright.sweep("gpt2-xl", over={1: 2}, **QUESTION), "--sweep: must be a text such as"),  # type: ignore[dict-item]
        (lambda: meshwright.recommend("gpt2-xl", **QUESTION, sizes=8), "sizes: must be a list, got 8"),  # type: ignore[arg-type]
        (lambda: meshwright.recommend("gpt2-xl", **QUESTION, sizes=["8"]), "sizes: is not a whole number"),  # type: ignore[list-item]
        (lambda: meshwright.recommend("gpt2-xl", **QUESTION, reserve_gib=5), "reserve_gib: must be a list"),  # type: ignore[arg-type]
        (lambda: meshwright.plan_batch("x", "y", formats=5), "formats: must be a text, or several"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_other_functions_refuse_values_of_a_wrong_type_in_words(
    call: Callable[[], object], words: str
) -> None:
    """They ended in a TypeError or an AttributeError of Python's own."""
    with pytest.raises(meshwright.InputError) as raised:
        call()
    assert words in str(raised.value)


def test_ranks_are_placed_for_objectives_and_weights_that_there_are(tmp_path: Path) -> None:
    plan = meshwright.plan(
        "gpt2-xl",
        cluster="dgx-a100",
        gpus=2,
        global_batch=2,
        seq_len=512,
        without=WITHOUT,
        robustness=False,
    )
    for changes, words in (
        ({"objective": 5}, "objective: is not known, got 5; allowed: traffic, spread"),
        ({"order": None}, "order: is not known"),
        ({"objective": "spread", "dp_weight": float("nan")}, "dp_weight: must be from 0 to 1"),
        ({"objective": "spread", "dp_weight": 5.0}, "dp_weight: must be from 0 to 1, got 5.0"),
    ):
        asked: dict[str, Any] = dict(changes)
        with pytest.raises(meshwright.InputError) as raised:
            meshwright.map(plan, **asked)
        assert words in str(raised.value)
    with pytest.raises(meshwright.InputError, match="cannot be used as a folder"):
        meshwright.save(plan, str(tmp_path / "a\0b"))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: meshwright.plan("llama-3-8b", **QUESTION, precison="fp8"), "'precision'"),  # type: ignore[call-arg]
        (lambda: meshwright.plan("llama-3-8b", **QUESTION, framework="megatorn"), "'megatron'"),  # type: ignore[arg-type]
        (lambda: meshwright.plan("llama-3-8b", **QUESTION, pin={"mikro_batch": 1}), "'micro_batch'"),
        (lambda: meshwright.recommend("llama-3-8b", **QUESTION, tokens_per_sec=3), "'tokens_per_s'"),  # type: ignore[call-arg]
        (lambda: meshwright.sweep("llama-3-8b", over="gpus=8", **QUESTION, precison="fp8"), "'precision'"),
        (lambda: meshwright.sweep("llama-3-8b", over="gpu=8", **QUESTION), "'gpus'"),
        (lambda: meshwright.fleet("jobs.yaml", cluster="dgx-h100", objektive="makespan"), "'objective'"),
        (lambda: meshwright.place_experts("x", cluster="dgx-h100", maks_moves=3), "'max_moves'"),
        (lambda: meshwright.read_cluster({"base": "dgx-h100", "gpu_per_node": 4}), "'gpus_per_node'"),
        (lambda: meshwright.estimate({"model": "llama-2-7b", "run": {"seqlen": 4096}}), "'seq_len'"),
    ],
)  # fmt: skip
def test_a_misspelt_field_is_refused_with_what_it_may_mean(
    call: Callable[[], object], words: str
) -> None:
    with pytest.raises(meshwright.InputError, match=f"did you mean {words}"):
        call()


def test_a_checker_refuses_names_that_there_are_not() -> None:
    """mypy reports an ignored error that is none: each of these lines is one that it finds."""
    for wrong in (
        lambda: meshwright.plan("llama-3-8b", **QUESTION, framework="megatorn"),  # type: ignore[arg-type]
        lambda: meshwright.plan("llama-3-8b", **QUESTION, precision="fp9"),  # type: ignore[arg-type]
        lambda: meshwright.plan("llama-3-8b", **QUESTION, objective="mean"),  # type: ignore[arg-type]
        lambda: meshwright.plan("llama-3-8b", **QUESTION, method="brute"),  # type: ignore[arg-type]
        lambda: meshwright.plan("llama-3-8b", **QUESTION, optimizer="adamw"),  # type: ignore[arg-type]
        lambda: meshwright.recommend("llama-3-8b", **QUESTION, precision="int4", workers=1),  # type: ignore[arg-type]
        lambda: meshwright.plan_batch("jobs.yaml", "out", engine="rai"),  # type: ignore[arg-type]
        lambda: meshwright.plan("llama-3-8b", **QUESTION, seqlen=128),  # type: ignore[call-arg]
    ):  # fmt: skip
        with pytest.raises(meshwright.InputError):
            wrong()


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
    "serve": "is a page that asks the functions",
    "mcp": "are tools that ask the functions",
}
OTHERWISE = {
    "batch": "plan_batch",
    "experts": "place_experts",
    "topology": "read_topology",
    "verify": "verify_plan",
}
OF_THE_TERMINAL = {
    *("as_json", "debug", "help", "full", "every_row", "force", "output"),
    *("picture", "plot", "matrix", "heat_map", "why"),
}
"""How an answer is shown, with which formulas, and files that it is written into beside."""
OF_COMMANDS = {
    "plan": {"sweep": "a function of its own"},
    "explain": {"words": "`plan`, or a term of the glossary"},
    "verify": {
        "plans": "`plan` and `directory`",
        "is_all": "a function of its own: `verify_plans`",
    },
    "compare": {"other": "`baseline` of the function"},
    "fleet": {"no_cache": "`cache` is None by default"},
    "experts": {"form": "of the file that is written"},
}
"""Options that a function says otherwise, and how."""


def commands() -> dict[str, click.Command]:
    """Every command by its name; of a group, the one command in it."""
    found: dict[str, click.Command] = {}
    for name, command in main.commands.items():
        inner = list(command.commands.values()) if isinstance(command, click.Group) else [command]
        assert len(inner) == 1, name
        found[name] = inner[0]
    return found


def test_what_a_command_says_a_function_says_too() -> None:
    functions = set(meshwright.__all__)
    for name in commands():
        assert name in NO_FUNCTION or OTHERWISE.get(name, name) in functions, name


@pytest.mark.parametrize("name", sorted(set(main.commands) - set(NO_FUNCTION)))
def test_what_an_option_asks_for_an_argument_asks_for_too(name: str) -> None:
    function = getattr(meshwright, OTHERWISE.get(name, name))
    arguments = set(inspect.signature(function).parameters)
    if "options" in arguments:
        options_of = {"fleet": FleetOptions, "experts": ExpertRequest}[name]
        arguments |= {each.name for each in fields(options_of)}
    options = {str(parameter.name) for parameter in commands()[name].params}
    otherwise = set(OF_COMMANDS.get(name, {}))
    assert otherwise <= options, "an exception for an option that there is not"
    assert options - OF_THE_TERMINAL - otherwise <= arguments


@pytest.mark.parametrize(
    ("line", "call"),
    [
        (
            "collective --op all-reduce --bytes 1GiB --ranks 16 --cluster dgx-h100",
            lambda: meshwright.collective("all-reduce", "1GiB", ranks=16, cluster="dgx-h100"),
        ),
        (
            "collective --op all-gather --bytes 1MB --end 8MB --ranks 8 --alpha 5us --beta 50GB/s",
            lambda: meshwright.collective("all-gather", "1MB", end=8e6, ranks=8, alpha="5us", beta=5e10),
        ),
        (
            "roofline --device h100-sxm-80gb --m 4096 --n 4096 --k 4096",
            lambda: meshwright.roofline(device="h100-sxm-80gb", m=4096, n=4096, k=4096),
        ),
        (
            "roofline --beta 900GB/s --peak-tflops 989",
            lambda: meshwright.roofline(beta="900GB/s", peak_tflops=989),
        ),
        (
            "pipeline --pp 4 --micro-batches 16 --vpp 2 --compute-ms 120 --boundary-bytes 1MB "
            "--schedule interleaved-1f1b",
            lambda: meshwright.pipeline(
                pp=4, micro_batches=16, vpp=2, compute_ms=120, boundary_bytes=1e6,
                schedule="interleaved-1f1b",
            ),
        ),
        (
            "overlap --compute 100ms --comm 60ms --sync 5ms",
            lambda: meshwright.overlap(compute_s=0.1, comm_s="60ms", sync_s=0.005),
        ),
        (
            "overlap --bytes 2GB --beta 50GB/s --passes 1",
            lambda: meshwright.overlap(size=2e9, beta=5e10, passes=1),
        ),
        (
            "volumes --params 7e9 --layers 32 --hidden 4096 --heads 32 --dp 8 --gpu-memory 80GB",
            lambda: meshwright.volumes(params=7e9, layers=32, hidden=4096, heads=32, dp=8),
        ),
        (
            "compress --bytes 2GB --ranks 16 --beta 12.5GB/s",
            lambda: meshwright.compress("2GB", ranks=16, alpha="5us", beta="12.5GB/s"),
        ),
        ("catalog clusters", lambda: {"clusters": meshwright.catalog("clusters")}),
        ("schema run", lambda: {"kind": "run", "json_schema": meshwright.schema("run")}),
        ("model llama-3-8b --seq-len 8192", lambda: meshwright.model("llama-3-8b", seq_len=8192)),
    ],
)  # fmt: skip
def test_a_function_answers_what_its_command_prints(line: str, call: Callable[[], Any]) -> None:
    done = CliRunner().invoke(main, [*line.split(), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert {**json.loads(json_text(call())), "schema": said["schema"]} == said


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: meshwright.catalog("clusterz"), "did you mean 'clusters'"),  # type: ignore[arg-type]
        (lambda: meshwright.schema("jobz"), "not a kind of file"),  # type: ignore[arg-type]
        (lambda: meshwright.collective("all-reduce"), "give --op, --bytes and --ranks"),
        (lambda: meshwright.roofline(m=1, n=1, k=1), "needs --device"),
        (lambda: meshwright.overlap(compute_s=1), "give a plan"),
        (lambda: meshwright.compress("2 apples", ranks=2, beta=1e9), "size"),
    ],
)
def test_a_question_that_is_none_is_an_input_error(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(meshwright.InputError, match=words):
        call()


LINK: dict[str, Any] = {
    "operation": "all-reduce",
    "size": 1e6,
    "ranks": 4,
    "alpha": 1e-6,
    "beta": 1e9,
}
ON_CLUSTER: dict[str, Any] = {
    "operation": "all-reduce",
    "size": 1e6,
    "ranks": 8,
    "cluster": "dgx-h100",
}
SIZES: dict[str, Any] = {
    "model": "gpt2-xl",
    "cluster": "dgx-h100",
    "global_batch": 8,
    "seq_len": 512,
}


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (meshwright.compress, {"size": 0, "ranks": 2, "beta": 1e9}, "size: must be above 0, got 0"),
        (meshwright.compress, {"size": 1, "ranks": 2.5, "beta": 1e9}, "ranks: is not a whole number"),
        (meshwright.collective, LINK | {"size": -1}, "size: must be above 0, got -1"),
        (meshwright.collective, LINK | {"beta": float("nan")}, "beta: must be above 0, got nan"),
        (meshwright.collective, LINK | {"beta": [1]}, "beta: is not a number"),
        (meshwright.collective, LINK | {"alpha": -1e-6}, "alpha: must be at least 0"),
        (meshwright.collective, LINK | {"end": 1e9, "factor": 1.0}, "factor: must be from 1.1"),
        (meshwright.overlap, {"size": 1e9, "beta": 1e9, "passes": 3}, "passes: must be 1 or 2, got 3"),
        (meshwright.overlap, {"compute_s": 1, "comm_s": 1, "size": 1e9}, "size: needs --beta"),
        (meshwright.overlap, {"comm_s": 1, "size": 1e9, "beta": 1e9}, "comm_s: needs --compute"),
        (meshwright.overlap, {"seq_len": 8, "size": 1e9, "beta": 1e9}, "needs --seq-len and --width"),
        (meshwright.collective, ON_CLUSTER | {"alpha": 1e-3}, "alpha: says nothing beside a cluster"),
        (meshwright.collective, ON_CLUSTER | {"per_node": 4}, "per_node: says nothing beside a cluster"),
        (meshwright.collective, LINK | {"nccl": True}, "nccl: says nothing beside a link of your own"),
        (meshwright.collective, {"log": "x.log", "alpha": 1e-3}, "alpha: says nothing beside --from"),
        (meshwright.roofline, {"m": 4, "cluster": "dgx-h100"}, "needs --m, --n and --k"),
        (meshwright.estimate, {"run": {}, "settings": ["tp=2"]}, "settings: says nothing beside a run file"),
        (meshwright.overlap, {"seq_len": 8, "width": 8, "element_bytes": -1.0}, "element-bytes: must be"),
        (meshwright.pipeline, {"pp": 2.5, "micro_batches": 4}, "pp: is not a whole number"),
        (meshwright.volumes, {"params": "7e9"}, "params: is not a number, got '7e9'"),
        (meshwright.model, {"model": "gpt2-xl", "seq_len": 0}, "seq_len: must be from 1 to 16777216"),
        (meshwright.verify_plans, {}, "plans: give plans, or folders"),
        (meshwright.recommend, SIZES | {"cluster": []}, "cluster: needs one"),
        (meshwright.recommend, SIZES | {"cluster": [3]}, "cluster: must be a name or a path"),
        (meshwright.plan_mixed, SIZES | {"sequence": 512}, "plan_mixed: is no argument, got 'sequence'"),
    ],
)  # fmt: skip
def test_amounts_and_numbers_that_are_none_are_refused(
    function: Callable[..., Any], arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(meshwright.InputError, match=words):
        function(**arguments)


@pytest.fixture(scope="module")
def small_plan() -> meshwright.Plan:
    return meshwright.plan(
        "llama-3-8b",
        cluster="dgx-h100",
        gpus=16,
        global_batch=64,
        seq_len=4096,
        without=WITHOUT,
        pin="pp=1",
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_ranks_are_mapped_onto_other_nodes(small_plan: meshwright.Plan) -> None:
    mapped = meshwright.map(small_plan, cluster="h100-leaf-3to1")
    assert mapped.inputs.cluster.name == "h100-leaf-3to1"
    assert mapped.layout == small_plan.layout


def test_a_cluster_is_shared_out(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.yaml"
    job = {"name": "a", "model": "llama-3-8b", "global_batch": 64, "seq_len": 4096}
    job |= {"framework": "fsdp2"}
    jobs.write_text(json.dumps({"schema": 1, "jobs": [job]}), encoding="utf-8")
    shared = meshwright.fleet(jobs, cluster="dgx-h100", gpus=16, workers=1)
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
        without=WITHOUT,
        pin="pp=1",
        robustness=False,
    )
    assert slower.inputs.cluster.nic_gbps_per_gpu == 100
    assert slower.predicted is not None
    assert small_plan.predicted is not None
    assert slower.predicted.step_time_s > small_plan.predicted.step_time_s
    with pytest.raises(meshwright.InputError, match="cluster"):
        meshwright.read_cluster({"base": "dgx-h900"})


# Tables of pandas, and what a prompt and a notebook show.


def test_a_plan_is_a_row_of_pandas(small_plan: meshwright.Plan) -> None:
    pandas = pytest.importorskip("pandas")
    frame = small_plan.to_frame()
    assert frame.shape[0] == 1
    row = frame.iloc[0]
    assert small_plan.predicted is not None
    assert small_plan.layout is not None
    assert row.step_time_s == small_plan.predicted.step_time_s
    assert (row.model, row.gpus, row.tp) == ("llama-3-8b", 16, small_plan.layout.tp)
    assert row.peak_memory_gib == max(small_plan.predicted.memory_gib)
    paid = meshwright.plan(
        "llama-3-8b",
        cluster="dgx-h100",
        gpus=8,
        global_batch=64,
        seq_len=4096,
        framework="fsdp2",
        robustness=False,
        tokens=1e12,
        gpu_hour_price=2.0,
    )
    both = pandas.concat([frame, paid.to_frame()], ignore_index=True)
    assert list(both.gpus) == [16, 8]
    assert paid.cost is not None
    assert list(both.dollars)[1] == paid.cost.plan.dollars
    assert pandas.isna(both.dollars[0])


def test_a_sweep_is_a_table_with_its_failures() -> None:
    pandas = pytest.importorskip("pandas")
    options: dict[str, Any] = {"cluster": "dgx-h100", "global_batch": 32, "seq_len": 4096}
    options |= {"framework": "fsdp2", "forbid": "optimizer-offload"}
    report = meshwright.sweep("llama-3-70b", over="gpus=4:32:x8", **options)
    frame = report.to_frame()
    assert list(frame.gpus) == [4, 32]
    assert list(frame.status) == ["infeasible", "optimal"]
    assert pandas.isna(frame.step_time_s[0])
    assert frame.message[0]
    assert repr(report) == "SweepReport(gpus (2): 1 of 2 with a plan)"


def test_batches_validations_and_recommendations_are_tables(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    jobs = tmp_path / "jobs.yaml"
    fields = {"cluster": "dgx-h100", "gpus": 8, "global_batch": 32, "seq_len": 4096}
    fields |= {"framework": "fsdp2"}
    rows = [
        {"name": "a", "model": "llama-3-8b", **fields},
        {"name": "b", "model": "lama", **fields},
    ]
    jobs.write_text(json.dumps({"schema": 1, "jobs": rows}), encoding="utf-8")
    report = meshwright.plan_batch(jobs, tmp_path / "out", workers=1, no_cache=True)
    assert list(report.to_frame().status) == ["optimal", "failed"]
    assert repr(report).startswith("BatchReport(2 jobs: {")

    validated = meshwright.validate(ROOT / "docs" / "examples" / "megatron_a100.yaml")
    frame = validated.to_frame()
    assert len(frame) == len(validated.rows)
    off = 100 * (frame.predicted_step_time_s / frame.measured_step_time_s - 1)
    assert list(off) == pytest.approx(list(frame.error_pct))
    assert len(repr(validated)) < 80

    answer = meshwright.recommend(
        "llama-3-8b",
        cluster="dgx-h100",
        global_batch=32,
        seq_len=4096,
        framework="fsdp2",
        sizes=(8, 16),
        workers=1,
        no_cache=True,
    )
    swept = answer.to_frame()
    assert sorted(swept.gpus) == [8, 16]
    assert set(swept.kind) == {"sweep"}


def test_without_pandas_a_table_says_how_to_install_it(
    small_plan: meshwright.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(meshwright.InputError, match=r"pip install 'meshwright\[notebook\]'"):
        small_plan.to_frame()


def test_a_plan_is_short_at_the_prompt_and_a_picture_in_a_notebook(
    small_plan: meshwright.Plan,
) -> None:
    assert small_plan.predicted is not None
    words = repr(small_plan)
    assert words.startswith(
        "Plan(status='optimal', model='llama-3-8b', cluster='dgx-h100', gpus=16,"
    )
    assert len(words) < 160
    page = small_plan._repr_html_()
    drawn = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    labels = [each.text or "" for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert labels[0] == "Where the step's time goes"
    assert {"gemm", "attention", "step"} <= set(labels)
    boxes = list(drawn.iter("{http://www.w3.org/2000/svg}rect"))[1:]
    # The bars of the parts lie end to end, and are as long as the step's together.
    lengths = [float(box.attrib["width"]) for box in boxes]
    assert sum(lengths[:-1]) == pytest.approx(lengths[-1], rel=0.01)
    assert rounded_seconds(small_plan.predicted.step_time_s) in page
    assert "<script" not in page


@pytest.mark.slow
def test_a_plan_beside_today_is_drawn_from_today_to_the_plan(tmp_path: Path) -> None:
    run = {"seq_len": 4096, "global_batch": 64, "micro_batch": 1, "tp": 8, "dp": 1, "zero_stage": 1}
    cluster = {"device": "h100-sxm-80gb", "gpus": 8}
    today = tmp_path / "today.yaml"
    today.write_text(
        json.dumps({"model": "llama-3-8b", "cluster": cluster, "run": run}), encoding="utf-8"
    )
    plan = meshwright.plan(
        "llama-3-8b", **QUESTION, pin="tp=2,pp=1", baseline=today, robustness=False
    )
    assert plan.baseline is not None
    page = plan._repr_html_()
    assert "From today&#x27;s step to the plan&#x27;s" in page or "From today's step" in page
    assert len(re.findall(r"<rect ", page)) == 3 + len(plan.baseline.waterfall)


def test_a_plan_that_there_is_not_says_why_in_a_notebook() -> None:
    question = {**QUESTION, "gpus": 1, "framework": "fsdp2"}
    plan = meshwright.plan("llama-3-70b", **question)
    assert plan.infeasible is not None
    assert "step_time_s" not in repr(plan)
    page = plan._repr_html_()
    assert "<svg" not in page
    assert plan.infeasible.smallest_changes[0] in html.unescape(page)


def test_a_plan_is_verified_and_its_faults_are_named(
    small_plan: meshwright.Plan, tmp_path: Path
) -> None:
    meshwright.save(small_plan, tmp_path)
    assert meshwright.verify_plan(tmp_path).passed
    file = tmp_path / "plan.yaml"
    text = file.read_text(encoding="utf-8")
    assert "global_batch: 64" in text
    file.write_text(text.replace("global_batch: 64", "global_batch: 128"), encoding="utf-8")
    audit = meshwright.verify_plan(file)
    assert not audit.passed
    assert any(check.broken for check in audit.checks)


def test_a_launch_file_a_memory_and_a_topology_are_read(tmp_path: Path) -> None:
    settings = {"seq_len": 4096, "global_batch": 64, "micro_batch": 1, "tp": 2, "dp": 4}
    run = tmp_path / "run.yaml"
    cluster = {"device": "h100-sxm-80gb", "gpus": 8}
    run.write_text(
        json.dumps({"model": "llama-2-7b", "cluster": cluster, "run": settings}), encoding="utf-8"
    )
    said = json.loads(CliRunner().invoke(main, ["memory", str(run), "--json"]).stdout)
    (document,) = meshwright.memory(run)
    assert {**json.loads(json_text(document)), "schema": said["schema"]} == said

    script = tmp_path / "today.sh"
    script.write_text(SCRIPT, encoding="utf-8")
    (priced,) = meshwright.estimate(script, from_launch=True, settings=["cluster=dgx-h100"])
    assert (int(priced.run.layout.tp), priced.run.workload.gpus) == (8, 16)

    tree = tmp_path / "topology.conf"
    tree.write_text(
        "SwitchName=l0 Nodes=n[0-3]\nSwitchName=l1 Nodes=n[4-7]\nSwitchName=s Switches=l[0-1]\n",
        encoding="utf-8",
    )
    imported = meshwright.read_topology([tree], form="slurm", node="dgx-h100")
    assert (imported.cluster.gpus, len(imported.cluster.nodes)) == (64, 8)


def test_a_term_is_explained_from_python_too() -> None:
    assert meshwright.explain("pipeline-bubble")["term"] == "pipeline bubble"
    both = meshwright.explain("sync-each-batch")
    assert "The rule of this name: " in both["meaning"]
    said = json.loads(CliRunner().invoke(main, ["explain", "sync-each-batch", "--json"]).stdout)
    assert both.items() <= said.items()
    with pytest.raises(meshwright.InputError):
        meshwright.explain("no such term at all")
