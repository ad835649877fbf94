"""Meshwright beside Calculon on measured runs that neither has seen; writes docs/peers.md.

    python -m benchmarks.peers --calculon DIR [--python PYTHON] [--draws 20] [-o PAGE]

DIR is a checkout of github.com/calculon-ai/calculon; PYTHON an interpreter with numpy, pandas and psutil, which it imports.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.few_shot import Sweep
from benchmarks.peers.calculon_cases import ask, why_not
from benchmarks.peers.comparison import OWN_RUNS, Figures, figures_of, our_figures
from meshwright.planner.runs.run_file import Run

PEERS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "peers.md"
ALEPH = ("aleph_alpha_layouts",)


def _flash_2(run: Run) -> bool:
    return "attn-flash2" in run.tags


def _flash_2_and_fused_norm(run: Run) -> bool:
    return _flash_2(run) and run.workload.fused_norm is True


def _flash_2_and_plain_norm(run: Run) -> bool:
    return _flash_2(run) and run.workload.fused_norm is not True


SWEEPS = (
    Sweep("Aleph Alpha 13B, flash 2", ALEPH, _flash_2),
    Sweep("of these, norms fused", ALEPH, _flash_2_and_fused_norm),
    Sweep("of these, norms not fused", ALEPH, _flash_2_and_plain_norm),
    Sweep("InternEvo 7B", ("internevo_7b_a100",)),
    Sweep("MLPerf GPT-3 175B", ("mlperf_gpt3_175b",)),
    Sweep("NeMo 2024, FP8", ("nemo_h100_fp8_2024",)),
)
PAGE = """# Beside the peers

Written by `python -m benchmarks.peers --calculon DIR --draws {draws}`, where DIR is a checkout of
[Calculon](https://github.com/calculon-ai/calculon) (Isaev et al., SC 2023), the published cost model of the same kind.
Both price the same measured runs of `tests/data/more_runs`, without suspects. No constant of ours was fitted on
them. Errors are means of the size of predicted over measured step time minus 1:

- *as it comes*: nothing corrected;
- *one factor*: every prediction times one number for the sweep, the geometric mean of measured over predicted of all rows;
- *factor of {own}* and *calibrated on {own}*: the number, or `meshwright calibrate`, sees {own} runs drawn at random, and the rest is
  predicted; means over the same {draws} draws for both.

*Regret* is how much slower the layout predicted fastest was measured than the best of its group (four or more rows
that share model, cluster, sequence and batch; ties count by the mean of their times), mean and worst. *ms* is
the processor's time for one warm prediction; ours includes memory of every stage and the chance to fit. Releases of one container count as one stack.

{table}

Where norms are not fused, Calculon picks better: both of our picks fill nine tenths of HBM by our own prediction, and their steps were
predicted a fifth and more too fast.

## What Calculon could not express
Rows left out for both: {left_out}.

What it only approximates: it knows no flash attention (scores go to memory and back), no vocabulary and no head, and one
kind of norm, so rows that differ in kernels alone are ties. A gated feed-forward is a plain one of 1.5 times the width: the same
parameters and FLOP. BF16 runs at its float16 rates. Device efficiencies are those of its `systems/a100_80g.json` and
`systems/h100_80g_nvl8.json`; bandwidths of links are each run's. Its memory limit is lifted, as these runs ran. MLPerf's and NeMo's tensor
parallelism overlaps by its `ring`.

SimuMax is not here: it prices operators by efficiencies measured for every shape on the machine beforehand, and
comes with those of A100 PCIe and B200. With the former it stands, as llm-analysis does, beside [dense models on A100](peers_dense.md).
"""
HEAD = """| sweep | rows | | as it comes % | one factor % | factor of {own}, rest % | calibrated on {own}, rest % | regret, mean % | worst % | groups | ms |
|---|---|---|---|---|---|---|---|---|---|---|"""


def line_of(sweep: str, rows: int, figures: Figures) -> str:
    """A line of the table."""
    regrets = [group.regret_pct for group in figures.regret]
    cells = [
        sweep,
        str(rows),
        figures.tool,
        f"{figures.uncorrected:.1f}",
        f"{figures.with_factor:.1f}",
        f"{figures.with_factor_of_few:.1f}",
        "" if figures.calibrated is None else f"{figures.calibrated:.1f}",
        f"{np.mean(regrets):.1f}" if regrets else "",
        f"{max(regrets):.1f}" if regrets else "",
        str(len(regrets)),
        f"{1e3 * figures.seconds:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def compare(sweep: Sweep, checkout: Path, python: str, draws: int) -> tuple[list[str], str]:
    """Two lines of the table, and the rows that were left out in words."""
    reasons: Counter[str] = Counter()
    runs, steps_s, seconds = [], [], []
    measured = [run for run in sweep.runs() if run.measured and run.measured.step_time_s]
    told = {run.id: why_not(run) for run in measured}
    expressed = [run for run in measured if told[run.id] is None]
    reasons.update(reason for reason in told.values() if reason is not None)
    for run, answer in zip(expressed, ask(expressed, checkout, python), strict=True):
        if answer.step_time_s is None:
            reasons[str(answer.refused)] += 1
            continue
        runs.append(run)
        steps_s.append(answer.step_time_s)
        seconds.append(answer.seconds)
    their_time = float(np.mean(seconds))
    theirs = figures_of("Calculon", runs, np.array(steps_s), draws=draws, seconds=their_time)
    both = (our_figures(runs, draws), theirs)
    lines = [line_of(sweep.name, len(runs), figures) for figures in both]
    words = ", ".join(f"{count} for {reason}" for reason, count in sorted(reasons.items()))
    return lines, f"{sweep.name}: {words}" if words else ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--calculon", type=Path, required=True, metavar="DIR")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("-o", "--output", type=Path, default=PEERS_PAGE)
    options = parser.parse_args(arguments)
    table, left_out = [HEAD.format(own=OWN_RUNS)], []
    for sweep in SWEEPS:
        lines, words = compare(sweep, options.calculon, options.python, options.draws)
        print("\n".join(lines), flush=True)
        table += lines
        left_out += [words] if words else []
    page = PAGE.format(
        draws=options.draws,
        own=OWN_RUNS,
        table="\n".join(table),
        left_out="; ".join(left_out) or "none",
    )
    options.output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
