"""Tabu search over exchanges of replicas: less traffic, under caps on loads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.planner.experts.params import TRAFFIC
from meshwright.planner.experts.problem import Ids, Loads
from meshwright.planner.experts.traffic.swap_state import Room, SwapState
from meshwright.planner.solvers.clock import is_over

_NONE = 1e-9
_LEAST = 1e-9
"""Of the start's cost: what is an improvement, as sums round."""


@dataclass(frozen=True, kw_only=True)
class Cap:
    """What a state must keep to."""

    loads: tuple[tuple[int, float], ...]
    """GPUs of a block, and the most load of such a block in mean GPU loads; the smallest blocks first."""
    rooms: tuple[Room, ...]
    price: float
    """Cost of a mean GPU load above the caps, while the search passes through such states."""

    @property
    def gpus(self) -> int:
        """Units that lie together in a block of so many GPUs need not change places."""
        return self.loads[0][0]

    def overload(self, state: SwapState) -> float:
        """Load above the caps."""
        return sum(state.overload(load, gpus) for gpus, load in self.loads)

    def overload_change(self, state: SwapState) -> Loads:
        """The same, more if two units change places, [units, units]."""
        return np.asarray(sum(state.overload_change(load, gpus) for gpus, load in self.loads))


@dataclass(frozen=True, kw_only=True)
class SwapResult:
    """GPUs of the best state within the cap [units], None if there was none; its cost; the steps taken."""

    gpu: Ids | None
    cost: float
    steps: int


def tabu_search(state: SwapState, cap: Cap, *, steps: int, patience: int, seed: int) -> SwapResult:
    """The best exchange of two units at every step, better or not; `state` ends where the search stopped.

    A unit does not go back to a place for some steps, unless that betters the best (Glover, Tabu Search part
    I, 1989). Ends after `steps`, or `patience` steps without a better state.
    """
    chance = np.random.default_rng(seed)
    places = int(state.gpu.max()) // cap.gpus + 1
    until = np.zeros((len(state.gpu), places), dtype=np.int64)
    now, over = state.cost(), cap.overload(state)
    least_change = _LEAST * max(abs(now), 1.0)
    best = state.gpu.copy() if over <= _NONE else None
    least_cost = now if over <= _NONE else np.inf
    lowest, since, step = now + cap.price * over, 0, 0
    while step < steps and since < patience and not is_over():
        step, since = step + 1, since + 1
        change, overload = state.change(), cap.overload_change(state)
        cost = _open(state, change + cap.price * overload, cap)
        place = state.gpu // cap.gpus
        tabu = until[:, place] > step
        cost[(tabu | tabu.T) & (now + cap.price * over + cost >= lowest - least_change)] = np.inf
        a, b = divmod(int(cost.argmin()), len(place))
        if not np.isfinite(cost[a, b]):
            break
        until[a, place[a]] = until[b, place[b]] = step + int(chance.integers(*TRAFFIC.tenure))
        state.swap(a, b)
        now, over = now + float(change[a, b]), max(over + float(overload[a, b]), 0.0)
        if now + cap.price * over < lowest - least_change:
            lowest, since = now + cap.price * over, 0
        if over <= _NONE and now < least_cost - least_change:
            best, least_cost = state.gpu.copy(), now
    return SwapResult(gpu=best, cost=least_cost, steps=step)


def _open(state: SwapState, cost: Loads, cap: Cap) -> Loads:
    place = state.gpu // cap.gpus
    shut = (place[:, None] == place[None, :]) | state.barred(cap.rooms)
    return np.where(shut, np.inf, cost)


def step_cost_s(units: int, windows: int, levels: int, tokens_per_unit: float, rooms: int) -> float:
    """About what a step takes on one core: the work that a time limit is shared out by."""
    pairs_s = units**2 * (1.4e-8 * windows + 2.5e-8 * levels + 2e-8 * rooms)
    return 2e-4 + pairs_s + levels * (2e-4 + 5e-7 * tokens_per_unit)
