"""The plan against every published recipe of Megatron's family, as priced and as measured.

    python -m benchmarks.recipes [--groups WORD] [--seconds S] [--free] [-o docs/recipes.md]
    python -m benchmarks.recipes --measured

A group is a model, device, size, batch, sequence length and precision. Its plan may use whatever the makers of
recipes do (`--allow all`) and memory as it is predicted, without a margin (`--memory-risk 0.5`): recipes run on
the edge of HBM. It is searched for with the degrees of the cheapest recipe pinned, which bounds the whole plan
from above in seconds, and freely where that costs more than the recipe, or everywhere with `--free`. The faster
of the two stands in the table, with the search that gave it. WORD keeps the groups whose name has it; S bounds
each search. With --measured only the measured runs that plans are held beside are written anew.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from benchmarks.optimum_bands import (
    SUPPORT_WORDS,
    MeasuredSettings,
    PlannedGroup,
    bands,
    coverage,
    document,
    recipes_text,
    settings_of_runs,
    supports,
)
from meshwright.costmodel.measured_settings import model_kind, priced_settings
from meshwright.costmodel.records import POINT_ESTIMATE, device_class, error_band
from meshwright.costmodel.stacks import stack_constants
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.frameworks.megatron import MEGATRON
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.plan.measured_share import RECIPES_TABLE
from meshwright.planner.request.choices import ALLOW
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.prediction import (
    RunPrediction,
    broken_rules,
    planned_workload,
    predict_run,
)
from meshwright.planner.runs.run_file import Run, read_rows, read_runs
from meshwright.planner.runs.run_terms import layout_from_document
from meshwright.planner.runs.validation import source_name

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
FILES = (DATA / "published_runs.yaml", *sorted((DATA / "recipes").glob("*.yaml")))
UNSEEN = tuple(sorted((DATA / "more_runs").glob("*.yaml")))
MEASURED = DATA.parent.parent / "costmodel" / "data" / RECIPES_TABLE
BANDS = DATA.parent.parent / "costmodel" / "data" / "optimum_bands.yaml"
Group = tuple[str, str, int, int, int, str]
"""Model, device, GPUs, sequences, tokens and precision."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The plan of a group against its recipes, seconds of a step."""

    group: Group
    priced_s: float
    """Of the recipe that is priced lowest."""
    measured_s: float
    """Of the recipe that ran fastest."""
    rules: tuple[str, ...]
    """That some recipe breaks."""
    plan_s: float | None
    status: str
    """Of the search that gave the plan."""
    search: str
    """Which search gave the plan: free or pinned."""
    words: str
    saved: str
    """What the plan saves against the recipe, largest parts first, as priced."""
    source: str
    """Who measured the fastest."""
    device: str | None
    """Class of the device."""
    kind: str
    settings: frozenset[str]
    """Of the plan, as `priced_settings` names them."""


def recipes(files: Iterable[Path] = FILES) -> dict[Group, list[Run]]:
    """Measured runs of Megatron's family, by group."""
    groups = defaultdict(list)
    for path in files:
        for run in read_runs(path):
            work = run.workload
            of_megatron = framework_of_stack(work.framework) is MEGATRON
            timed = run.measured is not None and run.measured.step_time_s is not None
            # No plan of today is held against software without flash attention.
            of_today = stack_constants(replace(work, attention_kernel=None)).flash_attention
            if not of_megatron or not of_today or not timed:
                continue
            device = work.cluster.device.name
            batch = work.gpus, work.global_batch, work.seq_len, work.precision
            groups[work.model.name, device, *batch].append(run)
    return dict(groups)


def compared(group: Group, runs: Sequence[Run], seconds: float | None, free: bool) -> Comparison:
    """The plan of a group: every decision of a search takes at most so many seconds."""
    predictions = [(run, predict_run(run)) for run in runs]
    rules = {finding.rule for pair in predictions for finding in broken_rules(*pair)}
    cheapest = min(predictions, key=lambda pair: float(pair[1].estimate.step_time_s))[0]
    priced_s = min(float(predicted.estimate.step_time_s) for _, predicted in predictions)
    plan = pinned = fastest_plan(replace(_request(cheapest, seconds), pins=_pins(cheapest)))
    if free or _step_s(pinned) > priced_s:
        plan = min((pinned, fastest_plan(_request(cheapest, seconds))), key=_step_s)
    fastest = min(runs, key=_measured_s)
    settings: frozenset[str] = frozenset()
    if plan.layout is not None:
        workload = planned_workload(plan.inputs, plan.execution)
        settings = priced_settings(workload, layout_from_document(plan.layout))
    return Comparison(
        group=group,
        priced_s=priced_s,
        measured_s=_measured_s(fastest),
        rules=tuple(sorted(rules)),
        plan_s=plan.objective.step_time_s,
        status=plan.status,
        search="pinned" if plan is pinned else "free",
        words=_words(plan),
        saved=_saved(predictions, plan),
        source=source_name(fastest),
        device=device_class(fastest.workload.cluster.device.name),
        kind=model_kind(fastest.workload),
        settings=settings,
    )


def _measured_s(run: Run) -> float:
    assert run.measured is not None
    return inf if run.measured.step_time_s is None else run.measured.step_time_s


def _step_s(plan: Plan) -> float:
    step_s = plan.objective.step_time_s
    return inf if step_s is None else step_s


def _pins(run: Run) -> dict[str, int | str]:
    """The degrees of a recipe."""
    names = ["tp", "cp", "pp", "dp", "vpp", "micro_batch"]
    if run.workload.model.moe is not None:
        names += ["ep", "etp"]
    return {name: int(getattr(run.layout, name)) for name in names}


def _request(run: Run, seconds: float | None) -> PlanRequest:
    work = run.workload
    return PlanRequest(
        model=work.model,
        cluster=work.cluster,
        gpus=work.gpus,
        global_batch=work.global_batch,
        seq_len=work.seq_len,
        precision=work.precision,
        optimizer=work.optimizer,
        allow=ALLOW,
        memory_risk=POINT_ESTIMATE,
        time_limit_s=seconds,
    )


def _saved(predictions: Sequence[tuple[Run, RunPrediction]], plan: Plan) -> str:
    """Seconds by part that the plan spares the cheapest recipe."""
    if plan.predicted is None:
        return ""
    cheapest = min(predictions, key=lambda pair: float(pair[1].estimate.step_time_s))[1]
    ours = plan.predicted.breakdown_s
    theirs = {name: float(part) for name, part in cheapest.estimate.breakdown_s.items()}
    spared = {name: part - ours.get(name, 0.0) for name, part in theirs.items()}
    largest = sorted(spared, key=lambda name: -spared[name])[:3]
    return ", ".join(f"{name} {spared[name]:.3g} s" for name in largest if spared[name] > 0)


def _words(plan: Plan) -> str:
    """Degrees and execution choices of a plan in a few words."""
    layout, execution = plan.layout, plan.execution
    if layout is None or execution is None:
        return "none"
    names = ("tp", "cp", "pp", "vpp", "ep", "etp", "micro_batch")
    degrees = [f"{name} {getattr(layout, name)}" for name in names if getattr(layout, name) > 1]
    if layout.recompute != "none":
        degrees.append(f"{layout.recompute} {' '.join(layout.recompute_modules)}".strip())
    chosen = [f"graph {execution.cuda_graph}"] if execution.cuda_graph != "none" else []
    if layout.ep > 1:
        chosen.append(execution.moe_dispatch)
        chosen += ["ep overlap"] if execution.ep_overlap else []
    return ", ".join([*degrees, *chosen])


def planned_groups(comparisons: Iterable[Comparison]) -> list[PlannedGroup]:
    """The groups that have a plan, in the order of `comparisons`."""
    return [
        PlannedGroup(
            source=each.source,
            device=each.device,
            kind=each.kind,
            settings=each.settings,
            ratio=each.measured_s / each.plan_s,
        )
        for each in comparisons
        if each.plan_s is not None
    ]


def measured_runs() -> list[MeasuredSettings]:
    """Settings of every trusted run of the repository, whatever its stack."""
    return settings_of_runs(every_run())


def every_run() -> Iterator[Run]:
    """Every run of the repository that can be read, whatever its stack."""
    return (run for path in (*FILES, *UNSEEN) for run in _readable(path))


def _readable(path: Path) -> Iterator[Run]:
    return (row for row in read_rows(path) if isinstance(row, Run))


def _bands_words(comparisons: Sequence[Comparison]) -> str:
    groups, runs = planned_groups(comparisons), measured_runs()
    if len({each.source for each in groups}) < 2:
        return ""
    planned = [each for each in comparisons if each.plan_s is not None]
    lows = {
        number: error_band(each.group[1], MEGATRON.name).low for number, each in enumerate(planned)
    }
    inside, every = coverage(groups, runs, lows)
    table = bands(groups, supports(groups, runs))
    rows = [
        f"| {band['basis']} | {band['groups']} | {band['low']:.3f} | {band['high']:.3f} |"
        for of_kind in table.values()
        for of_support in of_kind.values()
        for support, band in of_support.items()
        if band["basis"].endswith(SUPPORT_WORDS[support])
    ]
    plainly = sum(
        band.low <= group.ratio <= band.high
        for group, band in (
            (group, error_band(each.group[1], MEGATRON.name))
            for group, each in zip(groups, planned, strict=True)
        )
    )
    return _BANDS.format(
        rows="\n".join(rows), inside=inside, every=every, share=inside / every, plainly=plainly
    )


_BANDS = """
## The band of an optimum

A search picks what the cost model flatters most, so that the error of measured runs, which nobody picked by this model, is too narrow a
band for a plan. Its band is therefore that of the fastest measured step over the plan, 3rd and 97th percentile (which hold nine in ten of a source left out), by class of device, kind of
model and support: whether at least three measured runs on the class with the kind had all settings of the plan together, each of them in some
run, or not all. With n groups of its own such a set takes n / (n + 10) of their percentiles and the rest of the next wider one's (both without
the support, the class, the kind, all groups). The ends of measured runs count where they are wider. Part of the upper end is real, since
recipes are not optimal: what a plan takes lies between. Sets without a group of their own have the next wider one's band.

| groups | how many | measured over plan, 3rd percentile | 97th |
|---|---|---|---|
{rows}

With each source left out in turn, from the ratios and from the measured settings, {inside} of {every} fastest measured steps
({share:.0%}) lie in the band; the band of measured runs holds {plainly}.
"""


def page(comparisons: Sequence[Comparison], seconds: float | None) -> str:
    """The comparison as a Markdown page."""
    planned = [each for each in comparisons if each.plan_s is not None]
    prices = [each.plan_s / each.priced_s for each in planned if each.plan_s is not None]
    clocks = [each.plan_s / each.measured_s for each in planned if each.plan_s is not None]
    worse = sum(ratio > 1 + 1e-6 for ratio in prices)
    limit = "" if seconds is None else f", each search cut off after {seconds:g} s"
    head = f"""\
# Plans against published recipes

Written by `python -m benchmarks.recipes`{limit}. A group is a model, device, size, batch, sequence length and precision with a
recipe of Megatron's family in `tests/data`; the plan is that of `plan --allow all --memory-risk 0.5` with the degrees of the cheapest recipe pinned, which bounds
the whole plan from above, or searched for freely where that costs more. *Priced* is the cheapest recipe of the group as the cost model
prices it, *measured* the fastest that ran.

{len(comparisons)} groups; in {worse} the plan costs more than the recipe as priced. Median of plan over recipe {statistics.median(prices):.3f} as priced,
{statistics.median(clocks):.3f} as measured.

| model | device | GPUs | batch | tokens | precision | plan s | / priced | / measured | status | search | plan | rules that a recipe breaks |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""
    ordered = sorted(comparisons, key=lambda each: each.group)
    rows = [_row(each) for each in ordered]
    far = [_far_row(each) for each in ordered if _is_far(each)]
    return head + "\n".join(rows) + "\n" + _bands_words(ordered) + _FAR + "\n".join(far) + "\n"


_FAR_BELOW = 0.85
_FAR = f"""
## Plans under {_FAR_BELOW} of the fastest measurement

What the plan spares the recipe, by part. Where the recipe itself is priced far under its measurement, the cost model is too fast there.
*host* is what CUDA graphs take from the host's launches: on Hopper they leave experts in FP8 more than is priced (limits), so a gain of more
than a quarter from them there is to be tried before it is believed (Megatron-Bridge's guide reports up to 25 % off a step).
*attention* is mostly attention in FP8, which `--allow all` permits on Blackwell where both passes together gain by it.

| model | device | GPUs | batch | tokens | precision | plan / measured | recipe priced / measured | the plan spares |
|---|---|---|---|---|---|---|---|---|
"""


def _is_far(each: Comparison) -> bool:
    return each.plan_s is not None and each.plan_s < _FAR_BELOW * each.measured_s


def _far_row(each: Comparison) -> str:
    assert each.plan_s is not None
    ratios = [f"{each.plan_s / each.measured_s:.3f}", f"{each.priced_s / each.measured_s:.3f}"]
    return f"| {' | '.join([*map(str, each.group), *ratios, each.saved])} |"


def _row(each: Comparison) -> str:
    figures = ["", "", ""]
    if each.plan_s is not None:
        ratios = each.plan_s / each.priced_s, each.plan_s / each.measured_s
        figures = [f"{each.plan_s:.3f}", *(f"{ratio:.3f}" for ratio in ratios)]
    words = [each.status, each.search, each.words, ", ".join(each.rules)]
    cells = [*map(str, each.group), *figures, *words]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Compares every group that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", default="")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--free", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--measured", action="store_true")
    options = parser.parse_args()
    MEASURED.write_text(recipes_text(every_run()), encoding="utf-8")
    if options.measured:
        return
    comparisons = []
    for group, runs in recipes().items():
        if options.groups not in " ".join(map(str, group)):
            continue
        comparisons.append(compared(group, runs, options.seconds, options.free))
        print(_row(comparisons[-1]), flush=True)
    text = page(comparisons, options.seconds)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text, encoding="utf-8")
        if not options.groups:
            written = document(planned_groups(comparisons), measured_runs())
            BANDS.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
