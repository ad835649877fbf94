"""Placements that touch fewer nodes and leaves for each token, under a cap on the balance."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.experts.crew import Crew
from planner.experts.packing import Packing
from planner.experts.problem import Loads, Shape, Slots
from planner.experts.rows import Solved
from planner.experts.traffic import Level, Search, fewer_blocks


def layer_caps(best: Loads, cap: float) -> Loads:
    """Cap of every layer [layers] such that their mean is at most `cap`, for the balance reached, [layers].

    A layer that one hot expert keeps above the cap stays where it is; the others make up for it as far as
    they can, all with one cap.
    """
    if best.max() <= cap:
        return np.full(len(best), cap)
    low, high = 1.0, cap
    for _ in range(40):
        middle = (low + high) / 2
        if np.maximum(best, middle).mean() > cap:
            high = middle
        else:
            low = middle
    return np.maximum(best, low)


def less_traffic(
    tokens: NDArray[np.int32],
    loads: Loads,
    solved: Solved,
    *,
    shape: Shape,
    levels: tuple[Level, ...],
    cap: float,
    spread: bool,
    workers: int,
) -> Solved:
    """Exchanges between GPUs within the cap; a layer where none is found that helps stays as it is.

    Tokens [layers, tokens, top-k], loads [layers, windows, experts] over the mean GPU load.
    """
    caps = layer_caps(solved.value, cap)
    jobs = [
        (
            Search(
                tokens=tokens[layer],
                experts=loads.shape[2],
                shape=shape,
                levels=levels,
                cap=float(caps[layer]),
                loads=loads[layer],
                spread=spread,
            ),
            solved.slots[layer],
        )
        for layer in range(len(loads))
    ]
    with Crew(workers) as crew:
        slots = np.stack(crew.map(_layer, jobs))
    value = Packing(slots=slots, loads=loads).gpu_loads().max(axis=(1, 2))
    return Solved(slots=slots, value=value, bound=np.minimum(solved.bound, value))


def _layer(job: tuple[Search, Slots]) -> Slots:
    return fewer_blocks(*job)
