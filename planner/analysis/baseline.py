"""What people run today, priced beside a plan: a launch file, a run file or another plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.costmodel.execution import Execution
from meshwright.costmodel.memory.footprint import usable_hbm_gib
from meshwright.documents.reader import LARGE_FILE_BYTES, parse_mapping, path_text, read_text
from meshwright.errors import InputError
from meshwright.model_specs.parameters import parameter_count
from meshwright.model_specs.reader import model_from_mapping
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.analysis.setup import (
    Setup,
    setup_of_plan,
    setup_of_run,
)
from meshwright.planner.analysis.waterfall import waterfall
from meshwright.planner.plan.baseline_document import (
    BaselineDoc,
    BaselineKind,
    BrokenRule,
    CostComparison,
    Verdict,
)
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.texts import read_feasible_plan
from meshwright.planner.plan.training_cost import Budget, training_cost, with_cost
from meshwright.planner.request.inputs import PlanInputs
from meshwright.planner.runs.launches.flag_effects import unread_words
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.reader import read_launch, run_of_inputs
from meshwright.planner.runs.predicted import layout_document
from meshwright.planner.runs.run_file import Run, read_runs

SAME_SPEED = 0.001
"""A share of the step; a plan that is faster by less is no other answer."""
SAME_MODEL = 0.01
"""Relative difference of parameter counts beyond which a remark is made."""
_DOCUMENTS = (".yaml", ".yml", ".json")


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Today's setup and where it is from."""

    path: Path
    kind: BaselineKind
    setup: Setup
    remarks: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    """Flags and fields that change the price, or may, and that it does not know of."""


def read_baseline(path: Path, inputs: PlanInputs) -> Baseline:
    """Today's setup from a file, with the plan's model and, where the file says nothing of it, its cluster.

    Parameters
    ----------
    path
        A launch file of a framework, a run file of one run, a plan, or a plan's folder.
    inputs
        Of the plan that is compared.

    Raises
    ------
    InputError
        A file that cannot be read or priced, or that trains another model.
    """
    document = _document_if_any(path)
    if _describes_plan(document):
        other = read_feasible_plan(path)
        _same_layers(other.inputs.model, inputs, path)
        return Baseline(path=path, kind="plan", setup=setup_of_plan(other))
    if "run" in document or "runs" in document:
        runs = read_runs(path)
        if len(runs) != 1:
            what = f"holds {len(runs)} runs; a baseline is one: give a file of one run"
            raise InputError(what, where=path_text(path))
        baseline = _of_run("run", runs[0], inputs, path, runs[0].remarks)
        return replace(baseline, unread=runs[0].unread)
    launch = read_launch(path, inputs.model)
    run = run_of_inputs(launch, inputs, path)
    unread = [f"{path.name}: {unread_words(name)}" for name in launch.unread]
    remarks = (*run.remarks, *launch.remarks, *_model_remarks(launch, inputs), *unread)
    return replace(_of_run("launch", run, inputs, path, remarks), unread=launch.unread)


def with_baseline(
    plan: Plan,
    baseline: Baseline,
    budget: Budget | None = None,
) -> Plan:
    """A plan with what it brings over a baseline.

    Parameters
    ----------
    plan
        With a layout.
    baseline
        What is run today.
    budget
        Of the whole training, for what it costs; nothing is said of that when None.
    """
    assert plan.predicted is not None
    today, planned = baseline.setup, setup_of_plan(plan)
    fall = waterfall(today, planned)
    step_s = today.step_time_s
    tokens_per_s = today.tokens / step_s
    planned_tokens_per_s = planned.tokens / plan.predicted.step_time_s
    speed_up = planned_tokens_per_s / tokens_per_s
    usable_gib = usable_hbm_gib(today.workload)
    plan = with_cost(plan, budget or Budget())
    cost = None
    if plan.cost is not None and budget is not None:
        tokens, price = plan.cost.tokens, plan.cost.gpu_hour_price
        today_on = (today.workload.gpus, today.workload.cluster)
        cost = CostComparison(
            tokens=tokens,
            gpu_hour_price=price,
            today=training_cost(tokens, tokens_per_s, *today_on, price),
            plan=plan.cost.plan,
        )
    broken = today.broken_rules()
    keeps_rules = not broken and max(today.memory_gib) <= usable_gib
    document = BaselineDoc(
        file=str(baseline.path),
        kind=baseline.kind,
        verdict="not compared"
        if baseline.unread
        else _verdict(plan, speed_up, keeps_rules=keeps_rules),
        speed_up=None if baseline.unread else speed_up,
        unread=list(baseline.unread),
        step_time_s=step_s,
        tokens_per_step=today.tokens,
        tokens_per_s=tokens_per_s,
        gpus=today.workload.gpus,
        layout=layout_document(today.layout, today.stages),
        execution=Execution.within(today.workload),
        memory_gib=list(today.memory_gib),
        usable_hbm_gib=usable_gib,
        fits=max(today.memory_gib) <= usable_gib,
        broken_rules=[
            BrokenRule(rule=finding.rule, words=finding.words, remedy=finding.remedy)
            for finding in broken
        ],
        remarks=list(baseline.remarks),
        difference_s=fall.difference_s,
        waterfall=fall.changes,
        interactions_s=fall.interactions_s,
        cost=cost,
    )
    return plan.model_copy(update={"baseline": document})


def _verdict(plan: Plan, speed_up: float, *, keeps_rules: bool) -> Verdict:
    """Whether the plan is faster than today's layout, and by more than the cost model may be off."""
    assert plan.predicted is not None
    if speed_up <= 1 + SAME_SPEED:
        return "optimal" if keeps_rules else "breaks a rule"
    band = plan.predicted.error_band
    return "within error" if speed_up <= band.high / band.low else "faster"


def _of_run(
    kind: BaselineKind, run: Run, inputs: PlanInputs, path: Path, remarks: Sequence[str]
) -> Baseline:
    _same_layers(run.workload.model, inputs, path)
    run = replace(run, workload=replace(run.workload, model=inputs.model))
    try:
        setup = setup_of_run(run, inputs)
        step_s = setup.step_time_s
    except (ValueError, ArithmeticError) as error:
        raise InputError(f"cannot be priced: {error}", where=path_text(path)) from error
    if not 0 < step_s < float("inf"):
        raise InputError(f"cannot be priced: a step of {step_s} s", where=path_text(path))
    return Baseline(path=path, kind=kind, setup=setup, remarks=tuple(remarks))


def _same_layers(model: ModelSpec, inputs: PlanInputs, path: Path) -> None:
    layers = inputs.model.layers
    if model.layers != layers:
        what = f"trains a model of {model.layers} layers; {inputs.model.name} has {layers}"
        raise InputError(f"{what}: plan the model that the file trains", where=path_text(path))


def _model_remarks(launch: LaunchRun, inputs: PlanInputs) -> list[str]:
    """A remark where a launch file's flags describe another model than the plan's."""
    if not isinstance(launch.model, dict):
        return []
    model = model_from_mapping(launch.model, "model")
    written, planned = parameter_count(model), parameter_count(inputs.model)
    if abs(written / planned - 1) <= SAME_MODEL:
        return []
    sizes = f"{written / 1e9:.2f} B parameters, {inputs.model.name} has {planned / 1e9:.2f} B"
    return [f"the flags describe a model of {sizes}; both are priced as {inputs.model.name}"]


def is_plan(path: Path) -> bool:
    """Whether a file, or a folder, holds a plan. Raises InputError where it cannot be read."""
    return _describes_plan(_document_if_any(path))


def _describes_plan(document: Mapping[str, object]) -> bool:
    return "status" in document and "solver" in document


def _document_if_any(path: Path) -> dict[str, object]:
    """The mapping of a YAML or JSON file or of a plan's folder; empty for a script or a list."""
    if path.is_dir():
        path = path / "plan.yaml"
    if path.suffix.lower() not in _DOCUMENTS:
        return {}
    text = read_text(path, LARGE_FILE_BYTES)
    if text.lstrip().startswith("["):
        return {}
    return parse_mapping(text, path_text(path))
