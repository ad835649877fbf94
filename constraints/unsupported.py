"""What a framework has no setting for: rules that follow from the fields of its record."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.layout import Recompute
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import DEFAULT_FRAMEWORK, planned
from meshwright.frameworks.record import Framework

ZERO_STAGES = (0, 1, 2, 3)


class AllowedDegrees(Rule):
    """Degrees without a setting are 1, sequence parallelism without one is off; ZeRO has its stages."""

    unit = "fields"

    def __init__(self, framework: Framework) -> None:
        self.name = f"{framework.name}-degrees"
        self.framework = framework
        allowed: dict[str, tuple[int, ...]] = {
            axis: (1,) for axis in ("cp", "pp", "vpp", "ep", "etp") if axis not in framework.axes
        }
        stages = tuple(framework.zero_stages)
        if len(stages) < len(ZERO_STAGES):
            allowed["zero_stage"] = stages
        if framework.shard_groups is None or not framework.shard_groups.planned:
            allowed["shard_groups"] = (1,)
        if framework.optimizer_offload is None or not framework.optimizer_offload.planned:
            allowed["optimizer_offload"] = (0,)
        if framework.sequence_parallel is None:
            allowed["sequence_parallel"] = (0,)
        self.allowed = allowed

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        over = np.zeros_like(column(table, "tp"))
        for field, values in self.allowed.items():
            over = over + ~np.isin(column(table, field), values)
        return as_excess(over)

    def check(self, plan: FinishedPlan) -> Finding | None:
        wrong = []
        for field, values in self.allowed.items():
            value = int(getattr(plan.layout, field))
            if value not in values:
                wrong.append(f"{field} {value} (only {', '.join(map(str, values))})")
        if not wrong:
            return None
        return self.finding(
            value=len(wrong),
            words=f"{self.framework.name} cannot run {'; '.join(wrong)}",
            remedy=self.framework.degrees_remedy,
        )


class AllowedPrecisions(Rule):
    """The number format is one that the framework trains in."""

    unit = "formats"
    of_workload = True

    def __init__(self, framework: Framework) -> None:
        self.name = f"{framework.name}-precision"
        self.framework = framework
        self.precisions = planned(framework.precisions)

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        missing = 0 if table.workload.precision in self.precisions else 1
        return as_excess(np.full_like(column(table, "tp"), missing))

    def check(self, plan: FinishedPlan) -> Finding | None:
        wanted = plan.workload.precision
        if any(wanted == precision for precision in self.precisions):
            return None
        return self.finding(
            value=1,
            words=f"{self.framework.name} has no training in {wanted}",
            remedy=f"Choose one of {', '.join(self.precisions)}, or the {DEFAULT_FRAMEWORK} framework.",
        )


class NoLinearAttention(Rule):
    """Every layer has attention: the framework's model has no layer with Gated DeltaNet."""

    unit = "kinds of layers"
    of_workload = True

    def __init__(self, framework: Framework) -> None:
        self.name = f"{framework.name}-linear-attention"
        self.framework = framework

    def applies(self, workload: Workload) -> bool:
        return workload.model.linear_attention is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        missing = 0 if table.workload.model.linear_attention is None else 1
        return as_excess(np.full_like(column(table, "tp"), missing))

    def check(self, plan: FinishedPlan) -> Finding | None:
        layers = plan.workload.model.linear_layers
        if not layers:
            return None
        return self.finding(
            value=1,
            words=f"{self.framework.name} is not planned with the {layers} layers of linear attention",
            remedy=f"Choose the {DEFAULT_FRAMEWORK} framework for this model.",
        )


class NoSparseAttention(Rule):
    """Queries attend to every earlier position: the framework's model has no indexer that chooses some."""

    unit = "kinds of layers"
    of_workload = True

    def __init__(self, framework: Framework) -> None:
        self.name = f"{framework.name}-sparse-attention"
        self.framework = framework

    def applies(self, workload: Workload) -> bool:
        return workload.model.indexer is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        missing = 0 if table.workload.model.indexer is None else 1
        return as_excess(np.full_like(column(table, "tp"), missing))

    def check(self, plan: FinishedPlan) -> Finding | None:
        latent = plan.workload.model.attention
        if latent is None or latent.indexer is None:
            return None
        return self.finding(
            value=1,
            words=f"{self.framework.name} is not planned with attention to the "
            f"{latent.indexer.top_k} positions that an indexer chooses",
            remedy=f"Choose the {DEFAULT_FRAMEWORK} framework for this model.",
        )


class NoHybridLayers(Rule):
    """Every layer has attention and a feed-forward: no Mamba, and no pattern of single blocks."""

    unit = "kinds of layers"
    of_workload = True

    def __init__(self, framework: Framework) -> None:
        self.name = f"{framework.name}-hybrid-layers"
        self.framework = framework

    def applies(self, workload: Workload) -> bool:
        return workload.model.state_space is not None or workload.model.hybrid_pattern is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        missing = 1 if self.applies(table.workload) else 0
        return as_excess(np.full_like(column(table, "tp"), missing))

    def check(self, plan: FinishedPlan) -> Finding | None:
        model = plan.workload.model
        if not model.mamba_layers and model.hybrid_pattern is None:
            return None
        what = "a pattern of unlike layers"
        if model.state_space is not None:
            what = f"the {model.mamba_layers} layers of {model.state_space.title}"
        return self.finding(
            value=1,
            words=f"{self.framework.name} is not planned with {what}",
            remedy=f"Choose the {DEFAULT_FRAMEWORK} framework for this model.",
        )


class WholeModelRecompute(Rule):
    """Recomputation is off, or covers every layer: the framework wraps all alike."""

    unit = "settings"

    def __init__(self, framework: Framework) -> None:
        self.name = f"{framework.name}-recompute"
        self.framework = framework

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        mask = column(table, "recompute")
        chunks = column(table, "pp") * column(table, "vpp")
        # Division, because "a large number means all" may be too large to multiply.
        covered = column(table, "recompute_layers") >= -(-table.workload.model.layers // chunks)
        legal = (mask == 0) | ((mask == int(Recompute.FULL)) & covered)
        if "op" in self.framework.recompute_modules:
            legal |= mask == int(Recompute.OPERATORS)
        return as_excess(~legal)

    def check(self, plan: FinishedPlan) -> Finding | None:
        layout = plan.layout
        if int(layout.recompute) == 0:
            return None
        if int(layout.recompute) == 64 and "op" in self.framework.recompute_modules:
            return None
        chunks = int(layout.pp) * int(layout.vpp)
        whole = int(layout.recompute) == 32
        if whole and int(layout.recompute_layers) * chunks >= plan.workload.model.layers:
            return None
        words = "recomputes some layers only" if whole else "recomputes single modules"
        return self.finding(
            value=1,
            words=f"the plan {words}, {self.framework.name} recomputes every layer in full or none",
            remedy="Choose no recomputation or all of it.",
        )
