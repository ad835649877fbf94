"""Predicted against measured: per row, summed up, and what following the predicted ranking would have cost.

The cost model is passed in as a function, so that scoring stays plain arithmetic.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.costmodel.layout import ROUNDING, Recompute
from meshwright.costmodel.workload import Execution
from meshwright.documents import frame_of
from meshwright.planner.request.choices import CHANGED_ALONE
from meshwright.planner.runs.run_file import Measured, Run, UnreadRow
from meshwright.planner.runs.stated_pairs import StatedPair, UnpricedPair

if TYPE_CHECKING:
    import pandas

# Pairs of measured runs of the same work that differ in layout or settings: what choosing needs.
#
# A prediction may be off by the same factor for all layouts and still choose right. A pair asks for the ratio
# of two times, so such a factor cancels; what is left is what the choice between the two rests on.


LEAST_DIFFERENCE = 0.02
"""Pairs whose times differ by less are left out: one layout measured twice is 1.7 % apart on average."""
MOST_KNOBS = 2
"""Pairs that differ in more settings say nothing of a single one."""
_LAYOUT_KNOBS = (*CHANGED_ALONE, "sequence_parallel", "recompute_layers")
"""Fields of a layout that are chosen; dp follows from the others."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A run with its predicted and its measured seconds a step, both above 0."""

    run: Run
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two runs of the same work; ratios are seconds of the second over those of the first."""

    first: MeasuredStep
    second: MeasuredStep
    knobs: tuple[str, ...]
    """Names of the settings that differ, sorted."""

    @property
    def predicted(self) -> float:
        """Predicted ratio."""
        return self.second.predicted_s / self.first.predicted_s

    @property
    def measured(self) -> float:
        """Measured ratio."""
        return self.second.measured_s / self.first.measured_s

    @property
    def error(self) -> float:
        """Absolute difference of the logarithms of the two ratios."""
        return float(abs(np.log(self.predicted) - np.log(self.measured)))

    @property
    def right(self) -> bool:
        """Whether the prediction says which of the two is faster."""
        return (self.predicted - 1.0) * (self.measured - 1.0) > 0


def same_work(run: Run) -> tuple[object, ...]:
    """What two runs share that do the same work on the same machine.

    Model and cluster count by what they are, not by the words written about them.

    Parameters
    ----------
    run : Run

    Returns
    -------
    tuple
        Of the model, the cluster, the GPUs, tokens a sequence and sequences a step.
    """
    work = run.workload
    model = work.model.model_dump_json(exclude={"source", "attention_note", "published_parameters"})
    cluster = work.cluster.model_dump_json(
        exclude={
            "fabric": True, "assumed": True, "sources": True, "measured": True, "device": {"sources"}
        }
    )  # fmt: skip
    return model, cluster, work.gpus, work.seq_len, work.global_batch


def source_name(run: Run) -> str:
    """What a source is called: the words before its first semicolon.

    Parameters
    ----------
    run : Run

    Returns
    -------
    str
        Never empty.
    """
    return run.source.split(";")[0].strip() or "not stated"


def pairs_of(rows: Iterable[MeasuredStep]) -> list[Pair]:
    """Every pair of one source, work and precision whose measured times differ by at least 2 %.

    Two measurements of the same settings, by one release or by two, are no pair.

    Parameters
    ----------
    rows : iterable of MeasuredStep

    Returns
    -------
    list of Pair
        The first is the one with the lower values of the settings that differ, in the order of their names.
    """
    groups: defaultdict[tuple[object, ...], list[MeasuredStep]] = defaultdict(list)
    for row in rows:
        groups[(*same_work(row.run), row.run.workload.precision, source_name(row.run))].append(row)
    return [pair for group in groups.values() for pair in _pairs_in(group)]


def _pairs_in(group: Sequence[MeasuredStep]) -> Iterator[Pair]:
    settings = [settings_of(row.run) for row in group]
    for (a, of_a), (b, of_b) in combinations(zip(group, settings, strict=True), 2):
        times = sorted((a.measured_s, b.measured_s))
        if times[1] < times[0] * (1.0 + LEAST_DIFFERENCE):
            continue
        knobs = tuple(sorted(name for name in of_a if of_a[name] != of_b[name]))
        if not set(knobs) - {"framework"}:
            continue
        in_order = all(_rank(of_a[name]) == _rank(of_b[name]) for name in knobs) or (
            [_rank(of_a[name]) for name in knobs] < [_rank(of_b[name]) for name in knobs]
        )
        first, second = (a, b) if in_order else (b, a)
        yield Pair(first=first, second=second, knobs=knobs)


def _rank(value: Any) -> tuple[float, str]:
    """Orders values of one setting: numbers by size, words by the alphabet after 'none' and 'off'."""
    if isinstance(value, bool | int | float):
        return float(value), ""
    return (0.0, "") if value in {None, "none"} else (1.0, str(value))


def settings_of(run: Run) -> dict[str, Any]:
    """What was chosen for a run: degrees, memory and schedule of its layout, and its execution.

    Parameters
    ----------
    run : Run

    Returns
    -------
    dict of str to number, str or None
    """
    layout, work = run.layout, run.workload
    chosen: dict[str, Any] = {name: getattr(layout, name) for name in _LAYOUT_KNOBS}
    mask = Recompute(int(layout.recompute))
    words = "+".join(str(part.name).lower() for part in mask)
    chosen["recompute"] = words or "none"
    split = "" if run.stages is None else str(run.stages)
    return {
        **chosen,
        **vars(Execution.within(work)),
        "layer_split": split,
        "attention_kernel": work.attention_kernel,
        "framework": run.framework_words,
    }


def pair_sums(pairs: Sequence[Pair]) -> dict[str, Any]:
    """How well ratios are predicted.

    Parameters
    ----------
    pairs : sequence of Pair

    Returns
    -------
    dict
        `n` pairs; `error`, the mean difference of logarithms, at least 0; `direction`, the share of pairs
        whose faster run is predicted, 0 to 1. None without pairs.
    """
    if not pairs:
        return {"n": 0, "error": None, "direction": None}
    return {
        "n": len(pairs),
        "error": float(np.mean([pair.error for pair in pairs])),
        "direction": float(np.mean([pair.right for pair in pairs])),
    }


def gains_of(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """What each setting brings, by device: geometric means of the ratios of times.

    Parameters
    ----------
    pairs : sequence of Pair

    Returns
    -------
    list of dict
        A row for each setting, or two that change together, and device: `knob`, `device`, `pairs`,
        `predicted` and `measured` (below 1: faster with the higher value), `error`, `direction`.
    """
    groups: defaultdict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        if 1 <= len(pair.knobs) <= MOST_KNOBS:
            device = pair.first.run.workload.cluster.device.name
            groups[" and ".join(pair.knobs), device].append(pair)
    rows = []
    for (knob, device), group in sorted(groups.items()):
        means = {
            name: float(np.exp(np.mean([np.log(getattr(pair, name)) for pair in group])))
            for name in ("predicted", "measured")
        }
        sums = pair_sums(group)
        rows.append(
            {"knob": knob, "device": device, "pairs": sums.pop("n"), **means, **sums},
        )
    return rows


FAILED_ERROR_PCT = 100.0
"""A row that cannot be predicted counts with this error, so that failing never looks better than guessing."""
REGRET_GROUP = 4
"""Rows that share model, cluster, sequence length and global batch form a group from this many on, if not all
have the same settings."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the cost model expects: seconds of one step, and the peak memory of one GPU in GiB."""

    step_time_s: float
    memory_gib: float | None = None
    fit_probability: float | None = None
    """How likely the run is to fit into HBM."""


Predict = Callable[[Run], Prediction]
"""Raises ValueError or ArithmeticError where the cost model has no answer."""


@dataclass(frozen=True, kw_only=True)
class ScoredRow:
    """One row: predicted, measured, and the signed errors in percent (positive: predicted too much)."""

    id: str
    run: Run | None
    measured: Measured | None
    predicted: Prediction | None = None
    failed: str | None = None

    @property
    def error_s(self) -> float | None:
        """Predicted minus measured seconds; None without either."""
        if self.predicted is None or self.measured is None or self.measured.step_time_s is None:
            return None
        return self.predicted.step_time_s - self.measured.step_time_s

    @property
    def error_pct(self) -> float | None:
        """None without a measured step; FAILED_ERROR_PCT where the prediction failed."""
        step_s = None if self.measured is None else self.measured.step_time_s
        if self.failed is not None:
            return None if self.run is not None and step_s is None else FAILED_ERROR_PCT
        return _error_pct(None if self.predicted is None else self.predicted.step_time_s, step_s)

    @property
    def memory_error_pct(self) -> float | None:
        """Likewise of memory."""
        gib = None if self.measured is None else self.measured.memory_gib
        if self.failed is not None:
            return None if gib is None else FAILED_ERROR_PCT
        return _error_pct(None if self.predicted is None else self.predicted.memory_gib, gib)


@dataclass(frozen=True, kw_only=True)
class ErrorSummary:
    """Sums over rows, in percent. Mean, median, p90 (linear interpolation) and worst are of
    absolute errors."""

    count: int
    failed: int
    mean_error_pct: float | None = None
    median_error_pct: float | None = None
    p90_error_pct: float | None = None
    worst_error_pct: float | None = None
    bias_pct: float | None = None
    """Mean signed error of the rows that did not fail."""


@dataclass(frozen=True, kw_only=True)
class Feasibility:
    """Rows by what happened, and of them those that were told so."""

    ran: int
    ran_told_fit: int
    out_of_memory: int
    out_of_memory_told: int


@dataclass(frozen=True, kw_only=True)
class RegretGroup:
    """Alternatives for one model, cluster and batch, and what the one predicted fastest would have cost."""

    model: str
    device: str
    gpus: int
    seq_len: int
    global_batch: int
    rows: int
    chosen: str
    """The row predicted fastest; the first in file order among equals."""
    tied: int
    """Alternatives with that same predicted time, the chosen one included; rows of one setting are one."""
    fastest: str
    regret_pct: float
    """Measured time of the chosen alternative, or the mean of the tied ones, over the best one, minus 1."""
    least_pct: float
    """The least regret among all sets of tied ones: no order of these predictions would do better."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ValidationReport:
    """Everything that `validate` prints."""

    rows: tuple[ScoredRow, ...]
    regret: tuple[RegretGroup, ...]
    """Without suspect rows."""
    regret_with_suspects: tuple[RegretGroup, ...]
    stated_pairs: tuple[Pair, ...] = ()
    """Of a list of pairs, in place of rows; `first` has the measured time 1."""
    unpriced_pairs: tuple[UnpricedPair, ...] = ()

    def summary(self) -> dict[str, Any]:
        """The sums as plain data: step time overall, by suspicion and by kind of row; memory; regret."""
        rows = self.rows
        trusted = [row for row in rows if not _is_suspect(row)]
        suspects = [row for row in rows if _is_suspect(row)]
        step_time = {f"by_{name}": _by(rows, kind) for name, kind in KINDS.items()}
        memory = {f"by_{name}": _by(rows, kind, memory=True) for name, kind in KINDS.items()}
        with_suspects = _regret_sums(self.regret_with_suspects)
        stated = [pair for pair in self.stated_pairs if _apart(pair.measured)]
        pairs = pairs_of(measured_steps(trusted)) + stated
        return {
            **_plain(summarise(rows)),
            "without_suspects": _plain(summarise(trusted)),
            "suspects": _plain(summarise(suspects)),
            **step_time,
            "memory": _plain(summarise_memory(rows)) | memory,
            "regret": _regret_sums(self.regret) | {"with_suspects": with_suspects},
            "feasibility": _plain(feasibility(rows)),
            "pairs": pair_sums(pairs),
            "gains": gains_of(pairs),
        }

    def __repr__(self) -> str:
        rows, pairs = len(self.rows), len(self.stated_pairs)
        return f"ValidationReport({rows} rows, {pairs} stated pairs)"

    def to_frame(self) -> pandas.DataFrame:
        """The rows as a table of pandas, a measured run in each; of a list of pairs, a pair in each.

        Figures that both sides have stand in two columns, such as `predicted_step_time_s` and
        `measured_step_time_s`. Raises InputError where pandas is not installed.
        """
        if self.stated_pairs and not self.rows:
            return frame_of(map(_pair_document, self.stated_pairs))
        return frame_of(map(_flat_row, self.rows))

    def as_document(self) -> dict[str, Any]:
        """What `validate --json` prints; see the field names of the rows in `_row_document`."""
        return {
            "schema": 1,
            "rows": [_row_document(row) for row in self.rows],
            "summary": self.summary(),
            "regret": [_plain(group) for group in self.regret],
            "pairs": [_pair_document(pair) for pair in self.stated_pairs],
            "unpriced_pairs": [_plain(pair) for pair in self.unpriced_pairs],
        }


def _apart(ratio: float) -> bool:
    """Whether two times of this ratio differ by `LEAST_DIFFERENCE` or more."""
    return max(ratio, 1.0 / ratio) >= 1.0 + LEAST_DIFFERENCE


def _pair_document(pair: Pair) -> dict[str, Any]:
    return {
        "id": pair.first.run.id,
        "source": pair.first.run.source,
        "knob": pair.knobs[0],
        "device": pair.first.run.workload.cluster.device.name,
        "predicted": pair.predicted,
        "measured": pair.measured,
        "error": pair.error,
        "right": pair.right,
        "remarks": list(pair.first.run.remarks),
    }


def score_pairs(rows: Iterable[StatedPair | UnpricedPair], predict: Predict) -> ValidationReport:
    """Predicts both runs of every pair of a list. What has no price is counted, with the reason.

    Parameters
    ----------
    rows : iterable of StatedPair or UnpricedPair
    predict : Predict

    Returns
    -------
    ValidationReport
        Without rows.
    """
    pairs, unpriced = [], []
    for row in rows:
        if isinstance(row, UnpricedPair):
            unpriced.append(row)
            continue
        try:
            first_s, second_s = (predict(run).step_time_s for run in (row.first, row.second))
        except (ValueError, ArithmeticError) as error:
            reason = f"no price: {str(error) or type(error).__name__}"
            unpriced.append(UnpricedPair(id=row.id, knob=row.knob, reason=reason))
            continue
        # Rates of two batches are compared by the time of as many tokens.
        second_s *= _tokens(row.first) / _tokens(row.second)
        first = MeasuredStep(run=row.first, predicted_s=first_s, measured_s=1.0)
        second = MeasuredStep(run=row.second, predicted_s=second_s, measured_s=row.ratio)
        pairs.append(Pair(first=first, second=second, knobs=(row.knob,)))
    return ValidationReport(
        rows=(),
        regret=(),
        regret_with_suspects=(),
        stated_pairs=tuple(pairs),
        unpriced_pairs=tuple(unpriced),
    )


def _tokens(run: Run) -> int:
    return run.workload.global_batch * run.workload.seq_len


def score(rows: Iterable[Run | UnreadRow], predict: Predict) -> ValidationReport:
    """Predicts every row and compares. Rows that could not be read, or predicted, count as failed.

    Parameters
    ----------
    rows
        Of a file, read or not.
    predict
        From a run to its step and its peak.
    """
    scored = tuple(_scored(row, predict) for row in rows)
    return ValidationReport(
        rows=scored,
        regret=plan_regret([row for row in scored if not _is_suspect(row)]),
        regret_with_suspects=plan_regret(scored),
    )


def _scored(row: Run | UnreadRow, predict: Predict) -> ScoredRow:
    if isinstance(row, UnreadRow):
        return ScoredRow(id=row.id, run=None, measured=row.measured, failed=row.reason)
    unpriced = ScoredRow(id=row.id, run=row, measured=row.measured)
    try:
        predicted = predict(row)
    except (ValueError, ArithmeticError) as error:
        return replace(unpriced, failed=str(error) or type(error).__name__)
    for value in (predicted.step_time_s, predicted.memory_gib):
        if value is not None and not (math.isfinite(value) and value > 0):
            return replace(unpriced, failed=f"not a prediction: {predicted}")
    return replace(unpriced, predicted=predicted)


def _error_pct(predicted: float | None, measured: float | None) -> float | None:
    if predicted is None or measured is None:
        return None
    return 100.0 * (predicted - measured) / measured


def summarise(rows: Sequence[ScoredRow]) -> ErrorSummary:
    """Sums of the step-time errors of the rows that have one.

    Parameters
    ----------
    rows
        Predicted or failed; a failed one counts with `FAILED_ERROR_PCT`.
    """
    return _sums([(row.error_pct, row.failed is not None) for row in rows])


def summarise_memory(rows: Sequence[ScoredRow]) -> ErrorSummary:
    """Sums of the memory errors of the rows that have one.

    Parameters
    ----------
    rows
        As `summarise` takes them; those without a measured peak are left out.
    """
    return _sums([(row.memory_error_pct, row.failed is not None) for row in rows])


def _sums(rows: Iterable[tuple[float | None, bool]]) -> ErrorSummary:
    """Sums of (error, whether the row failed); rows without an error are left out."""
    errors = [(error, failed) for error, failed in rows if error is not None]
    failures = sum(failed for _, failed in errors)
    if not errors:
        return ErrorSummary(count=0, failed=failures)
    absolute = np.abs([error for error, _ in errors])
    signed = [error for error, failed in errors if not failed]
    return ErrorSummary(
        count=len(errors),
        failed=failures,
        mean_error_pct=float(absolute.mean()),
        median_error_pct=float(np.median(absolute)),
        p90_error_pct=float(np.percentile(absolute, 90)),
        worst_error_pct=float(absolute.max()),
        bias_pct=float(np.mean(signed)) if signed else None,
    )


def feasibility(rows: Sequence[ScoredRow]) -> Feasibility:
    """Of the rows that say whether they ran, how many are told right. A failed row is told wrong.

    Parameters
    ----------
    rows
        Of which those without `measured` say nothing.
    """
    fits = [(row.measured, _told_fit(row)) for row in rows if row.measured is not None]
    out_of_memory = [foreseen for measured, foreseen in fits if measured.out_of_memory]
    ran = [foreseen for measured, foreseen in fits if not measured.out_of_memory]
    return Feasibility(
        ran=len(ran),
        ran_told_fit=sum(foreseen is True for foreseen in ran),
        out_of_memory=len(out_of_memory),
        out_of_memory_told=sum(foreseen is False for foreseen in out_of_memory),
    )


def _told_fit(row: ScoredRow) -> bool | None:
    """Whether a row is predicted to fit; None where that is not known."""
    if row.predicted is None or row.predicted.fit_probability is None:
        return None
    return row.predicted.fit_probability > 0.5


@dataclass(frozen=True, kw_only=True)
class _Alternative:
    """The rows of a group that a plan could not choose between: repeats, and releases of one stack."""

    run: Run
    """The first in file order."""
    rows: int
    measured_s: float
    predicted_s: float | None
    """Means; None where no row has a prediction."""


def plan_regret(
    rows: Sequence[ScoredRow], least_rows: int = REGRET_GROUP
) -> tuple[RegretGroup, ...]:
    """Regret of every group of at least so many measured rows that offers a choice of settings.

    Rows with the same settings count by the mean of their times: the fastest of several repeats is luck, and
    which release they ran is not chosen. A failed row is never ranked fastest; where every row of a group
    failed, the slowest counts as chosen.

    Parameters
    ----------
    rows
        Rows of a run file, predicted and measured.
    least_rows
        Of a group.
    """
    groups: defaultdict[tuple[object, ...], list[tuple[Run, float, float | None]]]
    groups = defaultdict(list)
    for row in rows:
        measured_s = None if row.measured is None else row.measured.step_time_s
        if row.run is not None and measured_s is not None:
            predicted_s = None if row.predicted is None else row.predicted.step_time_s
            groups[same_work(row.run)].append((row.run, measured_s, predicted_s))
    large = [_alternatives(group) for group in groups.values() if len(group) >= least_rows]
    return tuple(_regret(group) for group in large if len(group) > 1)


def _alternatives(rows: Sequence[tuple[Run, float, float | None]]) -> list[_Alternative]:
    """Runs, measured and predicted times, by precision and settings; releases of a stack are no setting."""
    alike: defaultdict[tuple[object, ...], list[tuple[Run, float, float | None]]]
    alike = defaultdict(list)
    for row in rows:
        work = row[0].workload
        settings = settings_of(row[0]) | {"framework": work.framework}
        alike[(work.precision, *settings.values())].append(row)
    alternatives = []
    for group in alike.values():
        runs, measured, predicted = zip(*group, strict=True)
        priced = [predicted_s for predicted_s in predicted if predicted_s is not None]
        alternatives.append(
            _Alternative(
                run=runs[0],
                rows=len(group),
                measured_s=float(np.mean(measured)),
                predicted_s=float(np.mean(priced)) if priced else None,
            )
        )
    return alternatives


def _regret(group: Sequence[_Alternative]) -> RegretGroup:
    ranked = [(each.predicted_s, each) for each in group if each.predicted_s is not None]
    fastest = min(group, key=lambda each: each.measured_s)
    if ranked:
        predicted_s, chosen = min(ranked, key=lambda member: member[0])
        tied_s = _tied_s(ranked, predicted_s)
        least_s = min(float(np.mean(_tied_s(ranked, time_s))) for time_s, _ in ranked)
    else:
        chosen = max(group, key=lambda each: each.measured_s)
        tied_s = [chosen.measured_s]
        least_s = chosen.measured_s
    work = fastest.run.workload
    return RegretGroup(
        model=work.model.name,
        device=work.cluster.device.name,
        gpus=work.gpus,
        seq_len=work.seq_len,
        global_batch=work.global_batch,
        rows=sum(each.rows for each in group),
        chosen=chosen.run.id,
        tied=len(tied_s),
        fastest=fastest.run.id,
        # Rounding may take the mean of equal times below them.
        regret_pct=max(100.0 * (float(np.mean(tied_s)) / fastest.measured_s - 1.0), 0.0),
        least_pct=max(100.0 * (least_s / fastest.measured_s - 1.0), 0.0),
    )


def _tied_s(ranked: Sequence[tuple[float, _Alternative]], predicted_s: float) -> list[float]:
    """Measured times of the alternatives whose predicted time is this one."""
    return [
        each.measured_s
        for time_s, each in ranked
        if predicted_s / (1 + ROUNDING) <= time_s <= predicted_s * (1 + ROUNDING)
    ]


def _regret_sums(groups: Sequence[RegretGroup]) -> dict[str, Any]:
    regrets = [group.regret_pct for group in groups]
    return {
        "groups": len(regrets),
        "mean_pct": float(np.mean(regrets)) if regrets else None,
        "worst_pct": max(regrets, default=None),
    }


def measured_steps(rows: Iterable[ScoredRow]) -> list[MeasuredStep]:
    """The rows that have both a predicted and a measured step.

    Parameters
    ----------
    rows
        Failed ones, and those with memory alone, are left out.
    """
    return [
        MeasuredStep(
            run=row.run,
            predicted_s=row.predicted.step_time_s,
            measured_s=row.measured.step_time_s,
        )
        for row in rows
        if row.run is not None and row.predicted is not None
        if row.measured is not None and row.measured.step_time_s is not None
    ]


def _is_suspect(row: ScoredRow) -> bool:
    return row.run is not None and row.run.suspect is not None


def _recompute_kind(run: Run) -> str:
    mask = Recompute(int(run.layout.recompute))
    if mask is Recompute.NONE:
        return "none"
    return "full" if Recompute.FULL in mask else "selective"


KINDS: dict[str, Callable[[Run], str]] = {
    "source": source_name,
    "device": lambda run: run.workload.cluster.device.name,
    "precision": lambda run: run.workload.precision,
    "model_kind": lambda run: "dense" if run.workload.model.moe is None else "moe",
    "framework": lambda run: run.workload.framework,
    "recompute": _recompute_kind,
}
"""How rows are told apart in the sums. A source is named by what stands before its first semicolon."""


def _by(
    rows: Sequence[ScoredRow], kind: Callable[[Run], str], *, memory: bool = False
) -> dict[str, Any]:
    groups: defaultdict[str, list[ScoredRow]] = defaultdict(list)
    for row in rows:
        if (row.memory_error_pct if memory else row.error_pct) is not None:
            groups["not read" if row.run is None else kind(row.run)].append(row)
    sums = summarise_memory if memory else summarise
    return {name: _plain(sums(groups[name])) for name in sorted(groups)}


def _plain(record: object) -> dict[str, Any]:
    return dict(vars(record))


def _flat_row(row: ScoredRow) -> dict[str, Any]:
    """A row without mappings inside it, with what was run."""
    flat: dict[str, Any] = {"id": row.id}
    if row.run is not None:
        work = row.run.workload
        flat |= {"model": work.model.name, "device": work.cluster.device.name, "gpus": work.gpus}
    for name, value in _row_document(row).items():
        if isinstance(value, dict):
            flat |= {f"{name}_{figure}": number for figure, number in value.items()}
        elif name not in ("predicted", "measured"):
            flat[name] = value
    return flat


def _row_document(row: ScoredRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "predicted": None if row.predicted is None else _plain(row.predicted),
        "measured": None if row.measured is None else _plain(row.measured),
        "error_s": row.error_s,
        "error_pct": row.error_pct,
        "memory_error_pct": row.memory_error_pct,
        "failed": row.failed,
        "suspect": row.run.suspect if row.run is not None else None,
        "remarks": [] if row.run is None else list(row.run.remarks),
    }
