"""The plan document: what `plan --json` prints and `plan.yaml` holds, and nothing else does."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from meshwright.costmodel.execution import Execution
from meshwright.planner.plan.baseline_document import BaselineDoc, CostDoc
from meshwright.planner.plan.infeasible_document import Infeasible
from meshwright.planner.plan.solver_document import SolverReport
from meshwright.planner.request.inputs import PlanInputs
from meshwright.planner.runs.grades import Grade
from meshwright.planner.runs.predicted import LayoutDoc, Predicted

Status = Literal["optimal", "feasible", "infeasible", "unknown"]

MOST_LISTED_RANKS = 4096
"""With more ranks, the list of a mapping's places lies in a file, not in `plan --json`."""

_DOC = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Objective(BaseModel):
    """`gap` is (step_time_s - lower_bound_s) / step_time_s; an unknown bound is null, never 0."""

    model_config = _DOC

    step_time_s: float | None
    lower_bound_s: float | None
    gap: float | None


class Mapping(BaseModel):
    """Rank r runs on ranks[r] = [node, local GPU]; left out above 4,096 ranks.

    `matrix[axis]` holds the axis' factor at every fabric level, from the inside out; column products are
    the sizes of the levels.
    """

    model_config = _DOC

    order: list[str]
    levels: list[str]
    matrix: dict[str, list[int]]
    ranks: list[tuple[int, int]] | None = None


class Binding(BaseModel):
    """A constraint that holds the plan back."""

    model_config = _DOC

    rule: str
    value: float
    limit: float
    slack: float
    unit: str
    note: str


class IdleDoc(BaseModel):
    """GPUs that a plan leaves idle, and what the best layout on all of them costs."""

    model_config = _DOC

    gpus: int
    nodes: list[str]
    """Those without a rank; a node may be idle in part besides."""
    full_step_time_s: float | None
    """Of the best layout on all GPUs; null where there is none."""
    full_lower_bound_s: float | None
    reason: str


class Scenario(BaseModel):
    """What becomes of the plan where one thing is off."""

    model_config = _DOC

    change: str
    """Such as `nvlink 8.3 % slower`."""
    step_time_s: float | None
    """Of the plan as it stands; null where it no longer fits."""
    best_step_time_s: float | None
    """Of the fastest layout that was found for the changed cluster."""
    loss_at_most: float | None
    """Proven: by what share the plan is slower than the fastest layout could be; null where unknown."""
    proven: bool
    """Whether no layout is faster than `best_step_time_s`."""
    winner: dict[str, object] | None = None
    """The faster layout, if there is one."""


class Robustness(BaseModel):
    """Whether the same plan wins with the cost model off by its error band, one thing at a time."""

    model_config = _DOC

    step_time_band: tuple[float, float]
    """Measured over predicted step time, which compute and every level are off by."""
    memory_band: tuple[float, float]
    same_winner: bool | None
    """Null where no other winner was found, but not all was proven."""
    scenarios: list[Scenario]


class MemoryRisk(BaseModel):
    """How likely the plan is not to fit, by measured errors of predicted memory, and what safety costs."""

    model_config = _DOC

    asked: float
    """At most this share; 0.5 takes the prediction as it stands."""
    remains: float
    """Share of measured errors with which the fullest GPU would not hold its peak."""
    room_gib: float
    """What a GPU has for the peak, without a margin."""
    step_time_s_without: float | None = None
    """Of the fastest layout that fits by the prediction as it stands; null where it was not searched for."""
    cost: float | None = None
    """Share by which the plan is slower than that."""
    proven: bool = False
    """Whether no layout that fits by the prediction as it stands is faster than `step_time_s_without`."""


class Expected(BaseModel):
    """The mean step time over scenarios of the constants, and what planning for the nominal ones costs."""

    model_config = _DOC

    scenarios: int
    step_time_s: float
    """Least mean of a plan that was found."""
    lower_bound_s: float
    """No plan has a lower mean: the mean of the scenarios' own optima."""
    gap: float
    nominal_step_time_s: float
    """Mean of the plan that is fastest with the nominal constants."""
    regret: float | None
    """Of that plan, against knowing the constants: its mean over the bound, less 1."""
    same_as_nominal: bool
    winners: int
    """Different plans that win a scenario."""
    chosen: str
    """Degrees of the plan of the least mean."""


class ExecutionChoice(BaseModel):
    """One choice that differs from plain, and the best plan without it."""

    model_config = _DOC

    choice: str
    value: str | bool | float
    step_time_s_without: float | None
    """Of the fastest plan with the plain value of this choice; null where none was found."""
    proven: bool
    """Whether no plan without it is faster than that."""
    installs: str = ""
    """What has to be installed beside the framework."""


class SoftwareNeed(BaseModel):
    """Software that has to be installed beside the framework."""

    model_config = _DOC

    software: str
    needed_by: str
    """A kind of layers, the precision, a choice with its value, or a name in `--allow`."""
    choice: str = ""
    """Name of the execution choice that needs it; empty where none does."""
    pinned: bool = False
    """Whether the request pinned that choice, so that what it brings was not searched for."""


class Plan(BaseModel):
    """One plan: a layout with its proof and its reasons, or the reason why there is none."""

    model_config = _DOC

    schema_: Literal[1] = Field(default=1, alias="schema")
    status: Status
    objective: Objective
    layout: LayoutDoc | None
    execution: Execution | None = None
    """What the launch files set and the price assumes; null where it was not chosen yet."""
    choices: list[ExecutionChoice] | None = None
    """What each choice brings that is not plain, largest first; null where many plans are made at once."""
    installs: list[SoftwareNeed] = Field(default_factory=list)
    """What the plan needs beside the framework, chosen or pinned."""
    predicted: Predicted | None
    host_memory_gib: float | None = None
    """Of a node, for what the plan keeps there; null where nothing is offloaded. As in `predicted`."""
    grades: list[Grade] = Field(default_factory=list)
    """Figures beside the targets that guides to distributed training set."""
    mapping: Mapping | None
    expert_placement: dict[str, object] | None = None
    idle: IdleDoc | None = None
    left_out: str | None = None
    """Free nodes that were not considered, or GPUs asked for that are not used, and why."""
    binding: list[Binding] = Field(default_factory=list)
    infeasible: Infeasible | None = None
    warnings: list[str] = Field(default_factory=list)
    alternatives: list[dict[str, object]] = Field(default_factory=list)
    memory_risk: MemoryRisk | None = None
    robustness: Robustness | None = None
    """Left out where many plans are made at once."""
    cost: CostDoc | None = None
    """Of the whole training, where its tokens or days were given."""
    baseline: BaselineDoc | None = None
    """Against what is run today, where that was given."""
    expected: Expected | None = None
    """With a calibration; left out where many plans are made at once for the nominal constants."""
    solver: SolverReport
    inputs: PlanInputs
    digest: str | None = None
    """SHA-256 of the rest as it was first written, without `solver.wall_s` and `mapping.ranks`: `verify`
    finds edits by hand."""
