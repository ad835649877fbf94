"""Whether a layout lies in the space that a plan's proof speaks of, as the plan prints it."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.solver_document import SpaceReport
from meshwright.planner.plan.verify import wish_faults
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.predicted import LayoutDoc

_VALUES = {
    "tp": "tp",
    "cp": "cp",
    "pp": "pp",
    "dp": "dp",
    "ep": "ep",
    "etp": "etp",
    "schedule": "schedules",
    "zero_stage": "zero_stages",
    "shard_groups": "shard_groups",
    "optimizer_offload": "optimizer_offloads",
}
"""Fields of a layout, and where the space has the values that they may take."""


@dataclass(frozen=True, kw_only=True)
class PrintedSpace:
    """The layouts that a plan was chosen from: what the request wishes, and the values of its space."""

    request: PlanRequest
    space: SpaceReport | None

    @staticmethod
    def of_plan(plan: Plan) -> PrintedSpace:
        """The space of a plan; without a report of it only the wishes count."""
        request = PlanRequest.of_inputs(plan.inputs)
        return PrintedSpace(request=request, space=plan.solver.space)

    def outside(self, layout: LayoutDoc) -> str | None:
        """Why a layout is none of them, in words.

        Parameters
        ----------
        layout
            Its `stages` are not looked at: splits of the layers are searched for by the plan's own rule.

        Returns
        -------
        str or None
            Such as `zero_stage 2 was not searched, only 0, 1`; None for a layout of the space.
        """
        wishes, space = list(wish_faults(self.request, layout)), self.space
        if wishes or space is None:
            return next(iter(wishes), None)
        for name, values in _VALUES.items():
            value, searched = getattr(layout, name), getattr(space, values)
            if value not in searched:
                return f"{name} {value} was not searched, only {', '.join(map(str, searched))}"
        kind = "+".join(layout.recompute_modules) or layout.recompute
        if kind not in space.recompute:
            return f"recompute {kind} was not searched, only {', '.join(space.recompute)}"
        used = layout.tp * layout.cp * layout.pp * layout.dp
        return None if used <= space.gpus else f"{used} GPUs, the space has {space.gpus}"
