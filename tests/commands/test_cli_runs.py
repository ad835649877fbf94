"""The command line without a search: estimate, validate, catalog, schema, model, and what bad usage gives."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshwright import cli
from meshwright.cluster_specs.reader import cluster_names
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.documents import parse_mapping
from meshwright.model_specs.parameters import parameter_count
from meshwright.model_specs.reader import catalog_names, load_catalog_model
from meshwright.planner.report.catalog_view import json_schema
from meshwright.planner.report.prediction_view import memory_groups, stages_text
from meshwright.planner.request.reader import read_request
from tests.places import DATA, ROOT

PUBLISHED = ROOT / "tests" / "data" / "published_runs.yaml"
RUN: dict[str, Any] = {
    "id": "small",
    "model": "llama-2-7b",
    "cluster": "dgx-a100",
    "run": {
        "seq_len": 1024,
        "global_batch": 64,
        "micro_batch": 2,
        "tp": 2,
        "pp": 2,
        "dp": 4,
        "zero_stage": 1,
    },
}


def run(*args: object) -> Result:
    return CliRunner().invoke(cli.main, [str(arg) for arg in args], prog_name="meshwright")


def document(result: Result) -> dict[str, Any]:
    """The one JSON document on standard output, without NaN."""

    def refuse(text: str) -> None:
        raise AssertionError(text)

    data = json.loads(result.stdout, parse_constant=refuse)
    assert isinstance(data, dict)
    assert data["schema"] == 1
    assert result.stdout.count("\n") == 1
    return data


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def changed(**settings: object) -> dict[str, Any]:
    return {**RUN, "run": {**RUN["run"], **settings}}


def test_estimate_prints_parts_that_add_up(tmp_path: Path) -> None:
    result = run("estimate", write(tmp_path / "run.yaml", RUN), "--json")
    assert result.exit_code == 0
    data = document(result)
    predicted = data["predicted"]
    assert sum(predicted["breakdown_s"].values()) == pytest.approx(predicted["step_time_s"])
    assert len(predicted["memory_gib"]) == 2
    assert [sum(parts.values()) for parts in predicted["memory_parts_gib"]] == pytest.approx(
        predicted["memory_gib"]
    )
    tokens = 64 * 1024 / 16
    assert predicted["tokens_per_s_per_gpu"] * predicted["step_time_s"] == pytest.approx(tokens)
    # 312 TFLOP/s is the dense 16-bit peak of an A100.
    assert predicted["mfu"] == pytest.approx(predicted["tflops_per_gpu"] / 312)
    assert data["layout"]["stages"] == [[16], [16]]
    assert data["layout"]["num_micro_batches"] == 8
    assert data["measured"] is None
    assert data["broken_rules"] == []


def test_estimate_sets_measured_beside_predicted(tmp_path: Path) -> None:
    row = {**RUN, "measured": {"step_time_s": 2.0, "memory_gib": 10.0}}
    path = write(tmp_path / "run.yaml", row)
    data = document(run("estimate", path, "--json"))
    assert data["error_pct"] == pytest.approx(100 * (data["predicted"]["step_time_s"] / 2.0 - 1))
    shown = run("estimate", path).stdout
    assert "2.000 s" in shown
    assert "10.0 GiB" in shown


def test_estimate_warns_of_rules_that_the_run_breaks(tmp_path: Path) -> None:
    # 70 billion parameters on 4 GPUs; 25 heads on 2.
    large = run(
        "estimate", write(tmp_path / "large.yaml", {**RUN, "model": "llama-3-70b"}), "--json"
    )
    assert large.exit_code == 0
    assert [finding["rule"] for finding in document(large)["broken_rules"]] == ["hbm"]
    assert large.stderr.startswith("warning: hbm: pipeline rank")
    assert "over the limit" in run("estimate", tmp_path / "large.yaml").stdout
    odd = run("estimate", write(tmp_path / "odd.yaml", {**RUN, "model": "gpt2-xl"}), "--json")
    assert "heads-by-tp" in [finding["rule"] for finding in document(odd)["broken_rules"]]


def test_estimate_says_how_much_of_its_memory_a_plan_would_fill(tmp_path: Path) -> None:
    """Plans keep room for errors, a price keeps none: the two printed other usable GiB without a word."""
    request = read_request(
        model="llama-2-7b", cluster="dgx-a100", gpus=16, global_batch=64, seq_len=1024
    )
    as_priced = replace(request.workload(), memory_margin=1.0)
    text = " ".join(run("estimate", write(tmp_path / "run.json", RUN)).stdout.split())
    planned_gib, priced_gib = map(usable_hbm_gib, (request.workload(), as_priced))
    assert f"{priced_gib:.1f} GiB usable of" in text
    assert f"a plan fills {planned_gib:.1f} GiB at most (--memory-risk 0.05)" in text
    assert planned_gib < priced_gib - 1


def test_estimate_of_several_runs_is_one_document(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.yaml", {"runs": [RUN, {**RUN, "id": "again"}]})
    assert [one["id"] for one in document(run("estimate", path, "--json"))["runs"]] == [
        "small",
        "again",
    ]


@pytest.mark.slow
def test_validate_shows_the_worst_rows_or_all_of_them(tmp_path: Path) -> None:
    rows = list(parse_mapping(PUBLISHED.read_text(encoding="utf-8"), "runs")["runs"])[:40]  # type: ignore[call-overload]
    path = write(tmp_path / "runs.yaml", {"runs": rows})
    data = document(run("validate", path, "--json"))
    assert len(data["rows"]) == data["summary"]["count"] == 40
    assert data["summary"]["failed"] == 0
    # A guess of one MFU per class of device, precision, MoE and recomputation reaches 18 %.
    assert data["summary"]["mean_error_pct"] < 18
    first = data["rows"][0]
    assert set(first["predicted"]) == {"step_time_s", "memory_gib", "fit_probability"}
    assert first["measured"]["step_time_s"] == 1.42
    short, full = run("validate", path).stdout, run("validate", path, "--rows").stdout
    assert "worst of 40 rows" in short
    names = [row["id"] for row in rows if len(row["id"]) < 38]
    assert all(name in full for name in names)
    assert 0 < sum(name in short for name in names) <= 12 < len(names)
    assert max(map(len, short.splitlines())) <= 80


def test_validate_counts_rows_that_cannot_be_read(tmp_path: Path) -> None:
    measured = {"measured": {"step_time_s": 1.0}}
    bad = {**changed(global_batch=63), **measured, "id": "bad"}
    good = write(tmp_path / "runs.yaml", {"runs": [{**RUN, **measured}, bad]})
    data = document(run("validate", good, "--json"))
    assert [row["failed"] is None for row in data["rows"]] == [True, False]
    result = run("validate", write(tmp_path / "bad.yaml", {"runs": [bad]}))
    assert result.exit_code == 2
    assert "bad" in result.stderr


def test_validate_says_that_nothing_was_measured(tmp_path: Path) -> None:
    """A table of dashes was all that it said."""
    words = "no row has both a figure under `measured` and a price: nothing is compared"
    said = [
        " ".join(run("validate", write(tmp_path / "run.json", {**RUN, **more})).stdout.split())
        for more in ({}, {"measured": {"step_time_s": 1.0}}, {"measured": {"out_of_memory": True}})
    ]
    assert [words in text for text in said] == [True, False, False]


def test_stages_are_told_in_runs() -> None:
    assert stages_text([[24]]) == "24, all on one stage"
    assert stages_text([[8], [8], [8]]) == "8 on each of 3 ranks"
    assert (
        stages_text([[3, 4], [4, 4], [4, 4], [4, 3]]) == "rank 0: 3+4; ranks 1-2: 4+4; rank 3: 4+3"
    )


def test_memory_of_many_stages_is_put_together() -> None:
    assert memory_groups([5.0, 4.0]) == [("0", 5.0), ("1", 4.0)]
    assert memory_groups([5.0, 5.0, 4.0]) == [("0-1", 5.0), ("2", 4.0)]
    slope = [80.0 - stage for stage in range(64)]
    groups = memory_groups(slope)
    assert len(groups) <= 8
    assert groups[0][1] == 80.0
    assert "-".join(name for name, _ in groups).startswith("0-")
    assert memory_groups([1.0] * 512) == [("0-511", 1.0)]


def test_catalogs_list_every_name() -> None:
    assert [row["name"] for row in document(run("catalog", "models", "--json"))["models"]] == list(
        catalog_names()
    )
    assert [
        row["name"] for row in document(run("catalog", "clusters", "--json"))["clusters"]
    ] == list(cluster_names())
    for kind in ("models", "clusters", "devices"):
        shown = run("catalog", kind).stdout
        assert max(map(len, shown.splitlines())) <= 80
        for row in document(run("catalog", kind, "--json"))[kind]:
            assert row["name"] in shown


def test_model_says_what_was_read() -> None:
    data = document(run("model", "mixtral-8x7b", "--json", "--seq-len", 8192))
    assert (
        data["parameters"] == parameter_count(load_catalog_model("mixtral-8x7b")) == 46_702_792_704
    )
    assert data["active_parameters"] == 12_879_925_248
    assert data["moe"]["experts"] == 8
    assert data["seq_len"] == 8192
    assert "46,702,792,704" in run("model", "mixtral-8x7b").stdout


def test_short_convolutions_are_shown_by_what_they_see() -> None:
    shown = " ".join(run("model", DATA / "hf_configs" / "lfm2-1.2b.json").stdout.split())
    assert "short convolutions 3 positions of 2,048 channels, in 10 layers" in shown
    assert "2 of short convolutions and feed-forward" in shown
    assert "linear attention" not in shown


@pytest.mark.parametrize("kind", ["model", "cluster", "run", "plan"])
def test_schemas_are_json_schemas(kind: str) -> None:
    plain = json.loads(run("schema", kind).stdout)
    assert plain["$schema"].startswith("https://json-schema.org/")
    assert document(run("schema", kind, "--json"))["json_schema"] == plain == json_schema(kind)
    assert plain["properties"]


@pytest.mark.parametrize(
    ("kind", "part", "field", "words"),
    [
        ("model", None, "norm_zero_centered", "Norms multiply by 1 + weight (Gemma, Nemotron-4)"),
        ("model", "MoeSpec", "shared_ffn_hidden", "Width of all shared experts together;"),
        ("run", "SettingsDoc", "stages", "Transformer layers of each [pipeline rank]"),
        ("run", "SettingsDoc", "shard_groups", "The same as a number of groups:"),
        ("jobs", "job", "pin", "`tp=8,pp=4`, or a mapping."),
    ],
)
def test_a_schema_says_what_its_fields_are(
    kind: str, part: str | None, field: str, words: str
) -> None:
    schema = json_schema(kind)
    fields = (schema if part is None else schema["$defs"][part])["properties"]
    assert fields[field]["description"].startswith(words)
    assert "\n" not in fields[field]["description"]


def test_the_cluster_schema_takes_a_device_by_name() -> None:
    schema = json_schema("cluster")
    assert {"type", "description"} <= set(schema["properties"]["device"]["anyOf"][1])
    assert "required" not in schema


HOSTILE: list[tuple[str, bytes, str]] = [
    ("empty.yaml", b"", "the document is empty"),
    ("binary.yaml", bytes(range(256)), "not UTF-8"),
    ("list.yaml", b"- 1\n- 2\n", "must be a mapping"),
    (
        "huge.yaml",
        b"model: gpt2-xl\ncluster: dgx-a100\nrun: {seq_len: " + b"9" * 5000 + b"}",
        "cannot be read",
    ),
    ("deep.yaml", b"a: " + b"[" * 5000, "nested"),
    ("alias.yaml", b"a: &x [1]\nb: *x\n", "aliases"),
    ("twice.yaml", b"model: a\nmodel: b\n", "given twice"),
    ("python.yaml", b"!!python/object/apply:os.system ['true']\n", "not valid YAML"),
    ("words.yaml", b"model: gpt2-xl\ncluster: dgx-a100\nrun: seven\n", "run"),
    (
        "nan.yaml",
        b"model: gpt2-xl\ncluster: dgx-a100\nrun: {seq_len: .nan, global_batch: .inf}\n",
        "seq_len",
    ),
    (
        "slip.yaml",
        b"modle: gpt2-xl\ncluster: dgx-a100\nrun: {seq_len: 1, global_batch: 1}\n",
        "did you mean 'model'",
    ),
]


@pytest.mark.parametrize(("name", "content", "words"), HOSTILE, ids=[case[0] for case in HOSTILE])
@pytest.mark.parametrize("command", ["estimate", "validate"])
def test_hostile_files_are_refused_in_words(
    tmp_path: Path, command: str, name: str, content: bytes, words: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    result = run(command, path, "--json")
    assert result.exit_code == 2, result.output
    assert name in result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.output
    assert document(result)["error"]["exit_code"] == 2


@pytest.mark.parametrize("command", ["estimate", "validate", "explain", "model"])
@pytest.mark.parametrize("place", ["missing.yaml", ".", "x" * 5000])
def test_places_that_are_no_files_are_refused(tmp_path: Path, command: str, place: str) -> None:
    result = run(command, f"{tmp_path}/{place}")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(("Error: ", "Usage: "))
    assert "internal error" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["estimat", "x.yaml"], "Did you mean 'estimate'?"),
        (["catalog", "model"], "'models'"),
        (["estimate", "x.yaml", "--jsn"], "--json"),
        (["plan"], "Missing"),
        (
            ["plan", "gpt2-xl", "--cluster", "dgx-a100", "--seq-len", "x", "--global-batch", "1"],
            "--seq-len",
        ),
        (["model", "llama-3-8"], "did you mean 'llama-3-8b'"),
        (["compare", "x"], "Missing argument 'FILE'"),
        (["plan", "gpt2-xl", "--kind", "grpo"], "its update is --kind sft"),
    ],
)
def test_bad_usage_exits_with_2_and_a_near_miss(args: list[str], words: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_a_fault_of_the_program_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("meshwright.planner.report.catalog_view.model_document", broken)
    result = run("model", "gpt2-xl", "--json")
    assert result.exit_code == 70
    assert "internal error, ZeroDivisionError: by zero" in result.stderr
    assert "Traceback" not in result.output
    debugged = run("--debug", "model", "gpt2-xl", "--json")
    assert isinstance(debugged.exception, ZeroDivisionError)


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshwright.planner.report.catalog_view.model_document", stop)
    result = run("model", "gpt2-xl", "--json")
    assert result.exit_code == 130
    assert "Interrupted" in result.stderr


def process(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "cli.py", *args],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        check=False,
        timeout=120,
        encoding="utf-8",
    )


def test_output_that_is_piped_is_plain_text() -> None:
    done = process("catalog", "devices")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "h100-sxm-96gb-500w" in done.stdout
    assert all(line == line.rstrip() for line in done.stdout.splitlines())


@pytest.mark.slow
def test_an_ascii_terminal_gets_ascii(tmp_path: Path) -> None:
    rows = [
        {
            **RUN,
            "id": f"run {n}",
            "run": {**RUN["run"], "micro_batch": 2 - n % 2},
            "measured": {"step_time_s": float(n)},
        }
        for n in range(1, 9)
    ]
    path = write(tmp_path / "runs.yaml", {"runs": rows})
    done = process("validate", str(path), PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "#" in done.stdout


@pytest.mark.slow
def test_a_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} cli.py schema plan | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert done.stdout == "{\n"
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        ("schema plan >&-", 0, ""),
        ("catalog devices >&-", 0, ""),
        ("catalog devices 2>&- | head -n 1 | cut -c1-6", 0, "device"),
        ("catalog devices --json > /dev/full", 2, "Error: No space left on device"),
        ("catalog devices > /dev/full", 2, "Error: No space left on device"),
    ],
)
def test_streams_that_are_closed_or_full_are_no_fault_of_ours(
    words: str, code: int, shown: str
) -> None:
    """A closed stream ended in an internal error, a full one under --json in a traceback."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} cli.py {words}"],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode == code
    assert (done.stdout + done.stderr).strip() == shown


@pytest.mark.parametrize("columns", ["0", "40"])
def test_a_terminal_of_no_width_is_taken_for_a_usual_one(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """COLUMNS=0 left nothing of an answer but empty lines."""
    monkeypatch.setenv("COLUMNS", columns)
    shown = run("model", "qwen3-8b").stdout
    assert "FLOP per token" in shown
    assert max(map(len, shown.splitlines())) <= (int(columns) or 80)


def test_an_empty_name_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-o "$OUT"` without a value wrote its files where one stood."""
    monkeypatch.chdir(tmp_path)
    asked = "plan qwen3-0.6b --cluster dgx-h100 --gpus 1 --global-batch 4 --seq-len 512"
    result = run(*asked.split(), "-o", "")
    assert result.exit_code == 2
    assert "'-o' / '--output': the name is empty" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("pins", "code"),
    [
        pytest.param("tp=1", 0, marks=pytest.mark.slow),
        pytest.param("tp=3", 1, marks=pytest.mark.soak),
    ],
)
def test_a_reader_that_is_gone_leaves_files_and_exit_code(
    tmp_path: Path, pins: str, code: int
) -> None:
    out = tmp_path / "run"
    asked = f"qwen3-0.6b --cluster dgx-h100 --gpus 1 --global-batch 4 --seq-len 512 --pin {pins}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} cli.py plan {asked} -o {out} 2>&1 | :"],
        cwd=ROOT,
        check=False,
        timeout=120,
    )
    assert done.returncode == code
    assert (out / "launch.sh").exists() == (code == 0)


def test_a_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    spec = load_catalog_model("gpt2-xl").model_dump(exclude_none=True) | {
        "name": "x\x1b[31my [bold]"
    }
    result = run("model", write(tmp_path / "model.yaml", spec))
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "x?[31my [bold]" in result.stdout


def test_what_a_file_names_cannot_steer_the_terminal_from_warnings_errors_and_documents(
    tmp_path: Path,
) -> None:
    hostile = "x\x1b]0;t\x07\x9b2J\u202e\noptimal: all is well"
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        hostile: 1,
    }
    path = write(tmp_path / "config.json", config)
    asked = ("--cluster", "dgx-h100", "--gpus", "8", "--global-batch", "8", "--seq-len", "4096")
    for form in ([], ["--json"]):
        answer = run("plan", path, *asked, "--pin", "tp=8,pp=1,micro_batch=1", *form)
        assert answer.exit_code == 0
        for text in (answer.stdout, answer.stderr):
            assert all(line.isprintable() for line in text.split("\n"))
            assert "optimal: all is well" not in text.split("\n")
        assert bool(form) or "warning: the model's file says 'x\\x1b]0;t" in answer.stderr
    assert json.loads(answer.stdout)
    refused = run("model", write(tmp_path / "model.yaml", {"name": "x", hostile: 1}))
    assert refused.exit_code == 2
    assert all(line.isprintable() for line in refused.stderr.splitlines())
