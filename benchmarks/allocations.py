"""How many random listed allocations are proven, or within 2 %, before a time limit.

    python -m benchmarks.allocations [--cases 60] [--seed 0] [--limit-s 60] [--files FOLDER] [NUMBER ...]

Cases are those of tests/attack by their numbers, from --seed on, up to 512 GPUs. Requests that no plan fits count as
solved where that is proven. The limit counts seconds of the processor, so that other work on the machine changes no
answer: a search runs in one process. Choices and robustness are left out.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

from meshwright.planner.plan.make_plan import make_plan
from tests.attack.allocations import random_case
from tests.attack.judged import write_case

NEAR = 0.02
"""The relative gap that counts as near."""


@dataclass(frozen=True, kw_only=True)
class Solved:
    """What became of one request."""

    number: int
    status: str
    gap: float | None
    cpu_s: float
    words: str

    @property
    def kind(self) -> str:
        """How well it was solved."""
        if self.status in ("optimal", "infeasible"):
            return "proven"
        return "near" if self.gap is not None and self.gap <= NEAR else "open"


@contextmanager
def processor_clock() -> Iterator[None]:
    """Time limits count the seconds that this process has the processor."""
    with patch("time.monotonic", time.process_time):
        yield


def solved(number: int, limit_s: float) -> Solved:
    """Plans the case of a number."""
    case = random_case(number)
    request = replace(case.request(), time_limit_s=limit_s)
    began = time.process_time()
    with processor_clock():
        plan = make_plan(request, robustness=False, choices=False)
    cpu_s = time.process_time() - began
    options, goal = case.options, plan.objective
    gap = None
    if goal.step_time_s is not None and goal.lower_bound_s is not None:
        gap = 1 - goal.lower_bound_s / goal.step_time_s
    layout = plan.layout
    degrees = (
        ""
        if layout is None
        else f"tp{layout.tp} cp{layout.cp} pp{layout.pp} dp{layout.dp} ep{layout.ep}"
    )
    step = "-" if goal.step_time_s is None else f"{goal.step_time_s:.6g}"
    return Solved(
        number=number,
        status=plan.status,
        gap=gap,
        cpu_s=cpu_s,
        words=(
            f"{case.shape:13s} {case.cluster['base']:17s} {options['model']:14s} {options['framework']:10s} "
            f"{len(case.cluster['nodes']):2d} nodes {options['gpus']:3d} GPUs {step:>9s} s {degrees}"
        ),
    )


def main() -> None:
    """Prints one line for each case, and how many are of each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=60.0)
    parser.add_argument(
        "--files", type=Path, help="folder for the cluster files of cases left open"
    )
    parser.add_argument("--profile", type=Path, help="file of cProfile for all of them")
    given = parser.parse_args()
    kinds: dict[str, list[int]] = {"proven": [], "near": [], "open": []}
    profile = cProfile.Profile() if given.profile is not None else None
    with profile or nullcontext():
        for number in given.numbers or range(given.seed, given.seed + given.cases):
            result = solved(number, given.limit_s)
            kinds[result.kind].append(number)
            gap = "" if result.gap is None else f"{result.gap:.2%}"
            print(
                f"{number:4d} {result.words} {result.status:10s} {gap:>7s} {result.cpu_s:5.1f} s "
                f"load {os.getloadavg()[0]:.0f}",
                flush=True,
            )
            if result.kind == "open" and given.files is not None:
                write_case(random_case(number), given.files)
    if profile is not None:
        profile.dump_stats(given.profile)
    print("; ".join(f"{kind} {len(numbers)} {numbers}" for kind, numbers in kinds.items()))


if __name__ == "__main__":
    main()
