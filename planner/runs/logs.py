"""What a training run logged of itself: seconds of a step and peak memory, for the run file's `measured`.

Lines as Megatron-LM and Megatron-Bridge print them (`training_log`), and torchtitan (`MetricsProcessor.log`);
histories of Weights & Biases as CSV or JSON, TensorBoard's event files, and MLflow's folder of a run, with
the names under which these frameworks log. Nothing of a log is run, and all of it is bounded.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Literal

import yaml

from meshwright.costmodel.calibration import Calibration
from meshwright.documents import path_text, read_mapping, read_text, require_file, write_files
from meshwright.errors import InputError
from meshwright.planner.runs.prediction import PricedRun, price_run
from meshwright.planner.runs.run_file import ALLOCATED, FIRST_RANK, MAX_FILE_BYTES, run_from_mapping

WARM_UP_STEPS = 10
"""Steps that are left out: kernels are compiled and tuned in the first, buffers and caches fill."""
MOST_LOG_BYTES = 512 * 2**20
"""Of a text, which is read line by line."""
MOST_HISTORY_BYTES = 32 * 2**20
MOST_EVENT_BYTES = 128 * 2**20
LONGEST_LINE = 2**13
"""Characters; what is longer is cut, and no figure that is read lies behind."""
MOST_POINTS = 1_000_000
_MOST_EVENT_FILES = 64
_MOST_NAMED, _LONGEST_NAME = 12, 1024
"""Names that an error lists, and characters of one of a history that is looked at."""
_SLOWEST_S, _MOST_TOKENS_PER_S, _LARGEST_GIB = 1e6, 1e9, 1e5
_MIB_PER_GIB = 1024.0
_EXTRA = "event files need the package tensorboard: pip install 'meshwright[logs]'"

What = Literal["seconds", "rate", "allocated", "reserved"]
_GIB_PER_GB = 1e9 / 2**30
_MEGATRON_BRIDGE_MEMORY = "memory/mem-max-allocated-gigabytes"
METRICS: Mapping[str, tuple[What, float]] = {
    "iteration-time": ("seconds", 1.0),
    "mem-max-allocated-bytes": ("allocated", 2.0**-30),
    _MEGATRON_BRIDGE_MEMORY: ("allocated", _GIB_PER_GB),
    "throughput(tps)": ("rate", 1.0),
    "memory/max_reserved(GiB)": ("reserved", 1.0),
    "train_step_timing in s": ("seconds", 1.0),
    "elapsed_time_per_iteration_ms": ("seconds", 1e-3),
    "tokens_per_sec_per_gpu": ("rate", 1.0),
}
"""By name, what a logged figure is, and what it is multiplied with for seconds, tokens a second of one GPU,
or GiB: Megatron-LM's and Megatron-Bridge's, torchtitan's, NeMo's and nanotron's. torchtitan's
`time_metrics/end_to_end(s)` divides its second interval, a step shorter, by all of `log_freq`: its rate
counts right."""
_LIMITS: Mapping[What, float] = {
    "seconds": _SLOWEST_S,
    "rate": _MOST_TOKENS_PER_S,
    "allocated": _LARGEST_GIB,
    "reserved": _LARGEST_GIB,
}
_LAST_RANK, _ALL_STAGES = -1, -2
"""Stand for the rank that writes to TensorBoard, W&B and MLflow, of a pipeline one of its last stage; and for
the fullest stage, which Megatron-Bridge's writer knows (`reduce_max_memory_across_pp_group`)."""


def _key(name: str, step: int) -> int:
    """The step of a figure, or the rank that a peak is of."""
    if METRICS[name][0] in ("seconds", "rate"):
        return step
    return _ALL_STAGES if name == _MEGATRON_BRIDGE_MEMORY else _LAST_RANK


@dataclass(kw_only=True)
class LoggedRun:
    """What a log says, by step or by rank."""

    seconds: dict[int, float] = field(default_factory=dict)
    """Of one step, on the mean since the step that was logged before; by the step that was logged."""
    rate: dict[int, float] = field(default_factory=dict)
    """Tokens a second of one GPU, likewise."""
    allocated: dict[int, float] = field(default_factory=dict)
    """Peak that the allocator handed out, GiB, by rank."""
    reserved: dict[int, float] = field(default_factory=dict)
    """Peak that the allocator held, GiB, by rank."""
    out_of_memory: bool = False
    """Whether it says that an allocation failed."""

    def add(self, what: What, key: int, value: float, where: str) -> None:
        """Takes a figure in. Raises InputError for one that cannot be, or for too many.

        Parameters
        ----------
        what
            The figure is of.
        key
            The step that was logged, or the rank.
        value
            Seconds, tokens a second of one GPU, or GiB.
        where
            File and line, for messages.
        """
        if not 0.0 < value < _LIMITS[what]:
            raise InputError(
                f"must be above 0 and below {_LIMITS[what]:g}", where=where, value=value
            )
        figures: dict[int, float] = getattr(self, what)
        if what in ("allocated", "reserved"):
            value = max(value, figures.get(key, 0.0))
        figures[key] = value
        if len(figures) > MOST_POINTS:
            raise InputError(f"more than {MOST_POINTS} figures", where=where)


def read_log(path: Path) -> LoggedRun:
    """What a run logged of itself.

    Parameters
    ----------
    path
        Text of Megatron or torchtitan; a history of Weights & Biases (`.csv`, `.json`, `.jsonl`);
        TensorBoard's event file or its folder; MLflow's folder of a run.

    Raises
    ------
    InputError
        If there is no such log, or a figure of it cannot be, with file and line; or if it has none of the
        figures that are known.
    """
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError):
        is_folder = exists = False
    if not exists:
        raise InputError("no such file or folder", where=path_text(path))
    if is_folder and (path / "metrics").is_dir():
        return _of_mlflow(path)
    if is_folder or path.name.startswith("events.out.tfevents"):
        return _of_events(path)
    if path.suffix.lower() in (".csv", ".json", ".jsonl"):
        return _of_history(path)
    return _of_text(path)


def measured_fields(log: LoggedRun, pp: int, where: str) -> dict[str, Any]:
    """The `measured` section of a run file, and words on how it came about under `note`.

    The step is the median over what was logged after `WARM_UP_STEPS`; memory the peak of the fullest rank.

    Parameters
    ----------
    log
        As `read_log` returns it.
    pp
        Pipeline ranks of the run, from 1: memory of the last one alone says nothing of the fullest.
    where
        The log's name, for errors and words.

    Raises
    ------
    InputError
        If the log has no step but the first.
    """
    figures = log.rate or log.seconds
    if not figures:
        if log.out_of_memory:
            return {"measured": {"out_of_memory": True}, "note": f"{where}: out of memory"}
        raise InputError("no step was logged", where=where)
    steady, words = _steady(figures, where)
    step = float(f"{median(steady):.6g}")
    measured: dict[str, Any] = {"tokens_per_s_per_gpu" if log.rate else "step_time_s": step}
    return {"measured": measured | _memory(log, pp), "note": f"{where}: {words}"}


def _steady(figures: Mapping[int, float], where: str) -> tuple[list[float], str]:
    """Figures of intervals without a step of the warm-up, and words on them."""
    steps = sorted(figures)
    before = [0, *steps[:-1]]
    steady = [
        step for step, last in zip(steps, before, strict=True) if last >= WARM_UP_STEPS
    ] or steps[1:]
    if not steady:
        if steps[0] <= 1:
            raise InputError("only the first step was logged, which is warm-up", where=where)
        return [figures[steps[0]]], f"mean of the first {steps[0]} steps, warm-up included"
    values = [figures[step] for step in steady]
    spread = (max(values) - min(values)) / median(values)
    first, last = steady[0], steady[-1]
    words = f"median of {len(values)} figures, steps {first} to {last}, which spread {spread:.1%}"
    return values, words


def _memory(log: LoggedRun, pp: int) -> dict[str, Any]:
    """Peak and note; nothing where only a rank of the last of several stages told its own."""
    for by_rank, kind in ((log.allocated, ALLOCATED), (log.reserved, "peak reserved")):
        if not by_rank or (pp > 1 and set(by_rank) == {_LAST_RANK}):
            continue
        whose = f"the fullest of {len(by_rank)} ranks"
        if len(by_rank) == 1:
            whose = {0: FIRST_RANK, _ALL_STAGES: "the fullest stage"}.get(min(by_rank), "one rank")
        peak = float(f"{max(by_rank.values()):.6g}")
        return {"memory_gib": peak, "memory_note": f"{kind}, {whose}"}
    return {}


def price_logged(
    path: Path, log: Path, output: Path | None = None, calibration: Calibration | None = None
) -> PricedRun:
    """Prices the run of a run file beside what its log says.

    Parameters
    ----------
    path
        A run file of one run.
    log
        As `read_log` takes it.
    output
        Where to write the run file with what was measured, if anywhere.
    calibration
        What the user's own runs say of the constants.

    Raises
    ------
    InputError
        If a file cannot be used, or an `output` exists.
    """
    document = read_mapping(path, MAX_FILE_BYTES)
    rows = document.get("runs", [document])
    if not isinstance(rows, list) or len(rows) != 1 or not isinstance(rows[0], dict):
        raise InputError("must hold one run, as the log is of one", where=path_text(path))
    row = with_measurement(rows[0], log)
    run = run_from_mapping(
        row, where=str(path), base=path.parent, default_id=path.stem, calibration=calibration
    )
    if output is not None:
        write_run_file(output, row)
    return price_run(run, path)


def with_measurement(row: Mapping[str, Any], log: Path) -> dict[str, Any]:
    """A run of a run file with what its log measured in place of what it says. Raises InputError.

    Parameters
    ----------
    row
        A run, as a run file has it.
    log
        As `read_log` takes it.
    """
    settings = row.get("run")
    pp = settings.get("pp", 1) if isinstance(settings, Mapping) else 1
    fields = measured_fields(read_log(log), pp if isinstance(pp, int) else 1, path_text(log))
    note = row.get("note")
    if isinstance(note, str) and note:
        fields["note"] = f"{note}; {fields['note']}"
    return {**row, **fields}


def write_run_file(output: Path, row: Mapping[str, Any]) -> None:
    """Writes a run file of one run. Raises InputError where there is a file already.

    Parameters
    ----------
    output
        Where to.
    row
        The run, as a run file has it.
    """
    text = yaml.safe_dump({"schema": 1, **row}, sort_keys=False)
    write_files(output.parent, {output.name: text})


# Lines of Megatron-LM, Megatron-Bridge and torchtitan, in one file or mixed with others.


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_RANK = re.compile(r"\[rank(\d{1,7})\]")
_MEGATRON_STEP = (
    re.compile(r"iteration\s+(\d{1,12})\s*/\s*\d{1,12}\s*\|"),
    re.compile(r"elapsed time per iteration \(ms\):\s*([^\s|]{1,40})"),
)
_MEMORY = (
    (
        re.compile(r"\[Rank (\d{1,7})\].{0,80}memory \(MB\) \|"),
        re.compile(r"max allocated: ([^\s|]{1,40})"),
        1.0 / _MIB_PER_GIB,
    ),
    (
        re.compile(r"\[Rank (\d{1,7})\].{0,80}memory \(GB\) \|"),
        re.compile(r"mem-max-allocated-gigabytes: ([^\s|]{1,40})"),
        _GIB_PER_GB,
    ),
)
"""Of Megatron-LM and of Megatron-Bridge: rank, peak, and GiB of its unit."""
_TORCHTITAN_STEP = (
    re.compile(r"step:\s*(\d{1,12})\s+loss:"),
    re.compile(r"memory:\s*([^\sG]{1,40})GiB"),
    re.compile(r"[tw]ps:\s*([\d,.]{1,40})"),
)
_NEAR = 300
"""Characters behind which another figure of torchtitan's line stands."""
_OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory")


def _of_text(path: Path) -> LoggedRun:
    log = LoggedRun()
    for number, text in _lines(path):
        where = f"{path_text(path)}: line {number}"
        words = _COLOUR.sub("", text)
        step = _in_turn(words, _MEGATRON_STEP)
        if step:
            log.add("seconds", int(step[0]), _number(step[1], where) / 1e3, where)
        for head, peak, gib in _MEMORY:
            memory = _in_turn(words, (head, peak))
            if memory:
                log.add("allocated", int(memory[0]), _number(memory[1], where) * gib, where)
        step = _in_turn(words, _TORCHTITAN_STEP, _NEAR)
        if step:
            prefix = _RANK.search(words)
            rank = 0 if prefix is None else int(prefix[1])
            log.add("reserved", rank, _number(step[1], where), where)
            log.add("rate", int(step[0]), _number(step[2].replace(",", ""), where), where)
        log.out_of_memory |= any(name in words for name in _OUT_OF_MEMORY)
    if not (log.seconds or log.rate or log.out_of_memory):
        what = "no line of it tells a step: Megatron's have `elapsed time per iteration (ms)`"
        raise InputError(f"{what}, torchtitan's `step:` and `tps:`", where=path_text(path))
    return log


def _in_turn(words: str, patterns: Sequence[re.Pattern[str]], near: int = 0) -> list[str]:
    """What some patterns hold, each behind the one before, the first as early as can be; else nothing.

    Where figures are `near`, so many characters are looked at for each. Otherwise a line is passed once by
    each pattern: one pattern of them all would pass it again from each place where the first one fits.
    """
    start = 0
    while (match := patterns[0].search(words, start)) is not None:
        start, figures = match.end(), [match[1]]
        for pattern in patterns[1:]:
            at = match.end()
            match = pattern.search(words, at, at + near if near else len(words))
            if match is None:
                break
            figures.append(match[1])
        else:
            return figures
        if not near:
            break
    return []


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text, cut where they are longer than any that is read."""
    require_file(path, path_text(path))
    try:
        if path.stat().st_size > MOST_LOG_BYTES:
            what = f"is larger than {MOST_LOG_BYTES // 2**20} MiB: cut it to its last steps"
            raise InputError(what, where=path_text(path), value=path.stat().st_size)
        with path.open("rb") as stream:
            number, goes_on = 0, False
            while part := stream.readline(LONGEST_LINE):
                if not goes_on:
                    number += 1
                    yield number, part.decode("utf-8", "replace")
                goes_on = not part.endswith(b"\n")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=path_text(path)) from None


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError("must be a number", where=where, value=text) from None


# Histories of Weights & Biases: a row a step, from `Run.history()` or the page's export of a chart, whose
# columns are called `RUN - METRIC`.


_STEPS = ("_step", "Step", "step", "trainer/global_step")


def _of_history(path: Path) -> LoggedRun:
    rows = _csv_rows(path) if path.suffix.lower() == ".csv" else _json_rows(path)
    log, names = LoggedRun(), dict[str, None]()
    metric_of: dict[str, str] = {}
    for number, row in rows:
        where = f"{path_text(path)}: line {number}"
        step = number
        for name in _STEPS:
            if _is_figure(row.get(name)):
                step = _step(str(row[name]), f"{where}: {name}")
                break
        for name, value in row.items():
            if name not in metric_of:
                is_long = len(name) > _LONGEST_NAME
                metric_of[name] = "" if is_long else name.rpartition(" - ")[2]
                names[name] = None
            metric = metric_of[name]
            if metric not in METRICS or not _is_figure(value):
                continue
            what, factor = METRICS[metric]
            figure = _number(str(value), f"{where}: {name}")
            log.add(what, _key(metric, step), figure * factor, f"{where}: {name}")
    columns = [
        name for name in names if METRICS.get(metric_of[name], ("",))[0] in ("seconds", "rate")
    ]
    runs = {name.removesuffix(metric_of[name]) for name in columns}
    if len(runs) > 1:
        raise InputError(
            f"has columns of {len(runs)} runs: export one",
            where=path_text(path),
            value=", ".join(columns[:_MOST_NAMED]),
        )
    return _with_steps(log, path, names)


def _step(text: str, where: str) -> int:
    value = _number(text, where)
    if not 0 <= value < 1e15:
        raise InputError("must be a step, from 0", where=where, value=text)
    return int(value)


def _is_figure(value: object) -> bool:
    """Whether a cell holds something: histories have a row for every step of any metric."""
    if value is None or value == "" or isinstance(value, bool | dict | list):
        return False
    return not (isinstance(value, float) and math.isnan(value)) and str(value).lower() != "nan"


def _csv_rows(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    """(line, cells by column) of a file of at most `MOST_HISTORY_BYTES`."""
    reader = csv.reader(io.StringIO(read_text(path, MOST_HISTORY_BYTES)))
    try:
        columns = next(reader, [])
        # Rows end where their cells do: short ones under many columns would take their product.
        unfilled = dict.fromkeys(columns, "")
        for row in reader:
            if row:
                yield reader.line_num, unfilled | dict(zip(columns, row, strict=False))
                unfilled = {}
    except csv.Error as error:
        where = f"{path_text(path)}: line {reader.line_num}"
        raise InputError(f"cannot be read as CSV: {error}", where=where) from None


def _json_rows(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    """(line, or number of the row, and its fields) of a list of rows, or of a row a line."""
    text = read_text(path, MOST_HISTORY_BYTES)
    rows: Iterable[tuple[int, object]]
    if text.lstrip().startswith("["):
        try:
            rows = enumerate(json.loads(text), start=1)
        except (ValueError, RecursionError) as error:
            raise InputError(f"cannot be read as JSON: {error}", where=path_text(path)) from None
    else:
        rows = _json_lines(text, path)
    for number, row in rows:
        if not isinstance(row, dict):
            where = f"{path_text(path)}: line {number}"
            raise InputError("must be a mapping of metrics", where=where, value=row)
        yield number, row


def _json_lines(text: str, path: Path) -> Iterator[tuple[int, object]]:
    for number, part in enumerate(text.splitlines(), start=1):
        if not part.strip():
            continue
        try:
            yield number, json.loads(part)
        except (ValueError, RecursionError) as error:
            where = f"{path_text(path)}: line {number}"
            raise InputError(f"cannot be read as JSON: {error}", where=where) from None


def _with_steps(log: LoggedRun, path: Path, names: Iterable[str]) -> LoggedRun:
    """The log; raises InputError, which names what it has, where no metric of it tells the step."""
    if log.seconds or log.rate:
        return log
    steps = [name for name, (what, _) in METRICS.items() if what in ("seconds", "rate")]
    listed = ", ".join(list(names)[:_MOST_NAMED])
    what = f"no metric of it tells the step: {', '.join(steps)} do"
    raise InputError(what, where=path_text(path), value=listed or "none")


# MLflow's file store: a file for each metric, with a line of time, value and step for each figure.


def _of_mlflow(path: Path) -> LoggedRun:
    log, folder = LoggedRun(), path / "metrics"
    for name, (what, factor) in METRICS.items():
        file = folder / name
        if not file.is_file():
            continue
        for number, text in _lines(file):
            where = f"{path_text(file)}: line {number}"
            words = text.split()
            if len(words) < 3 or not words[2].isdecimal():
                raise InputError("must be a time, a value and a step", where=where, value=text[:80])
            figure = _number(words[1], where)
            log.add(what, _key(name, int(words[2][:15])), figure * factor, where)
    entries = islice(folder.rglob("*"), _MOST_NAMED)
    return _with_steps(log, path, (entry.relative_to(folder).as_posix() for entry in entries))


# TensorBoard's event files, read by its own package.


def _of_events(path: Path) -> LoggedRun:
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("*tfevents*"))
        if not files:
            raise InputError(
                "holds neither TensorBoard's event files nor MLflow's metrics",
                where=path_text(path),
            )
    if len(files) > _MOST_EVENT_FILES:
        raise InputError(f"holds more than {_MOST_EVENT_FILES} event files", where=path_text(path))
    for file in files:
        require_file(file, path_text(file))
    if sum(file.stat().st_size for file in files) > MOST_EVENT_BYTES:
        raise InputError(
            f"holds more than {MOST_EVENT_BYTES // 2**20} MiB of event files", where=path_text(path)
        )
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise InputError(_EXTRA, where="--measured", value=path_text(path)) from None
    # At most so many figures of a metric are kept, and nothing of images and the like.
    bounds = dict.fromkeys(("images", "audio", "histograms", "compressedHistograms"), 1)
    events = EventAccumulator(str(path), size_guidance={**bounds, "scalars": MOST_POINTS})
    try:
        events.Reload()
    except Exception as error:  # noqa: BLE001 - whatever its reader says of a damaged file
        raise InputError(f"cannot be read as event files: {error}", where=path_text(path)) from None
    log, names = LoggedRun(), list(events.Tags()["scalars"])
    for name in names:
        if name not in METRICS:
            continue
        what, factor = METRICS[name]
        for event in events.Scalars(name):
            where = f"{path_text(path)}: {name}, step {event.step}"
            log.add(what, _key(name, event.step), event.value * factor, where)
    return _with_steps(log, path, names)
