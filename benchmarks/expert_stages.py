"""What every stage of expert placement brings: cases with all stages, and with one of them left out.

`LOADS_FOLDER [SECONDS [STAGE ...]]`. One line a stage and case: balance, bound, processor seconds. The folder
holds eplb_baseline.json and the npz files that it names.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from meshwright.planner.experts.bound import CountBound
from meshwright.planner.experts.packing import Solved
from meshwright.planner.experts.problem import GroupParams, PlacementLimits, SlotShape
from meshwright.planner.experts.solve import PlacementEffort, place_layers

ROOM = "meshwright.planner.experts."


def nothing(*arguments: Any) -> None:
    """In place of a stage that changes what it is given."""


def no_counts(*arguments: Any, **options: Any) -> CountBound:
    """A bound by replica counts that says nothing."""
    return CountBound(bound=0.0, counts=())


STAGES: Mapping[str, Mapping[str, Any]] = {
    "none left out": {},
    "splits of GPU pairs": {"heuristic.split_pairs": nothing},
    "counts by limits": {"heuristic._try_limits": nothing},
    "counts at random": {"heuristic.recount": nothing},
    "bound by counts": {"heuristic.count_bound": no_counts},
    "bound by pairs": {"heuristic.pair_bound": nothing},
    "enumeration": {"solve.is_enumerable": lambda rows: False},
    "CP-SAT": {"solve.close_gaps": nothing},
    "partitions of groups": {"solve.GROUPS": GroupParams(most_partitions=0)},
}


@contextmanager
def without(stage: str) -> Iterator[None]:
    """The solver with a stage left out."""
    with ExitStack() as stack:
        for name, other in STAGES[stage].items():
            stack.enter_context(patch(ROOM + name, other))
        yield


def solved(folder: Path, case: Mapping[str, Any], time_limit_s: float) -> tuple[Solved, float]:
    """The placement of a case on one process, and processor seconds."""
    data = np.load(folder / f"{case['input']}.npz")
    shape = SlotShape(slots=case["replicas"], gpus=case["gpus"], nodes=case["nodes"])
    groups = int(data["num_groups"]) if case["policy"] == "hierarchical" else 1
    start = time.process_time()
    effort = PlacementEffort(time_limit_s=time_limit_s)
    placement = place_layers(
        data["load"].astype(float)[None], shape, PlacementLimits(groups=groups), effort
    )
    return placement, time.process_time() - start


def main() -> None:
    folder = Path(sys.argv[1])
    time_limit_s = float(sys.argv[2]) if len(sys.argv) > 2 else 5.0
    text = (folder / "eplb_baseline.json").read_text(encoding="utf-8")
    for stage in sys.argv[3:] or STAGES:
        for case in json.loads(text)["cases"]:
            with without(stage):
                placement, seconds = solved(folder, case, time_limit_s)
            over = placement.value / placement.bound
            print(
                f"{stage:22} {case['case']:26} {placement.value.mean():.5f} {placement.bound.mean():.5f} "
                f"{over.mean():.5f} ({over.max():.4f}) {seconds:6.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
