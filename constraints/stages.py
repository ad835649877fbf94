"""The pipeline split: every virtual stage holds at least one layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule


class LayersByStages(Rule):
    """pp vpp <= groups of layers. On a finished plan: pp ranks of vpp chunks, none empty, with all layers.

    A group is one layer, or the dense ones up to a layer with experts where those alternate: what a rank
    holds is then a whole number of groups, as prices are of their mean layer.
    """

    name = "layers-by-stages"
    unit = "layers"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        model = table.workload.model
        groups = model.layers // model.layers_in_group
        return as_excess(column(table, "pp") * column(table, "vpp") - groups)

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
        elif any(count % plan.workload.model.layers_in_group for count in chunks):
            group = plan.workload.model.layers_in_group
            value, limit = max(count % group for count in chunks), 0
            words = f"a virtual stage parts {group} layers of which one has experts"
        else:
            return None
        return self.finding(
            value=value,
            limit=limit,
            words=words,
            remedy=f"Give each of the pp x vpp stages {_least_words(plan)} of the {layers} layers; "
            "lower pp or vpp.",
        )


def _least_words(plan: FinishedPlan) -> str:
    """What a stage must have."""
    group = plan.workload.model.layers_in_group
    return "at least one" if group == 1 else f"a multiple of {group}"
