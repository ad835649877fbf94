"""Some split of the layers that a layout can have, where no split was chosen yet."""

from __future__ import annotations

from meshwright.constraints.stages import may_have_empty_ends
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.pipeline.schedules import traits
from meshwright.costmodel.pipeline.split import Stages
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.stages import balanced_stages, default_stages


def any_stages(workload: Workload, layout: Layout) -> Stages | None:
    """The split that is even in groups of layers, or one with empty ends where ranks in step may have them.

    Parameters
    ----------
    workload
        Its model and framework.
    layout
        One layout, in plain numbers.

    Returns
    -------
    tuple of tuple of int
        Layers of each [rank][virtual stage]; None where another virtual stage would be empty.
    """
    model, pp, vpp = workload.model, int(layout.pp), int(layout.vpp)
    even = balanced_stages(model.layers, pp, vpp, model.layers_in_group)
    return even or suiting_stages(workload, layout)


def suiting_stages(workload: Workload, layout: Layout) -> Stages | None:
    """A split that suits the schedule of a layout; None where a virtual stage would be empty that must not.

    Parameters
    ----------
    workload
        Its model and framework.
    layout
        One layout, in plain numbers.
    """
    model = workload.model
    return default_stages(
        model.layers,
        int(layout.pp),
        int(layout.vpp),
        in_step=traits(int(layout.schedule)).in_step,
        group=model.layers_in_group,
        empty_ends=may_have_empty_ends(workload),
    )
