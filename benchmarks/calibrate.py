"""Refits the free constants of the cost model on measured steps and writes them back to costmodel/data.

    python -m benchmarks.calibrate [--rows FILE] [--only PATTERN ...] [--from-priors] [--dry-run]

`--only architectures.hopper.*` moves the constants whose path matches and leaves the rest.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import yaml

from benchmarks.calibration import Problem, fit, rounded
from meshwright.costmodel.records import FILES, PROVENANCE, ConstantRecord, constant_records
from meshwright.planner.runs.calibration.evidence import Floats
from meshwright.planner.runs.run_file import read_runs

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "tests" / "data" / "published_runs.yaml"
DATA = ROOT / "costmodel" / "data"


def free_records(patterns: Sequence[str] = ()) -> list[ConstantRecord]:
    """The free constants whose path matches one of the patterns; all of them without patterns."""
    return [
        record
        for record in constant_records().values()
        if record.free
        and (not patterns or any(fnmatch(record.path, pattern) for pattern in patterns))
    ]


def with_values(text: str, values: Mapping[str, float]) -> str:
    """A constants file with other values at some paths; every other character stays.

    Raises KeyError for a path that the file does not have.
    """
    spans: dict[str, tuple[int, int]] = {}
    _spans_of_values(yaml.compose(text), "", spans)
    edits = sorted(((spans[path], value) for path, value in values.items()), reverse=True)
    for (start, end), value in edits:
        if float(yaml.safe_load(text[start:end])) != value:
            text = text[:start] + _plain(value) + text[end:]
    return text


def _spans_of_values(node: yaml.Node | None, path: str, spans: dict[str, tuple[int, int]]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, child in node.value:
        if key.value == "value" and isinstance(child, yaml.ScalarNode):
            spans[path] = (child.start_mark.index, child.end_mark.index)
        else:
            _spans_of_values(child, f"{path}.{key.value}" if path else key.value, spans)


def _plain(value: float) -> str:
    """A number that YAML reads as a number: 1e-05 it would take for a word."""
    return np.format_float_positional(value, trim="0")


def with_provenance(text: str, provenance: Mapping[str, object]) -> str:
    """A constants file whose `calibration` section says what the free constants were fitted on."""
    line = (
        f"{PROVENANCE}: {{"
        + ", ".join(f"{name}: {value}" for name, value in provenance.items())
        + "}"
    )
    lines = text.split("\n")
    old = [index for index, known in enumerate(lines) if known.startswith(f"{PROVENANCE}:")]
    if old:
        lines[old[0]] = line
    else:
        first = next(i for i, known in enumerate(lines) if known and not known.startswith("#"))
        lines.insert(first, line)
    return "\n".join(lines)


def write_whole(path: Path, text: str) -> None:
    """Replaces a file by rename, so that nobody reads half of it."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def write_constants(values: Mapping[str, float], provenance: Mapping[str, object]) -> None:
    """Writes values, by path, and where they came from into the files of `costmodel/data`."""
    records = constant_records()
    for file in FILES:
        mine = {path: value for path, value in values.items() if records[path].file == file}
        text = with_values((DATA / file).read_text(encoding="utf-8"), mine)
        write_whole(DATA / file, with_provenance(text, provenance))


def error_line(predicted_s: Floats, measured_s: Floats) -> str:
    """Mean, median, 90th percentile and worst size, and mean sign, of the errors of some rows in percent."""
    errors = 100.0 * (predicted_s / measured_s - 1.0)
    size = np.abs(errors)
    return (
        f"{len(errors):4d} rows  mean {size.mean():6.2f} %  median {np.median(size):6.2f} %  "
        f"90th {np.quantile(size, 0.9):6.2f} %  worst {size.max():6.1f} %  bias {errors.mean():+6.2f} %"
    )


def _print_constants(problem: Problem, before: Floats, after: Floats) -> None:
    counts = problem.touched.sum(axis=0)
    distance = (after - problem.priors) / problem.spreads
    for i in range(len(problem.free)):
        path, prior = problem.paths[i], problem.free[i].prior
        print(
            f"  {path:52} {np.exp(before[i]):10.4g} -> {np.exp(after[i]):10.4g}   prior {prior:8.4g}, "
            f"{distance[i]:+5.2f} spreads, {counts[i]:3d} rows"
        )


def provenance_of(rows: Path, problem: Problem, predicted_s: Floats) -> dict[str, object]:
    """What the files say of the fit; without a date, so that a second fit gives the same text."""
    size = np.abs(100.0 * (predicted_s / problem.measured_s - 1.0))
    return {
        "data": rows.name,
        "sha256": hashlib.sha256(rows.read_bytes()).hexdigest(),
        "rows": len(problem.runs),
        "mean_error_pct": round(float(size.mean()), 2),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Fits, prints the errors before and after, and writes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibrate", description=__doc__)
    parser.add_argument("--rows", type=Path, default=RUNS, help="a run file with measured steps")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="paths that may move"
    )
    parser.add_argument(
        "--from-priors", action="store_true", help="start at the priors, not at the values"
    )
    parser.add_argument("--dry-run", action="store_true", help="print, write nothing")
    given = parser.parse_args(arguments)
    records = free_records(given.only)
    if not records:
        parser.error(
            f"no free constant matches {given.only}: known are {[r.path for r in free_records()]}"
        )
    began = time.perf_counter()
    problem = Problem(read_runs(given.rows), records)
    print(f"before: {error_line(problem.predict(problem.start), problem.measured_s)}")
    found = fit(problem, start=problem.priors if given.from_priors else problem.start)
    values = rounded(problem.values(found))
    logs = np.log([values[path] for path in problem.paths])
    predicted = problem.predict(logs)
    _print_constants(problem, problem.start, logs)
    print(f"after:  {error_line(predicted, problem.measured_s)}")
    print(f"{len(records)} constants, {time.perf_counter() - began:.0f} s")
    if not given.dry_run:
        write_constants(values, provenance_of(given.rows, problem, predicted))


if __name__ == "__main__":
    main()
