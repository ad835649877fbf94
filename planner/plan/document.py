"""The plan document: what `plan --json` prints and `plan.yaml` holds, and nothing else does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    Field,
    SerializerFunctionWrapHandler,
    WrapSerializer,
    field_validator,
)

from meshwright.costmodel.workload import Execution
from meshwright.documents import ClosedDocument, finite, frame_of, left_out_at
from meshwright.planner.request.choices import DEGREES, OF_LAYOUT
from meshwright.planner.request.plan_request import PlanInputs
from meshwright.planner.runs.prediction import Grade
from meshwright.planner.runs.run_terms import LayoutDoc, Predicted

if TYPE_CHECKING:
    import pandas

# Why there is no plan, as fields and as the sentences made of them.


def _as_document(execution: Execution, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
    """Plans say nothing of choices that earlier versions did not have, where they are plain."""
    return without_later_choices(handler(execution))


LATER_CHOICES: dict[str, object] = {"parameter_offload": "none", "sync_each_batch": False}
"""Choices that earlier versions did not have, with their plain values."""


def without_later_choices(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of an execution by name, without choices of later versions that are plain.

    Parameters
    ----------
    settings
        Values by the name of a choice; other names stay.
    """
    return {
        name: value
        for name, value in settings.items()
        if name not in LATER_CHOICES or value != LATER_CHOICES[name]
    }


ExecutionDoc = Annotated[Execution, WrapSerializer(_as_document)]
"""Every execution setting of a plan, or of what it is compared with."""


class ConflictingRule(ClosedDocument):
    """A rule, a pin or a forbidden choice that cannot be kept together with the others of the conflict."""

    kind: Literal["rule", "pin", "forbid", "without", "layer-split"]
    """`layer-split`: layouts fit in memory on average, but no split of the layers fits on every rank."""
    rule: str
    """Name of the rule, of the pinned field or of the forbidden choice."""
    pinned: int | str | None = None
    """Value of a pin."""
    missed_by: float | None = None
    """The least by which layouts that were looked at and keep all other rules miss the limit, in `unit`."""
    limit: float | None = None
    """In `unit`; null where the limit is part of the rule."""
    unit: str | None = None
    words: str | None = None
    """What the rule says of the layout that misses it by least, and what would mend that."""
    allowed: list[str] = Field(default_factory=list)
    """Values that the rule allows, where they can be listed."""


class SmallestChange(ClosedDocument):
    """A change to the request, alone or as one of two, with which a plan was found."""

    change: Literal[
        "pin",
        "drop-pin",
        "allow",
        "permit",
        "loss",
        "reference",
        "train",
        "do-with",
        "precision",
        "framework",
        "reserve-gib",
        "memory-risk",
        "gpus",
        "global-batch",
        "device-hbm-gib",
        "host-memory-gib",
        "inside-domain",
        "max-cut-use",
    ]
    field: str | None = None
    """The pin that is changed or dropped, the choice that is allowed, or the axes that may leave a domain."""
    value: int | float | str | None = None
    """What to take: a pin's value, a precision, a framework, GiB, GPUs, a word of `--allow`, `--loss`,
    `--reference` or `--train`."""
    asked: int | float | str | None = None
    """What the request has in its place."""
    needs_gib: float | None = None
    """Of a change that makes room: memory of the fullest GPU under the layout that was found, GiB."""
    usable_gib: float | None = None
    """Memory that layouts may fill then, GiB."""
    together_with: SmallestChange | None = None
    """The other change of a pair, of which neither is enough alone."""


class Infeasible(ClosedDocument):
    """Rules that together leave no layout, and the smallest changes that would."""

    conflict: list[str]
    """A sentence for each of `rules`."""
    smallest_changes: list[str]
    """A sentence for each of `changes`."""
    rules: list[ConflictingRule] = Field(default_factory=list)
    changes: list[SmallestChange] = Field(default_factory=list)


def rule_sentence(conflicting: ConflictingRule, framework: str, layers: int) -> str:
    """One line for a rule of the conflict; `framework` and `layers` are those of the request.

    Parameters
    ----------
    conflicting
        The rule, pin or ban.
    framework
        Of the request, by name.
    layers
        Of the request's model, from 1.
    """
    name = conflicting.rule
    if conflicting.kind == "pin":
        return f"pin {name}={conflicting.pinned}"
    if conflicting.kind in ("forbid", "without"):
        return f"{conflicting.kind} {name}"
    if conflicting.kind == "layer-split":
        return (
            f"{name}: layouts fit on average, but no split of the {layers} layers leaves room for the "
            "embedding, head and logits on the first and last stage"
        )
    if conflicting.allowed:
        return f"{name}: {framework} runs {', '.join(conflicting.allowed)}"
    if conflicting.words is not None:
        return f"{name}: {conflicting.words}"
    return name + _missed_text(conflicting)


_LEANEST = "the leanest layout looked at needs at least"


def _missed_text(conflicting: ConflictingRule) -> str:
    """By how much a rule is missed, where that is known."""
    if conflicting.missed_by is None:
        return ""
    if conflicting.unit == "GiB" and conflicting.limit is not None:
        if conflicting.limit <= 0:
            needed_gib = conflicting.limit + conflicting.missed_by
            return (
                f": {_LEANEST} {needed_gib:.1f} GiB of its fullest GPU, and nothing is left usable"
            )
        return (
            f": {_LEANEST} {conflicting.missed_by:.1f} GiB beyond the usable "
            f"{conflicting.limit:.1f} of its fullest GPU"
        )
    return (
        f": the layouts looked at miss it by at least {conflicting.missed_by:g} {conflicting.unit}"
    )


CHANGE_WORDS = {
    "pin": "pin {field}={value}, not {asked}",
    "drop-pin": "drop the pin {field}={asked}",
    "allow": "allow {field}",
    "permit": "permit {value} (--allow {value})",
    "loss": "take the loss chunk by chunk (--loss {value})",
    "reference": "take a reference model that is {value} (--reference {value})",
    "train": "train adapters beside frozen weights (--train {value})",
    "do-with": "take {field} out of --without",
    "precision": "train in {value}, not {asked}",
    "framework": "take --framework {value}, not {asked}",
    "reserve-gib": "reserve {value:.1f} GiB or less, not {asked:g}",
    "memory-risk": "take a memory risk of {value:g} (the prediction as it stands), not {asked:g}",
    "gpus": "take {value} GPUs, not {asked}",
    "global-batch": "take {value} sequences a step, which the GPUs divide, not {asked}",
    "device-hbm-gib": "take GPUs with at least {value:g} GiB",
    "host-memory-gib": "take nodes whose hosts have at least {value:g} GiB, not {asked:g}",
    "inside-domain": "let the groups of {field} leave the NVLink domain",
    "max-cut-use": "let cuts be used to {value:g} of their capacity, not {asked:g}",
}


def change_sentence(change: SmallestChange) -> str:
    """One line for a change, in the imperative, with the memory of the layout that was found where it makes
    room.

    Parameters
    ----------
    change
        With `asked` where its words name what the request has.
    """
    words = CHANGE_WORDS[change.change].format(**dict(change))
    if change.together_with is not None:
        words = f"{words}, and {change_sentence(change.together_with)}"
    if change.needs_gib is None or change.usable_gib is None:
        return words
    return f"{words}: {change.needs_gib:.1f} of the usable {change.usable_gib:.1f} GiB are enough"


# How an answer was found, as fields: the space, what was left out of it and why, the proof.


MappingRule = Literal["axes-to-levels", "slots-to-leaves"]


class SpaceReport(BaseModel, frozen=True, extra="forbid", protected_namespaces=()):
    """The values of every choice that the search could make."""

    tp: list[int]
    cp: list[int]
    pp: list[int]
    dp: list[int]
    ep: list[int]
    etp: list[int]
    schedules: list[str]
    """Pipeline schedules, by name."""
    zero_stages: list[int]
    shard_groups: list[int] = [1]
    """Numbers of groups that replicas may shard in, where they divide."""
    optimizer_offloads: list[int] = [0]
    """Percent of the optimizer's states in the host's memory, where the ZeRO stage allows it."""
    recompute: list[str]
    """Kinds of recomputation: `none`, `full`, or modules joined by `+`."""
    executions: list[dict[str, str | bool]] = []
    """Combinations of execution choices: in each, those that differ from plain."""
    gradient_buckets: list[float] = []
    """Sizes of gradient buckets beside the framework's own, over that; empty where it is always taken."""
    gpus: int
    """The most GPUs that a layout may use."""
    even_stages: bool = False
    """Whether the framework deals layers out by itself: evenly, what is left over to the first ranks."""
    mapping: MappingRule
    """`axes-to-levels`: every mapping of the axes onto the fabric's levels with tp inside the innermost.
    `slots-to-leaves`: every assignment of slots to the leaves of an irregular allocation."""
    expert_gap: float | None = None
    """Of the expert placements that prices assume: imbalance above the least possible, relative; null where
    no loads were given."""


class PruningReport(ClosedDocument):
    """Layouts that were left out without an exact price, and why."""

    by_bound: int
    """No faster than the plan by their lower bound."""
    by_rule: dict[str, int]
    """Ruled out, by the first rule that each of them breaks."""
    priced: int
    """Priced exactly."""
    fewest_gpus: int
    """No layout on fewer GPUs than this can be faster; these were not enumerated."""


class ProofReport(ClosedDocument):
    """What the status rests on."""

    method: str
    """cp-sat or exhaustive."""
    incumbent_s: float | None
    """Step time of the plan; null without one."""
    lower_bound_s: float | None
    """No layout of the space is faster; null where nothing is known."""
    rounds: int
    """CP-SAT models solved."""
    model_bound_s: float | None = None
    """What CP-SAT proved of the combinations in its last model; null on irregular fabrics."""
    left_out_bound_s: float | None = None
    """No combination outside that model is faster, by bounds; null where nothing is known."""
    combinations: int = 0
    """Of kernel, execution, recomputed modules and ZeRO stage in the last model."""
    kernels: int = 0
    """Degrees, micro-batches, schedules and mappings in it."""


class SolverReport(ClosedDocument):
    """How the answer was found."""

    wall_s: float | None
    """Seconds from request to plan; null where files must not depend on the machine, as in a batch."""
    bound_rounds: int
    workers: int
    seed: int
    version: str
    """Of the solver."""
    program: str | None = None
    """Which meshwright made the plan; null in plans of versions that did not write it."""
    method: str = "cp-sat"
    layouts_considered: int = 0
    space: SpaceReport | None = None
    pruning: PruningReport | None = None
    proof: ProofReport | None = None

    @field_validator("space", mode="before")
    @classmethod
    def _drop_sentence(cls, value: Any) -> Any:
        """Plans written before the space had fields described it in one sentence."""
        return None if isinstance(value, str) else value


# What a plan brings over a layout that is run today, as the plan's document carries it.


BaselineKind = Literal["launch", "run", "plan"]
Verdict = Literal["faster", "within error", "optimal", "no faster", "breaks a rule", "not compared"]


class BrokenRule(ClosedDocument):
    """A rule that today's layout breaks."""

    rule: str
    words: str
    remedy: str


class BaselineChange(ClosedDocument):
    """One bar of the waterfall. Seconds are of the plan's tokens; what is gained is below 0."""

    change: str
    """Such as `tp 8 -> 4, dp 8 -> 16`."""
    alone_s: float | None
    """What this change alone does to today's step; null where it cannot be made alone."""
    in_turn_s: float
    """What it does after the changes above it."""
    step_time_s: float
    """The step with it and the changes above it."""
    memory_gib: float | None
    """Of the fullest GPU then; null of the best plan on a part of a mixed cluster, of which no more is kept.
    """
    fits: bool
    """Whether that is within the GPU's usable memory."""


class ScriptEdit(ClosedDocument):
    """One flag or key of the launch file that the plan sets otherwise."""

    name: str
    before: str | None
    """Null where it is not there."""
    after: str | None
    """Null where it is taken out."""


class ScriptDiff(ClosedDocument):
    """The smallest change of today's file that starts the plan's layout."""

    edits: list[ScriptEdit] = Field(default_factory=list)
    patch: str = ""
    """The edits as a unified diff of the file; empty where they could not be written into it."""
    step_time_s: float | None = None
    """Price of the edited file, as `estimate` gives it; null where it was not priced."""
    note: str = ""
    """What the file cannot say, or why there is no diff."""


class TrainingCost(ClosedDocument):
    """What a whole training costs."""

    days: float
    gpu_hours: float
    dollars: float | None
    """Null without a price of a GPU hour."""
    kwh: float | None = None
    """Of the GPUs at their board power; hosts, network and cooling are left out."""


class CostDoc(ClosedDocument):
    """What a plan's training costs."""

    tokens: float
    """As asked, or what is trained in the days that were asked for."""
    gpu_hour_price: float | None
    days_asked: float | None = None
    """The deadline, where there is one."""
    in_time: bool | None = None
    gpu_power_w: float
    """Board power of a GPU, of the vendor's datasheet."""
    plan: TrainingCost


class CostComparison(ClosedDocument):
    """Today and the plan over the same tokens."""

    tokens: float
    gpu_hour_price: float | None
    today: TrainingCost
    plan: TrainingCost


class BaselineDoc(ClosedDocument):
    """Today's layout, priced as it stands, and the way from it to the plan."""

    file: str
    kind: BaselineKind
    verdict: Verdict
    """`optimal`: no layout is faster by more than 0.1 %; `no faster`: the plan is not, and its space does
    not hold today's layout or is not searched to the end; `within error`: the plan is faster by less than the
    cost model's error; `breaks a rule`: the plan is no faster, but today's layout does not fit or breaks
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
    execution: ExecutionDoc
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


Status = Literal["optimal", "feasible", "infeasible", "unknown"]

MOST_LISTED_RANKS = 4096
"""With more ranks, the list of a mapping's places lies in a file, not in `plan --json`."""


class Objective(ClosedDocument):
    """`gap` is (step_time_s - lower_bound_s) / step_time_s; an unknown bound is null, never 0."""

    step_time_s: float | None
    lower_bound_s: float | None
    gap: float | None


class MoreBlocksDoc(ClosedDocument):
    """Levels at which equal parts take more blocks of the machine than the GPUs need."""

    used: dict[str, int]
    """Blocks that the ranks are in, by level."""
    fewest: dict[str, int]
    """Blocks that could hold as many GPUs."""
    step_time_s_on_fewest: float
    """The same layout on neighbouring nodes in turn."""


class Mapping(ClosedDocument):
    """Rank r runs on ranks[r] = [node, local GPU]; left out above 4,096 ranks.

    `matrix[axis]` holds the axis' factor at every fabric level, from the inside out; column products are
    the sizes of the levels.
    """

    order: list[str]
    levels: list[str]
    matrix: dict[str, list[int]]
    ranks: list[tuple[int, int]] | None = None
    more_blocks: MoreBlocksDoc | None = None
    """Null where the ranks are in as few blocks of every level as there can be."""
    stage_ep: list[list[int]] | None = None
    """Members of an expert group in one block of every level, stage by stage, where each is priced by them;
    null where the stage that reaches least far prices all of them."""


class Binding(ClosedDocument):
    """A constraint that holds the plan back."""

    rule: str
    value: float
    limit: float
    slack: float
    unit: str
    note: str


class IdleDoc(ClosedDocument):
    """GPUs that a plan leaves idle, and what the best layout on all of them costs."""

    gpus: int
    nodes: list[str]
    """Those without a rank; a node may be idle in part besides."""
    full_step_time_s: float | None
    """Of the best layout on all GPUs; null where there is none."""
    full_lower_bound_s: float | None
    reason: str


class Scenario(ClosedDocument):
    """What becomes of the plan where one thing is off."""

    change: str
    """Such as `nvlink 8.3 % slower`."""
    step_time_s: float | None
    """Of the plan as it stands; null where it no longer fits."""
    best_step_time_s: float | None
    """Of the fastest layout that was found for the changed cluster."""
    loss_at_most: float | None
    """Proven: by what share the plan is slower than the fastest layout could be; null where unknown."""
    status: str = ""
    """Of `best_step_time_s`: optimal, feasible, infeasible, or not searched where it is null. Empty in plans
    of versions that did not write it."""
    proven: bool
    """Whether no layout is faster than `best_step_time_s`; where that is null, whether none fits."""
    winner: dict[str, object] | None = None
    """The faster layout, if there is one."""


class Robustness(ClosedDocument):
    """Whether the same plan wins with the cost model off by its error band, one thing at a time."""

    step_time_band: tuple[float, float]
    """Measured over predicted step time, which compute and every level are off by."""
    memory_band: tuple[float, float]
    same_winner: bool | None
    """Null where no other winner was found, but not all was proven."""
    scenarios: list[Scenario]


class MemoryRisk(ClosedDocument):
    """How likely the plan is not to fit, by measured errors of predicted memory, and what safety costs."""

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


class Expected(ClosedDocument):
    """The mean step time over scenarios of the constants, and what planning for the nominal ones costs."""

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


class SettingCorrection(ClosedDocument):
    """What measured pairs correct of one setting."""

    setting: str
    factor: float
    """What the price of a step with it is multiplied by, above 0."""
    deviation: float
    """Standard deviation of the factor's logarithm."""
    pairs: int
    """Measured pairs of runs with and without it, on all devices."""


class PromisedStep(ClosedDocument):
    """A plan by its price and by what measured pairs make of it."""

    plan: str
    """Degrees, and what sets it apart from the other plan."""
    step_time_s: float
    """Predicted."""
    expected_step_time_s: float
    """Predicted times the corrections of its settings."""
    corrections: list[SettingCorrection]
    """Of the settings that it has."""


class ExpectedByPairs(ClosedDocument):
    """The least step that prices and measured pairs of runs make expect, and the fastest plan beside it."""

    chosen: PromisedStep
    fastest: PromisedStep
    """Of the least price, on the same nodes."""
    same_as_fastest: bool
    lower_bound_s: float | None
    """No plan on these nodes has a lower expected step; null where nothing is known."""
    gap: float | None
    proven: bool
    """Whether that of the plan chosen is the least."""


class ExecutionChoice(ClosedDocument):
    """One choice that differs from plain, and the best plan without it."""

    choice: str
    value: str | bool | float
    step_time_s_without: float | None
    """Of the fastest plan with the plain value of this choice; null where none was found."""
    lower_bound_s_without: float | None = None
    """No plan without it is faster; null where nothing is known."""
    status: str = ""
    """Of that search: optimal, feasible, infeasible (proven that there is no plan without it), or not
    searched (the time limit came before it, or before it had found a plan). Empty in plans of versions that
    did not write it."""
    pin: str = ""
    """What `--pin` takes to plan without it: a name and its plain value. Empty where nothing does."""
    proven: bool
    """Whether no plan without it is faster than that."""
    installs: str = ""
    """What has to be installed beside the framework."""
    measured_gain: float | None = None
    """Share of the step that the choice saved where runs with and without it were published; below 0 where it
    cost time, null where nobody published any."""
    pairs: int = 0
    """Of such runs."""
    measured_on: str = ""
    """On which devices, with which kinds of models."""


class NearestRun(ClosedDocument):
    """The published run that lies nearest to a plan, and what it measured."""

    id: str
    source: str
    """Who published it."""
    model: str
    device: str
    gpus: int
    global_batch: int
    seq_len: int
    precision: str
    framework: str
    """Software profile."""
    settings: list[str]
    """What of it has a price beside the sizes of its groups, in words."""
    step_time_s: float
    """Measured."""
    same_work: bool
    """Whether it trained the plan's model on the same machine with the same batch and precision."""


class KnobGain(ClosedDocument):
    """A choice that the plan makes otherwise than the nearest run, of which measured pairs are published."""

    choice: str
    value: str | bool | float
    """Of the plan."""
    value_of_run: str | bool | float
    predicted_gain: float
    """Share of the plan's step with the run's value that the plan's value saves, as priced."""
    measured_gain: float
    """The same from published pairs of runs; below 0 where the plan's value cost time."""
    pairs: int
    measured_on: str


class GainEvidence(ClosedDocument):
    """How much of what a plan promises over measured runs has been measured."""

    nearest_run: NearestRun | None
    """Null where nobody published a run of such a model on such a device."""
    basis: Literal["measured", "priced"] | None = None
    """What the plan is held against: the measured step of the fastest run of the same work, or the choices of
    the nearest run on the plan's own work, priced by the cost model; null where there is neither."""
    step_time_s: float | None = None
    """What the plan is held against, seconds."""
    gain: float | None = None
    """Share of that step that the plan promises to save; below 0 where it promises a slower one."""
    measured_share: float | None = None
    """Share of the promised gain, by logarithms, that published pairs of runs bear out, 0 to 1; 1 where the
    plan promises none. The rest is the cost model's word."""
    knobs: list[KnobGain] = Field(default_factory=list)
    """Largest predicted gain first."""


class SoftwareNeed(ClosedDocument):
    """Software that has to be installed beside the framework."""

    software: str
    needed_by: str
    """A kind of layers, the precision, a choice with its value, or a name in `--allow`."""
    choice: str = ""
    """Name of the execution choice that needs it; empty where none does."""
    pinned: bool = False
    """Whether the request pinned that choice, so that what it brings was not searched for."""


_IN_NOTEBOOKS = "meshwright.planner.report.plan_page"
"""What shows a plan there, imported when a notebook asks: this room knows nothing of views."""
LAYOUT_COLUMNS = (*(choice.name for choice in OF_LAYOUT), "num_micro_batches")
"""Fields of a layout that a row of results has."""
_IN_ROWS = (
    *LAYOUT_COLUMNS,
    *("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "host_memory_gib"),
)
"""Fields of the layout, then of what is predicted, that a row of results has."""


class PackingDoc(ClosedDocument):
    """What the plan's layout does with samples packed in one way."""

    packing: str
    """hybrid-cp where samples are dealt to ranks one by one."""
    fill: float
    """Tokens of samples over those of packs."""
    step_time_s: float
    imbalance_s: float
    """Of the step, what ranks wait for the slowest pack, or for the slowest rank of each round of samples."""
    tokens_per_s: float
    """Tokens of samples a second, of all GPUs together."""


class LengthsDoc(ClosedDocument):
    """Unlike samples in packs: what a step holds, and what that they are unlike costs."""

    pack_size: int
    """Tokens of a pack."""
    samples_per_step: float
    """In the mean."""
    tokens_per_step: float
    """Of samples, without padding, in the mean."""
    cut_samples: int
    """Samples of the file that are longer than a pack, and are cut to it."""
    attended_share: float
    """Attention of the mean pack over that of one sequence as long."""
    planned: PackingDoc
    """As asked."""
    others: list[PackingDoc] = Field(default_factory=list)
    """The same samples packed in other ways, in the plan's layout; most tokens a second first."""


class Plan(ClosedDocument):
    """One plan: a layout with its proof and its reasons, or the reason why there is none."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    status: Status
    objective: Objective
    layout: LayoutDoc | None
    execution: ExecutionDoc | None = None
    """What the launch files set and the price assumes; null where it was not chosen yet."""
    choices: list[ExecutionChoice] | None = None
    """What each choice brings that is not plain, largest first; null where many plans are made at once."""
    evidence: GainEvidence | None = left_out_at(None)
    """Null for plans without a layout, and for those of adapters, packs of samples or preferences: runs that
    plans are held beside train none of these."""
    installs: list[SoftwareNeed] = Field(default_factory=list)
    """What the plan needs beside the framework, chosen or pinned."""
    predicted: Predicted | None
    host_memory_gib: float | None = None
    """What the plan keeps in the memory of a node, above 0; null where nothing is offloaded. Predicted."""
    grades: list[Grade] = Field(default_factory=list)
    """Figures beside the targets that guides to distributed training set."""
    mapping: Mapping | None
    expert_placement: dict[str, object] | None = None
    lengths: LengthsDoc | None = left_out_at(None)
    """Where samples of unlike lengths are packed."""
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
    expected_by_pairs: ExpectedByPairs | None = left_out_at(None)
    """Where that is the objective, and no calibration speaks of the user's own runs."""
    solver: SolverReport
    inputs: PlanInputs
    digest: str | None = None
    """SHA-256 of the rest as it was first written, without `solver.wall_s` and `mapping.ranks`: `verify`
    finds edits by hand."""

    def __repr_args__(self) -> Iterator[tuple[str, object]]:
        """What a line of Python's prompt says of it: question, status and answer."""
        inputs, step_time_s = self.inputs, self.objective.step_time_s
        yield "status", self.status
        yield "model", inputs.model.name
        yield "cluster", inputs.cluster.name
        yield "gpus", inputs.gpus
        if self.layout is not None and step_time_s is not None:
            yield "step_time_s", round(step_time_s, 4)
            yield from (
                (axis, size) for axis in DEGREES if (size := getattr(self.layout, axis)) > 1
            )

    def _repr_html_(self) -> str:
        """What a notebook shows of it: the first screen, and where the step goes or what changed."""
        text: str = import_module(_IN_NOTEBOOKS).notebook_html(self)
        return text

    def figures(self) -> dict[str, Any]:
        """What a row of results says of it: status, price, bound, layout and memory, by name.

        Returns
        -------
        dict
            `message` says why there is no layout; the figures of one are then left out.
        """
        figures = {"status": self.status, "gpus": self.inputs.gpus, **self.objective.model_dump()}
        if self.infeasible is not None:
            changes = [f"or {change}" for change in self.infeasible.smallest_changes]
            figures["message"] = "; ".join([*self.infeasible.conflict, *changes])
        if self.layout is not None and self.predicted is not None:
            for name in _IN_ROWS:
                holder = self.layout if name in LayoutDoc.model_fields else self.predicted
                figures[name] = getattr(holder, name)
            tokens = self.inputs.tokens_per_step
            figures["tokens_per_s"] = tokens / self.predicted.step_time_s
            figures["peak_memory_gib"] = max(self.predicted.memory_gib)
        return figures

    def to_frame(self) -> pandas.DataFrame:
        """The plan as a table of pandas with one row, in the columns of a sweep's rows.

        Returns
        -------
        pandas.DataFrame
            Rows of several plans go under one another with `pandas.concat`.

        Raises
        ------
        InputError
            If pandas is not installed.
        """
        inputs = self.inputs
        asked = ("global_batch", "seq_len", "precision", "framework")
        row: dict[str, Any] = {"model": inputs.model.name, "cluster": inputs.cluster.name}
        row |= {name: getattr(inputs, name) for name in asked} | self.figures()
        if self.cost is not None:
            row |= {"tokens": self.cost.tokens, **self.cost.plan.model_dump()}
        return frame_of([row])


# What tells that a plan document was edited by hand.


DocumentT = TypeVar("DocumentT", bound=BaseModel)
_LEFT_OUT: Any = {"digest": True, "solver": {"wall_s"}, "mapping": {"ranks"}}
"""What differs from run to run, what may lie in a file of its own, and the digest itself."""


def digest_of(plan: BaseModel) -> str:
    """SHA-256 of the content of a plan, or of a plan on a mixed cluster, in hexadecimal.

    Parameters
    ----------
    plan
        Its own digest, the seconds of its search and its list of ranks do not count.
    """
    data = plan.model_dump(mode="json", by_alias=True, exclude=_LEFT_OUT)
    text = json.dumps(finite(data), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def with_digest(plan: DocumentT) -> DocumentT:
    """The plan with the digest of its content in its field `digest`.

    Parameters
    ----------
    plan
        Finished: whoever changes it later makes its digest anew.
    """
    return plan.model_copy(update={"digest": digest_of(plan)})
