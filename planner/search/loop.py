"""The search: families by their floor, members by their bound, survivors by CP-SAT, until bound and price
meet.

1. Families come cheapest floor first. Those below the best price so far are expanded into members; members
   that a rule forbids, or whose bound is no better than the best price, drop out.
2. The survivors' mappings are bounded. CP-SAT chooses among them; its choice, and the next few in line, are
   priced exactly and their coefficients replaced. When it chooses a layout that is already priced, that is
   the optimum.

Every layout that is dropped has a bound at or above the price of the plan, so the answer is optimal over
the space.
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
from meshwright.planner.search.master import THE_PLAN, UNDECIDED, LayoutMaster
from meshwright.planner.search.model import Candidates
from meshwright.planner.search.open_set import OpenSet
from meshwright.planner.search.pricing import Pricing
from meshwright.planner.search.space import Space

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Progress = Callable[[str], None]

FIRST_BATCH, LARGEST_BATCH = 128, 4096
PRICED_PER_ROUND = 8
BOUNDED_AHEAD = 128
"""Open layouts whose mappings are bounded before a CP-SAT model is built."""
WORTHWHILE = 0.995
"""A new best price below this share of the last one makes it worth while to price another layout at once."""


@dataclass
class Certificate:
    """What was looked at, what was left out and why."""

    layouts: int = 0
    """Layouts in the families that were considered."""
    ruled_out: dict[str, int] = field(default_factory=dict)
    """Layouts that a rule forbids, by the first rule that does."""
    bounded_out: int = 0
    """Layouts whose bound is no better than the plan's price."""
    priced: int = 0
    """Layouts priced exactly."""
    rounds: int = 0
    """CP-SAT models solved."""
    fewest_gpus: int = 1
    """Layouts on fewer GPUs than this cannot beat the plan; they were not enumerated."""

    def rule_out(self, name: str, count: int) -> None:
        """Counts layouts under a rule."""
        if count:
            self.ruled_out[name] = self.ruled_out.get(name, 0) + count


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a search ended. `best` is sorted by price; `lower_bound_s` is None where nothing is known."""

    status: str
    best: tuple[Priced, ...]
    lower_bound_s: float | None
    certificate: Certificate


class FoundError(Exception):
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
        begin_with: Layout | None = None,
        progress: Progress | None = None,
        routing: JointRouting | None = None,
    ) -> None:
        self._routing = routing
        self._any_plan, self._most_priced, self._begin_with = any_plan, most_priced, begin_with
        self._space, self._pricing, self._rules = space, pricing, tuple(rules)
        self._top_k, self._seed = top_k, seed
        self._deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
        self._say = progress or (lambda _: None)
        self._best: list[tuple[float, int, Priced]] = []
        self._open = OpenSet()
        self._loose_s = inf
        """No mapping of a priced layout that stayed undecided is faster than this."""
        self._unseen_s = 0.0
        """No layout that is neither open nor dropped is faster than this."""
        self.certificate = Certificate()

    def run(self) -> Outcome:
        """Searches to the end, or to the time limit."""
        if self._refused_outright():
            return self._outcome("infeasible", None)
        try:
            if self._begin_with is not None:
                self._add(_as_array(self._begin_with))
                self._price_open()
            self._scan_space()
            self._unseen_s = inf
            proven = self._close()
        except (OutOfTimeError, FoundError):
            bound = min(self._unseen_s, self._open.least_s(), self._price_s, self._loose_s)
            found = bool(self._best)
            return self._outcome("feasible" if found else "unknown", bound if bound > 0 else None)
        if not self._best:
            return self._outcome("infeasible", None)
        bound = min(proven, self._loose_s)
        return self._outcome("optimal" if bound >= proven * (1 - 1e-9) else "feasible", bound)

    def _refused_outright(self) -> bool:
        """Whether a rule refuses the workload itself, whatever the layout."""
        one = Layout(**{f.name: np.array([f.default]) for f in fields(Layout)})
        table = Candidates(workload=self._pricing.workload, layouts=one, memory_gib=np.zeros(1))
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
        """What a layout must beat to matter: the price of the k-th best."""
        return self._best[self._top_k - 1][0] if len(self._best) >= self._top_k else inf

    def _check_time(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise OutOfTimeError
        if self._most_priced is not None and self.certificate.priced >= self._most_priced:
            raise OutOfTimeError

    # 1. From families to open members.

    def _scan_space(self) -> None:
        """Layouts on more than half of the GPUs come first: they are likely fast, and bound the rest."""
        gpus = self._pricing.workload.gpus
        half = gpus // 2
        cost = self._pricing.gpu_seconds(self._space.shapes()) * (1 - 1e-9) if half else inf
        self._scan(self._space.families(gpus, half), cost / half if half else inf)
        self._price_open()
        if np.isfinite(self._cutoff_s) and np.isfinite(cost):
            self.certificate.fewest_gpus = max(1, int(cost / self._cutoff_s))
        if self.certificate.fewest_gpus <= half:
            self._scan(self._space.families(half, self.certificate.fewest_gpus - 1), inf)

    def _scan(self, families: Layout, later_s: float) -> None:
        """Expands families in the order of their floors until the floor reaches the cutoff.

        `later_s` bounds the families that are looked at after these.
        """
        pp = np.asarray(families.pp)
        if not len(pp):
            return
        members = self._space.members_per_family(families)
        self.certificate.layouts += int(members.sum())
        floor = self._pricing.floor_s(families, self._space.smallest_bubble[pp])
        order = np.argsort(floor, kind="stable")
        at, size = 0, FIRST_BATCH
        while at < len(order) and floor[order[at]] < self._cutoff_s:
            self._check_time()
            self._unseen_s = min(float(floor[order[at]]), later_s)
            batch = order[at : at + size]
            batch = batch[floor[batch] < self._cutoff_s]
            self._expand(families.take(batch))
            self._price_open()
            grown = self._best or not len(
                self._open
            )  # bigger steps where nothing is found to look at
            at, size = at + len(batch), min(2 * size, LARGEST_BATCH) if grown else size
        rest = order[at:]
        self.certificate.bounded_out += int(members[rest].sum())
        self._unseen_s = later_s

    def _expand(self, families: Layout) -> None:
        """Writes down the members of some families."""
        members = self._space.staged(self._promising(self._space.variants(families)))
        if len(np.atleast_1d(np.asarray(members.tp))):
            self._add(members)

    def _add(self, members: Layout) -> None:
        """Adds those that are legal and promising to the open ones."""
        memory_gib, again = self._pricing.least_memory_gib(members)
        members = replace(members, recompute_layers=again)
        legal = self._legal(members, memory_gib)
        members, memory_gib = members.take(legal), memory_gib[legal]
        if not len(memory_gib):
            return
        bound = self._pricing.lower_bound_s(members)
        good = bound < self._cutoff_s
        self.certificate.bounded_out += int(np.sum(~good))
        self._open.add(members.take(good), memory_gib[good], bound[good])

    def _promising(self, variants: Layout) -> Layout:
        """Drops layouts that, however many virtual stages they get, cannot fit or beat the cutoff.

        Neither virtual stages nor another schedule than 1F1B saves memory. Of the step T = m a + (S - a) x +
        ..., with S <= pp a and x = 1 / v for 1F1B, others save at most the factor
        (m + (pp - 1) x) / (m + (pp - 1) / 2) over two virtual stages.
        """
        counts = self._space.pipeline_counts[np.asarray(variants.pp)]
        memory_gib = self._pricing.floor_memory_gib(variants)
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
        least = replace(variants, recompute_layers=full.astype(np.int64))
        bound[single] = self._pricing.lower_bound_s(least.take(single))
        bound = np.minimum(bound, self._interleaved_bound_s(variants))
        good = bound < self._cutoff_s
        self.certificate.bounded_out += int(counts[~good].sum())
        return variants.take(good)

    def _interleaved_bound_s(self, variants: Layout) -> FloatArray:
        """A bound over two and more virtual stages; infinite where there can be one only."""
        pp, m = (np.asarray(x, dtype=np.float64) for x in (variants.pp, variants.num_micro_batches))
        least = self._space.smallest_bubble[np.asarray(variants.pp)]
        rows = np.flatnonzero((least > 0) & (least < 1))
        bound = np.full(len(pp), inf)
        if len(rows):
            full = (np.asarray(variants.recompute) & int(Recompute.FULL)) != 0
            two = replace(variants, vpp=np.full(len(pp), 2), recompute_layers=full.astype(np.int64))
            factor = (m + (pp - 1) * np.minimum(least, 0.5)) / (m + (pp - 1) / 2)
            bound[rows] = self._pricing.lower_bound_s(two.take(rows)) * factor[rows]
        return bound

    def _legal(self, members: Layout, memory_gib: FloatArray) -> NDArray[np.bool_]:
        """Which members no rule forbids; the others are counted under the first rule that does."""
        table = Candidates(workload=self._pricing.workload, layouts=members, memory_gib=memory_gib)
        legal = np.ones(len(memory_gib), dtype=bool)
        for rule in self._rules:
            broken = legal & (rule.excess(table) > 0)
            self.certificate.rule_out(rule.name, int(broken.sum()))
            legal &= ~broken
        return legal

    def _price_open(self) -> None:
        """Prices the most promising open layouts, so that the cutoff falls early."""
        self.certificate.bounded_out += self._open.drop(self._cutoff_s)
        for _ in range(PRICED_PER_ROUND):
            self._check_time()
            rows = self._open.by_bound()[:BOUNDED_AHEAD]
            self._bound_mappings(rows)
            row = min(
                (int(r) for r in rows), key=lambda r: float(self._open.bound_s[r]), default=None
            )
            if row is None or self._open.bound_s[row] >= self._cutoff_s:
                break
            before = self._price_s
            self._price(row)
            if np.isfinite(before) and self._price_s > before * WORTHWHILE:
                break
        self.certificate.bounded_out += self._open.drop(self._cutoff_s)

    def _bound_mappings(self, rows: IntArray) -> None:
        """Tightens the bounds of open layouts to those of their true mappings."""
        rows = rows[[self._open.mappings[row] is None for row in rows]]
        if not len(rows):
            return
        for row, bounds in zip(
            rows, self._pricing.mapping_bounds(self._open.take(rows)), strict=True
        ):
            self._open.set_mappings(int(row), bounds)

    def _price(self, row: int) -> None:
        """Prices an open layout exactly and closes it."""
        bounds = self._open.mappings[row]
        assert bounds is not None
        layout = self._open.scalar(row)
        priced = self._pricing.exact(layout, bounds, self._cutoff_s)
        self._loose_s = min(self._loose_s, self._pricing.loose_s)
        self._open.close(row)
        self.certificate.priced += 1
        if priced is not None:
            self._best.append((priced.step_time_s, self.certificate.priced, priced))
            self._best.sort(key=lambda entry: entry[:2])
            del self._best[self._top_k :]
            if self._any_plan:
                raise FoundError
            if priced is self._best[0][2]:
                self._say(f"{priced.step_time_s:.4g} s a step, {len(self._open)} layouts open")

    # 2. From open members to the optimum.

    def _close(self) -> float:
        """Solves masters over the open layouts until one chooses a priced layout; returns the proven
        bound.
        """
        proven_s: float | None = None
        while True:
            self._check_time()
            self.certificate.bounded_out += self._open.drop(self._cutoff_s)
            rows = self._open.by_bound()
            if self._bounded_prefix(rows[:BOUNDED_AHEAD]) < min(len(rows), BOUNDED_AHEAD):
                self._bound_mappings(rows[:BOUNDED_AHEAD])
                continue
            chosen = self._master(rows) if proven_s is None else None
            if chosen is None:
                proven_s = self._price_s if proven_s is None else proven_s
                if not len(rows):
                    return proven_s
                chosen = int(
                    rows[0]
                )  # only with further layouts to prove: the k-th best is not known yet
            for row in (chosen, *(int(r) for r in rows[:PRICED_PER_ROUND] if r != chosen)):
                self._check_time()
                if self._open.bound_s[row] < self._cutoff_s:
                    self._price(row)

    def _master(self, rows: IntArray) -> int | None:
        """The open layout that CP-SAT chooses; None if it chooses the best plan so far."""
        plan = self._best[0][2] if self._best else None
        if not len(rows) and plan is None:
            return None
        self.certificate.rounds += 1
        master = LayoutMaster(
            self._pricing, self._rules, self._open, cutoff_s=self._cutoff_s, routing=self._routing
        )
        left = None if self._deadline is None else self._deadline - time.monotonic()
        chosen = master.choose(rows[: self._bounded_prefix(rows)], plan, self._seed, left)
        if chosen == UNDECIDED:
            raise OutOfTimeError
        return None if chosen == THE_PLAN else chosen

    def _bounded_prefix(self, rows: IntArray) -> int:
        """How many of the first rows have bounds for their mappings."""
        return next(
            (n for n, row in enumerate(rows) if self._open.mappings[row] is None), len(rows)
        )


def _as_array(layout: Layout) -> Layout:
    """One layout as an array of one."""
    return Layout(**{name: np.array([value]) for name, value in vars(layout).items()})
