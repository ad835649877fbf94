"""The search: branch and bound over layouts, closed by CP-SAT.

Every layout x has a step time T(x) (its best mapping, split and recomputed layers) and lower bounds
b1(x) <= b2(x) <= b3(x) <= T(x), each tighter and dearer than the one before. With the incumbent T* (the best
step time so far), x is dropped as soon as b(x) >= T*; the plan is optimal when no layout is left.

1. Degrees (tp, cp, pp, dp, ep, etp) with a micro-batch come in the order of b1. Those below the incumbent are
   expanded into layouts; layouts that a rule forbids or whose b2 is no better drop out.
2. The rest stay in a pool. CP-SAT chooses among them by b3 or, where it is known, T; its choice and the next
   few in line are priced exactly. When it chooses a layout that is already priced, that is the optimum.

With top_k > 1, the k-th best step time takes the place of T*.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.memory import HbmCapacity
from meshwright.constraints.precision import PrecisionOnDevice
from meshwright.constraints.rule import Rule
from meshwright.constraints.unsupported import AllowedPrecisions
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.errors import OutOfTimeError
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.experts.joint import JointRouting
from meshwright.planner.search.layout_pool import LayoutPool
from meshwright.planner.search.master import THE_PLAN, UNDECIDED, LayoutMaster
from meshwright.planner.search.model import Candidates
from meshwright.planner.search.params import SearchParams
from meshwright.planner.search.pricing import Pricing
from meshwright.planner.search.space import Space

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Progress = Callable[[str], None]


@dataclass
class Certificate:
    """What was looked at, what was left out and why."""

    layouts: int = 0
    """Layouts in the degrees that were considered."""
    ruled_out: dict[str, int] = field(default_factory=dict)
    """Layouts that a rule forbids, by the first rule that does."""
    bounded_out: int = 0
    """Layouts whose bound is no better than the plan's price."""
    priced: int = 0
    """Layouts priced exactly."""
    rounds: int = 0
    """CP-SAT models solved."""
    executions: int = 1
    """Combinations of execution choices, each with layouts of its own."""
    fewest_gpus: int = 1
    """Layouts on fewer GPUs than this cannot beat the plan; they were not enumerated."""

    def rule_out(self, name: str, count: int) -> None:
        """Counts layouts under a rule."""
        if count:
            self.ruled_out[name] = self.ruled_out.get(name, 0) + count


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a search ended. `best` is sorted by price; `lower_bound_s` is None where nothing is known.

    `status` is that of a plan, or slower: nothing beats the cutoff that was given.
    """

    status: str
    best: tuple[Priced, ...]
    lower_bound_s: float | None
    certificate: Certificate


class AnyPlanFoundError(Exception):
    """Any plan was asked for, and here is one."""


class LayoutSearch:
    """One search over one space."""

    def __init__(
        self,
        space: Space,
        pricing: Pricing,
        rules: Sequence[Rule],
        *,
        top_k: int = 1,
        seed: int = 0,
        time_limit_s: float | None = None,
        any_plan: bool = False,
        most_priced: int | None = None,
        cutoff_s: float = inf,
        begin_with: Layout | None = None,
        progress: Progress | None = None,
        routing: JointRouting | None = None,
        params: SearchParams | None = None,
    ) -> None:
        self._params = params or SearchParams()
        self._routing = routing
        self._any_plan, self._most_priced, self._begin_with = any_plan, most_priced, begin_with
        self._space, self._pricing, self._rules = space, pricing, tuple(rules)
        self._top_k, self._seed, self._given_cutoff_s = top_k, seed, cutoff_s
        self._deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
        self._say = progress or (lambda _: None)
        self._best: list[tuple[float, int, Priced]] = []
        self._pool = LayoutPool()
        self._undecided_s = inf
        """No mapping of a priced layout that stayed undecided is faster than this."""
        self._unexplored_s = 0.0
        """No layout that was not expanded yet is faster than this."""
        self.certificate = Certificate()

    def run(self) -> Outcome:
        """Searches to the end, or to the time limit."""
        if self._refused_outright():
            return self._outcome("infeasible", None)
        try:
            if self._begin_with is not None:
                self._add(_as_array(self._begin_with))
                self._price_promising()
            self._scan_space()
            self._unexplored_s = inf
            proven = self._close()
        except (OutOfTimeError, AnyPlanFoundError):
            bound = min(self._unexplored_s, self._pool.least_s(), self._price_s, self._undecided_s)
            any_plan = bool(self._best)
            return self._outcome(
                "feasible" if any_plan else "unknown", bound if bound > 0 else None
            )
        if not self._best and np.isfinite(self._given_cutoff_s):
            return self._outcome("slower", min(self._given_cutoff_s, self._undecided_s))
        if not self._best:
            return self._outcome("infeasible", None)
        bound = min(proven, self._undecided_s)
        return self._outcome("optimal" if bound >= proven * (1 - 1e-9) else "feasible", bound)

    def _refused_outright(self) -> bool:
        """Whether a rule refuses the workload itself, whatever the layout."""
        default_layout = Layout(**{f.name: np.array([f.default]) for f in fields(Layout)})
        table = Candidates(
            workload=self._pricing.workload, layouts=default_layout, memory_gib=np.zeros(1)
        )
        rules = (
            rule for rule in self._rules if isinstance(rule, PrecisionOnDevice | AllowedPrecisions)
        )
        return any(rule.excess(table)[0] > 0 for rule in rules)

    def _outcome(self, status: str, bound_s: float | None) -> Outcome:
        best = tuple(priced for _, _, priced in self._best)
        return Outcome(
            status=status,
            best=best,
            lower_bound_s=None if bound_s is None or not np.isfinite(bound_s) else bound_s,
            certificate=self.certificate,
        )

    @property
    def _price_s(self) -> float:
        """The best price so far; infinite before the first."""
        return self._best[0][0] if self._best else inf

    @property
    def _cutoff_s(self) -> float:
        """What a layout must beat to matter: the price of the k-th best, here or in other spaces."""
        known = len(self._best) >= self._top_k
        own_s = self._best[self._top_k - 1][0] if known else inf
        return min(own_s, self._given_cutoff_s)

    def _check_time(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise OutOfTimeError
        if self._most_priced is not None and self.certificate.priced >= self._most_priced:
            raise OutOfTimeError

    # 1. From degrees to the pool.

    def _scan_space(self) -> None:
        """Layouts on more than half of the GPUs come first: they are likely fast, and bound the rest."""
        gpus = self._pricing.workload.gpus
        half = gpus // 2
        cost = self._pricing.gpu_seconds(self._space.shapes()) * (1 - 1e-9) if half else inf
        self._scan(self._space.degrees(gpus, half), cost / half if half else inf)
        self._price_promising()
        if np.isfinite(self._cutoff_s) and np.isfinite(cost):
            self.certificate.fewest_gpus = max(1, int(cost / self._cutoff_s))
        if self.certificate.fewest_gpus <= half:
            self._scan(self._space.degrees(half, self.certificate.fewest_gpus - 1), inf)

    def _scan(self, degrees: Layout, later_s: float) -> None:
        """Expands degrees in the order of their bounds until the bound reaches the cutoff.

        `later_s` bounds the degrees that are looked at after these.
        """
        pp = np.asarray(degrees.pp)
        if not len(pp):
            return
        layouts = self._space.layouts_per_degrees(degrees)
        self.certificate.layouts += int(layouts.sum())
        bound = self._pricing.compute_bound_s(degrees, self._space.smallest_bubble[pp])
        order = np.argsort(bound, kind="stable")
        position, size = 0, self._params.first_batch
        while position < len(order) and bound[order[position]] < self._cutoff_s:
            self._check_time()
            self._unexplored_s = min(float(bound[order[position]]), later_s)
            batch = order[position : position + size]
            batch = batch[bound[batch] < self._cutoff_s]
            self._expand(degrees.take(batch))
            self._price_promising()
            position += len(batch)
            if self._best or not len(self._pool):
                size = min(2 * size, self._params.largest_batch)
        rest = order[position:]
        self.certificate.bounded_out += int(layouts[rest].sum())
        self._unexplored_s = later_s

    def _expand(self, degrees: Layout) -> None:
        """Writes down the layouts of some degrees."""
        layouts = self._space.scheduled(self._promising(self._space.variants(degrees)))
        if len(np.atleast_1d(np.asarray(layouts.tp))):
            self._add(layouts)

    def _add(self, layouts: Layout) -> None:
        """Adds those that are legal and promising to the pool."""
        memory_gib, recomputed_layers = self._pricing.least_memory_gib(layouts)
        layouts = replace(layouts, recompute_layers=recomputed_layers)
        legal = self._legal(layouts, memory_gib)
        layouts, memory_gib = layouts.take(legal), memory_gib[legal]
        if not len(memory_gib):
            return
        bound = self._pricing.lower_bound_s(layouts)
        good = bound < self._cutoff_s
        self.certificate.bounded_out += int(np.sum(~good))
        self._pool.add(layouts.take(good), memory_gib[good], bound[good])

    def _promising(self, variants: Layout) -> Layout:
        """Drops layouts that, however many virtual stages they get, cannot fit or beat the cutoff.

        Neither virtual stages nor another schedule than 1F1B saves memory. Of the step T = m a + (S - a) x +
        ..., with S <= pp a and x = 1 / v for 1F1B, others save at most the factor
        (m + (pp - 1) x) / (m + (pp - 1) / 2) over two virtual stages.
        """
        counts = self._space.pipeline_counts[np.asarray(variants.pp)]
        memory_gib = self._pricing.recomputed_memory_gib(variants)
        table = Candidates(workload=self._pricing.workload, layouts=variants, memory_gib=memory_gib)
        for rule in self._rules:
            if rule.name == HbmCapacity.name:
                fits = rule.excess(table) <= 0
                self.certificate.rule_out(rule.name, int(counts[~fits].sum()))
                variants, counts = variants.take(fits), counts[fits]
        if not np.isfinite(self._cutoff_s) or not len(counts):
            return variants
        single = np.isin(np.asarray(variants.pp), self._space.single_stage)
        bound = np.full(len(counts), inf)
        full = (np.asarray(variants.recompute) & int(Recompute.FULL)) != 0
        fewest_recomputed = replace(variants, recompute_layers=full.astype(np.int64))
        bound[single] = self._pricing.lower_bound_s(fewest_recomputed.take(single))
        bound = np.minimum(bound, self._interleaved_bound_s(variants))
        good = bound < self._cutoff_s
        self.certificate.bounded_out += int(counts[~good].sum())
        return variants.take(good)

    def _interleaved_bound_s(self, variants: Layout) -> FloatArray:
        """A bound over two and more virtual stages; infinite where there can be one only."""
        pp, m = (np.asarray(x, dtype=np.float64) for x in (variants.pp, variants.num_micro_batches))
        bubble = self._space.smallest_bubble[np.asarray(variants.pp)]
        rows = np.flatnonzero((bubble > 0) & (bubble < 1))
        bound = np.full(len(pp), inf)
        if len(rows):
            full = (np.asarray(variants.recompute) & int(Recompute.FULL)) != 0
            two_stages = replace(
                variants, vpp=np.full(len(pp), 2), recompute_layers=full.astype(np.int64)
            )
            factor = (m + (pp - 1) * np.minimum(bubble, 0.5)) / (m + (pp - 1) / 2)
            bound[rows] = self._pricing.lower_bound_s(two_stages.take(rows)) * factor[rows]
        return bound

    def _legal(self, layouts: Layout, memory_gib: FloatArray) -> NDArray[np.bool_]:
        """Which layouts no rule forbids; the others are counted under the first rule that does."""
        table = Candidates(workload=self._pricing.workload, layouts=layouts, memory_gib=memory_gib)
        legal = np.ones(len(memory_gib), dtype=bool)
        for rule in self._rules:
            broken = legal & (rule.excess(table) > 0)
            self.certificate.rule_out(rule.name, int(broken.sum()))
            legal &= ~broken
        return legal

    def _price_promising(self) -> None:
        """Prices the most promising layouts of the pool, so that the cutoff falls early."""
        self.certificate.bounded_out += self._pool.drop(self._cutoff_s)
        for _ in range(self._params.priced_per_round):
            self._check_time()
            rows = self._pool.by_bound()[: self._params.bounded_together]
            self._bound_mappings(rows)
            row = min(
                (int(r) for r in rows), key=lambda r: float(self._pool.bound_s[r]), default=None
            )
            if row is None or self._pool.bound_s[row] >= self._cutoff_s:
                break
            before = self._price_s
            self._price(row)
            if np.isfinite(before) and self._price_s > before * self._params.worthwhile:
                break
        self.certificate.bounded_out += self._pool.drop(self._cutoff_s)

    def _bound_mappings(self, rows: IntArray) -> None:
        """Tightens the bounds of layouts in the pool to those of their true mappings."""
        rows = rows[[self._pool.mappings[row] is None for row in rows]]
        if not len(rows):
            return
        for row, bounds in zip(
            rows, self._pricing.mapping_bounds(self._pool.take(rows)), strict=True
        ):
            self._pool.set_mappings(int(row), bounds)

    def _price(self, row: int) -> None:
        """Prices a layout of the pool exactly and takes it out."""
        bounds = self._pool.mappings[row]
        assert bounds is not None
        layout = self._pool.scalar(row)
        priced = self._pricing.exact(layout, bounds, self._cutoff_s)
        self._undecided_s = min(self._undecided_s, self._pricing.undecided_s)
        self._pool.close(row)
        self.certificate.priced += 1
        if priced is not None:
            self._best.append((priced.step_time_s, self.certificate.priced, priced))
            self._best.sort(key=lambda entry: entry[:2])
            del self._best[self._top_k :]
            if self._any_plan:
                raise AnyPlanFoundError
            if priced is self._best[0][2]:
                self._say(f"{priced.step_time_s:.4g} s a step, {len(self._pool)} layouts left")

    # 2. From the pool to the optimum.

    def _close(self) -> float:
        """Solves masters over the pool until one chooses a priced layout; returns the proven
        bound.
        """
        proven_s: float | None = None
        while True:
            self._check_time()
            self.certificate.bounded_out += self._pool.drop(self._cutoff_s)
            rows = self._pool.by_bound()
            first = rows[: self._params.bounded_together]
            if self._bounded_prefix(first) < len(first):
                self._bound_mappings(first)
                continue
            chosen = self._master(rows) if proven_s is None else None
            if chosen is None:
                proven_s = self._price_s if proven_s is None else proven_s
                if not len(rows):
                    return proven_s
                chosen = int(
                    rows[0]
                )  # only with further layouts to prove: the k-th best is not known yet
            for row in (
                chosen,
                *(int(r) for r in rows[: self._params.priced_per_round] if r != chosen),
            ):
                self._check_time()
                if self._pool.bound_s[row] < self._cutoff_s:
                    self._price(row)

    def _master(self, rows: IntArray) -> int | None:
        """The row of the pool that CP-SAT chooses; None if it chooses the best plan so far."""
        plan = self._best[0][2] if self._best else None
        if not len(rows) and plan is None:
            return None
        self.certificate.rounds += 1
        master = LayoutMaster(
            self._pricing,
            self._rules,
            self._pool,
            cutoff_s=self._cutoff_s,
            routing=self._routing,
            params=self._params,
        )
        remaining_s = None if self._deadline is None else self._deadline - time.monotonic()
        chosen = master.choose(rows[: self._bounded_prefix(rows)], plan, self._seed, remaining_s)
        if chosen == UNDECIDED:
            raise OutOfTimeError
        return None if chosen == THE_PLAN else chosen

    def _bounded_prefix(self, rows: IntArray) -> int:
        """How many of the first rows have bounds for their mappings."""
        return next(
            (n for n, row in enumerate(rows) if self._pool.mappings[row] is None), len(rows)
        )


def _as_array(layout: Layout) -> Layout:
    """One layout as an array of one."""
    return Layout(**{name: np.array([value]) for name, value in vars(layout).items()})
