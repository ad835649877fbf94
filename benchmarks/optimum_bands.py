"""The band of an optimum, from plans against the fastest measured step of the same work.

Written by `python -m benchmarks.recipes -o docs/recipes.md` into costmodel/data/optimum_bands.yaml, with the
settings that were measured, by class of device and kind of model. A band is the 3rd and 97th percentile of
log(measured / plan), which hold nine in ten of a source that they have not seen; with n groups of its own a class of device, kind of model and support takes n / (n + 10) of
theirs and the rest of the next wider set.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from benchmarks.error_bands import KINDS_OF_MODEL, leaning
from meshwright.costmodel.execution_names import PRETRAINING
from meshwright.costmodel.measured_settings import (
    OTHER_CLASS,
    Support,
    model_kind,
    priced_settings,
    support_of,
)
from meshwright.costmodel.records import device_class, device_classes
from meshwright.costmodel.workload import Execution
from meshwright.model_specs.parameters import parameter_count
from meshwright.planner.plan.measured_share import MeasuredRecipe
from meshwright.planner.runs.prediction import arrangement
from meshwright.planner.runs.run_file import Run
from meshwright.planner.runs.run_terms import layout_document
from meshwright.planner.runs.validation import source_name

SUPPORT_WORDS: dict[Support, str] = {
    "together": "settings measured together",
    "apart": "settings measured, but not together",
    "unmeasured": "with a setting that was not measured there",
}


@dataclass(frozen=True, kw_only=True)
class PlannedGroup:
    """A group of measured runs and its plan."""

    source: str
    """Who measured the fastest."""
    device: str | None
    """Class of the device."""
    kind: str
    settings: frozenset[str]
    """Of the plan."""
    ratio: float
    """Fastest measured over planned seconds."""


@dataclass(frozen=True, kw_only=True)
class MeasuredSettings:
    """The settings of one measured run."""

    source: str
    device: str | None
    kind: str
    settings: frozenset[str]


def settings_of_runs(runs: Iterable[Run]) -> list[MeasuredSettings]:
    """Of trusted runs with a step time."""
    return [
        MeasuredSettings(
            source=source_name(run),
            device=device_class(run.workload.cluster.device.name),
            kind=model_kind(run.workload),
            settings=priced_settings(run.workload, run.layout),
        )
        for run in runs
        if run.suspect is None and run.measured is not None and run.measured.step_time_s is not None
    ]


def supports(
    groups: Sequence[PlannedGroup], runs: Sequence[MeasuredSettings], without: str | None = None
) -> list[Support]:
    """How near measured runs lie to each plan; those of one source may be left out."""
    tables: dict[tuple[str | None, str], Counter[frozenset[str]]] = {}
    for run in runs:
        if run.source != without:
            tables.setdefault((run.device, run.kind), Counter())[run.settings] += 1
    empty: Counter[frozenset[str]] = Counter()
    return [
        support_of(each.settings, tables.get((each.device, each.kind), empty).items())[0]
        for each in groups
    ]


@dataclass(frozen=True, kw_only=True)
class _Band:
    """Logarithms of both ends, and the groups of the narrowest set that has any."""

    ends: NDArray[np.float64]
    groups: int
    basis: str


OUTER = (0.03, 0.97)
"""Of the groups at hand the 5th and 95th hold nine in ten, but of a source left out 88 %, and these 90 %."""


def outer_percentiles(ratios: Sequence[float]) -> NDArray[np.float64]:
    """The logarithms of both ends of what such ratios are drawn from.

    Of n ratios, the next one of their kind is below the k-th smallest in k of n + 1 cases (Hyndman and Fan, The
    American Statistician 50, 1996, definition 6).
    """
    return np.quantile(np.log(ratios), OUTER, method="weibull")


def _narrowed(wider: _Band, own: Sequence[PlannedGroup], basis: str) -> _Band:
    if not own:
        return wider
    ends = leaning(wider.ends, outer_percentiles([each.ratio for each in own]), len(own))
    return _Band(ends=ends, groups=len(own), basis=basis)


Bands = dict[str, dict[str, dict[Support, dict[str, Any]]]]
"""By class of device (`OTHER_CLASS` among them), kind of model and support."""


def bands(groups: Sequence[PlannedGroup], of_groups: Sequence[Support]) -> Bands:
    """Measured over planned seconds, each set leaning on the next wider one: any group, the kind of model, the
    class of device, both, and both with the support.
    """
    ends = outer_percentiles([each.ratio for each in groups])
    whole = _Band(ends=ends, groups=len(groups), basis="any device and model")
    supported = list(zip(groups, of_groups, strict=True))
    table: Bands = {}
    for device in [*device_classes(), OTHER_CLASS]:
        on_device = [each for each in groups if each.device == device]
        for kind in KINDS_OF_MODEL:
            words = f"models {KINDS_OF_MODEL[kind]}"
            of_kind = [each for each in groups if each.kind == kind]
            wide = _narrowed(whole, of_kind, f"{words} on any device")
            wide = _narrowed(wide, on_device, f"any model on {device}")
            both = [each for each in on_device if each.kind == kind]
            wide = _narrowed(wide, both, f"{words} on {device}")
            for support, said in SUPPORT_WORDS.items():
                own = [
                    each
                    for each, of_own in supported
                    if (each.device, each.kind, of_own) == (device, kind, support)
                ]
                band = _narrowed(wide, own, f"{words} on {device}, {said}")
                low, high = (round(float(end), 3) for end in np.exp(band.ends))
                record = {"low": low, "high": high, "groups": band.groups, "basis": band.basis}
                table.setdefault(device, {}).setdefault(kind, {})[support] = record
    return table


def coverage(
    groups: Sequence[PlannedGroup], runs: Sequence[MeasuredSettings], lows: Mapping[int, float]
) -> tuple[int, int]:
    """Groups whose fastest measured step lies in the band made without their source, and all groups.

    `lows` has the lower end of the band of measured runs for each group, by its number.
    """
    inside = 0
    for source in sorted({each.source for each in groups}):
        rest = [each for each in groups if each.source != source]
        table = bands(rest, supports(rest, runs))
        own = [number for number, each in enumerate(groups) if each.source == source]
        of_own = supports([groups[number] for number in own], runs, without=source)
        for number, support in zip(own, of_own, strict=True):
            group = groups[number]
            band = table[group.device or OTHER_CLASS][group.kind][support]
            inside += min(lows[number], band["low"]) <= group.ratio <= band["high"]
    return inside, len(groups)


def document(groups: Sequence[PlannedGroup], runs: Sequence[MeasuredSettings]) -> str:
    """The text of costmodel/data/optimum_bands.yaml."""
    measured: dict[str, dict[str, list[dict[str, Any]]]] = {}
    counts = Counter((run.device or "", run.kind, tuple(sorted(run.settings))) for run in runs)
    for (device, kind, settings), count in sorted(counts.items()):
        if device:
            rows = measured.setdefault(device, {}).setdefault(kind, [])
            rows.append({"runs": count, "settings": list(settings)})
    head = (
        "# Fastest measured step over the plan of the same work, 3rd and 97th percentile, and the settings of\n"
        "# measured runs by class of device and kind of model: `python -m benchmarks.recipes`. docs/recipes.md explains it.\n"
    )
    body = {"bands": bands(groups, supports(groups, runs)), "measured": measured}
    return head + yaml.safe_dump(body, sort_keys=False, default_flow_style=None, width=200)


def fastest_recipes(runs: Iterable[Run]) -> list[MeasuredRecipe]:
    """Of trusted pre-training runs with a step time, the fastest of each work, as the cost model holds them."""
    fastest: dict[tuple[Any, ...], Run] = {}
    for run in runs:
        if run.suspect is None and run.workload.kind == PRETRAINING and _seconds(run) < inf:
            work = run.workload
            size = parameter_count(work.model)
            batch = work.gpus, work.global_batch, work.seq_len, work.precision
            key = (work.model.layers, size, work.cluster.device.name, *batch)
            fastest[key] = min(fastest.get(key, run), run, key=_seconds)
    return [_recipe(run) for run in fastest.values()]


def _seconds(run: Run) -> float:
    timed = run.measured is not None and run.measured.step_time_s is not None
    return (run.measured.step_time_s or inf) if timed and run.measured is not None else inf


def _recipe(run: Run) -> MeasuredRecipe:
    work = run.workload
    layout = layout_document(run.layout, arrangement(run)[0]).model_dump(mode="json")
    plain = {"sequence_parallel": False, "recompute": "none", "recompute_modules": []}
    plain |= {"zero_stage": 0, "optimizer_offload": 0, "recompute_layers": 0, "schedule": "1f1b"}
    left_out = ("stages", "num_micro_batches")
    settings = asdict(Execution.within(work).of_layout(run.layout))
    usual = asdict(Execution())
    return MeasuredRecipe(
        id=run.id,
        source=source_name(run),
        model=work.model.name,
        kind=model_kind(work),
        layers=work.model.layers,
        parameters=parameter_count(work.model),
        device=work.cluster.device.name,
        gpus=work.gpus,
        global_batch=work.global_batch,
        seq_len=work.seq_len,
        precision=work.precision,
        framework=work.framework,
        step_time_s=_seconds(run),
        settings=tuple(sorted(priced_settings(work, run.layout))),
        layout={
            name: value
            for name, value in layout.items()
            if name not in left_out and value != plain.get(name, 1)
        },
        execution={name: value for name, value in settings.items() if value != usual[name]},
    )


def recipes_text(runs: Iterable[Run]) -> str:
    """The text of costmodel/data/measured_recipes.json, a run a line."""
    rows = [json.dumps(asdict(recipe)) for recipe in fastest_recipes(runs)]
    return '{"recipes": [\n' + ",\n".join(rows) + "\n]}\n"
