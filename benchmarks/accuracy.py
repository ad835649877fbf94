"""Scores the cost model on the published runs, also on sources and model families that it was not fitted on.

    python -m benchmarks.accuracy [--quick]

`--quick` refits along the slopes of the fit on all rows, which leaves the refits a little short of their optimum.
Writes docs/accuracy.md with its plots, costmodel/data/error_bands.yaml, and what `python -m benchmarks.gain_posterior`
writes: the tables and the band on every plan are this script's output and nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from benchmarks.accuracy_plots import group_bars_svg
from benchmarks.accuracy_text import TEXT
from benchmarks.calibrate import ROOT, RUNS, error_line, free_records, write_whole
from benchmarks.calibration import Problem
from benchmarks.cross_validation import (
    FAMILIES,
    LeftOut,
    family_of,
    leave_out,
    leave_out_both,
    members,
    source_of,
    stack_of,
)
from benchmarks.error_bands import Outcome, error_bands
from benchmarks.gain_posterior import Posterior, posterior_of, regret_words, trusted_rows
from benchmarks.gain_posterior import write as write_posterior
from benchmarks.unseen import Unseen, fit_or_not, unseen_runs
from meshwright.cluster_specs.reader import device_names, load_device
from meshwright.costmodel.rates import device_prefixes
from meshwright.costmodel.records import (
    constant_records,
    device_class,
    device_classes,
    effective_paths,
)
from meshwright.costmodel.stacks import framework_names, framework_prefixes
from meshwright.planner.report.run_view import scatter_svg
from meshwright.planner.runs.calibration.evidence import Bools, Floats
from meshwright.planner.runs.prediction import prediction_of
from meshwright.planner.runs.run_file import Run, read_runs
from meshwright.planner.runs.validation import (
    KINDS,
    ErrorSummary,
    MeasuredStep,
    Pair,
    ScoredRow,
    gains_of,
    measured_steps,
    pair_sums,
    pairs_of,
    plan_regret,
    score,
)

PLOTS = ROOT / "docs" / "accuracy"
MORE = ROOT / "tests" / "data" / "more_runs"
BANDS = ROOT / "costmodel" / "data" / "error_bands.yaml"
LEAST_PAIRS = 5
"""A setting on a device is a row of the page from so many pairs on: fewer are the luck of one run."""
Group = Callable[[Run], str]


@dataclass(frozen=True)
class Scores:
    """Predictions of the measured runs: by the constants in the files, and with a group left out."""

    runs: tuple[Run, ...]
    measured_s: Floats
    fitted_s: Floats
    by_source: LeftOut
    by_family: LeftOut
    by_both: LeftOut
    by_stack: LeftOut
    rows: tuple[ScoredRow, ...]
    unseen: tuple[Unseen, ...]

    @property
    def left_out(self) -> dict[str, LeftOut]:
        """Every way of leaving out, by its name."""
        return {
            "source left out": self.by_source,
            "family left out": self.by_family,
            "source and family left out": self.by_both,
            "stack left out": self.by_stack,
        }


def scores(path: Path, *, exact: bool) -> Scores:
    """Scores the rows of a file. The constants in the files count as the fit on all of them."""
    problem = Problem(read_runs(path), free_records())
    known = problem.linearise(problem.start)
    return Scores(
        runs=problem.runs,
        measured_s=problem.measured_s,
        fitted_s=known.seconds,
        by_source=leave_out(problem, source_of, problem.start, known, exact=exact),
        by_family=leave_out(problem, family_of, problem.start, known, exact=exact),
        by_both=leave_out_both(problem, problem.start, known, exact=exact),
        by_stack=leave_out(problem, stack_of, problem.start, known, exact=exact),
        rows=score(problem.runs, prediction_of).rows,
        unseen=tuple(unseen_runs(MORE)),
    )


def free_counts() -> tuple[dict[str, int], dict[str, int]]:
    """Free constants behind each catalog device's figures, the shared ones included, and each framework's."""
    free = {path for path, record in constant_records().items() if record.free}

    def count(*prefixes: str) -> int:
        return len(free & set(effective_paths(*prefixes).values()))

    shared = count("shared")
    devices = {
        name: count(*device_prefixes(name, load_device(name).architecture)) + shared
        for name in device_names()
    }
    return devices, {name: count(*framework_prefixes(name)) for name in framework_names()}


def _figures(predicted_s: Floats, measured_s: Floats) -> tuple[float, float, float, float, float]:
    error = 100.0 * (predicted_s / measured_s - 1.0)
    size = np.abs(error)
    return (
        float(size.mean()), float(np.median(size)), float(np.quantile(size, 0.9)), float(size.max()),
        float(error.mean()),
    )  # fmt: skip


def _table(head: str, lines: Sequence[str]) -> str:
    rule = "|" + "---|" * (head.count("|") - 1)
    return "\n".join([head, rule, *lines])


def _line(name: str, predicted_s: Floats, measured_s: Floats) -> str:
    mean, median, p90, worst, bias = _figures(predicted_s, measured_s)
    return f"| {name} | {len(measured_s)} | {mean:.1f} | {median:.1f} | {p90:.1f} | {worst:.1f} | {bias:+.1f} |"


def _left_out_table(found: Scores, left_out: LeftOut, what: str) -> str:
    """Mean error of each group with it among the fitted rows, and left out."""
    lines = []
    everything = np.ones(len(found.runs), dtype=bool)
    groups = [("all", everything)] + [
        (g, members(left_out.groups, g)) for g in sorted(set(left_out.groups))
    ]
    for name, inside in groups:
        fitted = _figures(found.fitted_s[inside], found.measured_s[inside])
        out = _figures(left_out.seconds[inside], found.measured_s[inside])
        lines.append(
            f"| {name} | {inside.sum()} | {fitted[0]:.1f} | {out[0]:.1f} | {out[1]:.1f} | {out[2]:.1f} | "
            f"{out[3]:.1f} | {out[4]:+.1f} |"
        )
    head = f"| {what} | rows | fitted, mean % | left out, mean % | median % | 90th % | worst % | bias % |"
    return _table(head, lines)


def _blind_table(found: Scores) -> str:
    """One line for each way of leaving out, and the fit on all rows last."""
    lines = [_line(name, way.seconds, found.measured_s) for name, way in found.left_out.items()]
    lines.append(_line("fitted on all", found.fitted_s, found.measured_s))
    return _table("| | rows | mean % | median % | 90th % | worst % | bias % |", lines)


def _pairs_of_fit(found: Scores, seconds: Floats) -> list[Pair]:
    """Pairs among the rows of the fit, without suspects, as these seconds a step predict them."""
    rows = zip(found.runs, seconds.tolist(), found.measured_s.tolist(), strict=True)
    return pairs_of(
        MeasuredStep(run=run, predicted_s=predicted_s, measured_s=measured_s)
        for run, predicted_s, measured_s in rows
        if run.suspect is None
    )


def _pairs_of_unseen(file: Unseen) -> list[Pair]:
    return pairs_of(measured_steps(file.trusted))


def _pairs_table(found: Scores) -> str:
    """How well ratios are predicted: a line for each way of leaving out, and for each unseen file."""
    groups = {name: _pairs_of_fit(found, way.seconds) for name, way in found.left_out.items()} | {
        "fitted on all": _pairs_of_fit(found, found.fitted_s)
    }
    groups |= {f"never seen: {file.name}": _pairs_of_unseen(file) for file in found.unseen}
    lines = []
    for name, pairs in groups.items():
        sums = pair_sums(pairs)
        if sums["n"]:
            lines.append(
                f"| {name} | {sums['n']} | {sums['error']:.3f} | {100 * sums['direction']:.0f} |"
            )
    return _table("| | pairs | error of the logarithm | direction right, % |", lines)


def _gains_table(found: Scores) -> str:
    """What single settings bring by device: rows of the fit with their source left out, and unseen ones."""
    groups = {
        "source left out": _pairs_of_fit(found, found.by_source.seconds),
        "never seen": [pair for file in found.unseen[-2:] for pair in _pairs_of_unseen(file)],
    }
    lines = [
        f"| {gain['knob']} | {gain['device']} | {name} | {gain['pairs']} | {_change(gain['predicted'])} | "
        f"{_change(gain['measured'])} | {gain['error']:.3f} | {100 * gain['direction']:.0f} |"
        for name, pairs in groups.items()
        for gain in gains_of([pair for pair in pairs if len(pair.knobs) == 1])
        if gain["pairs"] >= LEAST_PAIRS
    ]
    head = (
        "| setting, more of it | device | rows | pairs | step predicted, % | step measured, % | "
        "error of the logarithm | direction right, % |"
    )
    return _table(head, sorted(lines))


def _change(ratio: float) -> str:
    return f"{100.0 * (ratio - 1.0):+.1f}"


def _unseen_table(found: Scores) -> str:
    lines = []
    for file in found.unseen:
        time, memory = file.step_time, file.memory
        lines.append(f"| {file.name} | {_sums(time)} | {_sums(memory)} |")
    head = (
        "| | rows | step time, mean % | median % | 90th % | worst % | bias % | "
        "with memory | mean % | median % | 90th % | worst % | bias % |"
    )
    return _table(head, lines)


def _sums(sums: ErrorSummary) -> str:
    if sums.mean_error_pct is None:
        return "0 | | | | | "
    figures = (
        sums.mean_error_pct, sums.median_error_pct, sums.p90_error_pct, sums.worst_error_pct,
    )  # fmt: skip
    return f"{sums.count} | " + " | ".join(f"{x:.1f}" for x in figures) + f" | {sums.bias_pct:+.1f}"


def _fit_words(found: Scores) -> str:
    sums = fit_or_not(found.unseen[:-2])
    ran, full = sums.ran_told_fit, sums.out_of_memory_told
    return (
        f"{ran} of {sums.ran} that ran are told to fit ({100 * ran / sums.ran:.1f} %), {full} of "
        f"{sums.out_of_memory} that ran out of memory are told not to ({100 * full / sums.out_of_memory:.1f} %)"
    )


def _time_table(found: Scores) -> str:
    groups: list[tuple[str, Bools]] = [
        ("all", np.ones(len(found.runs), dtype=bool)),
        ("without suspects", np.array([run.suspect is None for run in found.runs])),
    ]
    for kind in ("model_kind", "precision", "recompute", "device", "framework"):
        names = [KINDS[kind](run) for run in found.runs]
        groups += [(name, members(names, name)) for name in sorted(set(names))]
    lines = [
        _line(name, found.fitted_s[inside], found.measured_s[inside]) for name, inside in groups
    ]
    return _table("| | rows | mean % | median % | 90th % | worst % | bias % |", lines)


def _memory_table(found: Scores) -> str:
    known = [row for row in found.rows if row.memory_error_pct is not None]
    error = np.array([row.memory_error_pct for row in known], dtype=float) / 100.0
    names = [row.run.workload.framework for row in known if row.run is not None]
    groups = [("all", np.ones(len(known), dtype=bool))]
    groups += [(name, members(names, name)) for name in sorted(set(names))]
    lines = [_line(name, 1.0 + error[inside], np.ones(inside.sum())) for name, inside in groups]
    return _table("| | rows | mean % | median % | 90th % | worst % | bias % |", lines)


def _regret_words(found: Scores) -> str:
    groups = plan_regret(
        [row for row in found.rows if row.run is not None and row.run.suspect is None]
    )
    regrets = [group.regret_pct for group in groups]
    least = [group.least_pct for group in groups]
    worst = max(groups, key=lambda group: group.regret_pct)
    return (
        f"{len(regrets)} groups, mean {np.mean(regrets):.2f} %, worst {max(regrets):.2f} % "
        f"({worst.model} on {worst.gpus} GPUs). With the best order of these predictions: mean {np.mean(least):.2f} %, "
        f"worst {max(least):.2f} %"
    )


REFITS = {
    True: "go to their optimum, with slopes of their own",
    False: "step along the slopes of the fit on all rows, corrected at every step, and stop a little short of their optimum",
}


def _document(found: Scores, posterior: Posterior, *, exact: bool) -> str:
    devices, frameworks = free_counts()
    counts = _table(
        "| | free constants |",
        [f"| {name} | {count} |" for name, count in [*devices.items(), *frameworks.items()]],
    )
    return TEXT.format(
        rows=len(found.runs),
        refits=REFITS[exact],
        free=len(free_records()),
        records=len(constant_records()),
        time=_time_table(found),
        sources=_left_out_table(found, found.by_source, "source"),
        families=_left_out_table(found, found.by_family, "family"),
        rules=", ".join(f"{family} (`{pattern}`)" for pattern, family in FAMILIES),
        memory=_memory_table(found),
        regret=_regret_words(found),
        posterior=regret_words(posterior),
        pairs=_pairs_table(found),
        gains=_gains_table(found),
        least_pairs=LEAST_PAIRS,
        blind=_blind_table(found),
        unseen=_unseen_table(found),
        fit=_fit_words(found),
        counts=counts,
    )


def _bands_text(found: Scores) -> str:
    outcomes = [
        Outcome(
            device_class(run.workload.cluster.device.name), run.workload.framework, float(ratio)
        )
        for run, ratio in zip(found.runs, found.measured_s / found.by_source.seconds, strict=True)
    ]
    bands = error_bands(outcomes, device_classes(), framework_names())
    head = (
        "# Measured over predicted step time, 5th and 95th percentile, by device class and framework, of runs predicted\n"
        "# with their source left out, and of peak memory: `python -m benchmarks.accuracy`. `rows`, `basis`: whose runs.\n"
    )
    lines = [
        f"unmeasured: {_flow(_unmeasured_band(found))}",
        f"memory: {_flow(_memory_band(found))}",
        "bands:",
    ]
    for name, of_device in bands.items():
        lines.append(f"  {name}:")
        for framework, band in of_device.items():
            lines.append(f"    {framework}: {_flow(band)}")
    return head + "\n".join(lines) + "\n"


def _unmeasured_band(found: Scores) -> dict[str, float | int | str]:
    """Of measured over predicted steps of stacks that the fit had never seen."""
    low, high = np.quantile(found.measured_s / found.by_stack.seconds, [0.05, 0.95])
    return {
        "low": round(float(low), 3),
        "high": round(float(high), 3),
        "rows": len(found.runs),
        "basis": "stacks left out of the fit",
    }


def _memory_band(found: Scores) -> dict[str, float | int | str]:
    """Of measured over predicted peaks; memory has next to no constants that were fitted."""
    errors = [row.memory_error_pct for row in found.rows if row.memory_error_pct is not None]
    low, high = np.quantile(1 / (1 + np.array(errors) / 100.0), [0.05, 0.95])
    basis = "any device and framework"
    return {
        "low": round(float(low), 3),
        "high": round(float(high), 3),
        "rows": len(errors),
        "basis": basis,
    }


def _flow(record: Mapping[str, object]) -> str:
    return str(yaml.safe_dump(record, default_flow_style=True, sort_keys=False, width=1000)).strip()


def _plots(found: Scores) -> None:
    PLOTS.mkdir(exist_ok=True)
    devices = [KINDS["device"](run) for run in found.runs]
    for name, seconds, words in (
        ("fitted", found.fitted_s, "fitted on these rows"),
        ("source_left_out", found.by_source.seconds, "source left out"),
    ):
        points = list(zip(devices, found.measured_s.tolist(), seconds.tolist(), strict=True))
        picture = scatter_svg(points, f"{len(points)} measured steps, {words}")
        write_whole(PLOTS / f"{name}.svg", picture)
    for name, left_out in (("by_source", found.by_source), ("by_family", found.by_family)):
        errors = {}
        for group in sorted(set(left_out.groups)):
            inside = members(left_out.groups, group)
            label = f"{group if len(group) <= 44 else group[:41] + '...'} ({inside.sum()})"
            measured_s = found.measured_s[inside]
            both = (found.fitted_s[inside], left_out.seconds[inside])
            errors[label] = tuple(_figures(seconds, measured_s)[0] for seconds in both)
        title = f"Error {name.replace('_', ' ')} (rows)"
        picture = group_bars_svg(errors, ("fitted", "left out"), title)
        write_whole(PLOTS / f"{name}.svg", picture)


def main(arguments: Sequence[str] | None = None) -> None:
    """Scores, prints, then writes the document, the plots and the bands."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="refits that stop a little short")
    exact = not parser.parse_args(arguments).quick
    found = scores(RUNS, exact=exact)
    print(f"fitted                     {error_line(found.fitted_s, found.measured_s)}")
    for name, left_out in found.left_out.items():
        print(f"{name:26} {error_line(left_out.seconds, found.measured_s)}")
        for group in sorted(set(left_out.groups)):
            inside = members(left_out.groups, group)
            line = error_line(left_out.seconds[inside], found.measured_s[inside])
            print(f"    {group[:44]:44} {line}")
    print(f"pairs\n{_pairs_table(found)}\ngains\n{_gains_table(found)}")
    print(f"memory\n{_memory_table(found)}")
    print(f"regret: {_regret_words(found)}")
    print(f"never seen\n{_unseen_table(found)}\nfit or not: {_fit_words(found)}")
    posterior = posterior_of(trusted_rows(found.runs, found.by_source.seconds), found.unseen[:-2])
    print(f"regret by price and by posterior\n{regret_words(posterior)}")
    write_whole(BANDS, _bands_text(found))
    write_posterior(posterior)
    write_whole(ROOT / "docs" / "accuracy.md", _document(found, posterior, exact=exact))
    _plots(found)


if __name__ == "__main__":
    main()
