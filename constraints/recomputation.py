"""What recomputation can name: modules that the model has, and not beside all of a layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column, set_bits
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.layout import Recompute


class RecomputedModulesExist(Rule):
    """Only known modules; the experts' activation needs experts, the MLA up-projection needs MLA."""

    name = "recomputed-modules"
    unit = "modules"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        model, mask = table.workload.model, column(table, "recompute")
        allowed = sum(Recompute)
        if model.moe is None:
            allowed &= ~int(Recompute.MOE_ACTIVATION)
        if model.attention is None:
            allowed &= ~int(Recompute.MLA_UP_PROJECTION)
        return as_excess(set_bits(mask & ~np.int64(allowed)))

    def check(self, plan: FinishedPlan) -> Finding | None:
        model = plan.workload.model
        names = [module.name for module in Recompute if module is not Recompute.NONE]
        missing = []
        for bit, is_on in enumerate(reversed(f"{int(plan.layout.recompute):b}")):
            name = names[bit] if bit < len(names) else f"bit {bit}"
            exists = bit < len(names)
            if name == "MOE_ACTIVATION":
                exists = model.moe is not None
            elif name == "MLA_UP_PROJECTION":
                exists = model.attention is not None
            if is_on == "1" and not exists:
                missing.append(str(name).lower().replace("_", " "))
        if not missing:
            return None
        return self.finding(
            value=len(missing),
            words=f"recomputes {', '.join(missing)}, which {model.name} does not have",
            remedy="Leave it out: moe_act needs experts, mla_up_proj needs multi-head latent attention.",
        )


class FullRecomputeStandsAlone(Rule):
    """Recomputing whole layers excludes naming modules of them."""

    name = "full-recompute-alone"
    unit = "modules"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        mask = column(table, "recompute")
        modules = set_bits(mask & ~np.int64(Recompute.FULL))
        return as_excess(np.where(mask & int(Recompute.FULL), modules, 0))

    def check(self, plan: FinishedPlan) -> Finding | None:
        digits = f"{int(plan.layout.recompute):06b}"
        full, modules = digits[-6] == "1", digits.count("1") - 1
        if not full or modules == 0:
            return None
        return self.finding(
            value=modules,
            words=f"full recomputation together with {modules} single module(s)",
            remedy="Choose either full recomputation or a list of modules.",
        )
