"""The pipeline split: every virtual stage holds at least one layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule


class LayersByStages(Rule):
    """pp vpp <= layers. On a finished plan: pp ranks of vpp chunks, none empty, that hold all layers."""

    name = "layers-by-stages"
    unit = "layers"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        return as_excess(column(table, "pp") * column(table, "vpp") - table.workload.model.layers)

    def check(self, plan: FinishedPlan) -> Finding | None:
        layers, pp, vpp = plan.workload.model.layers, int(plan.layout.pp), int(plan.layout.vpp)
        chunks = [count for rank in plan.stages for count in rank]
        lengths = sorted({len(rank) for rank in plan.stages})
        if len(plan.stages) != pp or lengths != [vpp]:
            value, limit = len(chunks), pp * vpp
            shape = f"{len(plan.stages)} ranks with {lengths} chunks"
            words = f"the stages are {shape}, not pp {pp} x vpp {vpp}"
        elif min(chunks) < 1:
            value, limit = len(chunks), layers
            words = f"pp {pp} x vpp {vpp} leaves a virtual stage without a layer"
        elif sum(chunks) != layers:
            value, limit = sum(chunks), layers
            words = f"the stages hold {sum(chunks)} layers, the model has {layers}"
        else:
            return None
        return self.finding(
            value=value,
            limit=limit,
            words=words,
            remedy=f"Give each of the pp x vpp stages at least one of the {layers} layers; lower pp or vpp.",
        )
