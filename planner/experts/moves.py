"""From a current placement to a better one by few moves: moving an expert's weights costs."""

from __future__ import annotations

import numpy as np

from planner.experts.bound import balance_bound
from planner.experts.packing import Packing, has_duplicates, improve
from planner.experts.problem import ExpertError, Loads, Shape, Slots
from planner.experts.rows import Solved, by_layer


def improve_from(loads: Loads, current: Slots, shape: Shape, max_moves: int) -> Solved:
    """Exchanges from `current` [layers, gpus, slots of a GPU] until `max_moves` (expert, GPU) pairs are new.

    An exchange moves two. The layer that is worst goes next, so the moves go where they are needed. Replica
    counts stay. Raises ExpertError if the current placement has another shape or an expert twice on a GPU.
    """
    if current.shape[1:] != (shape.gpus, shape.per_gpu):
        raise ExpertError(
            f"from: the placement has {current[0].size} slots on {current.shape[1]} GPUs, {shape.slots} on "
            f"{shape.gpus} are asked for"
        )
    if has_duplicates(current).any():
        raise ExpertError(
            "from: the placement holds an expert twice on a GPU; place anew without --max-moves"
        )
    by_row = by_layer(loads, shape.gpus)
    slots = current.copy()
    bound = balance_bound(by_row, shape.slots, shape.gpus)
    value = Packing(slots=slots, loads=by_row).balance()
    stuck = np.zeros(len(slots), dtype=bool)
    left = max_moves
    while left >= 2 and not stuck.all():
        row = int(np.where(stuck, -np.inf, value).argmax())
        packing = Packing(slots=slots[row : row + 1].copy(), loads=by_row[row : row + 1])
        improve(packing, 1, bound[row : row + 1])
        reached = float(packing.balance()[0])
        spent = _new(current[row], packing.slots[0]) - _new(current[row], slots[row])
        if reached >= value[row] * (1 - 1e-9) or spent > left:
            stuck[row] = True
            continue
        slots[row], value[row] = packing.slots[0], reached
        left -= spent
    return Solved(slots=slots, value=value, bound=np.minimum(bound, value))


def _new(before: Slots, after: Slots) -> int:
    return sum(len(set(b.tolist()) - set(a.tolist())) for a, b in zip(before, after, strict=True))
