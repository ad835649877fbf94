"""Expert placement against the greedy balancer on the cases of its baseline file: `LOADS_FOLDER [SECONDS]`.

The folder holds eplb_baseline.json and the npz files it names. The greedy is written from its description (sort by
load, least loaded GPU with room; hottest replica first), without a ban on duplicates, to compare layer by layer.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from meshwright.planner.experts.balance.packing import greedy_counts
from meshwright.planner.experts.balance.place import place_layers
from meshwright.planner.experts.balance.rows import State
from meshwright.planner.experts.balance.solve import PlacementEffort
from meshwright.planner.experts.problem import Loads, PlacementLimits, SlotShape


def least_loaded(weights: Loads, bins: int) -> list[list[int]]:
    """Items to bins of one size: falling weights, each to the lightest bin with room."""
    held: list[list[int]] = [[] for _ in range(bins)]
    load = np.zeros(bins)
    for item in np.argsort(-weights, kind="stable"):
        room = [b for b in range(bins) if len(held[b]) < len(weights) // bins]
        target = min(room, key=lambda b: load[b])
        held[target].append(int(item))
        load[target] += weights[item]
    return held


def greedy_placement(load: Loads, shape: SlotShape, groups: int) -> tuple[float, bool]:
    """Largest over mean GPU load of one layer under the greedy, and whether a GPU holds an expert twice.

    Hierarchical if there are groups: whole groups to nodes, replicas within a node.
    """
    nodes = shape.nodes if groups > 1 else 1
    size = len(load) // groups
    parts = (
        least_loaded(load.reshape(groups, -1).sum(axis=1), nodes)
        if nodes > 1
        else [list(range(groups))]
    )
    worst, twice = 0.0, False
    for part in parts:
        own = np.concatenate([load[g * size : (g + 1) * size] for g in part])
        counts = greedy_counts(own[None], shape.slots // nodes, shape.slots)[0]
        expert = np.repeat(np.arange(len(own)), counts)
        replicas = (own / counts)[expert]
        for gpu in least_loaded(replicas, shape.gpus // nodes):
            worst = max(worst, float(replicas[gpu].sum()))
            twice = twice or len(set(expert[gpu].tolist())) < len(gpu)
    return worst * shape.gpus / float(load.sum()), twice


def _clock(marks: list[float]) -> Callable[[State], None]:
    """Appends the seconds from now to the call."""
    start = time.perf_counter()
    return lambda _: marks.append(time.perf_counter() - start)


def main() -> None:
    folder = Path(sys.argv[1])
    limit_s = float(sys.argv[2]) if len(sys.argv) > 2 else 10.0
    head = "case                      slots greedy   ours   over bound (largest)  above greedy (twice)  first   all"
    print(head, flush=True)
    for case in json.loads((folder / "eplb_baseline.json").read_text(encoding="utf-8"))["cases"]:
        data = np.load(folder / f"{case['input']}.npz")
        load = data["load"].astype(float)
        shape = SlotShape(slots=case["replicas"], gpus=case["gpus"], nodes=case["nodes"])
        groups = int(data["num_groups"]) if case["policy"] == "hierarchical" else 1
        greedy = [greedy_placement(row, shape, groups) for row in load]
        value = np.array([v for v, _ in greedy])
        twice = np.array([t for _, t in greedy])
        first: list[float] = []
        effort = PlacementEffort(
            time_limit_s=limit_s,
            workers=2,
            on_first=_clock(first),
        )
        start = time.perf_counter()
        found = place_layers(load[None], shape, PlacementLimits(groups=groups), effort)
        wall_s = time.perf_counter() - start
        over, above = found.value / found.bound, found.value > value * (1 + 1e-9)
        print(
            f"{case['case']:26} {shape.per_gpu:3} {value.mean():.4f} {found.value.mean():.4f} "
            f"{over.mean():.5f} ({over.max():.4f}) {(above & ~twice).sum():2} of {(~twice).sum():2} "
            f"({(above & twice).sum()} of {twice.sum()}) {first[0]:5.2f} s {wall_s:6.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
