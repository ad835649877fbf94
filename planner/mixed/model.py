"""The choice among kernels on a mixed cluster as one CP-SAT model.

    choose one kernel                         sum_i kernel_i = 1
    deal the layers out                       sum_r layers_r = L, 1 or more on ranks in use
    leading dense ones from the front on      sum_r leading_r = D,
                                              leading_r+1 > 0 only where leading_r = layers_r
    each rank works at its part's speed       work_r >= layer_s(r) (layers_r - leading_r) + ends_r
                                                        + lead_s(r) leading_r + again_s(r) recomputed_r
    no rank is slower than the busiest        busiest >= work_r
    every rank fits into the HBM of its part  fixed_r + layer_r layers_r + lead_r leading_r
                                                        - relief_r recomputed_r <= HBM_s(r)
    the step is as long as all that takes     step >= (m - x) busiest + x sum_r work_r + rest_i
    so that it is shortest                    min step

s(r) is the part on which the chosen kernel runs rank r. Times are whole nanoseconds and memory whole KiB,
rounded so that no plan is lost. A kernel that was priced has its price, and the split that goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, floor, inf
from typing import TYPE_CHECKING, Any

from meshwright.planner.bounds.layer_split import SplitCosts
from meshwright.planner.mixed.kernel import MixedKernel, least_again_s
from meshwright.planner.request.choices import OF_LAYOUT
from meshwright.planner.search.kernel_model import KIB_PER_GIB
from meshwright.planner.search.model import NANOSECONDS, floor_ns, price_ns
from meshwright.planner.search.pricing import SearchParams
from meshwright.planner.solvers.cp_sat import solved_in_two_attempts

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model

_PARTS_OF_WEIGHT = 1 << 10
"""What steps lose on many nodes is counted in these fractions."""


@dataclass(frozen=True, kw_only=True)
class MixedChoice:
    """What CP-SAT chose. `status` is optimal, feasible, infeasible or unknown."""

    status: str
    kernel: MixedKernel | None = None
    bound_s: float = 0.0
    """No kernel of the model is faster."""
    counts: tuple[int, ...] = ()
    """Layers of each rank."""


@dataclass(eq=False)
class MixedModel:
    """One model, from its kernels to its answer."""

    kernels: Sequence[MixedKernel]
    part_names: Sequence[str]
    cutoff_s: float
    """A kernel that is not priced yet must be faster; infinite where nothing is known."""
    model: cp_model.CpModel = field(init=False)

    def __post_init__(self) -> None:
        from meshwright.planner.solvers.or_tools import cp_model

        self.model = cp_model.CpModel()
        self._layers = self.kernels[0].layers
        self._ranks = max(int(each.layout.pp) for each in self.kernels)
        longest = self._longest_ns()
        ranks = range(self._ranks)
        self._step_ns = self.model.new_int_var(0, longest, "step_ns")
        self._busiest_ns = self.model.new_int_var(0, longest, "busiest_ns")
        self._layers_r = [self.model.new_int_var(0, self._layers, f"layers_r{r}") for r in ranks]
        self._again_r = [self.model.new_int_var(0, self._layers, f"recomputed_r{r}") for r in ranks]
        self._work_r = [self.model.new_int_var(0, longest, f"work_ns_r{r}") for r in ranks]
        self._hbm_r = [self.model.new_int_var(-(2**50), 0, f"hbm_kib_over_r{r}") for r in ranks]
        self._amount = self.model.new_int_var(0, self._layers, "recomputed_per_rank")
        self._literals = [
            self.model.new_bool_var(f"kernel_{index}") for index in range(len(self.kernels))
        ]
        self.model.add_exactly_one(self._literals)
        self.model.add(sum(self._layers_r) == self._layers).with_name("all_layers")
        for count, again in zip(self._layers_r, self._again_r, strict=True):
            self.model.add(again <= count)
            self.model.add(again <= self._amount)
        self._leading_layers()
        self._choices()
        for kernel, literal in zip(self.kernels, self._literals, strict=True):
            self._kernel(kernel, literal)
        self.model.minimize(self._step_ns)

    def _longest_ns(self) -> int:
        """No split of any kernel takes longer, nor does its busiest rank."""
        if self.cutoff_s < inf:
            return price_ns(self.cutoff_s)
        longest_s = 0.0
        for each in self.kernels:
            slowest_s = max(
                (max(own.layer_s, own.leading_s) + _again_s(own)) * self._layers
                + own.first_s
                + own.last_s
                for own in each.costs
            )
            steps = int(each.layout.num_micro_batches) + int(each.layout.pp)
            longest_s = max(longest_s, 4 * slowest_s * steps + each.bound_s)
        return price_ns(longest_s)

    def _leading_layers(self) -> None:
        """Dense layers at the front of a mixture-of-experts model lie on the first ranks."""
        leading = self.kernels[0].leading
        ranks = range(min(leading, self._ranks))
        self._leading_r = [self.model.new_int_var(0, leading, f"leading_r{r}") for r in ranks]
        if not leading:
            return
        self.model.add(sum(self._leading_r) == leading).with_name("all_leading_layers")
        for own, count in zip(self._leading_r, self._layers_r, strict=False):
            self.model.add(own <= count)
        for rank, (own, following) in enumerate(pairwise(self._leading_r)):
            goes_on = self.model.new_bool_var(f"leading_beyond_r{rank}")
            self.model.add(following == 0).only_enforce_if(goes_on.negated())
            self.model.add(own == self._layers_r[rank]).only_enforce_if(goes_on)

    def _leads(self, rank: int, difference: int) -> Any:
        """What the leading layers of a rank take beyond others."""
        return difference * self._leading_r[rank] if rank < len(self._leading_r) else 0

    def _choices(self) -> None:
        """A literal for every value of every choice, channelled from the kernels."""
        for choice in OF_LAYOUT:
            # Every kernel runs 1F1B, and what it offloads is settled once it is chosen.
            if choice.name not in ("schedule", "optimizer_offload"):
                self._named(
                    lambda each, name=choice.name: f"{name}_{int(getattr(each.layout, name))}"  # type: ignore[misc]
                )
        for name in vars(self.kernels[0].execution):
            self._named(lambda each, name=name: f"{name}_{getattr(each.execution, name)}")  # type: ignore[misc]
        for part, title in enumerate(self.part_names):
            self._named(
                lambda each, part=part, title=title: (  # type: ignore[misc]
                    f"ranks_on_{title}_{dict(each.composition).get(part, 0)}"
                )
            )
        self._named(lambda each: f"first_part_{self.part_names[each.composition[0][0]]}")

    def _named(self, name_of: Callable[[MixedKernel], str]) -> None:
        groups: dict[str, list[cp_model.IntVar]] = {}
        for each, literal in zip(self.kernels, self._literals, strict=True):
            groups.setdefault(name_of(each), []).append(literal)
        for name, literals in groups.items():
            self.model.add(sum(literals) == self.model.new_bool_var(name))

    def _kernel(self, kernel: MixedKernel, literal: cp_model.IntVar) -> None:
        """What holds where this kernel is chosen."""
        pp = int(kernel.layout.pp)
        if not kernel.full:
            self.model.add(self._amount == 0).only_enforce_if(literal)
        for rank in range(pp, self._ranks):
            self.model.add(self._layers_r[rank] == 0).only_enforce_if(literal)
        for segment, costs in zip(kernel.segments, kernel.costs, strict=True):
            own = range(segment.first, segment.first + segment.ranks)
            for rank in own:
                self._rank(kernel, literal, rank, costs)
            # Later ranks of a part hold fewer micro-batches: what fits in another order fits in this one.
            inner = [rank for rank in own if max(0, kernel.leading - 1) < rank < pp - 1]
            for rank, following in pairwise(inner):
                in_order = self._layers_r[rank] <= self._layers_r[following]
                self.model.add(in_order).only_enforce_if(literal)
        self._step(kernel, literal)

    def _rank(
        self, kernel: MixedKernel, literal: cp_model.IntVar, rank: int, costs: SplitCosts
    ) -> None:
        """The time and the memory of one rank."""
        layers, again, work = self._layers_r[rank], self._again_r[rank], self._work_r[rank]
        self.model.add(layers >= 1).only_enforce_if(literal)
        ends_s = costs.first_s * (rank == 0) + costs.last_s * (rank == int(kernel.layout.pp) - 1)
        load = floor_ns(costs.layer_s) * layers + floor_ns(ends_s)
        load = load + self._leads(rank, floor_ns(costs.leading_s) - floor_ns(costs.layer_s))
        may_lead = rank < len(self._leading_r)
        again_s = least_again_s(costs) if may_lead else costs.layer_recompute_s
        load = load + floor_ns(again_s) * again
        self.model.add(work >= load).only_enforce_if(literal)
        self.model.add(self._busiest_ns >= work).only_enforce_if(literal)
        row, limit_gib = kernel.memory[rank]
        used = floor((row.fixed_gib - limit_gib) * KIB_PER_GIB) - 1
        held = used + floor(row.layer_gib * KIB_PER_GIB) * layers
        held = held + self._leads(rank, floor(row.leading_gib * KIB_PER_GIB))
        if kernel.full:
            held = held - ceil(row.relief_gib * KIB_PER_GIB) * again
        self.model.add(self._hbm_r[rank] >= held).only_enforce_if(literal)

    def _step(self, kernel: MixedKernel, literal: cp_model.IntVar) -> None:
        """The step by its parts, no less than its bound; its price where that is known."""
        layout = kernel.layout
        filled = kernel.segments[0].part.workload.flushes
        weight = int(layout.num_micro_batches) - filled
        work = sum(self._work_r[: int(layout.pp)])
        scale = floor(kernel.scale * _PARTS_OF_WEIGHT)
        unscaled = self.model.new_int_var(0, 2**50, "")
        in_all = weight * self._busiest_ns + filled * work + floor_ns(kernel.rest_s)
        self.model.add(unscaled >= in_all).only_enforce_if(literal)
        scaled = _PARTS_OF_WEIGHT * self._step_ns >= scale * unscaled
        self.model.add(scaled).only_enforce_if(literal)
        bound = floor_ns(kernel.bound_s * (1 - 1e-12))
        self.model.add(self._step_ns >= bound).only_enforce_if(literal)
        if kernel.is_open:
            if self.cutoff_s < inf:
                below = price_ns(self.cutoff_s) - 1
                self.model.add(self._step_ns <= below).only_enforce_if(literal)
        elif kernel.price is not None:
            price = kernel.price
            self.model.add(self._step_ns >= price_ns(price.step_time_s)).only_enforce_if(literal)
            for count, known in zip(self._layers_r, price.counts, strict=False):
                self.model.add(count == known).only_enforce_if(literal)
            amount = min(int(price.layout.recompute_layers), self._layers)
            self.model.add(self._amount == amount).only_enforce_if(literal)

    def solve(self, seed: int, deadline: float, params: SearchParams) -> MixedChoice:
        """The shortest step, with one worker and a fixed seed, within the work that `params` allow."""
        solver, status = solved_in_two_attempts(
            self.model,
            seed=seed,
            work=params.work,
            most_conflicts=params.most_conflicts,
            deadline=deadline,
        )
        if status == "infeasible":
            return MixedChoice(status=status, bound_s=inf)
        bound_s = max(solver.best_objective_bound, 0.0) / NANOSECONDS
        if status == "unknown":
            return MixedChoice(status=status, bound_s=bound_s)
        index = next(i for i, literal in enumerate(self._literals) if solver.boolean_value(literal))
        chosen = self.kernels[index]
        return MixedChoice(
            status=status,
            kernel=chosen,
            bound_s=bound_s,
            counts=tuple(solver.value(count) for count in self._layers_r[: int(chosen.layout.pp)]),
        )


def _again_s(costs: SplitCosts) -> float:
    """At the most, for recomputing a layer of either kind."""
    return max(costs.layer_recompute_s, costs.leading_recompute_s)
