"""Which layouts on a mixed cluster may gain by offloading more of the optimizer: those that memory may limit.

Offloading more makes no step shorter: the host updates its share far slower than a GPU its own. So nothing is
offloaded where every rank, on any part, has room for all the layers that a step worth having gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.memory.activations import saved_activations
from meshwright.costmodel.memory.footprint import layer_bytes, usable_hbm_gib
from meshwright.costmodel.memory.profile import memory_profile
from meshwright.costmodel.memory.split_bounds import main_layer_rooms
from meshwright.costmodel.pipeline.schedules import in_flight
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.planner.bounds.stages import ALL_LAYERS
from meshwright.planner.search.space import Space

_MEMORY_ROUNDING = 1e-6
"""Of a rank's memory, in favour of looking."""


def with_more_offloaded(
    space: Space,
    workloads: Sequence[Workload],
    layouts: Layout,
    most_layers: NDArray[np.float64],
) -> Layout:
    """Every layout that offloads more than one of those given, which may therefore be faster.

    Parameters
    ----------
    space
        Its shares; the least of several is none.
    workloads
        On each part.
    layouts
        With nothing offloaded where there is a choice, [n].
    most_layers
        On a rank of each part, in a step worth having, [parts, n].

    Returns
    -------
    Layout
        Arrays of shape [k], k 0 or more.
    """
    if not space.offloads_several:
        return layouts.take(np.zeros(0, dtype=np.int64))
    limited = np.zeros(layouts.broadcast_shape(), dtype=np.bool_)
    for workload, most in zip(workloads, most_layers, strict=True):
        limited |= _lacks_room(workload, layouts, most)
    every = space.offloaded(layouts.take(limited))
    return every.take(np.asarray(every.optimizer_offload) > 0)


def _lacks_room(
    workload: Workload, layouts: Layout, most: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Whether some rank, were it on this part, may not hold so many layers, the fewest recomputed."""
    if memory_profile(workload.framework).keeps_stage_outputs:
        return np.ones(layouts.broadcast_shape(), dtype=np.bool_)  # these are beside the rooms
    full = (np.asarray(layouts.recompute) & int(Recompute.FULL)) != 0
    one = 1 if framework_of_stack(workload.framework).recompute_amount is not None else ALL_LAYERS
    sized = replace(layouts, recompute_layers=np.where(full, one, 0))
    rooms = main_layer_rooms(workload, sized, usable_hbm_gib(workload) * (1 - _MEMORY_ROUNDING))
    place = np.arange(rooms.shape[1])
    leading = workload.model.dense_layers if workload.model.moe_layers else 0
    if leading:
        taken = leading * _more_in_layers(workload, sized)
        rooms = np.where(place < leading, rooms - np.ceil(taken)[:, None], rooms)
    is_rank = place < np.asarray(layouts.pp)[:, None]
    return np.asarray(np.any(is_rank & (rooms < most[:, None]), axis=1))


def _more_in_layers(workload: Workload, layouts: Layout) -> NDArray[np.float64]:
    """How many main layers' room a leading layer takes beyond that of a main one, at the most; [n].

    On the first rank, where most micro-batches are in flight, or with none: between, each kind of layer takes
    a linear amount, whose ratio is largest at one of the ends.
    """
    layer = layer_bytes(workload, layouts, saved_activations(workload, layouts))
    largest = np.zeros(layouts.broadcast_shape())
    least = np.minimum(layer.saved, layer.dropped)
    for flying in (0.0, np.asarray(in_flight(layouts, 0), dtype=np.float64)):
        main = layer.states + least * flying
        for saved, of_leading in (
            (layer.saved, layer.leading_saved),
            (least, layer.leading_dropped),
        ):
            more = layer.leading_states - layer.states + (of_leading - saved) * flying
            largest = np.maximum(largest, more / main)
    return largest
