"""Column generation over leaf and pod patterns: a bound on every mapping, and columns to build one from.

    min  sum_p cost_p x_p + sum_q cost_q y_q
    each stage gets its slots            sum_p n_{p,s} x_p = demand_s          (one pod)
    a pod's leaves hold what it holds    sum_{p in b} n_{p,s} x_p = sum_q N_{q,s} y_{b,q}, and
                                         sum_{b,q} N_{q,s} y_{b,q} = demand_s  (several)
    every leaf and pod has a pattern     sum_{p of kind k} x_p <= leaves of kind k

x_p counts leaves, so equal leaves are never told apart. The bound is Lagrange's at the last prices: it holds
whether or not the columns are all there, and whatever the rounding of the linear programme.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.planner.mapping.problem import FloatArray, IntArray, MappingProblem
from meshwright.planner.mapping.relaxation.patterns import (
    BlockKind,
    Pricer,
    leaf_kinds,
    pattern_bytes,
    pod_kinds,
)

if TYPE_CHECKING:
    from ortools.linear_solver import pywraplp

MOST_ROUNDS = 400
CLOSE = 1e-7
"""Of the linear programme's value: columns that gain less are not worth a round."""
LARGEST_POD_TABLE = 30_000_000
"""States of the pods' dynamic programme; beyond it pods cost nothing in the bound."""


@dataclass
class Pool:
    """Patterns of one family of blocks, without repeats."""

    kinds: list[BlockKind]
    kind: list[int] = field(default_factory=list)
    patterns: list[IntArray] = field(default_factory=list)
    cost_s: list[float] = field(default_factory=list)
    seen: set[tuple[int, bytes]] = field(default_factory=set)

    def add(self, problem: MappingProblem, kind: int, pattern: IntArray) -> bool:
        """Adds a pattern; whether it is new."""
        key = (kind, pattern.tobytes())
        if key in self.seen:
            return False
        self.seen.add(key)
        self.kind.append(kind)
        self.patterns.append(pattern)
        sent = float(pattern_bytes(problem, pattern[None])[0])
        self.cost_s.append(sent * self.kinds[kind].s_per_byte)
        return True

    def add_all(self, problem: MappingProblem, patterns: list[list[IntArray]]) -> None:
        """Adds patterns by kind."""
        for kind, mine in enumerate(patterns):
            for pattern in mine:
                self.add(problem, kind, pattern)

    def copy(self) -> Pool:
        """The same patterns, to add others to."""
        return Pool(
            self.kinds, list(self.kind), list(self.patterns), list(self.cost_s), set(self.seen)
        )


@dataclass(kw_only=True)
class Relaxation:
    """What column generation found."""

    priced_bound_s: float
    """No assignment costs less, by the prices below; what patterns cost above the least counts from here."""
    value_s: float
    """Of the linear programme over the columns."""
    leaves: Pool
    pods: Pool | None
    leaf_prices: FloatArray
    """Of a slot of each stage in a leaf of each kind, [kinds, stages]; or of n slots, [kinds, stages, n]."""
    leaf_rent_s: FloatArray
    """What one leaf of each kind is worth, [kinds]; at most 0."""
    pod_prices: FloatArray
    pod_rent_s: FloatArray
    """What each pod is worth, [pods]; at most 0."""
    rounds: int
    piece_prices: FloatArray | None = None
    """Of a piece by family of stages and size, where cuts of stages are in it too (`two_sided`)."""

    @property
    def bound_s(self) -> float:
        """No assignment costs less."""
        return max(self.priced_bound_s, 0.0)


def dearest_slot_s(problem: MappingProblem) -> float:
    """More than a slot can cost."""
    t = problem.traffic
    all_bytes = (
        t.ring_bytes + t.context_bytes + t.expert_bytes * t.expert_slots
        + t.expert_ring_bytes * t.expert_slots + 2 * t.hop_bytes + 2 * t.wrap_bytes
    )  # fmt: skip
    worst = max(problem.leaf_s_per_byte, default=0.0) + max(problem.pod_s_per_byte)
    return max(all_bytes * worst, 1e-12)


class Master:
    """The linear programme over the columns so far."""

    def __init__(self, problem: MappingProblem, demand: IntArray, pods: bool) -> None:
        from ortools.linear_solver import pywraplp

        self._problem, self.demand = problem, demand
        self._solver: pywraplp.Solver = pywraplp.Solver.CreateSolver("GLOP")
        self.leaves = Pool(leaf_kinds(problem))
        self.pods = Pool(pod_kinds(problem)) if pods else None
        stages = problem.stages
        self._need = [self._row(int(n), int(n)) for n in demand]
        self._leaf_rows = [self._row(0, len(kind.members)) for kind in self.leaves.kinds]
        infinity = self._solver.infinity()
        self._pod_rows: list[Any] = []
        self._links: list[list[Any]] = []
        if self.pods is not None:
            self._pod_rows = [self._row(0, 1) for _ in self.pods.kinds]
            self._links = [[self._row(0, 0) for _ in range(stages)] for _ in self.pods.kinds]
        # Slots that no column provides: dear enough that none is bought at the end.
        self._cost_scale = 1.0 / dearest_slot_s(problem)
        for rows in [self._need, *self._links]:
            for row in rows:
                for sign in (1, -1):
                    spare = self._solver.NumVar(0, infinity, "")
                    row.SetCoefficient(spare, sign)
                    self._solver.Objective().SetCoefficient(spare, 10.0)
        self._solver.Objective().SetMinimization()

    def _row(self, low: float, high: float) -> Any:
        return self._solver.Constraint(low, high)

    def add_leaf(self, kind: int, pattern: IntArray) -> bool:
        """Adds a leaf pattern; whether it is new."""
        if not self.leaves.add(self._problem, kind, pattern):
            return False
        rows = self._need if self.pods is None else self._links[self.leaves.kinds[kind].parent]
        self._column(rows, pattern, self._leaf_rows[kind], self.leaves.cost_s[-1])
        return True

    def add_pod(self, pod: int, pattern: IntArray) -> bool:
        """Adds a pod pattern; whether it is new."""
        assert self.pods is not None
        if not self.pods.add(self._problem, pod, pattern):
            return False
        column = self._column(self._need, pattern, self._pod_rows[pod], self.pods.cost_s[-1])
        for stage, n in enumerate(pattern):
            if n:
                self._links[pod][stage].SetCoefficient(column, -float(n))
        return True

    def _column(self, rows: list[Any], pattern: IntArray, own: Any, cost_s: float) -> Any:
        column = self._solver.NumVar(0, self._solver.infinity(), "")
        for row, n in zip(rows, pattern, strict=True):
            if n:
                row.SetCoefficient(column, float(n))
        own.SetCoefficient(column, 1.0)
        self._solver.Objective().SetCoefficient(column, cost_s * self._cost_scale)
        return column

    def solve(self) -> float | None:
        """The value, in seconds; None where GLOP gives up, from the last basis and from none."""
        from ortools.linear_solver import pywraplp

        # The primal simplex goes wrong on the pods' degenerate rows where the dual does not.
        for algorithm in ("DUAL", "PRIMAL"):
            how = pywraplp.MPSolverParameters()
            how.SetIntegerParam(how.LP_ALGORITHM, getattr(how, algorithm))
            if algorithm == "PRIMAL":
                how.SetIntegerParam(how.INCREMENTALITY, how.INCREMENTALITY_OFF)
            if self._solver.Solve(how) == pywraplp.Solver.OPTIMAL:
                return float(self._solver.Objective().Value()) / self._cost_scale
        return None

    def prices(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Of a slot of each stage: whatever holds it, in leaves by kind, and in pods."""
        need = self._duals(self._need)
        if self.pods is None:
            return need, np.tile(need, (len(self.leaves.kinds), 1)), np.zeros((0, len(need)))
        links = np.array([self._duals(rows) for rows in self._links])
        parents = [kind.parent for kind in self.leaves.kinds]
        return need, links[parents], need - links

    def _duals(self, rows: Iterable[Any]) -> FloatArray:
        return np.array([row.dual_value() for row in rows]) / self._cost_scale


def relax(
    problem: MappingProblem,
    starts: Iterable[IntArray],
    *,
    demand: IntArray | None = None,
    stop: Callable[[], bool] = lambda: False,
    enough: float = 0.0,
) -> Relaxation:
    """Generates columns until none helps, or `stop` says so. `starts` are counts [leaves, stages] that fit.

    `demand` is the slots of each stage where they are not all the same. Ends early when bound and value are
    within the share `enough` of each other.
    """
    demand = np.full(problem.stages, problem.slots) if demand is None else demand
    with_pods = problem.pods > 1 and pod_states(problem) <= LARGEST_POD_TABLE
    master = Master(problem, demand, with_pods)
    for counts in starts:
        add_counts(master, problem, counts)
    leaf_pricer = Pricer(problem, master.leaves.kinds)
    pod_pricer = Pricer(problem, master.pods.kinds) if master.pods is not None else None
    best = Relaxation(
        priced_bound_s=-np.inf, value_s=np.inf, leaves=master.leaves, pods=master.pods, rounds=0,
        leaf_prices=np.zeros((len(master.leaves.kinds), problem.stages)),
        leaf_rent_s=np.zeros(len(master.leaves.kinds)), pod_prices=np.zeros((0, 0)), pod_rent_s=np.zeros(0),
    )  # fmt: skip
    for _ in range(MOST_ROUNDS):
        value_s = master.solve()
        if value_s is None:
            break
        best.rounds, best.value_s = best.rounds + 1, value_s
        fresh = _price(master, leaf_pricer, pod_pricer, best)
        if best.value_s - best.bound_s <= max(CLOSE, enough) * best.value_s or stop() or not fresh:
            break
    return best


def pod_states(problem: MappingProblem) -> int:
    """Entries of the pods' dynamic programme."""
    kinds = pod_kinds(problem)
    room = max(kind.room for kind in kinds)
    return len(kinds) * (room + 1) * (min(room, problem.slots) + 1) * problem.stages


def _price(master: Master, leaf_pricer: Pricer, pod_pricer: Pricer | None, best: Relaxation) -> int:
    """Adds columns at the current prices, keeps the bound if it is the best so far; how many are new."""
    need, leaf_prices, pod_prices = master.prices()
    fresh = 0
    rent = np.zeros(len(master.leaves.kinds))
    for kind, reduced, pattern in leaf_pricer.best(leaf_prices, ways=3):
        rent[kind] = min(rent[kind], reduced)
        fresh += master.add_leaf(kind, pattern)
        if master.pods is None:
            fresh += master.add_leaf(kind, pattern[::-1].copy())
    bound = float(need @ master.demand)
    bound += sum(
        len(kind.members) * float(r) for kind, r in zip(master.leaves.kinds, rent, strict=True)
    )
    worth = np.zeros(len(pod_prices))
    if pod_pricer is not None:
        for pod, reduced, pattern in pod_pricer.best(pod_prices, ways=2):
            worth[pod] = min(worth[pod], reduced)
            fresh += master.add_pod(pod, pattern)
        bound += float(worth.sum())
    if bound > best.priced_bound_s:
        best.priced_bound_s = bound
        best.leaf_prices, best.leaf_rent_s = leaf_prices, rent
        best.pod_prices, best.pod_rent_s = pod_prices, worth
    return fresh


def add_counts(master: Master, problem: MappingProblem, counts: IntArray) -> None:
    """Adds the patterns of a whole mapping, counts [leaves, stages]."""
    for kind, block in enumerate(master.leaves.kinds):
        for leaf in block.members:
            master.add_leaf(kind, counts[leaf].astype(np.int64))
    if master.pods is not None:
        for pod in range(problem.pods):
            master.add_pod(pod, counts[problem.pod_of == pod].sum(axis=0).astype(np.int64))


def counts_of(problem: MappingProblem, assignment: IntArray) -> IntArray:
    """Slots of each stage in each leaf, shape [leaves, stages]."""
    out = np.zeros((len(problem.leaf_slots), problem.stages), dtype=np.int64)
    stages = np.repeat(np.arange(problem.stages), problem.slots)
    np.add.at(out, (assignment.ravel(), stages), 1)
    return out
