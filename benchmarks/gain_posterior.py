"""By how much measured pairs correct the gains that the cost model says of settings, and what choosing by it costs.

    python -m benchmarks.gain_posterior

Writes costmodel/data/gain_posterior.yaml and docs/gains.md, as `python -m benchmarks.accuracy` does. Rows of the fit are predicted with
their source left out, along the slopes of the fit on all rows; rows that the fit has never seen and published pairs
that can be said, as they are. `costmodel/measured_settings.py` has the mathematics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log

import numpy as np
import yaml

from benchmarks.calibrate import ROOT, RUNS, free_records, write_whole
from benchmarks.calibration import Problem
from benchmarks.cross_validation import leave_out, source_of
from benchmarks.error_bands import KINDS_OF_MODEL
from benchmarks.unseen import Unseen, unseen_runs
from meshwright.costmodel.measured_settings import (
    LEAST_PAIRS,
    GainCorrections,
    GainObservation,
    GainShift,
    gain_posterior,
    model_kind,
    priced_settings,
)
from meshwright.costmodel.records import device_class, device_classes
from meshwright.planner.runs.calibration.evidence import Floats
from meshwright.planner.runs.prediction import prediction_of
from meshwright.planner.runs.run_file import Run, read_runs
from meshwright.planner.runs.stated_pairs import read_pairs
from meshwright.planner.runs.validation import (
    Pair,
    Prediction,
    RegretGroup,
    ScoredRow,
    measured_steps,
    pairs_of,
    plan_regret,
    same_work,
    score_pairs,
    settings_of,
    source_name,
)

DATA = ROOT / "costmodel" / "data" / "gain_posterior.yaml"
PAGE = ROOT / "docs" / "gains.md"
MORE = ROOT / "tests" / "data" / "more_runs"
STATED = tuple(ROOT / "tests" / "data" / f"{name}_pairs.yaml" for name in ("published", "more"))
READ_AS_ROWS = ("Zero Bubble Pipeline Parallelism",)
"""Sources of published pairs whose runs are measured rows too, and would count twice."""
CORRECTED = (
    *("recompute selective", "recompute full", "vpp", "cuda_graph partial", "cuda_graph full"),
    *("moe_dispatch deduplicated", "moe_dispatch allgather", "ep_overlap", "tp_overlap"),
)
"""Settings of which corrections are asked: discrete choices of a plan against the plain value."""
MAY_CHANGE = frozenset(
    ["recompute", "recompute_layers", "vpp", "cuda_graph", "moe_dispatch", "ep_overlap"]
) | {"tp_overlap", "framework"}
"""What two runs of a pair may differ in: those settings, and the release of one stack."""
LEAST_LAYOUTS = 3
"""Groups of so many measured rows count, if not all have the same settings."""


NOISY = "nanotron_ultrascale_sample"
"""Rows of one noisy step each: groups without them are summed up too."""
MANY_PAIRS, FAR_POINTS = 5, 5.0
"""A setting of so many published pairs whose mean gain is told so many points off has its reason in the page."""
REASONS = {
    "compile": (
        "each of the six is told to gain more than it does, by 6 to 11 % of the step: what eager PyTorch adds is told too long. One "
        "attained HBM rate, fitted to all stacks, stands for kernels of one operator and for compiled ones, 0.61 of the peak on the "
        "H100 of 96 GB. The bytes are counted from the code of the models and of torchao, and were not changed for these pairs."
    ),
    "ep_overlap": (
        "the price leaves the chunks without a pair exposed, and what full recomputation exchanges again. CUDA_DEVICE_MAX_CONNECTIONS of 1, "
        "as one of the pairs has, halves what is left (NVIDIA/Megatron-LM, pull request 6311). One rank's trace of Qwen3-30B-A3B hid 37 % "
        "of its exchanges, which took 31 % longer beside products (pull request 5094 of Megatron-Bridge): the price has one share for all."
    ),
}
"""Why the mean gain of such a setting is off, by the name of the setting."""


def changes_between(
    first: Collection[str], second: Collection[str], settings: Collection[str]
) -> dict[str, int]:
    """Which of some settings one of two runs has alone: 1 for those of the second, -1 for the first's, by name."""
    of_interest = sorted(set(first).symmetric_difference(second).intersection(settings))
    return {name: 1 if name in second else -1 for name in of_interest}


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """What pairs say, and what choosing by it costs against choosing by price alone."""

    observations: tuple[GainObservation, ...]
    spread: float
    pairs: int
    """Pairs that the spread is of."""
    by_price: Mapping[str, tuple[RegretGroup, ...]]
    """Regret of groups by the rows that they are of."""
    by_posterior: Mapping[str, tuple[RegretGroup, ...]]
    """The same groups in the same order."""
    varied: Mapping[str, int]
    """Groups whose layouts differ in a corrected setting."""
    stated: tuple[Pair, ...]
    """Published pairs that have a price, whatever they change."""


def trusted_rows(runs: Sequence[Run], seconds: Floats) -> list[ScoredRow]:
    """Rows of the fit without suspects, as these seconds a step predict them."""
    return [
        ScoredRow(
            id=run.id, run=run, measured=run.measured, predicted=Prediction(step_time_s=step_s)
        )
        for run, step_s in zip(runs, seconds.tolist(), strict=True)
        if run.suspect is None
    ]


def posterior_of(of_fit: Sequence[ScoredRow], files: Sequence[Unseen]) -> Posterior:
    """From rows of the fit with their source left out, and from files that the fit has never seen."""
    pairs = pairs_of(measured_steps(of_fit))
    unseen = [row for file in files for row in file.trusted]
    stated = priced_pairs()
    apart = [pair for pair in stated if not pair.first.run.source.startswith(READ_AS_ROWS)]
    spread = spread_of(pairs)
    observations = observations_of([*pairs, *pairs_of(measured_steps(unseen)), *apart])
    observations.sort(key=lambda each: (tuple(each.changes.items()), each.kind, each.source))
    parts = {
        "rows of the fit, source left out": of_fit,
        "never seen": [row for file in files if file.name != NOISY for row in file.trusted],
        "never seen, nanotron's single steps": [
            row for file in files if file.name == NOISY for row in file.trusted
        ],
    }
    return Posterior(
        observations=tuple(observations),
        spread=spread,
        pairs=len(pairs),
        by_price={name: plan_regret(rows, LEAST_LAYOUTS) for name, rows in parts.items()},
        by_posterior={
            name: posterior_regret(rows, observations, spread) for name, rows in parts.items()
        },
        varied={name: _varied(rows) for name, rows in parts.items()},
        stated=stated,
    )


def priced_pairs() -> tuple[Pair, ...]:
    """Published pairs that have a price, in the order of their files."""
    reports = [score_pairs(read_pairs(path), prediction_of) for path in STATED]
    return tuple(pair for report in reports for pair in report.stated_pairs)


@dataclass(frozen=True, kw_only=True)
class KnobGain:
    """What published pairs that change one setting say of its gain."""

    knob: str
    pairs: tuple[Pair, ...]

    @property
    def predicted_pct(self) -> float:
        """The step's change, geometric mean."""
        return _mean_pct([pair.predicted for pair in self.pairs])

    @property
    def measured_pct(self) -> float:
        """The step's change, geometric mean."""
        return _mean_pct([pair.measured for pair in self.pairs])

    @property
    def far(self) -> bool:
        """Whether the mean of many pairs is told far off."""
        points = abs(self.predicted_pct - self.measured_pct)
        return len(self.pairs) >= MANY_PAIRS and points > FAR_POINTS


def knob_gains(stated: Iterable[Pair]) -> list[KnobGain]:
    """By setting, those of most pairs first."""
    groups: defaultdict[str, list[Pair]] = defaultdict(list)
    for pair in stated:
        groups[pair.knobs[0]].append(pair)
    gains = [KnobGain(knob=knob, pairs=tuple(pairs)) for knob, pairs in groups.items()]
    return sorted(gains, key=lambda gain: (-len(gain.pairs), gain.knob))


def _mean_pct(ratios: Sequence[float]) -> float:
    return 100.0 * (exp(float(np.mean(np.log(ratios)))) - 1.0)


def _knob_line(gain: KnobGain) -> str:
    error = float(np.mean([pair.error for pair in gain.pairs]))
    right = sum(pair.right for pair in gain.pairs)
    sources = len({pair.first.run.source for pair in gain.pairs})
    return (
        f"| {gain.knob} | {len(gain.pairs)} | {sources} | {gain.predicted_pct:+.1f} | {gain.measured_pct:+.1f} | "
        f"{error:.3f} | {right} |"
    )


def observations_of(pairs: Iterable[Pair]) -> list[GainObservation]:
    """Pairs that change nothing but corrected settings, those of one source with one change together."""
    groups: defaultdict[tuple[object, ...], list[Pair]] = defaultdict(list)
    for pair in pairs:
        first, second = pair.first.run, pair.second.run
        of_first, of_second = settings_of(first), settings_of(second)
        differ = {name for name in of_first if of_first[name] != of_second[name]}
        stacks = {run.workload.framework for run in (first, second)}
        if "vpp" in differ:
            differ.discard("layer_split")  # other virtual stages cut the layers in other places
        if not differ <= MAY_CHANGE or len(stacks) > 1:
            continue
        words_of_first, words_of_second = (
            priced_settings(run.workload, run.layout) for run in (first, second)
        )
        changes = changes_between(words_of_first, words_of_second, CORRECTED)
        if changes:
            ahead = next(iter(changes.values()))
            turned = pair if ahead > 0 else replace(pair, first=pair.second, second=pair.first)
            key = tuple((name, ahead * sign) for name, sign in changes.items())
            work = first.workload
            groups[
                source_name(first), device_class(work.cluster.device.name), model_kind(work), key
            ].append(turned)
    return [_observation(key, group) for key, group in groups.items()]


def _observation(key: tuple[object, ...], group: Sequence[Pair]) -> GainObservation:
    source, device, kind, changes = key
    assert isinstance(changes, tuple)
    return GainObservation(
        source=str(source),
        device=None if device is None else str(device),
        kind=str(kind),
        changes=dict(changes),
        pairs=len(group),
        predicted=round(float(np.mean([log(pair.predicted) for pair in group])), 4),
        measured=round(float(np.mean([log(pair.measured) for pair in group])), 4),
    )


def spread_of(pairs: Sequence[Pair]) -> float:
    """Root mean square error of the logarithm of pairs."""
    return round(float(np.sqrt(np.mean([pair.error**2 for pair in pairs]))), 4)


def _varied(rows: Sequence[ScoredRow]) -> int:
    """Groups that regret counts of, where some corrected setting is used by some layouts and not by all."""
    settings: defaultdict[tuple[object, ...], list[frozenset[str]]] = defaultdict(list)
    for row in rows:
        if row.run is not None and row.measured and row.measured.step_time_s is not None:
            words = priced_settings(row.run.workload, row.run.layout)
            settings[same_work(row.run)].append(words.intersection(CORRECTED))
    groups = [group for group in settings.values() if len(group) >= LEAST_LAYOUTS]
    return sum(len(set(group)) > 1 for group in groups)


def posterior_regret(
    rows: Sequence[ScoredRow], observations: Sequence[GainObservation], spread: float
) -> tuple[RegretGroup, ...]:
    """Regret of choosing by price times corrections, made without the sources of the group."""
    groups: defaultdict[tuple[object, ...], list[ScoredRow]] = defaultdict(list)
    for row in rows:
        if row.run is not None:
            groups[same_work(row.run)].append(row)
    corrected: list[ScoredRow] = []
    for group in groups.values():
        sources = {source_name(row.run) for row in group if row.run is not None}
        others = [each for each in observations if each.source not in sources]
        corrected += [_corrected(row, others, spread) for row in group]
    return plan_regret(corrected, LEAST_LAYOUTS)


def _corrected(row: ScoredRow, observations: Sequence[GainObservation], spread: float) -> ScoredRow:
    if row.run is None or row.predicted is None:
        return row
    work = row.run.workload
    device, kind = device_class(work.cluster.device.name), model_kind(work)
    corrections = GainCorrections(shifts=gain_posterior(observations, device, kind, spread))
    factor = corrections.of(priced_settings(work, row.run.layout))
    predicted = replace(row.predicted, step_time_s=row.predicted.step_time_s * factor)
    return replace(row, predicted=predicted)


def data_text(found: Posterior) -> str:
    """The text of costmodel/data/gain_posterior.yaml."""
    head = (
        "# Measured and predicted logarithms of what settings do to a step, a line for each source, class of device, kind\n"
        "# of model and change (1: the second run has it): `python -m benchmarks.gain_posterior`. Rows of the fit are\n"
        "# predicted with their source left out. costmodel/measured_settings.py makes the posterior of them.\n"
    )
    source = (
        f"root mean square error of the logarithm of {found.pairs} measured pairs, source left out"
    )
    lines = [
        f"spread: {{value: {found.spread}, source: '{source}'}}",
        "observations:",
        *(f"- {_flow(asdict(each))}" for each in found.observations),
    ]
    return head + "\n".join(lines) + "\n"


def _flow(record: dict[str, object]) -> str:
    text = yaml.safe_dump(record, default_flow_style=True, sort_keys=False, width=10_000)
    return str(text).strip()


def page(found: Posterior) -> str:
    """The text of docs/gains.md."""
    places = [(device, kind) for kind in KINDS_OF_MODEL for device in device_classes()]
    tables = {place: gain_posterior(found.observations, *place, found.spread) for place in places}
    counts = {name: shift.pairs for table in tables.values() for name, shift in table.items()}
    corrections = [
        f"| class of device, models | {' | '.join(f'{n} ({counts[n]})' for n in counts)} |"
    ]
    corrections.append("|" + "---|" * (len(counts) + 1))
    for (device, kind), table in tables.items():
        figures = " | ".join(_correction_words(table[name]) for name in counts)
        corrections.append(f"| {device}, {kind} | {figures} |")
    return PAGE_TEXT.format(
        spread=found.spread,
        least_pairs=LEAST_PAIRS,
        corrections="\n".join(corrections),
        observations="\n".join(map(_observation_line, found.observations)),
        knobs=knob_words(found.stated),
        regret=regret_words(found),
    )


def knob_words(stated: Iterable[Pair]) -> str:
    """A table of published pairs by setting, and why the mean of a setting of many pairs is off."""
    gains = knob_gains(stated)
    lines = [
        "| setting | pairs | sources | step predicted, % | step measured, % | error of the logarithm | direction right |",
        "|---|---|---|---|---|---|---|",
        *map(_knob_line, gains),
    ]
    reasons = [f"- **{gain.knob}**: {REASONS[gain.knob]}" for gain in gains if gain.far]
    return "\n".join([*lines, "", *reasons])


def _correction_words(shift: GainShift) -> str:
    return f"{100 * (shift.factor - 1):+.1f} ± {100 * shift.deviation:.1f}"


def _observation_line(each: GainObservation) -> str:
    words = [f"{'' if sign > 0 else 'no '}{name}" for name, sign in each.changes.items()]
    predicted, measured = (
        f"{100 * (exp(figure) - 1):+.1f}" for figure in (each.predicted, each.measured)
    )
    return (
        f"| {each.source} | {each.device}, {each.kind} | {', '.join(words)} | {each.pairs} | "
        f"{predicted} | {measured} |"
    )


def regret_words(found: Posterior) -> str:
    """Regret by price and by posterior in a table, and which of both the default objective is."""
    lines = [
        "| layouts of | groups | with and without a corrected setting | by price: mean % | worst % | "
        "by posterior: mean % | worst % | choice moves in |",
        "|---|---|---|---|---|---|---|---|",
    ]
    worse = False
    for name, before in found.by_price.items():
        after = found.by_posterior[name]
        of_before, of_after = ([g.regret_pct for g in groups] for groups in (before, after))
        moved = sum(b.chosen != a.chosen for b, a in zip(before, after, strict=True))
        lines.append(
            f"| {name} | {len(before)} | {found.varied[name]} | {_sums(of_before)} | {_sums(of_after)} | {moved} |"
        )
        better = np.mean(of_after) < np.mean(of_before) and max(of_after) < max(of_before)
        worse |= not better
    reason = (
        "The posterior is not better in both mean and worst, so that the default objective stays the price alone."
        if worse
        else "The posterior is better in mean and worst everywhere."
    )
    return "\n".join(lines) + f"\n\n{reason}"


def _sums(regret: Sequence[float]) -> str:
    return f"{np.mean(regret):.2f} | {max(regret):.2f}"


PAGE_TEXT = """# What measured pairs say of the gains of settings

Written by `python -m benchmarks.gain_posterior`. `plan --objective expected` without `--calibration` minimises the price of a layout times
the corrections of its settings below. A correction is of the step with the setting: above 0 where the setting saves less than the cost
model says. Before any pair it is 0 % with the error of pairs as its spread, {spread} of the logarithm (root mean square, source left
out). Each source's pairs of one change count as one observation with that spread, in full on the class of device with the kind of model,
by half with one of both, by a quarter elsewhere; where several settings change together, all share what is found. A setting is corrected
from {least_pairs} pairs on (in brackets: those of all devices). Figures are percent ± standard deviation; `costmodel/measured_settings.py`
has the formula, and [plan](commands/plan.md#the-expected-step) how a plan is chosen by them.

{corrections}

## The pairs
Two measured runs of one work and source that differ in these settings alone, and at most in the release of their stack, and published
pairs whose two runs can be said. Rows of the fit are predicted with their source left out. The step's change is the geometric mean.

| source | device, models | to | pairs | predicted, % | measured, % |
|---|---|---|---|---|---|
{observations}

## Published pairs by setting
Every published pair that has a price (`tests/data/published_pairs.yaml`, `tests/data/more_pairs.yaml`): one setting changes, from `from` to `to`
as its source writes it, so that the settings of a row may change in either direction. No constant was fitted to a pair, though some sources have
rows in the fit. Of settings with five pairs or more whose mean is told more than 5 points off, the reason stands below.

{knobs}

Compilation of float8 training (pytorch/torchtitan, pull request 812) takes 2.06 s eager where 2.32 s is told, 1.10 s compiled as told. The
casts of eager torchao are counted as torchao 0.8.0 has them, the latest release on the day of that run, whose own version is not stated. Eager
kernels are told too long at 16 bits as well, by a third of what they add: one attained HBM rate stands for them and for compiled ones.

No pair that states all it takes was found of DualPipe (its authors publish profiles, others formulas), of ZeRO++ (figures without their
numbers, and narrow weights and gradients on the wire have no price), of MegaScale-MoE (arXiv 2505.11432, table 5: no virtual stages, micro-batch
or recomputation), nor of FlashAttention-3 in a step that a run file can say (a recommender's with three labels a sequence, alibaba/TorchEasyRec).

## Regret
Groups of three or more measured layouts of one work without suspects: the measured step of the layout with the least figure over the
fastest measured one, less 1. The sources of a group are left out of its posterior.

{regret}
"""


def write(found: Posterior) -> None:
    """Writes the data and the page."""
    write_whole(DATA, data_text(found))
    write_whole(PAGE, page(found))


def main() -> None:
    """Works all out anew, prints and writes."""
    problem = Problem(read_runs(RUNS), free_records())
    known = problem.linearise(problem.start)
    seconds = leave_out(problem, source_of, problem.start, known, exact=False).seconds
    found = posterior_of(trusted_rows(problem.runs, seconds), unseen_runs(MORE)[:-2])
    print(regret_words(found))
    write(found)


if __name__ == "__main__":
    main()
