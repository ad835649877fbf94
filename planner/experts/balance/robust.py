"""One placement for several windows of loads: the worst window, a guard against others, or the CVaR."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.planner.experts.balance.bound import balance_bound
from meshwright.planner.experts.balance.packing import SlotPacking, slot_loads
from meshwright.planner.experts.balance.place import place_layers
from meshwright.planner.experts.balance.rows import Solved, by_layer
from meshwright.planner.experts.balance.solve import PlacementEffort
from meshwright.planner.experts.problem import Loads, PlacementLimits, Slots, SlotShape
from meshwright.planner.solvers.clock import is_over

ROBUST_OBJECTIVES = ("guarded", "worst", "cvar")
_ROUNDS = 200


def cvar(values: Loads, share: float) -> Loads:
    """Mean of the largest `share` of the last axis, fractions of a window counted: [...] from [..., K].

    The least over t of t + sum(max(0, x - t)) / (share K), linear in x (Rockafellar and Uryasev, Optimization
    of conditional value-at-risk, 2000, equation 9), for windows of equal weight. share 1 is the mean, 1 / K
    and below the largest.
    """
    ordered = -np.sort(-values, axis=-1)
    size = max(share * values.shape[-1], 1.0)
    weight = np.clip(size - np.arange(values.shape[-1]), 0.0, 1.0)
    return np.asarray((ordered * weight).sum(axis=-1) / weight.sum())


def place_robustly(
    loads: Loads,
    shape: SlotShape,
    limits: PlacementLimits,
    effort: PlacementEffort,
    *,
    objective: str,
    share: float,
) -> Solved:
    """Placement of loads [windows, layers, experts] by one of ROBUST_OBJECTIVES; value is what is minimised.

    `worst` is the worst window. `guarded` counts even routing as one more window, so that GPUs share what
    replicas leave of the noise of windows that are not known; value and bound are those of the known ones.
    `cvar` betters, by exchanges, the best of the placements for the worst window and for the mean load.
    """
    windows, _, experts = loads.shape
    if windows == 1 or objective == "worst" or (objective == "guarded" and shape.slots == experts):
        return place_layers(loads, shape, limits, effort)
    relative = by_layer(loads, shape.gpus)
    if objective == "guarded":
        solved = place_layers(
            np.concatenate([loads, np.ones_like(loads[:1])]), shape, limits, effort
        )
        value = SlotPacking(slots=solved.slots, loads=relative).balance()
        bound = balance_bound(relative, shape.slots, shape.gpus)
        return Solved(slots=solved.slots, value=value, bound=np.minimum(bound, value))
    mean = np.swapaxes(relative.mean(axis=1, keepdims=True), 0, 1)
    tried = [place_layers(part, shape, limits, effort).slots for part in (loads, mean)]
    size = shape.node_gpus if limits.groups > 1 or limits.spread else shape.gpus
    slots = np.stack(
        [_least(rows, load, share, size) for *rows, load in zip(*tried, relative, strict=True)]
    )
    value = cvar(SlotPacking(slots=slots, loads=relative).gpu_loads().max(axis=2), share)
    # No window is below its own bound, and the CVaR rises with every window.
    each = [balance_bound(relative[:, k : k + 1], shape.slots, shape.gpus) for k in range(windows)]
    return Solved(
        slots=slots, value=value, bound=np.minimum(cvar(np.stack(each, axis=1), share), value)
    )


def _least(starts: list[Slots], load: Loads, share: float, size: int) -> Slots:
    """The best of one layer's starts after exchanges; `size` GPUs in a block that replicas do not leave."""
    done = [_exchanged(start, load, share, size) for start in starts]
    return np.sort(min(done, key=lambda pair: pair[1])[0], axis=1)


def _exchanged(start: Slots, load: Loads, share: float, size: int) -> tuple[Slots, float]:
    """The best exchange with the fullest GPU of any window, until none lowers the CVaR."""
    slots = start.copy()
    counts = np.bincount(slots.ravel(), minlength=load.shape[1])
    best = np.inf
    for _ in range(_ROUNDS):
        weight = slot_loads((load / counts)[None], slots[None])[0]
        gpu = weight.sum(axis=2)
        best = float(cvar(gpu.max(axis=1), share))
        exchanges = [
            _best_with(int(a), slots, weight, gpu=gpu, share=share, size=size)
            for a in np.unique(gpu.argmax(axis=1))
        ]
        value, a, i, g, j = min(exchanges)
        if value >= best * (1 - 1e-9) or is_over():
            break
        slots[a, i], slots[g, j] = slots[g, j], slots[a, i]
    return slots, best


def _best_with(
    a: int, slots: Slots, weight: Loads, *, gpu: Loads, share: float, size: int
) -> tuple[float, int, int, int, int]:
    """CVaR after the best exchange of a slot of GPU `a`, and its place: (CVaR, a, i, g, j)."""
    best = (np.inf, a, 0, a, 0)
    start = a // size * size
    for g in range(start, min(start + size, len(slots))):
        if g == a:
            continue
        shed = weight[:, a, :, None] - weight[:, g, None, :]
        rest = np.delete(gpu, [a, g], axis=1).max(axis=1, initial=0.0)[:, None, None]
        after = np.maximum(
            np.maximum(gpu[:, a, None, None] - shed, gpu[:, g, None, None] + shed), rest
        )
        value = cvar(np.moveaxis(after, 0, -1), share)
        value[np.isin(slots[a], slots[g]), :] = np.inf
        value[:, np.isin(slots[g], slots[a])] = np.inf
        i, j = np.unravel_index(int(value.argmin()), value.shape)
        best = min(best, (float(value[i, j]), a, int(i), g, int(j)))
    return best


def drift_row(window: str, loads: Loads, slots: Slots, alone: dict[str, Slots]) -> dict[str, Any]:
    """Balance on loads [1, layers, experts] that were not placed on: of `slots`, and of each window's own.

    `gain` is how much lower the worst layer is than the best of those alone, `gain_mean` the same for the
    mean over layers; negative where it is higher.
    """
    rows = np.swapaxes(loads, 0, 1)
    here = SlotPacking(slots=slots, loads=rows).balance()
    alone_balance = {
        name: SlotPacking(slots=slots_alone, loads=rows).balance()
        for name, slots_alone in alone.items()
    }
    return {
        "window": window,
        "balance_max": float(here.max()),
        "balance_mean": float(here.mean()),
        "alone_balance_max": {name: float(value.max()) for name, value in alone_balance.items()},
        "alone_balance_mean": {name: float(value.mean()) for name, value in alone_balance.items()},
        "gain": float(min(value.max() for value in alone_balance.values()) - here.max()),
        "gain_mean": float(min(value.mean() for value in alone_balance.values()) - here.mean()),
    }
