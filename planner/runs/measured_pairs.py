"""Pairs of measured runs of the same work that differ in layout or settings: what choosing needs.

A prediction may be off by the same factor for all layouts and still choose right. A pair asks for the ratio
of two times, so such a factor cancels; what is left is what the choice between the two rests on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from meshwright.costmodel.execution import Execution
from meshwright.costmodel.layout import Recompute
from meshwright.planner.runs.run_file import Run

LEAST_DIFFERENCE = 0.02
"""Pairs whose times differ by less are left out: one layout measured twice is 1.7 % apart on average."""
MOST_KNOBS = 2
"""Pairs that differ in more settings say nothing of a single one."""
_LAYOUT_KNOBS = (
    "tp", "cp", "pp", "ep", "etp", "vpp", "micro_batch", "sequence_parallel", "zero_stage", "shard_groups",
    "optimizer_offload", "recompute_layers", "schedule",
)  # fmt: skip
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
        exclude={"fabric": True, "assumed": True, "sources": True, "device": {"sources"}}
    )
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
