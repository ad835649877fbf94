"""Expert placement against the greedy balancer on the cases of its baseline file: `LOADS_FOLDER [SECONDS]`.

The folder holds eplb_baseline.json and the npz files it names. The greedy is written from its description (sort by
load, least loaded GPU with room; hottest replica first), without a ban on duplicates, to compare layer by layer.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from planner.experts.packing import greedy_counts
from planner.experts.place import place
from planner.experts.problem import Limits, Loads, Shape
from planner.experts.solve import Effort


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


def greedy_balance(load: Loads, shape: Shape, groups: int) -> float:
    """Largest over mean GPU load of one layer under the greedy; hierarchical if there are groups."""
    nodes = shape.nodes if groups > 1 else 1
    size = len(load) // groups
    parts = least_loaded(load.reshape(groups, -1).sum(axis=1), nodes) if nodes > 1 else [list(range(groups))]
    worst = 0.0
    for part in parts:
        own = np.concatenate([load[g * size : (g + 1) * size] for g in part])
        counts = greedy_counts(own[None], shape.slots // nodes, shape.slots)[0]
        replicas = np.repeat(own / counts, counts)
        held = least_loaded(replicas, shape.gpus // nodes)
        worst = max(worst, *(replicas[gpu].sum() for gpu in held))
    return float(worst * shape.gpus / load.sum())


def main() -> None:
    folder = Path(sys.argv[1])
    limit_s = float(sys.argv[2]) if len(sys.argv) > 2 else 10.0
    for case in json.loads((folder / "eplb_baseline.json").read_text(encoding="utf-8"))["cases"]:
        data = np.load(folder / f"{case['input']}.npz")
        load = data["load"].astype(float)
        shape = Shape(slots=case["replicas"], gpus=case["gpus"], nodes=case["nodes"])
        groups = int(data["num_groups"]) if case["policy"] == "hierarchical" else 1
        greedy = np.array([greedy_balance(row, shape, groups) for row in load])
        start = time.perf_counter()
        found = place(load[None], shape, Limits(groups=groups), Effort(time_limit_s=limit_s, workers=2))
        wall_s = time.perf_counter() - start
        print(
            f"{case['case']:26} {shape.per_gpu:3} slots  greedy {case['eplb_balance_mean']:.4f} ({greedy.mean():.4f})  "
            f"ours {found.value.mean():.4f}  over bound {(found.value / found.bound).mean():.5f} "
            f"({(found.value / found.bound).max():.4f})  above greedy {(found.value > greedy * (1 + 1e-9)).sum():2} of "
            f"{len(load)}  {wall_s:6.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
