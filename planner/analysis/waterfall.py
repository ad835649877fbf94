"""From today's setup to the plan's, one change at a time: what each brings alone, and in turn.

The changes are taken in the order of what they bring: each time the one that makes the step fastest now.
Where none can be made alone (degrees that would not divide), several are made at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.costmodel.estimate import Stages
from meshwright.costmodel.execution_names import STEP_KINDS
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.layout import AXES, Layout, Placement, Recompute
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.rates import step_time_band
from meshwright.costmodel.records import ErrorBand, with_stragglers
from meshwright.costmodel.schedules import schedule_name, traits
from meshwright.costmodel.workload import Execution, Workload
from meshwright.documents import LARGE_FILE_BYTES, parse_mapping, path_text, read_text
from meshwright.errors import InputError
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.model_specs.parameters import parameter_count
from meshwright.model_specs.reader import model_from_mapping
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.bounds.layer_split import ALL_LAYERS, suiting_stages
from meshwright.planner.mixed.document import MixedPlan, PartBaselineDoc, cost_on_parts
from meshwright.planner.plan.document import (
    BaselineChange,
    BaselineDoc,
    BaselineKind,
    BrokenRule,
    CostComparison,
    CostDoc,
    Plan,
    Verdict,
)
from meshwright.planner.plan.texts import (
    Setup,
    plan_path,
    read_feasible_plan,
    setup_of,
    workload_of_plan,
)
from meshwright.planner.plan.training_cost import Budget, training_cost, with_cost
from meshwright.planner.request.choices import BY_NAME, CHANGED_ALONE, DEGREES
from meshwright.planner.request.plan_request import PlanInputs
from meshwright.planner.runs.launches.command_line import unread_words
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.reader import read_launch, run_of_inputs
from meshwright.planner.runs.prediction import arrangement
from meshwright.planner.runs.run_file import Run, read_runs
from meshwright.planner.runs.run_terms import layout_document, recompute_words

# What a baseline is, and every step from it to a plan.


def setup_of_plan(plan: Plan) -> Setup:
    """A plan that has a layout, as it stands; also with another split of its layers.

    Parameters
    ----------
    plan
        With a layout and a mapping.
    """
    setup = setup_of(plan)
    return replace(setup, layout=_with_all_layers(setup.layout, setup.stages))


def setup_of_run(run: Run, inputs: PlanInputs) -> Setup:
    """A run of a plan's model, its experts as unevenly loaded as in the plan's inputs.

    Raises ValueError where its layers cannot be dealt out.

    Parameters
    ----------
    run
        Its model is replaced by that of the inputs.
    inputs
        Of the plan that the run is compared with.
    """
    stages, placement = arrangement(run)
    workload = replace(
        run.workload,
        model=inputs.model,
        expert_imbalance_by_ep=inputs.expert_imbalance_by_ep,
        expert_copies_by_ep=inputs.expert_copies_by_ep,
    )
    layout = _with_all_layers(run.layout, stages)
    return Setup(workload=workload, layout=layout, stages=stages, placement=placement)


def _with_all_layers(layout: Layout, stages: Stages) -> Layout:
    """Full recomputation of the longest virtual stage is that of every layer, also when stages change."""
    longest = max(max(rank) for rank in stages)
    full = bool(layout.recomputes_layers)
    if full and int(layout.recompute_layers) >= longest:
        return replace(layout, recompute_layers=ALL_LAYERS)
    return layout


State = dict[str, Any]
"""Every setting that can change by itself, by name."""

_LAYOUT = (*CHANGED_ALONE, "sequence_parallel")
_OF_STACK = ("stepwise_loss", "stepwise_rotary", "stepwise_activation", "fill_exposed")
"""Any may be on today. A plan has all off, as its launch files say."""
_WORK = ("precision", "optimizer", "framework", "loss", *_OF_STACK)
_EXECUTION = tuple(setting.name for setting in fields(Execution))
NEUTRAL = 1e-9
"""Relative change of a step below which a setting makes no difference."""


@dataclass(frozen=True)
class Waterfall:
    """The changes in their order, and what they do together beyond their single effects."""

    changes: list[BaselineChange]
    difference_s: float
    interactions_s: float


def waterfall(today: Setup, planned: Setup) -> Waterfall:
    """Single changes that lead from one setup to another, each priced alone and in turn.

    Seconds are those of the plan's tokens of a step: where today's batch is another, its step is scaled.

    Parameters
    ----------
    today
        Where the way begins.
    planned
        Where it ends.

    Returns
    -------
    Waterfall
        `in_turn_s` of the changes add up to `difference_s`.
    """
    way = _Way(today, planned)
    keys = way.changed_keys()
    start_s = way.seconds(way.first)
    end_s = way.seconds(way.last)
    alone_s = {key: way.alone_s(key, start_s) for key in keys}
    changes = []
    state, now_s = way.first, start_s
    while keys:
        chosen = way.next_change(state, keys)
        before, state = state, {**state, **{key: way.last[key] for key in chosen}}
        step_s = way.seconds(state)
        single_s = alone_s[chosen[0]] if len(chosen) == 1 else None
        changes.append(way.document(before, state, chosen, single_s, step_s - now_s))
        now_s = step_s
        keys = [key for key in keys if key not in chosen]
    alone = [change.alone_s for change in changes if change.alone_s is not None]
    difference_s = end_s - start_s
    return Waterfall(changes, difference_s, difference_s - sum(alone))


class _Way:
    """States between two setups, and their prices for the plan's tokens."""

    def __init__(self, today: Setup, planned: Setup) -> None:
        self._ends = (today, planned)
        self.first, self.last = (
            _state(setup, name) for setup, name in zip(self._ends, "ab", strict=True)
        )
        of_layout = [axis for axis in (*DEGREES, "gpus") if axis != "dp"]
        is_same_layout = all(self.first[axis] == self.last[axis] for axis in of_layout)
        if is_same_layout and _same_places(today, planned):
            self.first["mapping"] = self.last["mapping"]
        self._seconds: dict[str, float | None] = {}

    def changed_keys(self) -> list[str]:
        """Settings that differ and make a difference to one end or the other."""
        differing = [key for key in self.last if self.first[key] != self.last[key]]
        return [key for key in differing if not self._is_neutral(key)]

    def _is_neutral(self, key: str) -> bool:
        """Whether neither end would be another with the other's value; then both take the plan's."""
        taken = self._price({**self.first, key: self.last[key]})
        reverted = self._price({**self.last, key: self.first[key]})
        start, end = self._price(self.first), self._price(self.last)
        if taken is None or reverted is None or start is None or end is None:
            return False
        neutral = abs(taken / start - 1) < NEUTRAL and abs(reverted / end - 1) < NEUTRAL
        if neutral and self._memory(key):
            self.first[key] = self.last[key]
            return True
        return False

    def _memory(self, key: str) -> bool:
        """Whether the fullest GPU stays as full, too."""
        taken = self._setup({**self.first, key: self.last[key]})
        start = self._setup(self.first)
        assert taken is not None
        assert start is not None
        return abs(max(taken.memory_gib) - max(start.memory_gib)) < 1e-6

    def seconds(self, state: State) -> float:
        """Of a state that can be priced."""
        price = self._price(state)
        assert price is not None
        return price

    def alone_s(self, key: str, start_s: float) -> float | None:
        """What one change does to today's step.

        Parameters
        ----------
        key
            Of a setting that differs.
        start_s
            Today's step, for the plan's tokens.
        """
        price = self._price({**self.first, key: self.last[key]})
        return None if price is None else price - start_s

    def next_change(self, state: State, keys: list[str]) -> tuple[str, ...]:
        """The change that makes the step fastest now: a single one, or the fewest that go together.

        Parameters
        ----------
        state
            Where the way has come to.
        keys
            Settings that are still today's, at least one.
        """
        for size in (1, 2):
            priced = []
            for chosen in combinations(keys, size):
                price = self._price({**state, **{key: self.last[key] for key in chosen}})
                if price is not None:
                    priced.append((price, chosen))
            best = min(priced)[1] if priced else ()
            if best:
                return best
        return tuple(keys)

    def document(
        self,
        before: State,
        after: State,
        chosen: tuple[str, ...],
        alone_s: float | None,
        in_turn_s: float,
    ) -> BaselineChange:
        """One bar of the waterfall."""
        setup = self._setup(after)
        assert setup is not None
        memory_gib = max(setup.memory_gib)
        return BaselineChange(
            change=", ".join(_words(key, before, after) for key in chosen),
            alone_s=alone_s,
            in_turn_s=in_turn_s,
            step_time_s=self.seconds(after),
            memory_gib=memory_gib,
            fits=memory_gib <= usable_hbm_gib(setup.workload),
        )

    def _price(self, state: State) -> float | None:
        """Seconds of the plan's tokens; None where the state cannot be run."""
        # Clusters of one name may differ: both ends hold theirs, and no other comes in between.
        clusters = [setup.workload.cluster for setup in self._ends]
        name = repr(sorted((state | {"cluster": clusters.index(state["cluster"])}).items()))
        if name not in self._seconds:
            setup = self._setup(state)
            seconds = None
            if setup is not None:
                seconds = setup.step_time_s * self._ends[1].tokens / setup.tokens
            self._seconds[name] = seconds
        return self._seconds[name]

    def _setup(self, state: State) -> Setup | None:
        """The setup of a state; None where degrees do not divide or layers cannot be dealt out."""
        for end, own_state in zip(self._ends, (self.first, self.last), strict=True):
            if state == own_state:
                return end
        layout = _layout(state)
        if layout is None or int(layout.gpus) > state["cluster"].gpus:
            return None
        stages = self._stages(state, layout)
        if stages is None:
            return None
        workload = replace(
            self._ends[1].workload,
            **{name: state[name] for name in (*_WORK, "cluster", "gpus")},
            global_batch=state["batch"][0],
            seq_len=state["batch"][1],
        )
        execution = Execution(**{name: state[name] for name in _EXECUTION})
        workload = execution.applied(workload)
        if self._ends[0].workload.fp8_params is None and not execution.fp8_params:
            # Today's file leaves this to the software, as long as it is not changed.
            workload = replace(workload, fp8_params=None)
        placement = self._placement(state, layout) or nested_placement(workload.cluster, layout)
        return Setup(workload=workload, layout=layout, stages=stages, placement=placement)

    def _stages(self, state: State, layout: Layout) -> Stages | None:
        """The split that was chosen, where it goes with pp and vpp, or an even one."""
        pp, vpp = int(layout.pp), int(layout.vpp)
        stages: Stages = state["stages"]
        if len(stages) == pp and len(stages[0]) == vpp:
            return stages
        return suiting_stages(self._ends[1].workload, layout)

    def _placement(self, state: State, layout: Layout) -> Placement | None:
        """That of an end, where the ranks are in its order and the groups are its own."""
        end = self._ends["ab".index(state["mapping"])]
        same = all(int(getattr(layout, axis)) == int(getattr(end.layout, axis)) for axis in DEGREES)
        return end.placement if same and state["cluster"] == end.workload.cluster else None


def _state(setup: Setup, name: str) -> State:
    workload, layout = setup.workload, setup.layout
    state: State = {axis: int(getattr(layout, axis)) for axis in _LAYOUT}
    state["sequence_parallel"] = bool(layout.sequence_parallel)
    state["recompute"] = (int(layout.recompute), int(layout.recompute_layers))
    state |= {key: getattr(workload, key) for key in (*_WORK, "cluster", "gpus")}
    state["batch"] = (workload.global_batch, workload.seq_len)
    execution = Execution.within(workload)
    state |= {key: getattr(execution, key) for key in _EXECUTION}
    state["stages"] = setup.stages
    state["mapping"] = name
    return state


def _same_places(today: Setup, planned: Setup) -> bool:
    """Whether the groups of both lie alike."""
    if today.workload.cluster != planned.workload.cluster:
        return False
    for axis in fields(Placement):
        first, last = (getattr(setup.placement, axis.name) for setup in (today, planned))
        if not np.array_equal(first, last):
            return False
    return True


def _layout(state: State) -> Layout | None:
    """The layout of a state, dp taking the GPUs that are over; None where it does not divide."""
    model_parallel = state["tp"] * state["cp"] * state["pp"]
    dp, over = divmod(state["gpus"], model_parallel)
    if over or dp == 0:
        return None
    micro_batches, odd = divmod(state["batch"][0], dp * state["micro_batch"])
    if odd or micro_batches == 0:
        return None
    if (state["cp"] * dp) % state["shard_groups"]:
        return None
    schedule = state["schedule"]
    if schedule and (
        state["pp"] == 1 or traits(int(schedule)).faults(state["pp"], state["vpp"], micro_batches)
    ):
        return None
    if state["vpp"] > 1 and state["pp"] == 1:
        return None
    values = {key: state[key] for key in _LAYOUT}
    values["sequence_parallel"] = state["sequence_parallel"] and state["tp"] > 1
    mask, layers = state["recompute"]
    layout = Layout(
        **values, dp=dp, num_micro_batches=micro_batches, recompute=mask, recompute_layers=layers
    )
    whole_experts = (state["tp"] * state["cp"] * dp) % layout.expert_group == 0
    return layout if whole_experts else None


def _words(key: str, before: State, after: State) -> str:
    """A change as it is written: `tp 8 -> 4, dp 8 -> 16`."""
    label = BY_NAME[key].title if key in BY_NAME else _LABELS.get(key, key.replace("_", " "))
    words = f"{label} {_value(key, before)} -> {_value(key, after)}"
    if key == "stages":
        return "layers of the stages as planned"
    if key == "mapping":
        return "ranks placed as planned"
    if key == "cluster" and before[key].name == after[key].name:
        return f"{before[key].name} as planned"
    if key not in (*AXES, "gpus"):
        return words
    first, last = _layout(before), _layout(after)
    if first is None or last is None or first.dp == last.dp:
        return words
    return f"{words}, dp {first.dp} -> {last.dp}"


def _value(key: str, state: State) -> str:
    value = state[key]
    if key == "batch":
        return " x ".join(map(str, value))
    if key == "cluster":
        return str(value.name)
    if key == "schedule":
        return schedule_name(value, state["vpp"])
    if key == "recompute":
        mask, layers = state["recompute"]
        kind, modules, _ = recompute_words(Recompute(mask), layers)
        if kind == "full" and layers < ALL_LAYERS:
            return f"full of {layers} layers a stage"
        return f"selective {'+'.join(modules)}" if modules else kind
    return ("off", "on")[bool(value)] if isinstance(value, bool) or key in _OF_STACK else str(value)


_LABELS = {
    "batch": "global batch x sequence",
    "gpus": "GPUs",
    "stepwise_loss": "cross entropy step by step",
    "stepwise_rotary": "rotary embeddings step by step",
    "stepwise_activation": "activation function step by step",
    "fill_exposed": "exposed transfers in fill and drain",
}


# What people run today, priced beside a plan: a launch file, a run file or another plan.


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
    part: str = ""
    """Of a mixed cluster, where it runs on one."""


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
        A file that cannot be read or priced, or that trains another model; or a plan for packs of samples.
    """
    if inputs.lengths is not None:
        what = "is not compared with a plan for packs of samples: plan with --seq-len for that"
        raise InputError(what, where=path_text(path))
    baseline = _baseline(path, inputs)
    _same_reference(baseline.setup.workload, inputs, path)
    return baseline


def read_baseline_on_parts(path: Path, inputs_of_parts: Mapping[str, PlanInputs]) -> Baseline:
    """Today's setup from a file, on the part of a mixed cluster where it runs fastest.

    A file that names its cluster is priced there. Of others each part is tried: those count that have GPUs
    enough, and first of all those where no rule is broken and memory suffices.

    Parameters
    ----------
    path
        As `read_baseline` takes it.
    inputs_of_parts
        The inputs on each part, by its name.

    Raises
    ------
    InputError
        As `read_baseline`; or where no part has as many GPUs as the file asks for.
    """
    candidates: list[Baseline] = []
    refused: InputError | None = None
    for name, inputs in inputs_of_parts.items():
        try:
            baseline = read_baseline(path, inputs)
        except InputError as error:
            refused = refused or error
            continue
        workload = baseline.setup.workload
        if workload.cluster.name != inputs.cluster.name or baseline.kind != "launch":
            named = workload.cluster.name
            parts = (part for part, on in inputs_of_parts.items() if on.cluster.name == named)
            return replace(baseline, part=next(parts, ""))
        if workload.gpus <= inputs.gpus:
            candidates.append(replace(baseline, part=name))
        else:
            words = f"asks for {workload.gpus} GPUs, no part of the cluster has as many"
            refused = refused or InputError(words, where=path_text(path))
    if not candidates:
        assert refused is not None
        raise refused
    candidates.sort(key=lambda each: (not _runs(each.setup), each.setup.step_time_s))
    best, *slower = candidates
    steps = [f"the file names no devices: priced on {best.part}, where it is fastest"]
    steps += [f"on {on.part} it would take {on.setup.step_time_s:.4g} s a step" for on in slower]
    return replace(best, remarks=(*best.remarks, "; ".join(steps)))


def _runs(setup: Setup) -> bool:
    """Whether a setup keeps every rule, and fits as predicted."""
    return max(setup.memory_gib) <= usable_hbm_gib(setup.workload) and not setup.broken_rules()


def _baseline(path: Path, inputs: PlanInputs) -> Baseline:
    document = _document_if_any(path)
    if _describes_plan(document):
        planned = read_feasible_plan(path)
        _check_same_training(planned.inputs, inputs, path)
        return Baseline(path=path, kind="plan", setup=setup_of_plan(planned))
    if "run" in document or "runs" in document:
        runs = read_runs(path, inputs.calibration)
        if len(runs) != 1:
            what = f"holds {len(runs)} runs; a baseline is one: give a file of one run"
            raise InputError(what, where=path_text(path))
        baseline = _of_run("run", runs[0], inputs, path, runs[0].remarks)
        remarks = (*baseline.remarks, *_beside_measured(runs[0], baseline.setup))
        return replace(baseline, unread=runs[0].unread, remarks=remarks)
    launch = read_launch(path, inputs.model)
    run = run_of_inputs(launch, inputs, path)
    names = launch.not_read(has_images=run.workload.model.encoder is not None)
    unread = [f"{path.name}: {unread_words(name)}" for name in names]
    remarks = (*run.remarks, *launch.remarks, *_model_remarks(launch, inputs), *unread)
    return replace(_of_run("launch", run, inputs, path, remarks), unread=names)


def _beside_measured(run: Run, setup: Setup) -> Iterator[str]:
    """How far a run's own measured step is from the price that stands for it."""
    measured_s = None if run.measured is None else run.measured.step_time_s
    if measured_s is not None:
        off = f"{100 * (setup.step_time_s / measured_s - 1):+.1f} % off"
        yield f"today's step was measured: {measured_s:.4g} s, from which its price is {off}"


def _same_reference(today: Workload, inputs: PlanInputs, path: Path) -> None:
    """Raises InputError where the reference model of a step is elsewhere than the plan's."""
    if today.reference != inputs.reference:
        place = today.reference or "not a model of its own"
        what = f"has a reference that is {place}; the plan's is {inputs.reference}"
        raise InputError(f"{what}: plan with the same --reference", where=path_text(path))


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
    planned = setup_of_plan(plan)
    plan = with_cost(plan, budget or Budget())
    assert plan.predicted is not None
    # Both are priced alike: what an optimum may promise too much is no error between them.
    workload = workload_of_plan(plan)
    document = _document(
        baseline,
        waterfall(baseline.setup, planned),
        tokens_per_s=planned.tokens / plan.predicted.step_time_s,
        band=with_stragglers(step_time_band(workload), workload.nodes),
        is_proven=plan.status == "optimal",
        cost=None if budget is None else plan.cost,
    )
    return plan.model_copy(update={"baseline": document})


def parts_with_baseline(
    plan: MixedPlan, baseline: Baseline, budget: Budget | None = None
) -> MixedPlan:
    """A pipeline through parts of a cluster with what it brings over a baseline.

    Parameters
    ----------
    plan
        With a layout.
    baseline
        What is run today, on one of its parts or elsewhere.
    budget
        As `with_baseline` takes it.
    """
    assert plan.predicted is not None
    cost = cost_on_parts(plan, budget or Budget()) or plan.cost
    band = plan.predicted.error_band
    document = _document(
        baseline,
        _fall_to_parts(baseline, plan),
        tokens_per_s=plan.predicted.tokens_per_s,
        band=ErrorBand(low=band.low, high=band.high, rows=band.rows, basis=band.basis),
        is_proven=plan.status == "optimal",
        cost=None if budget is None else cost,
    )
    against = PartBaselineDoc(**dict(document), part=baseline.part)
    return plan.model_copy(update={"baseline": against, "cost": cost})


def _fall_to_parts(baseline: Baseline, plan: MixedPlan) -> Waterfall:
    """The way to a pipeline through parts: the best plan on today's part alone, then all parts together."""
    assert plan.predicted is not None
    start_s = baseline.setup.step_time_s * plan.inputs.tokens_per_step / baseline.setup.tokens
    end_s, changes, now_s = plan.predicted.step_time_s, [], start_s
    alone = next((each for each in plan.alone if each.part == baseline.part), None)
    if alone is not None and alone.step_time_s is not None:
        now_s = alone.step_time_s
        changes.append(
            BaselineChange(
                change=f"the best plan on {alone.part} alone",
                alone_s=now_s - start_s,
                in_turn_s=now_s - start_s,
                step_time_s=now_s,
                memory_gib=None,
                fits=True,
            )
        )
    changes.append(
        BaselineChange(
            change=f"a pipeline through {' then '.join(plan.runs_on)}",
            alone_s=None,
            in_turn_s=end_s - now_s,
            step_time_s=end_s,
            memory_gib=max(plan.memory_gib),
            fits=True,
        )
    )
    return Waterfall(
        changes, end_s - start_s, end_s - start_s - sum(each.alone_s or 0.0 for each in changes)
    )


def _document(
    baseline: Baseline,
    fall: Waterfall,
    *,
    tokens_per_s: float,
    band: ErrorBand,
    is_proven: bool,
    cost: CostDoc | None,
) -> BaselineDoc:
    """What a plan of so many tokens a second brings over a baseline.

    `band` is of the plan's step, `is_proven` whether it is optimal in its space, and `cost` of the whole
    training, None where nothing is to be said of it.
    """
    today = baseline.setup
    step_s, usable_gib = today.step_time_s, usable_hbm_gib(today.workload)
    today_tokens_per_s = today.tokens / step_s
    speed_up = tokens_per_s / today_tokens_per_s
    compared = None
    if cost is not None:
        today_on = (today.workload.gpus, today.workload.cluster)
        compared = CostComparison(
            tokens=cost.tokens,
            gpu_hour_price=cost.gpu_hour_price,
            today=training_cost(cost.tokens, today_tokens_per_s, *today_on, cost.gpu_hour_price),
            plan=cost.plan,
        )
    broken = today.broken_rules()
    fits = max(today.memory_gib) <= usable_gib
    verdict = _verdict(band, speed_up, keeps_rules=fits and not broken, is_proven=is_proven)
    return BaselineDoc(
        file=str(baseline.path),
        kind=baseline.kind,
        verdict="not compared" if baseline.unread else verdict,
        speed_up=None if baseline.unread else speed_up,
        unread=list(baseline.unread),
        step_time_s=step_s,
        tokens_per_step=today.tokens,
        tokens_per_s=today_tokens_per_s,
        gpus=today.workload.gpus,
        layout=layout_document(today.layout, today.stages),
        execution=Execution.within(today.workload),
        memory_gib=list(today.memory_gib),
        usable_hbm_gib=usable_gib,
        fits=fits,
        broken_rules=[
            BrokenRule(rule=finding.rule, words=finding.words, remedy=finding.remedy)
            for finding in broken
        ],
        remarks=list(baseline.remarks),
        difference_s=fall.difference_s,
        waterfall=fall.changes,
        interactions_s=fall.interactions_s,
        cost=compared,
    )


def _verdict(band: ErrorBand, speed_up: float, *, keeps_rules: bool, is_proven: bool) -> Verdict:
    """Whether a plan is faster than today's layout, and by more than the cost model may be off."""
    if speed_up <= 1 + SAME_SPEED and not keeps_rules:
        return "breaks a rule"
    if speed_up <= 1 + SAME_SPEED:
        return "optimal" if is_proven and speed_up >= 1 - SAME_SPEED else "no faster"
    return "within error" if speed_up <= band.high / band.low else "faster"


def _of_run(
    kind: BaselineKind, run: Run, inputs: PlanInputs, path: Path, remarks: Sequence[str]
) -> Baseline:
    _check_same_training(run.workload, inputs, path)
    run = replace(run, workload=replace(run.workload, model=inputs.model))
    try:
        setup = setup_of_run(run, inputs)
        step_s = setup.step_time_s
    except (ValueError, ArithmeticError) as error:
        raise InputError(f"cannot be priced: {error}", where=path_text(path)) from error
    if not 0 < step_s < float("inf"):
        raise InputError(f"cannot be priced: a step of {step_s} s", where=path_text(path))
    return Baseline(path=path, kind=kind, setup=setup, remarks=tuple(remarks))


def _check_same_training(today: Workload | PlanInputs, inputs: PlanInputs, path: Path) -> None:
    """Raises InputError where a file has other layers, passes, trained parameters or images than a plan."""
    model, layers = today.model, inputs.model.layers
    trained, images = _options_of(today.adapters), _image_options(model)
    if model.layers != layers:
        what = f"trains a model of {model.layers} layers; {inputs.model.name} has {layers}"
        what += ": plan the model that the file trains"
    elif STEP_KINDS[today.kind].passes != STEP_KINDS[inputs.kind].passes:
        what = f"takes steps of another kind than the plan: plan with --kind {today.kind}"
    elif trained != _options_of(inputs.adapters):
        what = f"trains other parameters than the plan: plan with {trained}"
    elif images != _image_options(inputs.model):
        what = f"reads other images than the plan: plan with {images}"
    else:
        return
    raise InputError(what, where=path_text(path))


def _image_options(model: ModelSpec) -> str:
    """What sequences hold of images and whether their encoder is trained, as options of a plan."""
    use = None if model.encoder is None else model.encoder.use
    if use is None:
        return "--image-tokens 0"
    frozen = "" if use.trained else " --freeze-encoder"
    return f"--image-tokens {use.tokens} --images-per-sequence {use.images}{frozen}"


def _options_of(adapters: AdapterSpec | None) -> str:
    """What is trained, as options of a plan."""
    if adapters is None:
        return "--train full"
    method, targets = adapters.method, ",".join(sorted(adapters.targets))
    return f"--train {method} --lora-rank {adapters.rank} --lora-targets {targets}"


def _model_remarks(launch: LaunchRun, inputs: PlanInputs) -> list[str]:
    """A remark where a launch file's flags describe another model than the plan's."""
    if not isinstance(launch.model, dict):
        return []
    # Where the tokenizer has the vocabulary, flags say nothing of it.
    vocab = {"vocab": inputs.model.vocab} if launch.assumed else {}
    model = model_from_mapping(launch.model | vocab, "model")
    written, planned = parameter_count(model), parameter_count(inputs.model)
    if abs(written / planned - 1) <= SAME_MODEL:
        return []
    sizes = f"{written / 1e9:.2f} B parameters, {inputs.model.name} has {planned / 1e9:.2f} B"
    return [f"the flags describe a model of {sizes}; both are priced as {inputs.model.name}"]


def is_plan(path: Path) -> bool:
    """Whether a file, or a folder, holds a plan. Raises InputError where it cannot be read.

    Parameters
    ----------
    path
        A file, or the folder of a plan; scripts and lists hold none.
    """
    return _describes_plan(_document_if_any(path))


def _describes_plan(document: Mapping[str, object]) -> bool:
    return "status" in document and "solver" in document


def _document_if_any(path: Path) -> dict[str, object]:
    """The mapping of a YAML or JSON file or of a plan's folder; empty for a script or a list."""
    if path.is_dir():
        path = plan_path(path)
    if path.suffix.lower() not in _DOCUMENTS:
        return {}
    text = read_text(path, LARGE_FILE_BYTES)
    if text.lstrip().startswith("["):
        return {}
    return parse_mapping(text, path_text(path))
