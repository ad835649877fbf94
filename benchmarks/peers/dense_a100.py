"""Dense models on A100 beside three published cost models, source by source; writes docs/peers_dense.md.

    python -m benchmarks.peers.dense_a100 --calculon DIR --simumax DIR --llm-analysis DIR [--python PYTHON] [-o PAGE]

Each DIR is a checkout: github.com/calculon-ai/calculon, github.com/MooreThreads/SimuMax, github.com/cli99/llm-analysis.
PYTHON is an interpreter with what they import: numpy, pandas, psutil, sympy, tabulate, graphviz, tqdm, matplotlib, fire.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

import numpy as np

from benchmarks.calibrate import ROOT, RUNS, free_records
from benchmarks.calibration import Problem
from benchmarks.cross_validation import leave_out, source_of
from benchmarks.peers import calculon_cases, llm_analysis_cases, simumax_cases
from benchmarks.peers.comparison import Floats, mean_error_pct, measured_steps, stack_factor
from meshwright.planner.runs.prediction import prediction_of
from meshwright.planner.runs.run_file import Run, read_runs

MORE = ROOT / "tests" / "data" / "more_runs"
PAGE = ROOT / "docs" / "peers_dense.md"
DEVICE = "a100-sxm-80gb"
ASK = {
    "Calculon": calculon_cases.ask,
    "SimuMax": simumax_cases.ask,
    "llm-analysis": llm_analysis_cases.ask,
}
OURS = "meshwright"
TEXT = """# Dense models on A100 beside the peers

Written by `python -m benchmarks.peers.dense_a100` from checkouts of [Calculon](https://github.com/calculon-ai/calculon),
[SimuMax](https://github.com/MooreThreads/SimuMax) and [llm-analysis](https://github.com/cli99/llm-analysis). All rows of this repository are
taken that ran dense models on A100 SXM 80 GB, are no suspects, and can be said in the words of all four: {rows} of {all_rows}
({left_out}).

Errors are means of the size of predicted over measured step time minus 1, in percent: first as predictions come, then after each tool's
predictions of a source are multiplied by one number, the geometric mean of measured over predicted. Ours of a source that takes part in the fit are by constants
fitted without that source.

{table}

Another is nearer as predictions come: {nearer}.

How the others are asked: Calculon as [here](peers.md). SimuMax has the kernels of its only A100, the PCIe one, with the run's links in the place of
PCIe; every attention is flash attention, as it has no other. llm-analysis takes half of the peak and nine tenths of the memory's bandwidth, the
figures that its README names where nothing was measured, and its own links of an A100; it has no bubble of the pipeline.
"""


def dense_rows() -> list[Run]:
    """Measured dense runs on the device that are no suspects, in the order of their files."""
    files = [RUNS, *sorted(MORE.glob("*.yaml"))]
    return [run for path in files for run in read_runs(path) if _is_dense(run)]


def _is_dense(run: Run) -> bool:
    measured = run.measured is not None and run.measured.step_time_s is not None
    workload = run.workload
    on_device = workload.cluster.device.name == DEVICE
    return measured and on_device and workload.model.moe is None and not run.suspect


def our_steps(runs: Sequence[Run]) -> Floats:
    """Predicted seconds: by constants fitted without the run's source, where that source takes part in the fit."""
    problem = Problem(read_runs(RUNS), free_records())
    fitted = leave_out(problem, source_of, problem.start, problem.linearise(problem.start))
    unfitted = {
        run.id: float(seconds) for run, seconds in zip(problem.runs, fitted.seconds, strict=True)
    }
    return np.array([unfitted.get(run.id) or prediction_of(run).step_time_s for run in runs])


def table_of(runs: Sequence[Run], steps_s: dict[str, Floats]) -> list[str]:
    """A line a source, and one of all, with each tool's two errors."""
    measured_s = measured_steps(runs)
    sources = np.array([source_of(run) for run in runs])
    lines = [
        "| source | rows | " + " | ".join(steps_s) + " |",
        "|---|---|" + "---|" * len(steps_s),
    ]
    groups = [(source, sources == source) for source in dict.fromkeys(sources.tolist())]
    for source, inside in [*groups, ("all", np.ones(len(runs), dtype=bool))]:
        cells = []
        for seconds in steps_s.values():
            predicted_s, real_s = seconds[inside], measured_s[inside]
            factor = stack_factor(predicted_s, real_s)
            as_it_comes = mean_error_pct(predicted_s, real_s)
            cells.append(f"{as_it_comes:.1f}, {mean_error_pct(factor * predicted_s, real_s):.1f}")
        lines.append(f"| {_short(source)} | {int(inside.sum())} | " + " | ".join(cells) + " |")
    return lines


def nearer_than_ours(runs: Sequence[Run], steps_s: dict[str, Floats]) -> str:
    """The sources in which another tool's predictions are nearer as they come, in words."""
    measured_s = measured_steps(runs)
    sources = np.array([source_of(run) for run in runs])
    words = []
    for source in dict.fromkeys(sources.tolist()):
        inside = sources == source
        errors = {
            tool: mean_error_pct(seconds[inside], measured_s[inside])
            for tool, seconds in steps_s.items()
        }
        tools = [tool for tool, error in errors.items() if error < errors[OURS]]
        if tools:
            words.append(f"{', '.join(tools)} on {_short(source)}")
    return "; ".join(words) or "nowhere"


def _short(source: str) -> str:
    """A source's name as the table has it."""
    return shorten(source.replace("|", "/").split(", rows of")[0], 64, placeholder=" ...")


def main(arguments: Sequence[str] | None = None) -> None:
    """Asks all four, prints the table and writes the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.dense_a100", description=__doc__
    )
    for tool in ASK:
        parser.add_argument(f"--{tool.lower()}", type=Path, required=True, metavar="DIR")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("-o", "--output", type=Path, default=PAGE)
    options = vars(parser.parse_args(arguments))
    measured = dense_rows()
    reasons = Counter(
        f"Calculon has no words for {reason}"
        for reason in map(calculon_cases.why_not, measured)
        if reason
    )
    runs = [run for run in measured if calculon_cases.why_not(run) is None]
    steps_s: dict[str, Floats] = {}
    for tool, ask in ASK.items():
        answers = ask(runs, options[tool.lower().replace("-", "_")], options["python"])
        reasons.update(f"{tool} says {answer.refused}" for answer in answers if answer.refused)
        steps_s[tool] = np.array([answer.step_time_s or np.nan for answer in answers])
    by_all = np.all([np.isfinite(seconds) for seconds in steps_s.values()], axis=0)
    runs = [run for run, said in zip(runs, by_all, strict=True) if said]
    steps_s = {
        OURS: our_steps(runs),
        **{tool: seconds[by_all] for tool, seconds in steps_s.items()},
    }
    table = table_of(runs, steps_s)
    print("\n".join(table))
    words = "; ".join(f"{count} left out: {reason}" for reason, count in sorted(reasons.items()))
    page = TEXT.format(
        rows=len(runs),
        all_rows=len(measured),
        left_out=words or "none left out",
        table="\n".join(table),
        nearer=nearer_than_ours(runs, steps_s),
    )
    options["output"].write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
