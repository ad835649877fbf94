"""What each stage of the mapping solver brings: result, bound and time with it and without it.

python -m benchmarks.mapping_stages [--objective traffic|busiest|spread] [--seeds N] [STAGE ...]

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
from meshwright.planner.mapping.busiest.least import least_busiest
from meshwright.planner.mapping.problem import MappingProblem
from meshwright.planner.mapping.relaxation.arrange import arranged
from meshwright.planner.mapping.relaxation.columns import relax
from meshwright.planner.mapping.relaxation.orderless import Chosen, cheapest_choice
from meshwright.planner.mapping.solution import MappingSolution
from meshwright.planner.mapping.solve import least_traffic
from meshwright.planner.mapping.spread.least import SpreadSolution, least_spread

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


def _bound_of_relaxation(problem: Any, found: Any, *_: object) -> float:
    return float(found.bound_s)


def _bound_given(*_: object, bound_s: float, **__: object) -> float:
    return bound_s


def _without_flows(*given: Any, flows: bool) -> Chosen:
    if flows:
        return Chosen(
            holdings=[], cuts=(None, None), cost_s=float("inf"), bound_s=0.0, complete=False
        )
    return cheapest_choice(*given, flows=False)


def _as_chosen(problem: Any, found: Any, choice: Any, best: Any) -> None:
    best.offer(arranged(problem, found.leaves.kinds, choice.holdings, choice.cuts))


def _anew(problem: Any, found: Any, choice: Any, best: Any) -> None:
    best.offer(arranged(problem, found.leaves.kinds, choice.holdings, (None, None)))


TRAFFIC: dict[str, Patches] = {
    "all": {},
    "regular orders": {"solve.blocked_orders": lambda problem: iter(())},
    "cuts of stages (two-sided, deepening)": {
        "solve.relax_two_sided": lambda problem, starts, stop: relax(problem, starts, stop=stop),
        "solve.deepened": _bound_of_relaxation,
    },
    "deepening": {"solve.deepened": _bound_of_relaxation},
    "smoothing": {"relaxation.two_sided.SMOOTHING": 0.0},
    "flows": {"relaxation.deepening.cheapest_choice": _without_flows},
    "arranged anew": {"relaxation.deepening._arrange": _as_chosen},
    "arranged as chosen": {"relaxation.deepening._arrange": _anew},
    "arranged by patterns": {"relaxation.arrange._groups": lambda *given: []},
    "patterns after deepening": {"solve._whole": _bound_given},
    "slot model": {"solve.is_small": lambda problem: False},
    "bound of pods": {"solve.pods_bound_s": lambda *given: 0.0},
    "exchange": {"relaxation.pods.exchanged": lambda problem, counts, tries: counts},
    "pod by pod": {"relaxation.pods.pod_by_pod": _nothing},
    "leaves and pods together": {"solve.LARGEST_JOINT": 0},
}
BUSIEST: dict[str, Patches] = {
    "all": {},
    "regular orders": {"busiest.least.blocked_orders": lambda problem: iter(())},
    "least traffic first": {"solve.deepened": _bound_of_relaxation, "solve._whole": _bound_given},
    "slot model": {"busiest.least.is_small": lambda problem: False},
    "by room": {"busiest.bound.CeilingBound.by_room": lambda self: 0.0},
    "by stages": {"busiest.least._refuted": lambda ceilings, low_s, price_s, steps=8: low_s},
    "listed patterns": {"busiest.bound.LISTED": 0},
    "bisection": {"busiest.least._lower": lambda *given: []},
    "enumerated patterns": {"busiest.least.SHARES": ()},
}
SPREAD: dict[str, Patches] = {
    "all": {},
    "regular orders": {"spread.least.blocked_orders": lambda problem: iter(())},
    "bands": {"spread.least._Best.bands": _nothing},
    "gathering swaps": {"spread.least._Best._gathered": lambda self, made, heights: made},
    "settling swaps": {"spread.least._Best.settle": _nothing},
    "exact": {"spread.least.is_small": lambda problem: False},
    "orders of pods": {"spread.build.ORDERS": 1},
    "80 shapes": {"spread.least.MOST_TRIED": 20},
}
STAGES = {"traffic": TRAFFIC, "busiest": BUSIEST, "spread": SPREAD}
SOLVERS: dict[str, Callable[[MappingProblem], MappingSolution]] = {
    "traffic": least_traffic,
    "busiest": least_busiest,
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


def solved(objective: str, problem: MappingProblem) -> Result:
    """Solves once."""
    began = time.process_time()
    solution = SOLVERS[objective](problem)
    cpu_s = time.process_time() - began
    reach = ""
    if isinstance(solution, SpreadSolution):
        reach = f"pods {solution.pods.found} leaves {solution.leaves.found}"
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
            full = solved(arguments.objective, problem)
            print(
                f"{name:26} {seed} {'all':38} {full.price_s:9.4f} {full.bound_s:9.4f} {full.cpu_s:6.1f} s {full.reach}",
                flush=True,
            )
            for stage in arguments.stages or [stage for stage in stages if stage != "all"]:
                with without(stages[stage]):
                    result = solved(arguments.objective, problem)
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
