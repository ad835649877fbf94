"""The space, the pruning and the proof of a plan in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.costmodel.bucket_sizes import LEAST_GAIN
from meshwright.planner.drawing.quantities import counted, percent, seconds
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.solver_document import PruningReport, SolverReport, SpaceReport

_MAPPINGS = {
    "axes-to-levels": "every mapping of the axes onto the fabric levels with tp inside the innermost",
    "slots-to-leaves": "every assignment of slots (free nodes, equal parts of one, or the nodes of a "
    "tensor group, with axes in them as in Megatron) to leaves",
}
_ANY_STAGES = (
    "every split of the layers (interleaved: those even in every virtual stage but for the ends, which "
    "may be empty)"
)
_EVEN_STAGES = "layers dealt out evenly, as the framework does by itself"
PROVEN_EXPERT_GAP = 1e-6
"""Relative imbalance: below this a placement of experts counts as the best one."""
MOST_LISTED_VALUES = 8


def space_text(space: SpaceReport) -> str:
    """The values of every choice, in one sentence."""
    parts = [
        _degrees_text(space),
        "every micro-batch that divides",
        "virtual stages that deal layers evenly",
    ]
    if len(space.executions) > 1:
        parts.append(f"{len(space.executions)} combinations of execution choices")
    if space.executions and all(each.get("tp_overlap") for each in space.executions):
        parts.append("tensor-parallel overlap on wherever it may be")
    if len(space.schedules) > 2:
        parts.append(f"{len(space.schedules)} pipeline schedules")
    parts += [
        f"ZeRO stage in {_values_text(space.zero_stages)}",
        *(
            [f"shard groups in {_values_text(space.shard_groups)}"]
            if len(space.shard_groups) > 1
            else []
        ),
        *(
            [f"{_values_text(space.optimizer_offloads)} % of the optimizer's states offloaded"]
            if len(space.optimizer_offloads) > 1
            else []
        ),
        f"{len(space.recompute)} kinds of recomputation",
        f"up to {space.gpus} GPUs",
        _MAPPINGS[space.mapping],
        _EVEN_STAGES if space.even_stages else _ANY_STAGES,
        _buckets_text(space),
    ]
    if space.expert_gap is not None:
        parts.append(_experts_text(space.expert_gap))
    return ", ".join(parts)


def _buckets_text(space: SpaceReport) -> str:
    """Which sizes gradient buckets may have, and what that leaves unproven."""
    own = "gradient buckets of the framework's own size"
    if not space.gradient_buckets:
        return own
    *sizes, largest = (f"{times:g}" for times in space.gradient_buckets)
    others = f"{', '.join(sizes)} or {largest} times that without virtual stages"
    return f"{own}, or {others} where the step is {LEAST_GAIN:.2%} faster with it"


def _degrees_text(space: SpaceReport) -> str:
    axes = {
        "tp": space.tp,
        "cp": space.cp,
        "pp": space.pp,
        "dp": space.dp,
        "ep": space.ep,
        "etp": space.etp,
    }
    parts = [f"{axis} in {_values_text(values)}" for axis, values in axes.items() if values != [1]]
    return ", ".join(parts) or "every degree 1"


def _values_text(values: Sequence[int]) -> str:
    """All values of a choice, or its ends where there are many."""
    if len(values) > MOST_LISTED_VALUES:
        return f"{values[0]}..{values[-1]} ({len(values)} values)"
    return "{" + ", ".join(map(str, values)) + "}"


def _experts_text(gap: float) -> str:
    how = "the best placement of each degree"
    if gap > PROVEN_EXPERT_GAP:
        how = (
            f"one placement of each degree, its imbalance at most {gap:.2g} above what is possible"
        )
    return f"experts where measured loads want them ({how})"


def pruning_text(solver: SolverReport) -> str:
    """How many layouts were left out by what; empty where the plan does not say."""
    pruning = solver.pruning
    if pruning is None:
        return ""
    text = (
        f"{solver.layouts_considered} layouts: {pruning.by_bound} no faster by their bound, "
        f"{pruning.priced} priced exactly"
    )
    if pruning.by_rule:
        text += f", ruled out: {_rules_text(pruning)}"
    if pruning.fewest_gpus > 1:
        text += f"; none on fewer than {pruning.fewest_gpus} GPUs can be faster"
    return text


def _rules_text(pruning: PruningReport) -> str:
    return ", ".join(f"{rule} {number}" for rule, number in sorted(pruning.by_rule.items()))


def proof_text(plan: Plan) -> str:
    """Bound against incumbent, and after how many rounds."""
    objective = plan.objective
    after = f"after {counted(plan.solver.bound_rounds, 'round')}"
    if objective.step_time_s is None:
        nothing = f"nothing found {after}"
        return nothing if plan.status == "unknown" else "a rule excludes every layout"
    incumbent = seconds(objective.step_time_s)
    if objective.lower_bound_s is None:
        return f"step time {incumbent}, no bound known, {after}"
    if plan.status == "optimal":
        return f"bound = incumbent = {incumbent} {after}"
    gap = "" if objective.gap is None else f", gap {percent(objective.gap, 2)}"
    return f"bound {seconds(objective.lower_bound_s)}, incumbent {incumbent}{gap}, {after}"
