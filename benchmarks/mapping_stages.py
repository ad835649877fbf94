"""What each stage of the mapping solver brings: result, bound and time with it and without it.

python -m benchmarks.mapping_stages [--objective traffic|spread] [--seeds N] [STAGE ...]

A stage is taken out by replacing one function or number; docs/fabric.md holds the table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from benchmarks.fabric import CASES, Case, case_instance
from meshwright.planner.mapping.least_traffic import least_traffic
from meshwright.planner.mapping.problem import MappingProblem
from meshwright.planner.mapping.slots import MappingSolution
from meshwright.planner.mapping.spread import SpreadSolution, least_spread

ROOM = "meshwright.planner.mapping."
Patches = dict[str, Any]

MORE_CASES = {
    "64 on 9, 8 spare": Case(
        model="llama-3-70b", nodes=64, leaves=9, leaf_nodes=16, pods=1, pp=4, spare=8
    ),
    "512 on 40, 64 spare": Case(
        model="gpt3-175b", nodes=512, leaves=40, leaf_nodes=20, pods=1, pp=8, spare=64
    ),
    "64 on 9, ep 16": Case(
        model="deepseek-v3", nodes=64, leaves=9, leaf_nodes=16, pods=1, pp=4, ep=16
    ),
    "64 on 9, 2 pods, ep 16": Case(
        model="deepseek-v3", nodes=64, leaves=9, leaf_nodes=16, pods=2, pp=4, ep=16
    ),
    "12 on 4, 2 pods": Case(model="llama-3-70b", nodes=12, leaves=4, leaf_nodes=6, pods=2, pp=3),
    "512 on 40, vpp 2": Case(
        model="gpt3-175b", nodes=512, leaves=40, leaf_nodes=20, pods=1, pp=8, vpp=2
    ),
}


def _nothing(*_: object, **__: object) -> None:
    return None


TRAFFIC: dict[str, Patches] = {
    "regular orders": {"least_traffic.regular_orders": lambda problem: iter(())},
    "deepening": {
        "least_traffic.deepened": lambda problem, relaxation, *_: relaxation.bound_s,
    },
    "slot model": {"least_traffic.is_small": lambda problem: False},
    "exchange": {"least_traffic.exchanged": lambda problem, counts, tries: counts},
}
SPREAD: dict[str, Patches] = {
    "regular orders": {"spread.regular_orders": lambda problem: iter(())},
    "bands": {"spread._Best.bands": _nothing},
    "gathering swaps": {"spread._Best._gathered": lambda self, made, heights: made},
    "exact": {"spread.is_small": lambda problem: False},
    "orders of pods": {"spread_build.ORDERS_OF_PODS": 1},
    "20 shapes": {"spread.SHAPES_TRIED": 5},
}
STAGES = {"traffic": TRAFFIC, "spread": SPREAD}
SOLVERS: dict[str, Callable[..., MappingSolution]] = {
    "traffic": least_traffic,
    "spread": least_spread,
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """One solve."""

    price_s: float
    bound_s: float
    cpu_s: float
    reach: str


@contextmanager
def without(patches: Patches) -> Iterator[None]:
    """The solver with some functions and numbers replaced."""
    with ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(patch(ROOM + name, value))
        yield


def solved(objective: str, problem: MappingProblem, patches: Patches) -> Result:
    """Solves once."""
    began = time.process_time()
    with without(patches):
        solution = SOLVERS[objective](problem)
    cpu_s = time.process_time() - began
    reach = ""
    if isinstance(solution, SpreadSolution):
        reach = f"pods {solution.pods.reached} leaves {solution.leaves.reached}"
    return Result(price_s=solution.price_s, bound_s=solution.bound_s, cpu_s=cpu_s, reach=reach)


def main() -> None:
    """Prints one line for each case, seed and stage taken out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="*")
    parser.add_argument("--objective", choices=[*STAGES], default="traffic")
    parser.add_argument("--case", action="append")
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    stages = STAGES[arguments.objective]
    every = CASES | MORE_CASES
    for name in arguments.case or every:
        for seed in range(arguments.seeds):
            problem = case_instance(every[name], seed).problem
            full = solved(arguments.objective, problem, {})
            print(
                f"{name:26} {seed} {'all':38} {full.price_s:9.4f} {full.bound_s:9.4f} {full.cpu_s:6.1f} s {full.reach}",
                flush=True,
            )
            for stage in arguments.stages or [stage for stage in stages if stage != "all"]:
                result = solved(arguments.objective, problem, stages[stage])
                worse = result.price_s / full.price_s - 1 if full.price_s else 0.0
                lower = (full.bound_s - result.bound_s) / full.price_s if full.price_s else 0.0
                same = abs(worse) < 5e-5 and abs(lower) < 5e-5 and result.reach == full.reach
                print(
                    f"{name:26} {seed} {stage:38} {'same' if same else f'result {worse:+.2%}, bound {-lower:+.2%}':34} "
                    f"{result.cpu_s:6.1f} s {result.reach if not same else ''}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
