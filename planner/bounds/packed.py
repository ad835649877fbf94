"""The best that any mapping could give a group: packed as far inside the fabric as it can be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.fabric import full_levels
from meshwright.costmodel.collectives.on_levels import best_beyond
from meshwright.costmodel.constants.calibrated import calibrated_constants
from meshwright.costmodel.constants.rates import links_of
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layout import Layout, Placement
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.workload import Workload

IntArray = NDArray[np.int64]


def packed_context(workload: Workload, layouts: Layout) -> Context:
    """Layouts under a placement and links that no mapping on any allocation beats.

    Parameters
    ----------
    workload
        Its cluster counts at its full size.
    layouts
        Shape [...].

    Returns
    -------
    Context
        Placements of shape [..., levels].
    """
    levels = full_levels(workload.cluster)
    links = best_beyond(links_of(levels, calibrated_constants(workload)))
    context = make_context(workload, layouts, packed_placement(layouts, levels.blocks))
    return replace(context, links=links)


def packed_placement(layouts: Layout, blocks: IntArray) -> Placement:
    """Every group packed as far inside as it can be while tensor groups lie inside the innermost level.

    Members of a group of another axis belong to different tensor groups, each of which fills tp GPUs of the
    block; expert groups take only the tensor ranks that tp and etp x ep have in common
    (`meshwright.costmodel.placement`).

    Parameters
    ----------
    layouts
        Shape [n].
    blocks
        GPUs in one block of each level, shape [levels].

    Returns
    -------
    Placement
        Members of a group inside a block of each level, [n, levels].
    """
    tp = np.asarray(layouts.tp, dtype=np.int64)[..., None]
    experts = np.asarray(layouts.etp * layouts.ep, dtype=np.int64)[..., None]

    def packed(size: object, apart: object = 1) -> IntArray:
        room = np.maximum(-(-blocks // np.asarray(apart, dtype=np.int64)), 1)
        return np.minimum(np.asarray(size, dtype=np.int64)[..., None], room)

    return Placement(
        tp=packed(layouts.tp),
        cp=packed(layouts.cp, tp),
        dp=packed(layouts.dp, tp),
        pp=packed(layouts.pp, tp),
        ep=packed(layouts.ep),
        etp=packed(layouts.etp),
        edp=packed(layouts.edp, np.gcd(tp, experts)),
        dp_cp=packed(layouts.dp * layouts.cp, tp),
    )
