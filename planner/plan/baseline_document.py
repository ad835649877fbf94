"""What a plan brings over a layout that is run today, as the plan's document carries it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from meshwright.costmodel.execution import Execution
from meshwright.planner.runs.predicted import LayoutDoc

BaselineKind = Literal["launch", "run", "plan"]
Verdict = Literal["faster", "within error", "optimal", "breaks a rule", "not compared"]

_DOC = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class BrokenRule(BaseModel):
    """A rule that today's layout breaks."""

    model_config = _DOC

    rule: str
    words: str
    remedy: str


class BaselineChange(BaseModel):
    """One bar of the waterfall. Seconds are of the plan's tokens; what is gained is below 0."""

    model_config = _DOC

    change: str
    """Such as `tp 8 -> 4, dp 8 -> 16`."""
    alone_s: float | None
    """What this change alone does to today's step; null where it cannot be made alone."""
    in_turn_s: float
    """What it does after the changes above it."""
    step_time_s: float
    """The step with it and the changes above it."""
    memory_gib: float
    """Of the fullest GPU then."""
    fits: bool
    """Whether that is within the GPU's usable memory."""


class ScriptEdit(BaseModel):
    """One flag or key of the launch file that the plan sets otherwise."""

    model_config = _DOC

    name: str
    before: str | None
    """Null where it is not there."""
    after: str | None
    """Null where it is taken out."""


class ScriptDiff(BaseModel):
    """The smallest change of today's file that starts the plan's layout."""

    model_config = _DOC

    edits: list[ScriptEdit] = Field(default_factory=list)
    patch: str = ""
    """The edits as a unified diff of the file; empty where they could not be written into it."""
    step_time_s: float | None = None
    """Price of the edited file, as `estimate` gives it; null where it was not priced."""
    note: str = ""
    """What the file cannot say, or why there is no diff."""


class TrainingCost(BaseModel):
    """What a whole training costs."""

    model_config = _DOC

    days: float
    gpu_hours: float
    dollars: float | None
    """Null without a price of a GPU hour."""
    kwh: float | None = None
    """Of the GPUs at their board power; hosts, network and cooling are left out."""


class CostDoc(BaseModel):
    """What a plan's training costs."""

    model_config = _DOC

    tokens: float
    """As asked, or what is trained in the days that were asked for."""
    gpu_hour_price: float | None
    days_asked: float | None = None
    """The deadline, where there is one."""
    in_time: bool | None = None
    gpu_power_w: float
    """Board power of a GPU, of the vendor's datasheet."""
    plan: TrainingCost


class CostComparison(BaseModel):
    """Today and the plan over the same tokens."""

    model_config = _DOC

    tokens: float
    gpu_hour_price: float | None
    today: TrainingCost
    plan: TrainingCost


class BaselineDoc(BaseModel):
    """Today's layout, priced as it stands, and the way from it to the plan."""

    model_config = _DOC

    file: str
    kind: BaselineKind
    verdict: Verdict
    """`optimal`: no layout is faster by more than 0.1 %; `within error`: the plan is faster by less than
    the cost model's error; `breaks a rule`: the plan is no faster, but today's layout does not fit or breaks
    a rule that the plan keeps; `not compared`: today's file asks for more than its price knows of."""
    speed_up: float | None
    """Tokens per second of the plan over those of today; null where they are not compared."""
    unread: list[str] = Field(default_factory=list)
    """Flags and fields of today's file that change the price, or may, and are not read."""
    step_time_s: float
    """Of today's layout, with its own batch."""
    tokens_per_step: int
    tokens_per_s: float
    gpus: int
    layout: LayoutDoc
    execution: Execution
    memory_gib: list[float]
    """Per pipeline stage, the peak on one GPU."""
    usable_hbm_gib: float
    fits: bool
    broken_rules: list[BrokenRule] = Field(default_factory=list)
    remarks: list[str] = Field(default_factory=list)
    """What was not read, or is assumed."""
    difference_s: float
    """Seconds of the plan less those of today, both for the plan's tokens of a step."""
    waterfall: list[BaselineChange]
    """`in_turn_s` add up to `difference_s`."""
    interactions_s: float
    """`difference_s` less all `alone_s`: what the changes do together and not one by one."""
    diff: ScriptDiff | None = None
    cost: CostComparison | None = None
