"""What runs logged of themselves: the figures that reach a run file, worked by hand."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import meshwright
from meshwright.cli import main
from meshwright.errors import InputError
from meshwright.planner.runs import logs
from meshwright.planner.runs.logs import measured_fields, read_log
from meshwright.planner.runs.run_file import read_runs
from tests.commands.test_documented_commands import SCRIPT

MEGATRON = (
    " [2025-08-01 07:19:37.123456] iteration {step:8d}/    5000 | consumed samples:          128 | "
    "elapsed time per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): 80.2 | "
    "learning rate: 6.976744E-08 | global batch size:   128 | lm loss: 1.043863E+01 |\n"
)
MEMORY = (
    "[Rank {rank}] (after 10 iterations) memory (MB) | allocated: 10770.37 | max allocated: {mb:.2f} | "
    "reserved: 16334.00 | max reserved: 17000.00\n"
)
BRIDGE_MEMORY = (
    "[Rank 0] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 20.1 | "
    "mem-max-allocated-gigabytes: 53.687 | mem-max-reserved-gigabytes: 60.2 | mem-alloc-retires: 0\n"
)
TITAN = (
    "[rank{rank}]:[titan] 2025-06-01 10:00:00,000 - root - INFO - \x1b[31mstep: {step:2}  "
    "\x1b[32mloss: {loss:8.5f}  \x1b[38;2;180;60;0mgrad_norm:  1.2345  "
    "\x1b[36mmemory: {gib:5.2f}GiB(52.12%)  "
    "\x1b[34mtps: {tps:,}  \x1b[36mtflops: 311.22  \x1b[35mmfu: 31.47%\x1b[39m\n"
)
RUN: dict[str, Any] = {
    "model": "llama-2-7b",
    "cluster": "dgx-h100",
    "run": {"gpus": 8, "seq_len": 4096, "global_batch": 64, "tp": 2, "pp": 2, "zero_stage": 1},
}


def fields_of(path: Path, pp: int = 1) -> dict[str, Any]:
    fields = measured_fields(read_log(path), pp, path.name)
    assert fields["note"].startswith(path.name)
    measured: dict[str, Any] = fields["measured"]
    return measured


def test_megatrons_step_is_the_median_after_the_warm_up(tmp_path: Path) -> None:
    """Steps 1 and 10 hold warm-up, as 20 does where the line before it is of step 5."""
    log = tmp_path / "train.log"
    times = {1: 19138.8, 10: 2500.0, 20: 1000.0, 30: 1100.0, 40: 5000.0}
    text = "starting\n" + "".join(MEGATRON.format(step=step, ms=ms) for step, ms in times.items())
    log.write_text(text + "done\n", encoding="utf-8")
    assert fields_of(log) == {"step_time_s": 1.1}
    note = measured_fields(read_log(log), 1, "x")["note"]
    assert note == "x: median of 3 figures, steps 20 to 40, which spread 363.6%"
    log.write_text(text.replace("10/    5000", "5/    5000"), encoding="utf-8")
    assert fields_of(log) == {"step_time_s": 3.05}, "the mean of steps 30 and 40"


def test_sparse_logs_say_what_they_can(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(MEGATRON.format(step=100, ms=1500), encoding="utf-8")
    assert fields_of(log) == {"step_time_s": 1.5}
    assert "warm-up included" in measured_fields(read_log(log), 1, "x")["note"]
    log.write_text(
        MEGATRON.format(step=1, ms=9000) + MEGATRON.format(step=5, ms=1200), encoding="utf-8"
    )
    assert fields_of(log) == {"step_time_s": 1.2}, "all but the first"
    log.write_text(MEGATRON.format(step=1, ms=9000), encoding="utf-8")
    with pytest.raises(InputError, match="only the first step"):
        fields_of(log)


def test_megatrons_memory_is_the_fullest_ranks(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    steps = "".join(MEGATRON.format(step=step, ms=1000) for step in (10, 20, 30))
    log.write_text(
        MEMORY.format(rank=0, mb=20480) + MEMORY.format(rank=8, mb=10240) + steps, "utf-8"
    )
    assert fields_of(log, pp=2) == {
        "step_time_s": 1.0,
        "memory_gib": 20.0,
        "memory_note": "peak allocated, the fullest of 2 ranks",
    }
    log.write_text(MEMORY.format(rank=0, mb=20480) + steps, encoding="utf-8")
    assert fields_of(log)["memory_note"] == "peak allocated, rank 0"
    log.write_text(BRIDGE_MEMORY + steps, encoding="utf-8")
    assert fields_of(log)["memory_gib"] == pytest.approx(50.0, rel=1e-4), "53.687e9 bytes"


def test_torchtitans_lines_give_a_rate_and_reserved_memory(tmp_path: Path) -> None:
    log = tmp_path / "titan.log"
    rates = {1: 120, 10: 4000, 20: 6100, 30: 6000, 40: 6200}
    log.write_text(
        "".join(
            TITAN.format(rank=0, step=step, loss=8.0, gib=41.0 + step / 100, tps=tps)
            for step, tps in rates.items()
        ),
        encoding="utf-8",
    )
    assert fields_of(log) == {
        "tokens_per_s_per_gpu": 6100.0,
        "memory_gib": 41.4,
        "memory_note": "peak reserved, rank 0",
    }


def test_a_run_that_did_not_fit_is_told(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n", "utf-8")
    assert fields_of(log) == {"out_of_memory": True}
    steps = "".join(MEGATRON.format(step=step, ms=1000) for step in (10, 20))
    log.write_text(steps + "CUDA out of memory\n", encoding="utf-8")
    assert fields_of(log) == {"step_time_s": 1.0}, "it had fitted before"


def test_histories_of_weights_and_biases(tmp_path: Path) -> None:
    rows = [
        {"_step": step, "lm loss": 3.0, "iteration-time": seconds, "mem-max-allocated-bytes": 2**34}
        for step, seconds in ((10, 5.0), (20, 1.0), (30, 1.2), (40, None), (50, 1.1))
    ]
    listed = tmp_path / "history.json"
    listed.write_text(json.dumps(rows), encoding="utf-8")
    lines = tmp_path / "history.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    table = tmp_path / "export.csv"
    cells = ((10, "5.0"), (20, "1.0"), (30, "1.2"), (40, ""), (50, "1.1"))
    head = '"Step","run a - iteration-time","run a - iteration-time__MIN","run a - iteration-time__MAX"\n'
    table.write_text(
        head + "".join(f'"{step}","{cell}","0.1","9"\n' for step, cell in cells), encoding="utf-8"
    )
    memory = {"memory_gib": 16.0, "memory_note": "peak allocated, one rank"}
    assert fields_of(listed) == fields_of(lines) == {"step_time_s": 1.1} | memory
    assert fields_of(table) == {"step_time_s": 1.1}
    assert fields_of(listed, pp=2) == {"step_time_s": 1.1}, (
        "the last stage says nothing of the fullest"
    )
    for row in rows:
        del row["mem-max-allocated-bytes"]
        row["memory/mem-max-allocated-gigabytes"] = 53.687
    listed.write_text(json.dumps(rows), encoding="utf-8")
    assert fields_of(listed, pp=2)["memory_note"] == "peak allocated, the fullest stage"


def test_mlflows_folder_of_a_run(tmp_path: Path) -> None:
    metrics = tmp_path / "mlruns" / "0" / "abc" / "metrics"
    (metrics / "memory").mkdir(parents=True)
    times = {10: 5.0, 20: 1.0, 30: 1.2, 40: 1.1}
    (metrics / "iteration-time").write_text(
        "".join(f"1700000000000 {seconds} {step}\n" for step, seconds in times.items()), "utf-8"
    )
    (metrics / "memory" / "mem-max-allocated-gigabytes").write_text(
        "1700000000000 53.687 10\n", "utf-8"
    )
    measured = fields_of(metrics.parent, pp=4)
    assert measured["step_time_s"] == 1.1
    assert measured["memory_gib"] == pytest.approx(50.0, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("train.log", "nothing of the kind\n", "no line of it tells a step"),
        ("train.log", MEGATRON.format(step=20, ms=-1.0), "train.log: line 1: must be above 0"),
        ("train.log", "x\n" + MEGATRON.format(step=20, ms=float("nan")), "line 2: must be above 0"),
        ("train.log", MEGATRON.replace("{ms:.1f}", "fast").format(step=20), "line 1: must be a number"),
        ("h.json", "[3]", "line 1: must be a mapping of metrics"),
        ("h.json", "[{", "cannot be read as JSON"),
        ("h.json", '[{"_step": 1e400, "iteration-time": 1}]', "line 1: _step: must be a step"),
        ("h.json", '[{"_step": 20, "iteration-time": 1e9}]', "line 1: iteration-time: must be above 0"),
        ("h.jsonl", '{"_step": 1}\n{"_step"', "line 2: cannot be read as JSON"),
        ("h.csv", "Step,lm loss\n1,2.0\n", "no metric of it tells the step"),
        ("h.csv", "Step,iteration-time\n20,fast\n", "line 2: iteration-time: must be a number"),
        ("h.csv", "Step,a - iteration-time,b - iteration-time\n20,1,2\n", "has columns of 2 runs"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named_with_its_line(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_log(tmp_path / name)
    assert words in str(caught.value)


def test_folders_and_files_that_are_no_logs(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "loss").write_text("1 2 3\n", encoding="utf-8")
    for path, words in (
        (tmp_path / "no.log", "no such file"),
        (tmp_path, "no metric of it tells the step"),
        (tmp_path / "metrics", "neither TensorBoard's event files nor MLflow's"),
    ):
        with pytest.raises(InputError, match=words):
            read_log(path)
    (tmp_path / "metrics" / "iteration-time").write_text("1 2\n", encoding="utf-8")
    with pytest.raises(
        InputError, match="iteration-time: line 1: must be a time, a value and a step"
    ):
        read_log(tmp_path)


def test_pipes_and_devices_are_no_logs(tmp_path: Path) -> None:
    """They were read until somebody wrote to them, or without an end."""
    os.mkfifo(tmp_path / "events.out.tfevents.1")
    os.mkfifo(tmp_path / "train.log")
    for path in (tmp_path / "train.log", tmp_path, Path("/dev/zero")):
        with pytest.raises(InputError, match="this is a pipe or a device"):
            read_log(path)


def test_logs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "train.log"
    hostile = "iteration " * 100_000 + "\n" + "step: 1 loss: " * 50_000
    steps = "".join(MEGATRON.format(step=step, ms=1000) for step in (10, 20))
    log.write_text(f"{hostile}\n{steps}", encoding="utf-8")
    assert fields_of(log) == {"step_time_s": 1.0}
    monkeypatch.setattr(logs, "MOST_POINTS", 1)
    with pytest.raises(InputError, match="line 4: more than 1 figures"):
        read_log(log)
    monkeypatch.setattr(logs, "MOST_LOG_BYTES", 10)
    with pytest.raises(InputError, match="is larger than"):
        read_log(log)


def test_event_files_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(InputError, match=r"pip install 'meshwright\[logs\]'"):
        read_log(tmp_path)


def test_a_script_and_its_log_become_a_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one command: what `validate` and `calibrate` take."""
    monkeypatch.chdir(tmp_path)
    Path("today.sh").write_text(SCRIPT, encoding="utf-8")
    steps = "".join(MEGATRON.format(step=step, ms=1500) for step in (10, 20, 30))
    Path("train.log").write_text(MEMORY.format(rank=0, mb=20480) + steps, encoding="utf-8")
    words = (
        "estimate today.sh --from-launch --with cluster=dgx-h100 --measured train.log -o run.yaml"
    )
    done = CliRunner().invoke(main, [*words.split(), "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["measured"]["step_time_s"] == 1.5
    assert document["error_pct"] == pytest.approx(
        100 * (document["predicted"]["step_time_s"] / 1.5 - 1)
    )
    (run,) = read_runs(Path("run.yaml"))
    assert run.measured is not None
    assert (run.measured.step_time_s, run.measured.memory_gib) == (1.5, 20.0)
    assert (run.measured.allocated, run.measured.first_rank) == (True, True)
    report = meshwright.validate("run.yaml")
    assert report.rows[0].error_pct == pytest.approx(document["error_pct"])


def test_a_run_file_takes_a_log_too(tmp_path: Path) -> None:
    run, log = tmp_path / "run.yaml", tmp_path / "titan.log"
    run.write_text(yaml.safe_dump({"runs": [{"id": "a", **RUN, "note": "mine"}]}), "utf-8")
    log.write_text(
        "".join(TITAN.format(rank=0, step=s, loss=8.0, gib=41, tps=8192) for s in (10, 20)), "utf-8"
    )
    words = ["estimate", str(run), "--measured", str(log), "-o", str(tmp_path / "out.yaml")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "Against the measurement" in done.output
    written = yaml.safe_load((tmp_path / "out.yaml").read_text("utf-8"))
    assert written["note"].startswith("mine; ")
    (priced,) = meshwright.estimate(run, measured=log)
    assert priced.run.measured is not None
    # 64 sequences of 4,096 tokens at 8,192 tokens a second on each of 8 GPUs.
    assert priced.run.measured.step_time_s == 4.0
    (mapped,) = meshwright.estimate(RUN, measured=log)
    assert mapped.run.measured == priced.run.measured
    again = CliRunner().invoke(main, words)
    assert again.exit_code == 2, "a file is not replaced"
    alone = CliRunner().invoke(main, ["estimate", str(run), "-o", str(tmp_path / "x.yaml")])
    assert alone.exit_code == 2
    assert "--measured" in alone.output
    run.write_text(json.dumps({"runs": [{"id": "a", **RUN}, {"id": "b", **RUN}]}), "utf-8")
    several = CliRunner().invoke(main, [*words[:-1], str(tmp_path / "y.yaml")])
    assert several.exit_code == 2
    assert "must hold one run" in several.output


class Counted:
    """A pattern that counts the characters that its searches are given."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern, self.characters = pattern, 0

    def search(self, words: str, start: int, end: int | None = None) -> re.Match[str] | None:
        end = len(words) if end is None else end
        found = self.pattern.search(words, start, end)
        self.characters += (end if found is None else found.end()) - start
        return found


@pytest.mark.parametrize(
    ("patterns", "near", "piece"),
    [
        (logs._MEGATRON_STEP, 0, "iteration 1/9 |"),
        (logs._MEMORY[0][:2], 0, "[Rank 1] memory (MB) |"),
        (logs._MEMORY[1][:2], 0, "[Rank 1] memory (GB) |"),
        (logs._TORCHTITAN_STEP, logs._NEAR, "step: 1 loss: memory: 1GiB "),
    ],
)
def test_a_line_of_many_beginnings_is_passed_a_few_times(
    patterns: Any, near: int, piece: str
) -> None:
    """Each began a search to the end of the line: twice the line took four times as long."""
    work = {}
    for pieces in (100, 200, 400):
        counted = [Counted(pattern) for pattern in patterns]
        assert logs._in_turn(piece * pieces, counted, near) == []  # type: ignore[arg-type]
        work[pieces] = sum(each.characters for each in counted)
        assert work[pieces] < 30 * len(piece) * pieces
    assert work[400] < 2.2 * work[200] < 4.84 * work[100]


def test_a_step_behind_a_broken_one_is_read() -> None:
    line = (
        f"step: 1 loss: 3 {'.' * 400} step: 20 loss: 2.1 memory: 40.5GiB(51%) tps: 7,000 mfu: 40%"
    )
    assert logs._in_turn(line, logs._TORCHTITAN_STEP, logs._NEAR) == ["20", "40.5", "7,000"]


def test_short_rows_under_many_columns_take_their_own_cells(tmp_path: Path) -> None:
    """They were filled up to the columns of the head: rows times columns, of a file of megabytes."""
    path = tmp_path / "history.csv"
    columns = [f"metric {number}" for number in range(2000)]
    rows = [f"{step},0.5" for step in range(1, 2001)]
    head = ",".join(("_step", "iteration-time", *columns))
    path.write_text("\n".join((head, *rows)), encoding="utf-8")
    cells = sum(len(row) for _, row in logs._csv_rows(path))
    assert cells == len(columns) + 2 + 2 * (len(rows) - 1)
    assert len(logs.read_log(path).seconds) == len(rows)


def test_endless_names_of_columns_are_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    path.write_text(
        f"_step,iteration-time,{'x' * 5000} - iteration-time\n1,2.0,3.0\n", encoding="utf-8"
    )
    assert logs.read_log(path).seconds == {1: 2.0}
