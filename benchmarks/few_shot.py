"""What a few own runs bring: the error of the other runs of a sweep after a calibration on some chosen at random.

    python -m benchmarks.few_shot [--draws 20] [--runs 0,1,3,5,10] [-o PAGE] [SWEEP ...]

`-o docs/few_runs.md` writes the page. Each draw picks the software profile that its own runs speak for, unless the sweep's framework is known.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from meshwright.costmodel.calibration import NAMES, Calibration
from meshwright.frameworks.catalog import STACK_NAMES, stack_in_words
from meshwright.planner.runs.calibration.evidence import Evidence, Floats, robust_optimum
from meshwright.planner.runs.calibration.service import CLEARLY_BETTER, calibrate_runs, draft_stack
from meshwright.planner.runs.prediction import prediction_of
from meshwright.planner.runs.run_file import Run, UnreadRow, read_rows
from meshwright.planner.runs.validation import FAILED_ERROR_PCT, Prediction, plan_regret, score

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "more_runs"


@dataclass(frozen=True)
class Sweep:
    """Some runs of one stack on one device."""

    name: str
    files: tuple[str, ...]
    keeps: Callable[[Run], bool] = lambda run: True

    def runs(self) -> list[Run]:
        """The rows that are measured and not suspect."""
        rows = [row for file in self.files for row in read_rows(DATA / f"{file}.yaml")]
        read = [row for row in rows if not isinstance(row, UnreadRow)]
        return [run for run in read if run.measured and not run.suspect and self.keeps(run)]


PAGE_HEAD = """# What a few own runs bring

Written by `python -m benchmarks.few_shot {arguments}` from `tests/data/more_runs`, on none of which the
shipped constants were fitted. Some runs of a sweep are drawn at random, `meshwright calibrate` sees them, and the others are
predicted: means over {draws} draws (one prediction of all with 0 own runs), suspects left out. A layout is told to fit
where that is likelier than not. Regret is that of the pick among the others, in groups of four or more that share
cluster, sequence and batch, ties counted by their mean. Means over few draws scatter by about a percentage point.

nanotron's step times are one noisy step each. Its peaks fall into two kinds that no row tells apart: with tensor parallelism, about half of them
exceed the others by just what `tp_recompute_allgather: false` keeps (huggingface/nanotron, pull request 208), as two runs of 3.6B on 512 H100 that
differ in ZeRO stage alone, 17.9 and 6.0 GiB. Were each row's kind known, the mean error with no own run would be 5.9 %.

| sweep | runs | own runs | step time, mean error % | memory, mean error % | ran, told to fit % | out of memory, told so % | regret, mean % |
|---|---|---|---|---|---|---|---|
"""


def _paddle_on_80_gb(run: Run) -> bool:
    device = run.workload.cluster.device.name
    return "Paddle" in run.framework_words and device == "a100-sxm-80gb"


ALEPH = ("aleph_alpha_layouts",)
SWEEPS = (
    Sweep("Aleph Alpha 13B, flash 2", ALEPH, lambda run: "attn-flash2" in run.tags),
    Sweep("Aleph Alpha 13B", ALEPH),
    Sweep("Aleph Alpha 13B, ran or not", (*ALEPH, "aleph_alpha_oom")),
    Sweep("InternEvo 7B", ("internevo_7b_a100",)),
    Sweep("nanotron, memory", ("nanotron_ultrascale_sample",)),
    Sweep("FlagPerf Paddle, memory", ("flagperf",), _paddle_on_80_gb),
)


@dataclass(frozen=True)
class _Linear:
    """Every row of a sweep as one software profile sees it, along its slopes."""

    framework: str
    goal_low: Floats
    goal_high: Floats
    errors: Floats
    slopes: Floats

    def value(self, rows: Sequence[int]) -> float:
        """What a fit to some rows would reach."""
        errors, slopes = self.errors[rows], self.slopes[rows]
        zero = np.zeros(len(NAMES))
        x = robust_optimum(errors, slopes, zero, self.goal_low, self.goal_high)
        residuals = errors + slopes @ x
        return float(np.sum(2.0 * (np.sqrt(1.0 + residuals**2) - 1.0)) + x @ x)


def _profiles(runs: Sequence[Run]) -> list[_Linear]:
    """The profiles that may stand for a sweep's framework."""
    stack = stack_in_words(runs[0].framework_words)
    names = STACK_NAMES if stack is None else (stack.name,)
    device = runs[0].workload.cluster.device.name
    profiles = []
    for name in names:
        evidence = Evidence(runs, draft_stack("sweep", name, device))
        goal = evidence.goal()
        zero = np.zeros(len(NAMES))
        if len(names) == 1:
            size = len(evidence.noise)
            none = np.zeros((size, len(NAMES)))
            profiles.append(_Linear(name, goal.low, goal.high, np.zeros(size), none))
        else:
            slopes = goal.slopes(zero)
            profiles.append(_Linear(name, goal.low, goal.high, goal.errors(zero), slopes))
    return profiles


def priced(run: Run, stack: Calibration) -> Prediction:
    """A run under a calibration, whatever its file calls the framework."""
    workload = replace(run.workload, framework=stack.framework, calibration=stack)
    return prediction_of(replace(run, workload=workload))


def _draw(
    runs: list[Run], profiles: list[_Linear], order: Sequence[int], count: int
) -> list[float]:
    """Mean errors of steps and of memory, shares told right, and regret, of the runs that were not chosen."""
    own, rest = [runs[i] for i in order[:count]], [runs[i] for i in order[count:]]
    if count == 0:
        report = score(rest, prediction_of)
    else:
        rows = _rows_of(runs, set(order[:count]))
        values = {profile.framework: profile.value(rows) for profile in profiles}
        if len(values) > 1:
            values[runs[0].workload.framework] -= CLEARLY_BETTER
        best = min(values, key=lambda framework: values[framework])
        stack = calibrate_runs(own, like=best, suggest=False).calibration
        report = score(rest, lambda run: priced(run, stack))
    steps = [abs(row.error_pct) for row in report.rows if row.error_pct is not None]
    peaks = [abs(row.memory_error_pct) for row in report.rows if row.memory_error_pct is not None]
    feasible = report.summary()["feasibility"]
    regrets = [group.regret_pct for group in plan_regret(report.rows)]
    return [
        _mean(steps),
        _mean(peaks),
        _share(feasible["ran_told_fit"], feasible["ran"]),
        _share(feasible["out_of_memory_told"], feasible["out_of_memory"]),
        _mean(regrets),
    ]


def _rows_of(runs: list[Run], chosen: set[int]) -> list[int]:
    """Rows of an `Evidence` on all runs that belong to the chosen ones: steps, peaks, limits."""
    steps = [i for i, run in enumerate(runs) if run.measured and run.measured.step_time_s]
    peaks = [i for i, run in enumerate(runs) if run.measured and run.measured.memory_gib]
    limits = [i for i in range(len(runs)) if i not in set(peaks)]
    return [row for row, run in enumerate([*steps, *peaks, *limits]) if run in chosen]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _share(told: int, of: int) -> float:
    return FAILED_ERROR_PCT * told / of if of else float("nan")


def _curve(sweep: Sweep, counts: Sequence[int], draws: int) -> list[str]:
    """One line of the table for each number of own runs."""
    runs = sweep.runs()
    profiles = _profiles(runs)
    lines = []
    for count in counts:
        if count >= len(runs):
            continue
        random = np.random.default_rng(0)
        orders = [random.permutation(len(runs)).tolist() for _ in range(draws if count else 1)]
        rows = np.array([_draw(runs, profiles, order, count) for order in orders])
        known = ~np.all(np.isnan(rows), axis=0)
        means = [
            f"{np.nanmean(column):.1f}" if has_any else ""
            for column, has_any in zip(rows.T, known, strict=True)
        ]
        line = f"| {sweep.name} | {len(runs)} | {count} | " + " | ".join(means) + " |"
        print(line, flush=True)
        lines.append(line)
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line for every sweep and number of own runs, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.few_shot", description=__doc__)
    parser.add_argument("sweeps", nargs="*", help="Beginnings of names; all without.")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--runs", default="0,1,3,5,10")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    counts = [int(count) for count in options.runs.split(",")]
    lines = []
    for sweep in SWEEPS:
        if options.sweeps and not sweep.name.startswith(tuple(options.sweeps)):
            continue
        lines += _curve(sweep, counts, options.draws)
    if options.output is not None:
        words = shlex.join(sys.argv[1:] if arguments is None else arguments)
        page = PAGE_HEAD.format(arguments=words, draws=options.draws) + "\n".join(lines) + "\n"
        options.output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
