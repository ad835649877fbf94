"""Batches: reading jobs, results, the cache, the journal, and going on after a kill."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import meshwright
from meshwright.errors import InputError
from meshwright.planner.audit import audit_plan
from meshwright.planner.many.batch import (
    RESULT_FORMATS,
    BatchOptions,
    BatchReport,
    _identity,
    asked_of,
    do_job,
    request_of,
    run_batch,
)
from meshwright.planner.many.jobs import AnswerCache, JobDoc, code_files, read_jobs, request_key
from meshwright.planner.mixed.document import MixedRequest
from meshwright.planner.report.many_view import batch_view
from meshwright.planner.request.choices import WITHOUT
from tests.places import ROOT
from tests.planner.report.test_views import text

SMALL: dict[str, Any] = {
    "model": "llama-3-8b",
    "cluster": "dgx-h100",
    "gpus": 8,
    "global_batch": 64,
    "seq_len": 2048,
}
FEW: dict[str, Any] = {
    **SMALL,
    "pin": "micro_batch=1,cp=1,zero_stage=1",
    "without": ",".join(WITHOUT),
}
"""The same with few layouts and one execution."""


class Quiet:
    """Counts what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, bool]] = []
        self.already = 0

    def start(self, jobs: int, already: int) -> None:
        assert jobs >= already
        self.already = already

    def done(self, row: Mapping[str, Any], cached: bool, seconds: float) -> None:
        assert seconds >= 0
        self.heard.append((str(row["name"]), cached))


def jobs_file(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / "jobs.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    """What a batch leaves, but for the journal, which knows how long things took."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "journal.sqlite"
    }


def batch(
    tmp_path: Path, document: dict[str, Any], name: str = "out", **options: Any
) -> BatchReport:
    chosen = BatchOptions(**{"workers": 1, **options})
    return run_batch(jobs_file(tmp_path, document), tmp_path / name, chosen, Quiet())


def test_a_matrix_is_multiplied_out_after_the_jobs(tmp_path: Path) -> None:
    document = {
        "defaults": {"seq_len": 2048},
        "jobs": [{**SMALL, "name": "mine"}, SMALL],
        "matrix": {
            "model": "llama-3-8b",
            "cluster": ["dgx-h100"],
            "gpus": [8, 16],
            "global_batch": [64, 32],
        },
    }
    jobs = read_jobs(jobs_file(tmp_path, document))
    assert [job.name for job in jobs] == [
        "mine",
        "llama-3-8b-dgx-h100-8-64-2048",
        "llama-3-8b-dgx-h100-8-64-2048-2",
        "llama-3-8b-dgx-h100-8-32-2048",
        "llama-3-8b-dgx-h100-16-64-2048",
        "llama-3-8b-dgx-h100-16-32-2048",
    ]
    assert all(job.document is not None and job.document.seq_len == 2048 for job in jobs)


def test_paths_start_at_the_jobs_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base: dgx-h100\ngpus: 8\n", encoding="utf-8")
    (job,) = read_jobs(jobs_file(tmp_path, {"jobs": [{**SMALL, "cluster": "mine.yaml"}]}))
    assert job.document is not None
    assert request_of(job.document).cluster.gpus == 8
    assert job.name == "llama-3-8b-mine-8-64-2048"


@pytest.mark.parametrize(
    ("document", "parts"),
    [
        ({}, ["no job"]),
        ({"job": []}, ["job", "did you mean 'jobs'"]),
        ({"jobs": [{**SMALL, "name": "../up"}]}, ["jobs[0].name", "'../up'", "letters"]),
        (
            {"jobs": [{**SMALL, "name": "a"}, {**SMALL, "name": "A"}]},
            ["jobs[1].name", "two jobs", "'A'"],
        ),
        ({"matrix": {**SMALL, "gpus": []}}, ["matrix.gpus", "empty list"]),
        ({"matrix": {**SMALL, "name": "x"}}, ["matrix.name", "leave it out"]),
        (
            {"matrix": [{**SMALL, "gpus": list(range(1, 1001)), "seed": list(range(101))}]},
            ["100000", "101000"],
        ),
    ],
)
def test_a_bad_file_says_what_and_where(
    tmp_path: Path, document: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        read_jobs(jobs_file(tmp_path, document))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.slow
def test_a_bad_job_names_itself_field_and_value_and_stops_nothing(tmp_path: Path) -> None:
    document = {
        "jobs": [
            {**FEW, "name": "odd", "global_batch": "many"},
            {**FEW, "name": "typo", "seqlen": 3},
            {**FEW, "name": "who", "model": "llama-3-8c"},
            {**FEW, "name": "good"},
            {**SMALL, "name": "tight", "model": "gpt3-175b"},
        ]
    }
    report = batch(tmp_path, document)
    rows = {row["name"]: row for row in report.rows}
    assert report.by_status == {"failed": 3, "optimal": 1, "infeasible": 1}
    for part in ("jobs[0]", "(odd)", "global_batch", "'many'"):
        assert part in rows["odd"]["message"]
    assert "jobs[1]" in rows["typo"]["message"]
    assert "'seq_len'" in rows["typo"]["message"]
    assert "did you mean 'llama-3-8b'" in rows["who"]["message"]
    assert "hbm" in rows["tight"]["message"]
    assert "take" in rows["tight"]["message"]
    assert rows["good"]["tp"] * rows["good"]["pp"] * rows["good"]["dp"] * rows["good"]["cp"] <= 8
    with pytest.raises(InputError) as caught:
        batch(tmp_path, document, "strict", strict=True)
    for name in ("odd", "typo", "who"):
        assert name in str(caught.value)
    assert not (tmp_path / "strict").exists()


def test_results_hold_every_job_in_order(tmp_path: Path) -> None:
    document = {"jobs": [{**FEW, "name": name, "seed": at} for at, name in enumerate("zab")]}
    report = batch(tmp_path, document)
    with (tmp_path / "out/results.csv").open(encoding="utf-8") as stream:
        table = list(csv.DictReader(stream))
    written = json.loads((tmp_path / "out/results.json").read_text(encoding="utf-8"))
    assert (
        [row["name"] for row in table]
        == [row["name"] for row in written["jobs"]]
        == ["z", "a", "b"]
    )
    assert written["schema"] == 1
    assert written["summary"] == {"optimal": 3}
    assert [row["step_time_s"] for row in written["jobs"]] == [
        row["step_time_s"] for row in report.rows
    ]
    plan = yaml.safe_load((tmp_path / "out/plans/a/plan.yaml").read_text(encoding="utf-8"))
    assert plan["objective"]["step_time_s"] == written["jobs"][1]["step_time_s"]
    assert plan["solver"]["wall_s"] is None


def test_a_spreadsheet_meets_no_formula() -> None:
    (line,) = (
        RESULT_FORMATS["csv"]([{"name": "x", "message": "=HYPERLINK(1)"}]).decode().splitlines()[1:]
    )
    assert line.endswith(",'=HYPERLINK(1)")


def test_a_second_batch_answers_from_the_cache(tmp_path: Path) -> None:
    document = {"jobs": [{**FEW, "name": "one"}, {**FEW, "name": "other"}]}
    cold = batch(tmp_path, document, "cold", cache=tmp_path / "kept")
    warm = batch(tmp_path, document, "warm", cache=tmp_path / "kept")
    assert (cold.cached, warm.cached) == (1, 2)
    assert files_of(tmp_path / "cold") == files_of(tmp_path / "warm")


def test_a_damaged_entry_counts_as_absent(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path)
    cache.put("ab12", {"row": {"status": "optimal"}})
    assert cache.get("ab12") == {"row": {"status": "optimal"}}
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    whole = path.read_bytes()
    for bad in (b"", whole[:-1], whole[:40] + b"x" + whole[41:], b"no digest at all"):
        path.write_bytes(bad)
        assert cache.get("ab12") is None
    assert cache.get("cd34") is None


def test_the_key_follows_everything_that_decides_a_plan() -> None:
    base = request_key(request_of(JobDoc(**SMALL)))
    assert base == request_key(request_of(JobDoc(**SMALL, name="another")))
    changes: list[dict[str, Any]] = [
        {"model": "qwen3-8b"},
        {"gpus": 16},
        {"global_batch": 32},
        {"pin": "tp=2"},
        {"forbid": ["cp"]},
        {"precision": "fp8"},
        {"framework": "fsdp2"},
        {"seed": 1},
        {"top": 2},
        {"reserve_gib": 1},
        {"method": "exhaustive"},
    ]
    keys = {request_key(request_of(JobDoc(**{**SMALL, **change}))) for change in changes}
    assert len(keys | {base}) == len(changes) + 1
    assert request_key(request_of(JobDoc(**SMALL, pin={"tp": 2}))) in keys


def test_a_plan_cut_short_by_time_is_not_kept(tmp_path: Path) -> None:
    result = do_job({**SMALL, "name": "x", "time_limit": 0.0}, str(tmp_path / "kept"))
    assert result["row"]["status"] == "unknown"
    assert not (tmp_path / "kept").exists()


def test_a_job_without_a_limit_has_that_of_the_batch(tmp_path: Path) -> None:
    """The exhaustive method has none by itself, and what a limit ended is said in words."""
    exhaustive = {**FEW, "pin": f"{FEW['pin']},tp=2,pp=1", "method": "exhaustive"}
    jobs = [
        {**FEW, "name": "of-the-batch"},
        {**FEW, "name": "its-own", "time_limit": 60},
        {**exhaustive, "name": "exhaustive"},
    ]
    path, options = jobs_file(tmp_path, {"jobs": jobs}), BatchOptions(workers=1, time_limit_s=0.0)
    report = run_batch(path, tmp_path / "out", options, Quiet())
    assert [row["status"] for row in report.rows] == ["unknown", "optimal", "optimal"]
    assert "1 not proven: the search ended first; a job's time_limit" in text(*batch_view(report))
    report = run_batch(path, tmp_path / "without", BatchOptions(workers=1), Quiet())
    assert set(report.by_status) == {"optimal"}
    assert "not proven" not in text(*batch_view(report))


def test_a_batch_is_another_one_when_a_file_that_it_names_is(tmp_path: Path) -> None:
    """Else rows of the old cluster would stand beside rows of the new one."""
    cluster = tmp_path / "mine.yaml"
    cluster.write_text("extends: dgx-h100\ngpus: 64\n", encoding="utf-8")
    (tmp_path / "jobs.yaml").write_text(
        yaml.safe_dump({"jobs": [{**SMALL, "cluster": "mine.yaml"}]}), encoding="utf-8"
    )
    before = _identity(read_jobs(tmp_path / "jobs.yaml"))
    assert _identity(read_jobs(tmp_path / "jobs.yaml")) == before
    cluster.write_text("extends: dgx-h100\ngpus: 128\n", encoding="utf-8")
    assert _identity(read_jobs(tmp_path / "jobs.yaml")) != before


def test_only_the_same_batch_is_resumed(tmp_path: Path) -> None:
    document = {"jobs": [{**FEW, "name": "one"}]}
    batch(tmp_path, document)
    with pytest.raises(InputError, match="--resume"):
        batch(tmp_path, document)
    with pytest.raises(InputError, match="other jobs"):
        batch(tmp_path, {"jobs": [{**FEW, "name": "one", "seed": 5}]}, resume=True)
    again = batch(tmp_path, document, resume=True)
    assert (again.already, again.jobs) == (1, 1)
    (tmp_path / "mess").mkdir()
    (tmp_path / "mess/journal.sqlite").write_text(
        "not a database, but long enough to look at", encoding="utf-8"
    )
    with pytest.raises(InputError, match="not a journal"):
        batch(tmp_path, document, "mess", resume=True)


def test_force_begins_anew_in_place_of_another_batch(tmp_path: Path) -> None:
    """Where other jobs had been planned, only another folder or `rm` helped."""
    batch(tmp_path, {"jobs": [{**FEW, "name": "one"}, {**FEW, "name": "two", "seed": 5}]})
    mine = tmp_path / "out/plans/mine"
    mine.mkdir()
    document = {"jobs": [{**FEW, "name": "two"}]}
    with pytest.raises(InputError, match="--force"):
        batch(tmp_path, document)
    with pytest.raises(InputError, match="say one"):
        batch(tmp_path, document, force=True, resume=True)
    report = batch(tmp_path, document, force=True)
    assert (report.already, report.jobs) == (0, 1)
    assert {path.name for path in (tmp_path / "out/plans").iterdir()} == {"two", "mine"}
    mine.rmdir()
    batch(tmp_path, document, "fresh")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")


def test_results_of_something_else_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    results = tmp_path / "out/results.csv"
    results.write_text("mine", encoding="utf-8")
    document = {"jobs": [{**FEW, "name": "one"}]}
    with pytest.raises(InputError, match=r"results\.csv is already there"):
        batch(tmp_path, document)
    assert results.read_text(encoding="utf-8") == "mine"
    batch(tmp_path, document, force=True)
    assert "one" in results.read_text(encoding="utf-8")


@pytest.mark.soak
def test_workers_change_nothing(tmp_path: Path) -> None:
    document = {"jobs": [{**FEW, "gpus": n, "global_batch": b} for n, b in ((4, 32), (8, 64))]}
    batch(tmp_path, document, "one")
    batch(tmp_path, document, "two", workers=2)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


# A killed process, a killed worker.

BATCH: dict[str, Any] = {
    "matrix": {**SMALL, "gpus": [4, 8], "global_batch": [16, 32, 64], "seed": [0, 1]}
}


def command(jobs: Path, out: Path, cache: Path | None, *more: str) -> list[str]:
    kept = ["--no-cache"] if cache is None else ["--cache", str(cache)]
    return [
        sys.executable,
        str(ROOT / "cli.py"),
        "batch",
        str(jobs),
        "-o",
        str(out),
        "--workers",
        "2",
        *kept,
        *more,
    ]


def start(line: list[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        line, cwd=ROOT, env=environment, stdout=quiet, stderr=quiet, start_new_session=True
    )


def kill_after(line: list[str], seconds: float) -> None:
    process = start(line)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.soak
def test_ten_kills_lose_nothing(tmp_path: Path) -> None:
    jobs = jobs_file(tmp_path, BATCH)
    began = time.monotonic()
    assert start(command(jobs, tmp_path / "whole", None)).wait() == 0
    took = time.monotonic() - began
    chance = random.Random(11)
    for trial in range(10):
        out = tmp_path / f"killed{trial}"
        kill_after(command(jobs, out, None), chance.uniform(0.1, 1.1) * took)
        assert start(command(jobs, out, None, "--resume")).wait() == 0
        assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.soak
def test_two_batches_share_a_cache(tmp_path: Path) -> None:
    jobs = jobs_file(tmp_path, BATCH)
    both = [start(command(jobs, tmp_path / name, tmp_path / "kept")) for name in ("a", "b")]
    assert [process.wait() for process in both] == [0, 0]
    assert start(command(jobs, tmp_path / "alone", None)).wait() == 0
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b") == files_of(tmp_path / "alone")


@pytest.mark.slow
def test_a_lost_worker_is_replaced(tmp_path: Path) -> None:
    matrix = {**FEW, "gpus": [4, 8], "global_batch": [16, 32]}
    jobs = jobs_file(tmp_path, {"matrix": matrix})
    process = start(command(jobs, tmp_path / "out", None))
    killed = False
    while process.poll() is None:
        for child in workers_of(process.pid):
            if not killed:
                time.sleep(0.3)
                os.kill(child, signal.SIGKILL)
                killed = True
        time.sleep(0.05)
    assert killed
    assert process.returncode == 0
    rows = json.loads((tmp_path / "out/results.json").read_text(encoding="utf-8"))["jobs"]
    assert {row["status"] for row in rows} == {"optimal"}
    assert len(rows) == 4


def workers_of(parent: int) -> list[int]:
    """Processes that do jobs: children of a batch that were started to run Python code of their own."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            after = (path / "stat").read_text().rsplit(")", 1)[1].split()
            line = (path / "cmdline").read_bytes()
        except (OSError, IndexError):
            continue
        if int(after[1]) == parent and b"spawn_main" in line:
            found.append(int(path.name))
    return found


def test_the_fingerprint_covers_every_room() -> None:
    """Once it covered no file at all after its own module had moved, so old answers outlived new code."""
    package = Path(meshwright.__path__[0]).resolve()
    files = {path.relative_to(package).as_posix() for path in code_files()}
    for name in (
        "errors.py",
        "costmodel/estimate.py",
        "constraints/registry.py",
        "frameworks/catalog.py",
        "planner/search/model.py",
        "planner/many/jobs.py",
    ):
        assert name in files
    assert any(name.endswith(".yaml") for name in files)
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in files)


@pytest.mark.parametrize("nodes", ["h[2-3],a1", ("h2", "h3", "a1")])
def test_a_job_names_nodes_of_several_parts(tmp_path: Path, nodes: str | tuple[str, ...]) -> None:
    parts = [
        {"name": name, "cluster": {"base": base, "nodes": [{"name": f"{name}[1-4]"}]}}
        for name, base in (("h", "dgx-h100"), ("a", "dgx-a100"))
    ]
    (tmp_path / "mixed.yaml").write_text(yaml.safe_dump({"name": "named", "parts": parts}))
    fields = {**FEW, "gpus": None, "cluster": str(tmp_path / "mixed.yaml"), "nodes": nodes}
    request = asked_of(JobDoc.model_validate(fields))
    assert isinstance(request, MixedRequest)
    assert [part.gpus for part in request.parts] == [16, 8]
    nodes_of = (node for part in request.parts for node in part.cluster.nodes)
    assert [node.name for node in nodes_of if node.free_gpus != 0] == ["h2", "h3", "a1"]


@pytest.mark.slow
def test_jobs_on_clusters_with_parts_are_planned_too(tmp_path: Path) -> None:
    """Their plans say on which parts they run, and what training costs on all of them."""
    parts = [{"cluster": "dgx-h100", "gpus": 16}, {"cluster": "dgx-a100", "gpus": 16}]
    (tmp_path / "mixed.yaml").write_text(yaml.safe_dump({"name": "old-and-new", "parts": parts}))
    fields = {
        **FEW,
        "name": "through",
        "cluster": str(tmp_path / "mixed.yaml"),
        "gpus": None,
        "pin": "tp=2,cp=1,pp=2,micro_batch=1,zero_stage=1,recompute=none",
        "tokens": 1e9,
    }
    result = do_job(fields, str(tmp_path / "kept"))
    row = result["row"]
    assert row["status"] == "optimal"
    assert sorted(row["runs_on"].split(" then ")) == ["dgx-a100", "dgx-h100"]
    assert row["gpus"] == 32
    gpu_hours = 1e9 / row["tokens_per_s"] * row["gpus"] / 3600
    assert row["gpu_hours"] == pytest.approx(gpu_hours)
    for name, content in result["files"].items():
        (tmp_path / name).write_text(content)
    assert audit_plan(tmp_path / "mixed_plan.yaml").passed
    assert do_job(fields, str(tmp_path / "kept"))["files"] == result["files"]
    refused = do_job({**fields, "train": "qlora"}, None)["row"]
    assert refused["status"] == "failed"
    assert "plan on one part alone" in refused["message"]


@pytest.mark.parametrize("link", ["plans", ".staging", "journal.sqlite"])
def test_a_link_in_the_folder_of_a_batch_leads_nowhere(tmp_path: Path, link: str) -> None:
    """What lies behind it is of others: nothing there is removed or written."""
    others = tmp_path / "others" / "a"
    others.mkdir(parents=True)
    (others / "precious").write_text("x", encoding="utf-8")
    folder = tmp_path / "batch"
    folder.mkdir()
    (folder / link).symlink_to(others.parent, target_is_directory=True)
    path = jobs_file(tmp_path, {"jobs": [{"name": "a", **FEW}]})
    with pytest.raises(InputError, match="link out of the batch's folder"):
        run_batch(path, folder, options=BatchOptions(cache=None, force=True), listener=Quiet())
    assert [entry.name for entry in others.parent.iterdir()] == ["a"]
    assert (others / "precious").read_text(encoding="utf-8") == "x"


def test_thousands_of_jobs_alike_are_numbered_at_once(tmp_path: Path) -> None:
    matrix = {key: [value] for key, value in SMALL.items()} | {"gpus": [8] * 20_000}
    began = time.process_time()
    jobs = read_jobs(jobs_file(tmp_path, {"matrix": matrix}))
    assert len({job.name for job in jobs}) == 20_000
    assert jobs[-1].name.endswith("-20000")
    assert time.process_time() - began < 15
