"""Expert placement against the greedy balancer on the cases of its baseline file: `LOADS_FOLDER [SECONDS]`.

The folder holds eplb_baseline.json and the npz files it names.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from meshwright.planner.experts.packing import State, greedy_placement, has_duplicates
from meshwright.planner.experts.problem import Loads, PlacementLimits, SlotShape
from meshwright.planner.experts.service import gpu_share
from meshwright.planner.experts.solve import PlacementEffort, place_layers


def greedy_balance(load: Loads, shape: SlotShape, groups: int) -> tuple[float, bool]:
    """Largest over mean GPU load of one layer under the greedy, and whether a GPU holds an expert twice."""
    slots = greedy_placement(load, shape, groups)[None]
    balance = gpu_share(load[None, None], slots).max()
    return float(balance), bool(has_duplicates(slots).any())


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
        greedy = [greedy_balance(row, shape, groups) for row in load]
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
