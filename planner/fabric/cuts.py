"""Which cut of the fabric holds a plan back: the bisection rule, level by level and phase by phase."""

from __future__ import annotations

import numpy as np

from cluster_specs.graph import cut_gb_per_s
from costmodel.estimate import Estimate
from costmodel.layout import Layout, Placement
from costmodel.phases import CutUse, cut_uses
from costmodel.step_time import make_context
from costmodel.workload import Workload

ROUNDING = 1.0 + 1e-9


def plan_cuts(
    workload: Workload, layout: Layout, placement: Placement, priced: Estimate
) -> tuple[CutUse, ...]:
    """Every cut that something crosses in a phase of the step, minimum cuts by maximum flow."""
    parts = {name: float(np.asarray(s)) for name, s in priced.breakdown_s.items()}
    context = make_context(workload, layout, placement)
    halves = cut_gb_per_s(workload.cluster, workload.gpus)
    return cut_uses(context, priced.level_traffic, parts, halves)


def binding_cut(cuts: tuple[CutUse, ...]) -> CutUse | None:
    """The cut with the highest utilisation."""
    return max(cuts, key=lambda cut: cut.utilisation, default=None)


def broken_cuts(cuts: tuple[CutUse, ...]) -> list[str]:
    """Cuts that what must cross them in a phase keeps busy for longer than the phase."""
    return [
        f"{cut.level}, {cut.cut}: {cut.busy_s:.4g} s of traffic in the {cut.phase}, "
        f"which take {cut.phase_s:.4g} s"
        for cut in cuts
        if cut.utilisation > ROUNDING
    ]
