"""What `meshwright verify` does: a plan and the files that start it, checked without the solver.

Nothing is searched. Prices, memory and rules are worked out again from the document, ranks are counted from
`ranks.csv`, launch files are read by the readers of `estimate --from-launch`.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from math import inf, isclose
from pathlib import Path
from typing import Any, get_args

import numpy as np
from pydantic import BaseModel

from meshwright.cluster_specs.allocation import fabric_levels, is_irregular, node_name
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.data_parallel import LEAST_GAIN
from meshwright.costmodel.estimate import estimate_layout
from meshwright.costmodel.layout import AXES, EXPERT_AXES, ROUNDING, Layout
from meshwright.costmodel.placement import placement_on
from meshwright.costmodel.rates import peak_memory_band, step_time_band
from meshwright.costmodel.records import ErrorBand
from meshwright.costmodel.recount import blocks_left, recounted_placement
from meshwright.costmodel.workload import Execution
from meshwright.documents import (
    LARGE_FILE_BYTES,
    path_text,
    program_version,
    read_mapping,
    read_text,
)
from meshwright.errors import InfeasibleError, InputError, MeshwrightError, shown
from meshwright.frameworks.deepspeed import DEEPSPEED
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.bounds.mappings import (
    MEGATRON_DEFAULT,
    MEGATRON_TP_PP_DP,
    mappings_of,
    ranks_on,
)
from meshwright.planner.launch.plan_files import TARGETS, pipeline_files, plan_files, stand_in
from meshwright.planner.launch.writer import unlaunched
from meshwright.planner.mapping.slots import Place
from meshwright.planner.mixed.document import (
    MixedPlan,
    MixedSolverDoc,
    mixed_plan_path,
    read_mixed_plan,
    request_of_parts,
)
from meshwright.planner.mixed.service import changed_parts, changes_of_parts, moved_step_s
from meshwright.planner.mixed.verify import mixed_faults
from meshwright.planner.plan.assemble import (
    Claim,
    bindings,
    compared_choices,
    cut_binding,
    mapping_of_layout,
    memory_risk_document,
    predicted_use,
    software_needs,
    space_report,
    warnings,
)
from meshwright.planner.plan.best_plan import NO_MODEL
from meshwright.planner.plan.document import (
    MemoryRisk,
    Plan,
    Robustness,
    Scenario,
    SolverReport,
    digest_of,
)
from meshwright.planner.plan.measured_share import evidence_of
from meshwright.planner.plan.nodes import unused_nodes, words_of_full
from meshwright.planner.plan.robustness import (
    PARAMS,
    changes,
    described,
    gain_of,
    monotone_bound_s,
    same_winner,
    step_as_it_stands_s,
)
from meshwright.planner.plan.texts import (
    MIXED_FILE,
    NO_PLAN,
    plan_path,
    priced_of,
    read_plan,
    setup_of,
)
from meshwright.planner.plan.verify import faults, split_faults, wish_faults
from meshwright.planner.request.choices import OF_EXECUTION, OF_LAYOUT
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.launches.reader import read_launch
from meshwright.planner.runs.prediction import grades
from meshwright.planner.runs.run_terms import LayoutDoc, layout_document, layout_from_document
from meshwright.planner.search.model import solver_version
from meshwright.planner.search.space import space_of

# What a plan states, against what follows from its inputs, its layout and its mapping.


def stated_figure_faults(plan: Plan) -> Iterator[str]:
    """Everything in a plan document that does not follow from the rest of it, in words.

    The rules, sums and the price are those of `planner.plan.verify`; beyond them every figure that is
    printed is worked out again and compared.

    Parameters
    ----------
    plan
        Of any status. Only one with a layout, a mapping and a prediction is priced again.
    """
    request = PlanRequest.of_inputs(plan.inputs)
    yield from faults(request, plan)
    yield from _objective_faults(plan)
    if plan.layout is None or plan.mapping is None or plan.predicted is None:
        return
    yield from _figure_faults(request, plan)
    yield from _robustness_faults(request, plan)
    yield from _alternative_faults(request, plan)
    if plan.objective.lower_bound_s is not None:
        yield from _space_faults(request, plan)


def _objective_faults(plan: Plan) -> Iterator[str]:
    price_s, bound_s = plan.objective.step_time_s, plan.objective.lower_bound_s
    gap = None
    if price_s is not None and bound_s is not None:
        gap = (price_s - bound_s) / price_s
    yield from _differences("objective.gap", plan.objective.gap, gap)
    proof = plan.solver.proof
    if proof is not None:
        yield from _differences("solver.proof.incumbent_s", proof.incumbent_s, price_s)
        yield from _differences("solver.proof.lower_bound_s", proof.lower_bound_s, bound_s)
    if plan.status in ("infeasible", "unknown") and plan.layout is not None:
        yield f"status: {plan.status}, but there is a layout"


def _figure_faults(request: PlanRequest, plan: Plan) -> Iterator[str]:
    """Every printed figure against what the cost model makes of the layout on its ranks."""
    assert plan.layout is not None
    assert plan.mapping is not None
    assert plan.predicted is not None
    priced = priced_of(plan)
    execution = priced.execution.of_layout(priced.layout)
    workload = execution.applied(request.workload().on(int(priced.layout.gpus)))
    predicted, use = predicted_use(workload, priced)
    counted = layout_document(priced.layout, priced.stages)
    yield from _differences("layout", plan.layout, counted)
    if plan.execution is not None:
        # What the workload holds: a setting that the framework does not have is not among it.
        yield from _differences("execution", plan.execution, Execution.within(workload))
    yield from _differences("predicted", plan.predicted, predicted)
    mapping = mapping_of_layout(workload, priced).model_dump()
    if plan.mapping.ranks is None:
        mapping["ranks"] = None
    if not plan.mapping.matrix and not plan.mapping.levels:
        # `map` lists ranks alone.
        mapping["levels"] = []
    yield from _differences("mapping", plan.mapping, mapping)
    if plan.memory_risk is not None:
        expected = memory_risk_document(request, predicted)
        for name in ("asked", "remains", "room_gib"):
            stated_figure = getattr(plan.memory_risk, name)
            yield from _differences(f"memory_risk.{name}", stated_figure, getattr(expected, name))
        yield from _cost_of_room_faults(plan.memory_risk, predicted.step_time_s)
    yield from _idle_faults(request, plan, priced)
    reasons = [*bindings(request, workload, priced, predicted), *cut_binding(use)]
    yield from _differences("binding", plan.binding, reasons)
    yield from _software_faults(plan)
    yield from _choice_faults(plan)
    if plan.grades:
        yield from _differences("grades", plan.grades, grades(plan.layout, plan.predicted))
    if plan.evidence is not None:
        yield from _differences("evidence", plan.evidence, evidence_of(plan))
    spoken = list(warnings(request, priced, predicted, plan.idle))
    of_plan = [words for words in plan.warnings if not words.startswith(NO_MODEL)]
    yield from _differences("warnings", of_plan, spoken)


def _cost_of_room_faults(risk: MemoryRisk, step_s: float) -> Iterator[str]:
    """What a margin of memory costs, by the steps with it and without."""
    without_s, cost = risk.step_time_s_without, None
    if without_s is not None:
        cost = step_s / without_s - 1.0
        if without_s > step_s * (1 + ROUNDING):
            yield f"memory_risk.step_time_s_without: {without_s} is above the plan's {step_s}"
    elif risk.proven:
        yield "memory_risk.proven: true of no step"
    yield from _differences("memory_risk.cost", risk.cost, cost)


def _idle_faults(request: PlanRequest, plan: Plan, priced: Priced) -> Iterator[str]:
    idle_gpus = request.gpus - int(priced.layout.gpus)
    idle = plan.idle
    if idle is None:
        if idle_gpus:
            yield f"idle: {idle_gpus} GPUs have no rank, but none is said to be idle"
        return
    yield from _differences("idle.gpus", idle.gpus, idle_gpus)
    yield from _differences("idle.nodes", idle.nodes, unused_nodes(request, priced))
    full_s, bound_s = idle.full_step_time_s, idle.full_lower_bound_s
    words = "" if full_s is None else words_of_full(full_s, priced.step_time_s)
    if words not in idle.reason:
        yield f"idle.reason: {idle.reason!r} does not say of all GPUs that the best layout {words}"
    elif full_s is not None and not (bound_s or 0.0) <= full_s * (1 + ROUNDING):
        yield f"idle.full_lower_bound_s: {bound_s} is above the step on all GPUs, {full_s}"
    elif full_s is not None and idle.reason.endswith(words) and not _is_met(full_s, bound_s):
        yield f"idle.full_lower_bound_s: {bound_s} does not prove the step on all GPUs, {full_s}"


def _robustness_faults(request: PlanRequest, plan: Plan) -> Iterator[str]:
    robustness = plan.robustness
    if robustness is None:
        return
    workload = request.workload()
    band, memory = step_time_band(workload), peak_memory_band(workload)
    changed = list(changes(request, band, memory))
    rows = [change.words for change in changed]
    yield from _outline_faults(robustness, band, memory, rows)
    for change, scenario in zip(changed, robustness.scenarios, strict=False):
        step_time_s = step_as_it_stands_s(request, plan, change)
        where = f"robustness.scenarios, {change.words}"
        yield from _differences(where, scenario.step_time_s, step_time_s)
        least_s = monotone_bound_s(change, plan.objective.lower_bound_s, workload)
        yield from _scenario_faults(where, scenario, least_s)
        if scenario.winner is not None:
            on_changed = change.applied(request)
            yield from _next_best_faults(f"{where}: winner", on_changed, scenario.winner)


def _outline_faults(
    stated: Robustness, band: ErrorBand, memory: ErrorBand, changed: Sequence[str]
) -> Iterator[str]:
    """Bands, changes and the verdict of what is said of a plan whose prediction is off."""
    yield from _differences(
        "robustness.step_time_band", stated.step_time_band, (band.low, band.high)
    )
    yield from _differences("robustness.memory_band", stated.memory_band, (memory.low, memory.high))
    words = [scenario.change for scenario in stated.scenarios]
    yield from _differences("robustness.scenarios", words, list(changed))
    yield from _differences(
        "robustness.same_winner", stated.same_winner, same_winner(stated.scenarios)
    )


def _scenario_faults(where: str, scenario: Scenario, least_s: float = 0.0) -> Iterator[str]:
    """What the figures of a scenario do not say of each other; no plan is faster then than `least_s`."""
    now_s, best_s, loss = scenario.step_time_s, scenario.best_step_time_s, scenario.loss_at_most
    bound_s = None if now_s is None or loss is None else now_s / (1.0 + loss)
    yield from _claim_faults(where, scenario.status, scenario.proven, best_s, bound_s)
    if now_s is not None and (best_s is None or best_s > now_s * (1 + ROUNDING)):
        yield f"{where}: the fastest layout takes {best_s} s, the plan {now_s} s"
    if bound_s is not None and bound_s < least_s * (1 - ROUNDING):
        yield f"{where}.loss_at_most: {loss}, though no plan is faster than {least_s} s"
    winner = scenario.winner
    if winner is None:
        if now_s is not None and best_s is not None and best_s < now_s * (1 - PARAMS.same):
            yield f"{where}: {best_s} s is less than the plan's {now_s} s, but there is no winner"
        return
    yield from _differences(f"{where}: winner.step_time_s", winner.get("step_time_s"), best_s)
    slower = 0.0 if now_s is None or best_s is None else 100.0 * (best_s / now_s - 1.0)
    yield from _differences(f"{where}: winner.slower_pct", winner.get("slower_pct"), slower)


def _claim_faults(
    where: str, status: str, proven: bool, step_s: float | None, bound_s: float | None
) -> Iterator[str]:
    """A search's claim that its step and bound do not bear out."""
    if not status:
        return  # plans of earlier versions
    if status not in get_args(Claim) or (step_s is None) == (status in ("optimal", "feasible")):
        yield f"{where}: called {shown(status)} with a step of {step_s} s"
    elif proven != (status in ("optimal", "infeasible")):
        yield f"{where}.proven: {proven} of what is called {status}"
    if bound_s is None:
        return
    if step_s is None:
        if status == "infeasible" and bound_s < inf:
            yield f"{where}: called infeasible, yet with a lower bound of {bound_s} s"
    elif bound_s > step_s * (1 + ROUNDING):
        yield f"{where}: lower bound {bound_s} above the step of {step_s} s"
    elif status == "optimal" and not _is_met(step_s, bound_s):
        yield f"{where}: called optimal at {step_s} s and a lower bound of {bound_s} s"


def _is_met(step_s: float, bound_s: float | None) -> bool:
    """Whether a bound proves a step, but for what another size of gradient buckets may bring."""
    return bound_s is not None and bound_s >= step_s * (1 - LEAST_GAIN)


def _choice_faults(plan: Plan | MixedPlan) -> Iterator[str]:
    """Choices with values that the plan does not have, and claims that their own figures do not bear out."""
    if plan.layout is None or plan.execution is None:
        return
    made = {
        choice.name: (choice, value)
        for choice, value in compared_choices(plan.layout, plan.execution)
    }
    choices = plan.choices or []
    for stated in choices:
        where = f"choices, {stated.choice}"
        yield from _claim_faults(
            where,
            stated.status,
            stated.proven,
            stated.step_time_s_without,
            stated.lower_bound_s_without,
        )
        if stated.choice == "bucket_mb":
            yield from _differences(f"{where}.value", stated.value, plan.execution.bucket_mb)
            continue
        if stated.choice not in made:
            yield f"{where}: the plan does not make it"
            continue
        choice, value = made[stated.choice]
        yield from _differences(f"{where}.value", stated.value, value)
        unmeasured = stated.model_copy(
            update={"measured_gain": None, "pairs": 0, "measured_on": ""}
        )
        expected = described(unmeasured, choice, value, plan.inputs)
        yield from _differences(where, stated, expected)
    if [*choices] != sorted(choices, key=gain_of, reverse=True):
        yield "choices: not in the order of what they bring"


def _software_faults(plan: Plan | MixedPlan) -> Iterator[str]:
    if plan.layout is None or plan.execution is None:
        return
    needs = software_needs(plan.inputs, plan.layout, plan.execution)
    yield from _differences("installs", plan.installs, needs)


def _space_faults(request: PlanRequest, plan: Plan) -> Iterator[str]:
    """A search over another space than the request's, or a plan that this does not have."""
    solver, proof = plan.solver, plan.solver.proof
    if proof is not None:
        yield from _differences("solver.proof.method", proof.method, solver.method)
        yield from _differences("solver.proof.rounds", proof.rounds, solver.bound_rounds)
        bound_s = proof.lower_bound_s if proof.combinations else None
        yield from _differences("solver.proof.left_out_bound_s", proof.left_out_bound_s, bound_s)
        if not proof.kernels <= proof.combinations:
            yield f"solver.proof: {proof.kernels} kernels of {proof.combinations} combinations"
    assert plan.layout is not None
    if plan.execution is not None:
        layout = layout_from_document(plan.layout)
        execution = replace(plan.execution, bucket_mb=None).of_layout(layout)
        ways = [way for way in _ways(request, layout) if way == execution]
        outside = _outside_faults(request, layout, ways)
        yield from (f"the plan is {words}" for words in outside)
    if solver.space is not None:
        expected = space_report(request, space_of(request))
        yield from _differences("solver.space", solver.space, expected)


def _next_best_faults(
    where: str, request: PlanRequest, entry: Mapping[str, object]
) -> Iterator[str]:
    """A further layout that is none of the request's, or that takes another time on a regular fabric."""
    document = _layout_of_entry(request, entry)
    layout = layout_from_document(document)
    settings: dict[str, Any] = {
        choice.name: entry[choice.name] for choice in OF_EXECUTION if choice.name in entry
    }
    ways = [
        way for way in _ways(request, layout) if replace(way, **settings).of_layout(layout) == way
    ]
    broken = [*_entry_faults(request, document), *_outside_faults(request, layout, ways)]
    yield from (f"{where}: {words}" for words in broken)
    if broken or is_irregular(request.cluster):
        return
    works = [
        replace(request.workload(way).on(int(layout.gpus)), chooses_buckets=True) for way in ways
    ]
    placement = placement_on(works[0].cluster, layout, mappings_of(works[0], layout))
    stages = tuple(map(tuple, document.stages))
    estimates = [estimate_layout(workload, layout, placement, stages) for workload in works]
    least_s = min(float(np.min(each.step_time_s)) for each in estimates)
    stated_s = entry.get("step_time_s")
    # A mapping that keeps cuts below a limit may be a slower one.
    most_s = least_s * (1 + LEAST_GAIN) if request.max_cut_use >= 1 else inf
    if not isinstance(stated_s, float) or not least_s * (1 - ROUNDING) <= stated_s <= most_s:
        yield f"{where}: {shown(stated_s)} s a step, under its fastest mapping {least_s}"


def _layout_of_entry(request: PlanRequest, entry: Mapping[str, object]) -> LayoutDoc:
    """The layout of a further plan, whose entry leaves out what follows from the rest."""
    fields = {name: entry[name] for name in LayoutDoc.model_fields if name in entry}
    in_parallel = int(str(entry["dp"])) * int(str(entry["micro_batch"]))
    plain = {
        "sequence_parallel": int(str(entry["tp"])) > 1 and space_of(request).sequence_parallel,
        "num_micro_batches": request.global_batch // max(in_parallel, 1),
    }
    return LayoutDoc.model_validate(plain | fields)


def _entry_faults(request: PlanRequest, document: LayoutDoc) -> Iterator[str]:
    """What of a further layout does not make up the model and the batch, or itself."""
    yield from split_faults(request, document)
    yield from wish_faults(request, document)
    counted = layout_document(layout_from_document(document), tuple(map(tuple, document.stages)))
    yield from _differences("layout", document, counted)


def _ways(request: PlanRequest, layout: Layout) -> list[Execution]:
    """How a layout may be run, but for the size of its gradient buckets."""
    every = request.execution_options.executions()
    return list(dict.fromkeys(each.of_layout(layout) for each in every))


def _outside_faults(
    request: PlanRequest, layout: Layout, ways: Sequence[Execution]
) -> Iterator[str]:
    """Whether the space of a search has a layout, run in at least one way; in words where not."""
    if not space_of(request).has(layout):
        yield "no layout of the search's space"
    if not ways:
        yield "run in no way that the request leaves open"


def _alternative_faults(request: PlanRequest, plan: Plan) -> Iterator[str]:
    best_s = plan.objective.step_time_s or 0.0
    for number, alternative in enumerate(plan.alternatives):
        where = f"alternatives[{number}]"
        yield from _next_best_faults(where, request, alternative)
        step_time_s, slower_pct = alternative.get("step_time_s"), alternative.get("slower_pct")
        if not isinstance(step_time_s, float) or step_time_s < best_s * (1 - ROUNDING):
            yield f"{where}.step_time_s: {shown(step_time_s)} is less than the plan's {best_s}"
        else:
            expected = 100.0 * (step_time_s / best_s - 1.0)
            yield from _differences(f"{where}.slower_pct", slower_pct, expected)


def _differences(where: str, stated: object, expected: object) -> Iterator[str]:
    """Where plain data, documents or settings differ, by path."""
    stated, expected = _fields(stated), _fields(expected)
    if isinstance(stated, dict) and isinstance(expected, dict):
        for key in dict.fromkeys((*expected, *stated)):
            yield from _differences(f"{where}.{key}", stated.get(key), expected.get(key))
    elif _are_lists(stated, expected):
        for index, (one_part, other_part) in enumerate(zip(stated, expected, strict=True)):  # type: ignore[call-overload]
            yield from _differences(f"{where}[{index}]", one_part, other_part)
    elif not _same(stated, expected):
        yield f"{where}: {shown(stated)}, worked out again {shown(expected)}"


def _fields(value: object) -> object:
    """A document or an execution by its fields; anything else as it is."""
    if isinstance(value, Execution):
        return asdict(value)
    return value.model_dump() if isinstance(value, BaseModel) else value


def _are_lists(stated: object, expected: object) -> bool:
    if not isinstance(stated, list | tuple) or not isinstance(expected, list | tuple):
        return False
    return len(stated) == len(expected)


def _same(stated: object, expected: object) -> bool:
    if isinstance(stated, float) and isinstance(expected, float):
        return isclose(stated, expected, rel_tol=ROUNDING, abs_tol=1e-12)
    if isinstance(stated, list | tuple) and isinstance(expected, list | tuple):
        return list(stated) == list(expected)
    return stated == expected


# What a check of an audit is, and those that hold for every kind of plan.


MOST_LISTED = 20
"""Faults of one check that are listed; the others are counted."""
_UNREADABLE = (MeshwrightError, ValueError, ArithmeticError, LookupError, AssertionError)
"""What arithmetic on a damaged plan may end with."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    broken: tuple[str, ...] | None
    """What is wrong, in words; None where there was nothing to look at."""


def checked(name: str, faults: Callable[[], Iterator[str]]) -> Check:
    """The check of these faults; what cannot even be worked out is one of them.

    Parameters
    ----------
    name
        What is looked at, in a few words.
    faults
        Yields what is wrong, in words; called once, and may raise what a damaged plan makes arithmetic
        raise.
    """
    broken: list[str] = []
    try:
        broken.extend(dict.fromkeys(faults()))
    except _UNREADABLE as error:
        reason = str(error) or type(error).__name__
        broken.append(f"cannot be worked out: {reason}")
    beyond = len(broken) - MOST_LISTED
    if beyond > 0:
        broken[MOST_LISTED:] = [f"and {beyond} more"]
    return Check(name=name, broken=tuple(broken))


def version_faults(solver: SolverReport | MixedSolverDoc) -> Iterator[str]:
    """A plan of another version may have other prices and other launch files by right.

    Parameters
    ----------
    solver
        Of the plan: it names the program and the solver that made it.
    """
    made_by, program = solver.program, program_version()
    if made_by != program:
        stated = "an earlier version" if made_by is None else made_by
        yield f"made by {stated}, checked by {program}: plan again with this version"
    if solver.version != solver_version():
        yield f"made with {solver.version}, here is {solver_version()}: plan again"


def edit_faults(plan: Plan | MixedPlan) -> Iterator[str]:
    """Whether a document is the one that was written, by its digest.

    Parameters
    ----------
    plan
        As it was read, with the digest that it was written with.
    """
    if plan.digest is None:
        yield "the plan has no digest: it was made by an earlier version, or the line was taken out"
    elif plan.digest != digest_of(plan):
        yield "the document is not the one that was written: its digest differs"


# The files that start a plan, against the plan: what their flags say, and every line of them.


READABLE = (
    "launch.sh",
    "megatron_args.json",
    "torchtitan_args.json",
    "ds_config.json",
    "accelerate.yaml",
)
"""What `estimate --from-launch` reads."""
_SAID_ELSEWHERE = (
    ("ds_config.json", "launch.sh", "tp"),
    ("accelerate.yaml", "llama_factory.yaml", "recompute"),
)
"""Of a file, what another one beside it says in its place."""
_OF_LAYOUT = (*(choice.name for choice in OF_LAYOUT), "sequence_parallel")
_OF_INPUTS = ("seq_len", "global_batch", "precision", "optimizer")
_OF_MODEL = ("layers", "hidden", "heads", "ffn_hidden")


def launch_file_faults(plan: Plan, file: Path, folder: Path) -> Iterator[str]:
    """Where the files of a folder do not start the plan, in words.

    Flags are read as `estimate --from-launch` reads them and compared with the layout; then every line is
    compared with what is written for the plan.

    Parameters
    ----------
    plan
        With a layout.
    file
        Where the plan was read: as plan.yaml of the folder it is not compared with itself.
    folder
        Where the launch files are.

    Raises
    ------
    InputError
        If a file cannot be read.
    """
    try:
        target = target_of(plan, folder)
        expected = plan_files(plan, target)
    except InfeasibleError as error:
        yield f"these files cannot start the plan: {error}"
        return
    if (folder / "plan.yaml").resolve() == file.resolve():
        del expected["plan.yaml"]
    yield from file_faults(plan, expected, folder)


def file_faults(plan: Plan, expected: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Where files of a folder differ from those that are written for a plan, in words.

    Parameters
    ----------
    plan
        With a layout.
    expected
        Texts by file name.
    folder
        Where the files are.

    Raises
    ------
    InputError
        If a file cannot be read.
    """
    for name in READABLE:
        if name in expected and (folder / name).is_file():
            unlike = [
                setting
                for file, beside, setting in _SAID_ELSEWHERE
                if file == name and beside in expected
            ]
            yield from _flag_faults(plan, folder / name, said_elsewhere=unlike)
    for name, text in expected.items():
        path = folder / name
        if path.is_file():
            yield from _line_faults(name, read_text(path, LARGE_FILE_BYTES), text)
        else:
            yield f"{name} is missing"


def target_of(plan: Plan, folder: Path) -> str | None:
    """The target whose files are in a folder: of those that can start the plan, the one with the fewest files
    missing, and most of its own; None where none can, and where the mapping alone is there of a plan whose
    framework's scripts have no such step.

    Parameters
    ----------
    plan
        With a layout.
    folder
        Where the launch files are, whatever started them.
    """
    framework = plan.inputs.framework
    first: str | None = None if unlaunched(plan.inputs) else framework
    fewest_missing: tuple[float, int] = (inf, 0)
    best: str | None = None
    for target in (first, *(name for name in TARGETS if name != framework)):
        try:
            names = plan_files(plan, target).keys() - {"plan.yaml"}
        except InfeasibleError:
            continue
        present = sum((folder / name).is_file() for name in names)
        missing = (len(names) - present, -present)
        if missing < fewest_missing:
            fewest_missing, best = missing, target
    return best


def _flag_faults(plan: Plan, path: Path, *, said_elsewhere: Collection[str]) -> Iterator[str]:
    try:
        launch = read_launch(path)
    except InputError:
        # Some scripts leave the model to a file beside them; their lines are compared all the same.
        return
    for name, planned in _planned_settings(plan).items():
        stated = planned if name in said_elsewhere else launch.settings.get(name, planned)
        if stated != planned:
            yield f"{path.name}: {name} is {shown(stated)}, the plan says {shown(planned)}"
    if not isinstance(launch.model, Mapping):
        return
    for name, planned in _planned_model(plan).items():
        stated = launch.model.get(name, planned)
        if stated != planned:
            yield f"{path.name}: the model's {name} is {shown(stated)}, the plan says {shown(planned)}"


def _planned_model(plan: Plan) -> dict[str, Any]:
    """What a reader could find of a plan's model: Megatron-DeepSpeed has one width for all feed-forwards."""
    model = plan.inputs.model
    fields = {name: getattr(model, name) for name in _OF_MODEL}
    if plan.inputs.framework == DEEPSPEED.name and model.moe is not None:
        fields["ffn_hidden"] = model.moe.moe_ffn_hidden
    return fields


def _planned_settings(plan: Plan) -> dict[str, Any]:
    """What a reader could find of a plan, by the names of a run file."""
    assert plan.layout is not None
    settings: dict[str, Any] = {name: getattr(plan.layout, name) for name in _OF_LAYOUT}
    settings |= {name: getattr(plan.inputs, name) for name in _OF_INPUTS}
    layout = plan.layout
    return settings | {"gpus": layout.gpus}


def _line_faults(name: str, text: str, expected: str) -> Iterator[str]:
    """The first line that differs, and how many do."""
    pairs = list(zip_longest(text.splitlines(), expected.splitlines()))
    differing = [number for number, (line, planned) in enumerate(pairs, start=1) if line != planned]
    if differing:
        line, planned = pairs[differing[0] - 1]
        rest = f", and {len(differing) - 1} more lines differ" if len(differing) > 1 else ""
        stated = "nothing" if line is None else shown(line)
        wanted = "nothing" if planned is None else shown(planned)
        yield f"{name}: line {differing[0]} is {stated}, for the plan it is {wanted}{rest}"
    elif text != expected:
        yield f"{name}: ends of lines differ from what is written for the plan"


# What `meshwright verify` looks at of a plan on a mixed cluster.


def mixed_checks(plan: MixedPlan, folder: Path | None) -> Iterator[Check]:
    """One check each of the document, versions, edits by hand, prices and rules, and launch files.

    Parameters
    ----------
    plan
        Of any status.
    folder
        Where its launch files are; None where there are none.
    """
    yield Check(name="document", broken=())
    yield Check(name="versions", broken=tuple(version_faults(plan.solver)))
    yield Check(name="edits by hand", broken=tuple(edit_faults(plan)))
    yield checked("prices and rules", lambda: stated_faults_on_parts(plan))
    if folder is None or not plan.runs_on:
        yield Check(name="launch files", broken=None)
    elif plan.layout is not None:
        yield checked("launch files", lambda: _pipeline_file_faults(plan, folder))
    else:
        yield checked("plan of the part alone", lambda: _part_faults(plan, folder / "plan.yaml"))
        yield checked("launch files", lambda: _part_file_faults(folder))


def stated_faults_on_parts(plan: MixedPlan) -> Iterator[str]:
    """Everything in a plan on a mixed cluster that does not follow from the rest of it, in words.

    Parameters
    ----------
    plan
        Of any status.
    """
    yield from mixed_faults(plan)
    if plan.solver.priced > plan.solver.rows:
        yield f"solver.priced: {plan.solver.priced} of {plan.solver.rows} rows"
    if plan.layout is None or plan.execution is None:
        return
    yield from _software_faults(plan)
    yield from _choice_faults(plan)
    if plan.robustness is None:
        return
    stated, request = plan.robustness, request_of_parts(plan)
    band, memory, rows = changes_of_parts(request)
    yield from _outline_faults(stated, band, memory, list(rows))
    for scenario, by_part in zip(stated.scenarios, rows.values(), strict=False):
        where = f"robustness.scenarios, {scenario.change}"
        changed = changed_parts(request, by_part)
        yield from _differences(where, scenario.step_time_s, moved_step_s(changed, plan))
        yield from _scenario_faults(where, scenario)
        if scenario.winner is not None:
            document = _layout_of_entry(changed.first, scenario.winner)
            yield from (
                f"{where}: winner: {words}" for words in _entry_faults(changed.first, document)
            )


def _pipeline_file_faults(plan: MixedPlan, folder: Path) -> Iterator[str]:
    """Where the files do not start the pipeline, the order of hosts in the template included."""
    try:
        expected = pipeline_files(plan)
    except InfeasibleError as error:
        yield f"these files cannot start the plan: {error}"
        return
    yield from file_faults(stand_in(plan), expected, folder)


def _part_faults(plan: MixedPlan, file: Path) -> Iterator[str]:
    """What is wrong with the plan of the part that is fastest alone, or sets it apart from what is stated."""
    part_plan = read_plan(file)
    yield from edit_faults(part_plan)
    yield from stated_figure_faults(part_plan)
    if part_plan.objective.step_time_s != plan.objective.step_time_s:
        yield (
            f"{file.name}: {part_plan.objective.step_time_s} s a step, the mixed plan says "
            f"{plan.objective.step_time_s} s"
        )
    devices = [each.device for each in plan.alone if each.part in plan.runs_on]
    if [part_plan.inputs.cluster.device.name] != devices:
        yield f"{file.name}: on {part_plan.inputs.cluster.device.name}, the mixed plan says {devices}"


def _part_file_faults(folder: Path) -> Iterator[str]:
    file = folder / "plan.yaml"
    yield from launch_file_faults(read_plan(file), file, folder)


# `ranks.csv` against the plan: every rank's place, and every group's members counted block by block.


RANKS_FILE = "mapping/ranks.csv"


@dataclass(frozen=True, kw_only=True)
class ListedRank:
    """A line of the file."""

    rank: int
    place: Place
    coordinates: Mapping[str, int]
    """The rank's position on every axis."""


def rank_list_faults(plan: Plan, path: Path) -> Iterator[str]:
    """Where `ranks.csv` is not what the plan says and prices, in words.

    Raises InputError if the file cannot be read.

    Parameters
    ----------
    plan
        With a layout; its cluster names the hosts.
    path
        Of `mapping/ranks.csv`, whose ranks may be counted in either order of Megatron's axes.
    """
    assert plan.layout is not None
    listed = read_rank_list(plan.inputs.cluster, path)
    layout = plan.layout
    world = layout.gpus
    if [entry.rank for entry in listed] != list(range(world)):
        yield f"{path.name}: must list the ranks 0 to {world - 1} in turn"
        return
    places = Counter(entry.place for entry in listed)
    for place, count in places.items():
        if count > 1:
            yield f"{path.name}: {count} ranks on GPU {place[1]} of node {place[0]}"
    yield from _coordinate_faults(layout, listed, path.name)
    yield from _place_faults(plan, listed, path.name)
    yield from recount_faults(plan, listed)


def read_rank_list(cluster: ClusterSpec, path: Path) -> list[ListedRank]:
    """The lines of a `ranks.csv`. Raises InputError, naming the line.

    Parameters
    ----------
    cluster
        Whose nodes the column `host` names.
    path
        CSV with the columns rank, host, gpu and an axis each.
    """
    text = read_text(path, LARGE_FILE_BYTES)
    numbers = {node_name(cluster, node): node for node in range(cluster.node_count)}
    try:
        rows = list(csv.DictReader(text.splitlines()))
    except csv.Error as error:
        raise InputError(f"is no CSV: {error}", where=path_text(path)) from None
    return [
        _listed_rank(row, numbers, f"{path_text(path)}: line {line}")
        for line, row in enumerate(rows, start=2)
    ]


def _listed_rank(row: Mapping[str, str], numbers: Mapping[str, int], where: str) -> ListedRank:
    host = row.get("host") or ""
    if host not in numbers:
        raise InputError("is no node of the plan's cluster", where=f"{where}: host", value=host)
    axes = [axis for axis in (*AXES, *EXPERT_AXES) if axis in row]
    try:
        return ListedRank(
            rank=int(row["rank"]),
            place=(numbers[host], int(row["gpu"])),
            coordinates={axis: int(row[axis]) for axis in axes},
        )
    except (KeyError, TypeError, ValueError):
        raise InputError("must have a number in every column", where=where, value=row) from None


def _coordinate_faults(layout: LayoutDoc, listed: Sequence[ListedRank], name: str) -> Iterator[str]:
    """Positions on the axes that do not follow from the rank, in either order of the axes."""
    orders = [
        [axis for axis in order if axis in AXES] for order in (MEGATRON_DEFAULT, MEGATRON_TP_PP_DP)
    ]
    wrong = [[rank for rank in listed if not _is_at(layout, rank, order)] for order in orders]
    fewest = min(wrong, key=len)
    for entry in fewest:
        yield f"{name}: rank {entry.rank} cannot be at {dict(entry.coordinates)} of the layout"


def _is_at(layout: LayoutDoc, entry: ListedRank, order: Sequence[str]) -> bool:
    """Whether a rank has the coordinates that counting in an order gives."""
    expected: dict[str, int] = {}
    rest = entry.rank
    for axis in order:
        rest, expected[axis] = divmod(rest, int(getattr(layout, axis)))
    within = expected["tp"] + layout.tp * (expected["cp"] + layout.cp * expected["dp"])
    *inner, outermost = EXPERT_AXES
    if outermost in entry.coordinates:
        for axis in inner:
            within, expected[axis] = divmod(within, int(getattr(layout, axis)))
        expected[outermost] = within
    return all(expected[axis] == position for axis, position in entry.coordinates.items())


def _place_faults(plan: Plan, listed: Sequence[ListedRank], name: str) -> Iterator[str]:
    """Ranks that do not run where the plan maps them."""
    assert plan.layout is not None
    layout, mapping = plan.layout, plan.mapping
    if mapping is None or (mapping.ranks is None and not mapping.matrix):
        return
    mapped = mapping.ranks or ranks_on(plan.inputs.cluster, mapping.matrix)
    for entry in listed:
        place = entry.coordinates
        rank = place["tp"] + layout.tp * (
            place["cp"] + layout.cp * (place["dp"] + layout.dp * place["pp"])
        )
        if rank >= len(mapped) or tuple(mapped[rank]) != entry.place:
            planned = mapped[rank] if rank < len(mapped) else None
            yield (
                f"{name}: rank {entry.rank} is on (node, GPU) {shown(entry.place)}, the plan maps it "
                f"to {shown(planned)}"
            )


def recount_faults(plan: Plan, listed: Sequence[ListedRank]) -> Iterator[str]:
    """Groups that reach further than their price assumes, counted from the list alone.

    A price says how many members of a group of each axis share the block of each level that paces it.

    Parameters
    ----------
    plan
        With a layout and a mapping.
    listed
        Every rank of it once, in any order, with its coordinates on all of `AXES`.
    """
    setup = setup_of(plan)
    workload = setup.workload
    in_turn = sorted(listed, key=lambda entry: [entry.coordinates[axis] for axis in reversed(AXES)])
    ranks, coordinates = [entry.place for entry in in_turn], listed[0].coordinates
    counted = recounted_placement(workload.cluster, setup.layout, ranks)
    yield from blocks_left(workload.cluster, ranks)
    for depth, level in enumerate(fabric_levels(workload.cluster, workload.gpus).names):
        for axis in ("tp", "cp", "dp_cp", *(name for name in EXPERT_AXES if name in coordinates)):
            priced = int(np.broadcast_to(getattr(setup.placement, axis), counted.tp.shape)[depth])
            members = int(getattr(counted, axis)[depth])
            if members < priced:
                yield (
                    f"a group of {axis} has {members} of its ranks in a block of {level}, "
                    f"the price assumes {priced}"
                )


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Everything that was looked at of a plan."""

    plan: Path
    directory: Path | None
    """The folder of the launch files; None where there are none beside the plan."""
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not any(check.broken for check in self.checks)


def audit_plan(path: Path, directory: Path | None = None) -> Audit:
    """Checks a plan and its files.

    Parameters
    ----------
    path
        A `plan.yaml` or `mixed_plan.yaml`, its folder, or saved `plan --json` output.
    directory
        The folder of the launch files; that of the plan when None, if it holds any.

    Returns
    -------
    Audit
        One check each of the document, versions, edits by hand, prices and rules, ranks, and launch files;
        `mixed_checks` has those of a plan on a mixed cluster.

    Raises
    ------
    InputError
        If there is no such plan or folder, or the file is no plan at all.
    """
    if directory is not None and not directory.is_dir():
        raise InputError("no such folder", where=path_text(directory))
    mixed = mixed_plan_path(path)
    file = mixed or plan_path(path)
    folder = directory or _folder_of(file)
    try:
        if mixed is not None:
            checks = tuple(mixed_checks(read_mixed_plan(mixed), folder))
            return Audit(plan=file, directory=folder, checks=checks)
        plan = read_plan(file)
    except InputError as error:
        _refuse_what_is_no_plan(file)
        unread = Check(name="document", broken=(str(error),))
        return Audit(plan=file, directory=folder, checks=(unread,))
    return Audit(plan=file, directory=folder, checks=tuple(_checks(plan, file, folder)))


MOST_PLANS = 1000
"""That one command looks at."""
_PLAN_NAMES = ("plan.yaml", MIXED_FILE)


@dataclass(frozen=True, kw_only=True)
class Audits:
    """Several plans, each looked at by itself."""

    audits: tuple[Audit, ...]
    skipped: tuple[Path, ...] = ()
    """Files of folders that bear the name of a plan's file but are none."""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong with any of them."""
        return all(audit.passed for audit in self.audits)


def audit_plans(paths: Sequence[Path]) -> Audits:
    """Checks plans, and all plans below folders, each with the launch files beside it.

    Parameters
    ----------
    paths
        Plans, folders of plans, or folders below which plans lie: every `plan.yaml` and `mixed_plan.yaml`
        that is a plan, but in hidden folders and behind links.

    Returns
    -------
    Audits
        In the order of the paths, each plan once. A named file that is no plan is a broken document.

    Raises
    ------
    InputError
        If a path is not there, or no plan is below a folder, or more than `MOST_PLANS` are.
    """
    audits: dict[Path, Audit] = {}
    skipped: dict[Path, None] = {}
    for path in paths:
        below = _plan_files(path)
        if not below:
            what = f"no {' or '.join(_PLAN_NAMES)} in this folder or below it"
            raise InputError(what, where=path_text(path))
        if len(audits) + len(below) > MOST_PLANS:
            raise InputError(f"more than {MOST_PLANS} plans", where=path_text(path))
        for file in below:
            if file in audits or file in skipped:
                continue
            try:
                audits[file] = audit_plan(file)
            except InputError as error:
                if file != path:
                    skipped[file] = None
                    continue
                unread = Check(name="document", broken=(str(error),))
                audits[file] = Audit(plan=file, directory=None, checks=(unread,))
    if not audits:
        what = f"nothing below is a plan, though {len(skipped)} files have the name of one"
        raise InputError(what, where=path_text(paths[0]))
    return Audits(audits=tuple(audits.values()), skipped=tuple(skipped))


def _plan_files(path: Path) -> list[Path]:
    """The path where it is a file, else the plans of the folder and of the folders below it."""
    try:
        if not path.is_dir():
            if not path.exists():
                raise InputError("no such file", where=path_text(path))
            return [path]
        files = []
        for folder, inner, names in os.walk(path):
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            files += [Path(folder) / name for name in _PLAN_NAMES if name in names]
            if len(files) > MOST_PLANS:
                break
    except (OSError, ValueError):
        raise InputError("no such file", where=path_text(path)) from None
    return files


def audits_document(audits: Audits) -> dict[str, Any]:
    """What `verify --all --json` prints."""
    return {
        "passed": audits.passed,
        "plans": [audit_document(audit) for audit in audits.audits],
        "skipped": [str(path) for path in audits.skipped],
    }


def audit_document(audit: Audit) -> dict[str, Any]:
    """What `verify --json` prints of one plan."""
    return {
        "plan": str(audit.plan),
        "directory": None if audit.directory is None else str(audit.directory),
        "passed": audit.passed,
        "checks": [
            {
                "check": check.name,
                "passed": None if check.broken is None else not check.broken,
                "broken": list(check.broken or ()),
            }
            for check in audit.checks
        ],
    }


def _checks(plan: Plan, file: Path, folder: Path | None) -> Iterator[Check]:
    yield Check(name="document", broken=())
    yield Check(name="versions", broken=tuple(version_faults(plan.solver)))
    yield Check(name="edits by hand", broken=tuple(edit_faults(plan)))
    yield checked("prices and rules", lambda: stated_figure_faults(plan))
    if folder is None or plan.layout is None:
        yield Check(name="ranks", broken=None)
        yield Check(name="launch files", broken=None)
        return
    yield checked("ranks", lambda: rank_list_faults(plan, folder / RANKS_FILE))
    yield checked("launch files", lambda: launch_file_faults(plan, file, folder))


def _folder_of(file: Path) -> Path | None:
    """The plan's own folder where it holds launch files."""
    written = ("launch.sh", RANKS_FILE, "hostfile.template")
    return file.parent if any((file.parent / name).exists() for name in written) else None


def _refuse_what_is_no_plan(file: Path) -> None:
    """Raises InputError again for a file that is no plan; a plan with a wrong field is a fault."""
    data = read_mapping(file, LARGE_FILE_BYTES)
    if "solver" not in data and "layout" not in data:
        raise InputError(NO_PLAN, where=path_text(file), value=data)
