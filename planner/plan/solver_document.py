"""How an answer was found, as fields: the space, what was left out of it and why, the proof."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

_DOC = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

MappingRule = Literal["axes-to-levels", "slots-to-leaves"]


class SpaceReport(BaseModel):
    """The values of every choice that the search could make."""

    model_config = _DOC

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


class PruningReport(BaseModel):
    """Layouts that were left out without an exact price, and why."""

    model_config = _DOC

    by_bound: int
    """No faster than the plan by their lower bound."""
    by_rule: dict[str, int]
    """Ruled out, by the first rule that each of them breaks."""
    priced: int
    """Priced exactly."""
    fewest_gpus: int
    """No layout on fewer GPUs than this can be faster; these were not enumerated."""


class ProofReport(BaseModel):
    """What the status rests on."""

    model_config = _DOC

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


class SolverReport(BaseModel):
    """How the answer was found."""

    model_config = _DOC

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
