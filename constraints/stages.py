"""The pipeline split: every virtual stage holds at least one layer, but for the ends of ranks in step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.layout import Ints
from meshwright.costmodel.pipeline.schedules import has_trait
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import framework_of_stack


def may_have_empty_ends(workload: Workload) -> bool:
    """Whether the first chunk may hold the embedding alone, and the last one the head alone.

    Ranks in step need it to be even: Llama 3's 405B has 126 layers for it (arXiv 2407.21783, section 3.3.2),
    and Megatron-Bridge runs DeepSeek-V3 as `Et|(tt|)*30mL`. A hybrid pattern has no words for it.

    Parameters
    ----------
    workload
        Its framework must take any split.
    """
    is_pattern = workload.model.hybrid_pattern is not None
    return framework_of_stack(workload.framework).uneven_stages and not is_pattern


class LayersByStages(Rule):
    """pp vpp <= groups of layers, 2 more where ends may be empty. On a finished plan: pp ranks of vpp chunks
    with all layers, none empty but these.

    Where ranks with several virtual stages are in step, the first chunk of the model may hold the embedding
    alone, and the last one the head.
    A group is one layer, or the dense ones up to a layer with experts where those alternate: what a rank
    holds is then a whole number of groups, as prices are of their mean layer.
    """

    name = "layers-by-stages"
    unit = "layers"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        model = table.workload.model
        groups = model.layers // model.layers_in_group
        pp, vpp = column(table, "pp"), column(table, "vpp")
        empty = 2 * _has_empty_ends(table.workload, pp, vpp, column(table, "schedule"))
        return as_excess(pp * vpp - groups - empty)

    def check(self, plan: FinishedPlan) -> Finding | None:
        layers, pp, vpp = plan.workload.model.layers, int(plan.layout.pp), int(plan.layout.vpp)
        chunks = [count for rank in plan.stages for count in rank]
        empty_ends = _has_empty_ends(plan.workload, pp, vpp, plan.layout.schedule)
        inner = chunks[1:-1] if empty_ends else chunks
        lengths = sorted({len(rank) for rank in plan.stages})
        if len(plan.stages) != pp or lengths != [vpp]:
            value, limit = len(chunks), pp * vpp
            shape = f"{len(plan.stages)} ranks with {lengths} chunks"
            words = f"the stages are {shape}, not pp {pp} x vpp {vpp}"
        elif min(inner, default=1) < 1 or min(chunks) < 0:
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


def _has_empty_ends(workload: Workload, pp: Ints, vpp: Ints, schedule: Ints) -> NDArray[np.bool_]:
    """Which pipelines may have them: those whose ranks are in step."""
    several = (np.asarray(pp) > 1) & (np.asarray(vpp) > 1)
    return several & has_trait(schedule, "in_step") & may_have_empty_ends(workload)


def _least_words(plan: FinishedPlan) -> str:
    """What a stage must have."""
    group = plan.workload.model.layers_in_group
    return "at least one" if group == 1 else f"a multiple of {group}"
