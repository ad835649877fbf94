"""The choice of a plan as one CP-SAT model.

    choose one combination                    sum_i combination_i = 1
    of kernel, execution, recomputed modules and ZeRO stage
                                              tp_8 = sum of its combinations; and so on for every choice
    deal the layers out                       sum_r layers_r = L,  vpp <= layers_r on ranks r < pp, else 0
    recompute some of them                    recomputed_r <= layers_r,  recomputed_r <= vpp K
    no rank is slower than the busiest        busiest >= layer layers_r + again recomputed_r + ends_r
    what it offloads fits into its host       host_r: fixed + layer_r layers_r <= share of the host
    groups stay inside a domain, cuts are spared        `keep_inside`, `spare_cuts`
    every rank fits into its HBM              hbm_r: fixed + layer_r layers_r - relief_r recomputed_r <= HBM
    the step is as long as all that takes     step >= weight busiest + rest_j + again_j sum_r recomputed_r
                                              step >= bound_i
    so that it is shortest                    min step

A kernel is the part of a layout that is enumerated: degrees, micro-batch, pipeline schedule and mapping.
Times are integer nanoseconds and memory whole KiB, rounded so that no plan is lost. A combination that was
priced exactly has its price as bound, and the split that goes with it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, inf
from typing import TYPE_CHECKING, Any

from meshwright.costmodel.layout import ROUNDING, Layout, Recompute
from meshwright.costmodel.schedules import schedule_name, traits
from meshwright.planner.bounds.combination_costs import RankCosts
from meshwright.planner.bounds.paces import HostRow, RankRow
from meshwright.planner.mapping.joint import Grid, Need, post_mappings
from meshwright.planner.request.choices import OF_LAYOUT
from meshwright.planner.search.branches import Combination
from meshwright.planner.search.model import NANOSECONDS, floor_ns, price_ns
from meshwright.planner.search.pricing import SearchParams
from meshwright.planner.solvers.programmes import solved_in_two_attempts

if TYPE_CHECKING:
    from meshwright.planner.experts.training import JointRouting
    from meshwright.planner.solvers.or_tools import cp_model


# Rows of the model on mappings: groups that must not leave a domain, cuts that must not be filled.
#
#     a group of 8 experts has 8 members in one domain    sum_v v ep_v <= ep_members_inside
#     no cut is used beyond the limit                     cut_use_leaf_uplink_gradients <= limit
#
# Mappings that break a row are in the model: they are what the rows decide on. What a mapping keeps inside
# is known before it is priced. What it makes of the cuts comes with its price, at its fastest split, and
# stands at nothing before: the model may then choose it, and learns what it uses.


BILLIONTHS = 10**9
MOST_USE = 1_000
"""Times its capacity: a cut that is used more counts as this."""


def keep_inside(
    model: cp_model.CpModel,
    literals: Sequence[cp_model.IntVar],
    axis: str,
    degrees: Sequence[int],
    inside: Sequence[int],
) -> None:
    """Groups of one axis have all their members in one domain.

    Parameters
    ----------
    model
        Where the row goes.
    literals
        Of the choices, of which one is true.
    axis
        As `Layout` names it.
    degrees
        Members of a group with each choice.
    inside
        How many of them share a domain with each choice.
    """
    members = model.new_int_var(0, max(inside), f"{axis}_members_inside")
    model.add(members == sum(count * x for count, x in zip(inside, literals, strict=True)))
    asked = sum(degree * x for degree, x in zip(degrees, literals, strict=True))
    model.add(asked <= members).with_name(f"nvlink_domain_{axis}")


def spare_cuts(
    model: cp_model.CpModel,
    literals: Sequence[cp_model.IntVar],
    uses: Sequence[Mapping[str, float]],
    limit: float,
) -> None:
    """No cut is used beyond a share of its capacity.

    Parameters
    ----------
    model
        Where the rows go.
    literals
        Of the choices, of which one is true.
    uses
        Of each choice, the share of each cut that it uses as far as that is known, from 0 on.
    limit
        From above 0 to 1.
    """
    allowed = int(limit * BILLIONTHS)
    for name in sorted({name for own in uses for name in own}):
        shares = [_billionths(own.get(name, 0.0), limit, allowed) for own in uses]
        used = model.new_int_var(0, max(shares), f"cut_use_{name}")
        model.add(used == sum(share * x for share, x in zip(shares, literals, strict=True)))
        model.add(used <= allowed).with_name(f"bisection_{name}")


def _billionths(use: float, limit: float, allowed: int) -> int:
    """At most what is allowed where the use keeps to the limit, as `constraints.fabric` judges it."""
    share = ceil(min(use, MOST_USE) * BILLIONTHS)
    return min(share, allowed) if use <= limit * (1 + ROUNDING) else max(share, allowed + 1)


KIB_PER_GIB = 2**20
LARGEST_SUM = 2**60
"""CP-SAT's sums are 64-bit integers."""


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """What CP-SAT chose. `status` is optimal, feasible, infeasible or unknown."""

    status: str
    combination: Combination | None = None
    bound_s: float = 0.0
    """No combination of the model is faster."""
    layers: tuple[int, ...] = ()
    recomputed: tuple[int, ...] = ()


@dataclass(eq=False)
class KernelModel:
    """One model, from its combinations to its answer."""

    layers: int
    leading: int
    combinations: Sequence[Combination]
    cutoff_s: float
    """A combination that is not priced yet must be faster."""
    empty_ends: bool = False
    """Whether the first and the last chunk of ranks in step may hold no layer."""
    max_cut_use: float = 1.0
    """Share of a cut's capacity that may be used in a phase."""
    host_limit_gib: float = inf
    """What one GPU may keep on its host."""
    routing: JointRouting | None = None
    model: cp_model.CpModel = field(init=False)

    def __post_init__(self) -> None:
        from meshwright.planner.solvers.or_tools import cp_model

        self.model = cp_model.CpModel()
        self._ranks = max(int(each.layout.pp) for each in self.combinations)
        self._variables()
        self._choices()
        self._layers()
        self._recomputation()
        self._busiest_rank()
        self._hbm()
        self._host_memory()
        self._limits_of_mappings()
        self._step()
        self._prices()
        self._placements()
        self.model.minimize(self._step_ns)

    def _variables(self) -> None:
        model = self.model
        busiest, longest = self._largest_ns()
        self._step_ns = model.new_int_var(0, longest, "step_ns")
        self._busiest_ns = model.new_int_var(0, busiest, "busiest_ns")
        self._layers_r = self._per_rank("layers")
        self._recomputed_r = self._per_rank("recomputed")
        self._leading_r = self._per_rank("leading")[: max(self.leading, 0)]
        self._amount = model.new_int_var(0, self.layers, "recomputed_per_stage")
        self._literals = [
            model.new_bool_var(f"combination_{index}") for index in range(len(self.combinations))
        ]

    def _largest_ns(self) -> tuple[int, int]:
        """No split of any combination makes the busiest rank, or the step, longer."""
        busiest_s, longest_s, weight = 0.0, 0.0, 1.0
        for each in self.combinations:
            costs = each.costs
            slowest_s = max(costs.layer_s, costs.leading_s) + costs.again_s
            rank_s = self.layers * slowest_s + costs.first_s + costs.last_s
            for layer_s, leading_s, again_s, beside_s in costs.ranks:
                on_rank_s = self.layers * (max(layer_s, leading_s) + again_s) + beside_s
                rank_s = max(rank_s, on_rank_s)
            rest_s = max(line + max(again, 0.0) * self.layers for line, again in costs.lines)
            in_all = costs.weight + costs.work_weight * len(costs.ranks)
            step_s = in_all * rank_s + max(rest_s, 0.0)
            busiest_s, weight = max(busiest_s, rank_s), max(weight, in_all)
            longest_s = max(longest_s, step_s, each.bound_s)
            if each.priced is not None:
                longest_s = max(longest_s, each.priced.step_time_s)
        if self.cutoff_s < inf:
            longest_s = self.cutoff_s
        busiest, longest = price_ns(busiest_s) + self.layers, price_ns(longest_s)
        largest = max(ceil(weight) * busiest, longest, 1)
        self._fractions = 2 ** max(0, min(12, (LARGEST_SUM // largest).bit_length() - 1))
        return busiest, longest

    def _per_rank(self, name: str) -> list[cp_model.IntVar]:
        return [
            self.model.new_int_var(0, self.layers, f"{name}_r{rank}") for rank in range(self._ranks)
        ]

    def _choices(self) -> None:
        """One combination; a literal for every value of every choice."""
        self.model.add_exactly_one(self._literals)
        numbers: dict[Hashable, int] = {}
        for each in self.combinations:
            numbers.setdefault(each.kernel, len(numbers))
        self._named(lambda each: f"kernel_{numbers[each.kernel]}")
        if any(each.on_parts for each in self.combinations):
            self._named(lambda each: f"runs_on_{each.on_parts}")
        for choice in OF_LAYOUT:
            self._named(lambda each, name=choice.name: f"{name}_{_value(each.layout, name)}")  # type: ignore[misc]
        for name in vars(self.combinations[0].execution):
            self._named(lambda each, name=name: f"{name}_{getattr(each.execution, name)}")  # type: ignore[misc]

    def _named(self, name_of: Callable[[Combination], str | None]) -> None:
        """A literal for each name, true where a combination of that name is chosen."""
        for name, indices in self._grouped(name_of).items():
            if name is None:
                continue
            literal = self.model.new_bool_var(str(name))
            self.model.add(sum(self._literals[index] for index in indices) == literal)

    def _grouped(self, key_of: Callable[[Combination], Hashable]) -> dict[Hashable, list[int]]:
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for index, each in enumerate(self.combinations):
            groups[key_of(each)].append(index)
        return groups

    def _families(
        self, key_of: Callable[[Combination], Hashable]
    ) -> Iterable[tuple[Combination, cp_model.IntVar]]:
        """A combination of each group, and the literal that says that one of the group is chosen."""
        for indices in self._grouped(key_of).values():
            first = self.combinations[indices[0]]
            if len(indices) == 1:
                yield first, self._literals[indices[0]]
                continue
            literal = self.model.new_bool_var("")
            self.model.add(sum(self._literals[index] for index in indices) == literal)
            yield first, literal

    def _layers(self) -> None:
        """All layers on the ranks in use, at least one for each virtual stage that may not be empty."""
        model = self.model
        model.add(sum(self._layers_r) == self.layers).with_name("all_layers")
        for rank, count in enumerate(self._layers_r):
            using = [
                index for index, each in enumerate(self.combinations) if int(each.layout.pp) > rank
            ]
            fewest = sum(self._filled(i, rank) * self._literals[i] for i in using)
            most = self.layers * sum(self._literals[i] for i in using)
            model.add(count >= fewest).with_name(f"stages_r{rank}")
            model.add(count <= most).with_name(f"used_r{rank}")
        if self._leading_r:
            model.add(sum(self._leading_r) == self.leading).with_name("all_leading_layers")
        for count, leading in zip(self._layers_r, self._leading_r, strict=False):
            model.add(leading <= count)

    def _filled(self, index: int, rank: int) -> int:
        """Virtual stages of a rank that must have a layer."""
        layout = self.combinations[index].layout
        vpp, last = int(layout.vpp), int(layout.pp) - 1
        may_be_empty = self.empty_ends and vpp > 1 and traits(int(layout.schedule)).in_step
        return vpp - ((rank == 0) + (rank == last)) * may_be_empty

    def _recomputation(self) -> None:
        """As many layers of every virtual stage, or fewer where it is shorter."""
        model = self.model
        if not any(each.full for each in self.combinations):
            model.add(self._amount == 0)
        by_rank = model.new_int_var(0, self.layers * 64, "recomputed_per_rank")
        for each, literal in self._families(lambda each: (each.full, int(each.layout.vpp))):
            amount = int(each.layout.vpp) * self._amount if each.full else 0
            model.add(by_rank == amount).only_enforce_if(literal)
        for count, recomputed in zip(self._layers_r, self._recomputed_r, strict=True):
            model.add(recomputed <= count)
            model.add(recomputed <= by_rank)

    def _busiest_rank(self) -> None:
        """No rank works longer than the busiest."""
        longest = self.model.new_int_var(0, self.layers, "most_layers")
        self.model.add_max_equality(longest, self._layers_r)
        for each, literal in self._families(_load_key):
            if each.costs.ranks:
                for rank, own in enumerate(each.costs.ranks):
                    load = self._load(rank, own) + floor_ns(own.beside_s)
                    self.model.add(self._busiest_ns >= load).only_enforce_if(literal)
                continue
            layer, leading, again, first, last = (
                floor_ns(seconds) for seconds in _load_key(each)[:5]
            )
            end = int(each.layout.pp) - 1
            lead = min(layer, leading) - layer
            extra = lead * sum(self._leading_r) if lead else 0
            rows = {"": layer * longest + extra}
            for rank, ends in ((0, first), (end, last if end else first + last)):
                rows[f"_{rank}"] = (
                    layer * self._layers_r[rank] + ends + self._leads(rank, leading - layer)
                )
            if again:
                for rank in range(end + 1):
                    load = layer * self._layers_r[rank] + again * self._recomputed_r[rank]
                    load = load + self._leads(rank, leading - layer)
                    rows[f"_{rank}_again"] = load + first * (rank == 0) + last * (rank == end)
            for load in rows.values():
                self.model.add(self._busiest_ns >= load).only_enforce_if(literal)

    def _load(self, rank: int, costs: RankCosts, times: float = 1.0) -> Any:
        """What the layers of a rank take that runs on a part of its own, so many times."""
        layer, leading, again = (floor_ns(times * seconds) for seconds in costs[:3])
        load = layer * self._layers_r[rank] + self._leads(rank, leading - layer)
        return load + again * self._recomputed_r[rank]

    def _leads(self, rank: int, difference: int) -> Any:
        """What leading dense layers of a rank take beyond others."""
        if rank >= len(self._leading_r) or not difference:
            return 0
        return difference * self._leading_r[rank]

    def _hbm(self) -> None:
        """What every rank holds fits."""
        limit_gib = max(each.limit_gib for each in self.combinations)

        def relief_gib(each: Combination, rank: int) -> float:
            return each.memory[rank].relief_gib if each.full else 0.0

        self._rows_of_ranks("hbm", limit_gib, _memory_key, lambda row: row, relief_gib)

    def _host_memory(self) -> None:
        """What every rank offloads fits into its share of the host, where that is limited."""
        if self.host_limit_gib == inf:
            return

        def key(each: Combination) -> Hashable:
            return tuple(row.host for row in each.memory)

        self._rows_of_ranks("host", self.host_limit_gib, key, lambda row: row.host)

    def _rows_of_ranks(
        self,
        name: str,
        limit_gib: float,
        key_of: Callable[[Combination], Hashable],
        row_of: Callable[[RankRow], RankRow | HostRow],
        relief_gib: Callable[[Combination, int], float] = lambda *_: 0.0,
    ) -> None:
        """What every rank keeps in one kind of memory stays within a limit, whichever family is chosen."""
        usable, families = ceil(limit_gib * KIB_PER_GIB) + 1, list(self._families(key_of))
        for rank, count in enumerate(self._layers_r):
            used = self.model.new_int_var(-(2**50), 2**50, f"{name}_kib_r{rank}")
            for each, literal in families:
                if rank >= len(each.memory):
                    continue
                row = row_of(each.memory[rank])
                sum_kib = _floor_kib(row.fixed_gib) + _floor_kib(row.layer_gib) * count
                if rank < len(self._leading_r):
                    sum_kib = sum_kib + _floor_kib(row.leading_gib) * self._leading_r[rank]
                relief = ceil(relief_gib(each, rank) * KIB_PER_GIB)
                if relief:
                    sum_kib = sum_kib - relief * self._recomputed_r[rank]
                self.model.add(used >= sum_kib).only_enforce_if(literal)
            self.model.add(used <= usable).with_name(f"{name}_r{rank}")

    def _limits_of_mappings(self) -> None:
        """Groups stay inside their domain, and cuts are spared, where that is asked."""
        for axis in self.combinations[0].inside:
            degrees = [int(getattr(each.layout, axis)) for each in self.combinations]
            inside = [each.inside[axis] for each in self.combinations]
            keep_inside(self.model, self._literals, axis, degrees, inside)
        if self.max_cut_use < 1:
            priced = [each.priced.cut_uses if each.priced else () for each in self.combinations]
            spare_cuts(self.model, self._literals, list(map(dict, priced)), self.max_cut_use)

    def state_limits(
        self, inside: Mapping[str, Sequence[int]], uses: Sequence[Mapping[str, float]]
    ) -> None:
        """Adds the rows on domains and cuts that were not asked, for whoever reads the model.

        Parameters
        ----------
        inside
            By axis whose groups lie in one domain each by rule: how many members one has room for, with each
            combination.
        uses
            Of each combination, the share of each cut that it uses, where that was worked out. Where no limit
            was asked, `MOST_USE` is allowed.
        """
        for axis in inside.keys() - self.combinations[0].inside.keys():
            degrees = [int(getattr(each.layout, axis)) for each in self.combinations]
            keep_inside(self.model, self._literals, axis, degrees, inside[axis])
        if self.max_cut_use >= 1:
            spare_cuts(self.model, self._literals, uses, MOST_USE)

    def state_places(
        self, needs: Sequence[Need | None], leaves: Mapping[Grid, Sequence[str]]
    ) -> None:
        """Adds where slots lie, for whoever reads the model.

        Parameters
        ----------
        needs
            What each combination asks of the slots; None where it asks nothing.
        leaves
            Names of the leaves of each grid of slots. Names of variables of all but the first begin with the
            number of the grid.
        """
        for name in sorted({name for each in self.combinations for name in each.matrix}):
            self._named(
                lambda each, name=name: (  # type: ignore[misc]
                    f"{name}_in_blocks_{_joined(each.matrix[name])}"
                    if name in each.matrix
                    else None
                )
            )
        mapped = post_mappings(
            self.model, [[literal] for literal in self._literals], [[need] for need in needs]
        )
        for number, (grid, cells) in enumerate(mapped.items()):
            cells.state_names(leaves[grid], f"grid_{number}_" if number else "")

    def _step(self) -> None:
        """The step by its parts, and no less than its bound."""
        recomputed = sum(self._recomputed_r)
        for each, literal in self._families(_step_key):
            weight = floor(each.costs.weight * self._fractions)
            for rest_s, again_s in each.costs.lines:
                rest = floor(rest_s * NANOSECONDS * self._fractions) - self._fractions
                load = weight * self._busiest_ns + rest
                for rank, own in enumerate(each.costs.ranks):
                    load = load + self._load(rank, own, each.costs.work_weight * self._fractions)
                if each.full:
                    load = load + floor(again_s * NANOSECONDS * self._fractions) * recomputed
                self.model.add(self._fractions * self._step_ns >= load).only_enforce_if(literal)
        bounds = [floor_ns(each.bound_s * (1 - 1e-12)) for each in self.combinations]
        total = sum(bound * x for bound, x in zip(bounds, self._literals, strict=True))
        self.model.add(self._step_ns >= total).with_name("step_bound")

    def _prices(self) -> None:
        """What was priced costs that, with its split; what was not must be faster than all that was."""
        model = self.model
        for each, literal in zip(self.combinations, self._literals, strict=True):
            if each.is_open:
                if self.cutoff_s < inf:
                    model.add(self._step_ns <= price_ns(self.cutoff_s) - 1).only_enforce_if(literal)
            elif each.priced is not None:
                model.add(self._step_ns >= price_ns(each.priced.step_time_s)).only_enforce_if(
                    literal
                )
                for rank, stage in enumerate(each.priced.stages):
                    model.add(self._layers_r[rank] == sum(stage)).only_enforce_if(literal)
                amount = min(int(each.priced.layout.recompute_layers), self.layers)
                model.add(self._amount == amount).only_enforce_if(literal)

    def _placements(self) -> None:
        """Experts lie so that their ranks are as evenly loaded as the prices assume."""
        if self.routing is None:
            return
        from meshwright.planner.experts.training import post_placements

        asked = [each.imbalance for each in self.combinations]
        if self.routing.fits(asked):
            choices = [[literal] for literal in self._literals]
            post_placements(self.model, choices, [[each] for each in asked], self.routing)

    def solve(self, seed: int, time_limit_s: float | None, params: SearchParams) -> KernelChoice:
        """The shortest step, with one worker and a fixed seed, within the work that `params` allow.

        Parameters
        ----------
        seed
            Of CP-SAT's random numbers.
        time_limit_s
            Seconds of the clock; None without a limit.
        params
            Work and conflicts of each of two attempts.
        """
        solver, status = solved_in_two_attempts(
            self.model,
            seed=seed,
            work=params.work,
            most_conflicts=params.most_conflicts,
            deadline=inf if time_limit_s is None else time.monotonic() + time_limit_s,
        )
        if status == "infeasible":
            return KernelChoice(status=status, bound_s=inf)
        bound_s = max(solver.best_objective_bound, 0.0) / NANOSECONDS
        if status == "unknown":
            return KernelChoice(status=status, bound_s=bound_s)
        index = next(i for i, literal in enumerate(self._literals) if solver.boolean_value(literal))
        ranks = range(int(self.combinations[index].layout.pp))
        return KernelChoice(
            status=status,
            combination=self.combinations[index],
            bound_s=bound_s,
            layers=tuple(solver.value(self._layers_r[rank]) for rank in ranks),
            recomputed=tuple(solver.value(self._recomputed_r[rank]) for rank in ranks),
        )


def _joined(numbers: Iterable[int]) -> str:
    return "_".join(map(str, numbers))


def _value(layout: Layout, name: str) -> object:
    """A choice of a layout as its literal is named."""
    value = getattr(layout, name)
    if name == "schedule":
        return schedule_name(int(value), int(layout.vpp))
    return (Recompute(int(value)).name or "none").lower() if name == "recompute" else value


def _load_key(
    each: Combination,
) -> tuple[float, float, float, float, float, int, tuple[RankCosts, ...]]:
    costs = each.costs
    times = (costs.layer_s, costs.leading_s, costs.again_s, costs.first_s, costs.last_s)
    return (*times, int(each.layout.pp), costs.ranks)


def _step_key(each: Combination) -> Hashable:
    costs = each.costs
    return costs.weight, costs.lines, costs.work_weight, costs.ranks


def _memory_key(each: Combination) -> Hashable:
    return each.full, tuple(each.memory)


def _floor_kib(gib: float) -> int:
    return floor(gib * KIB_PER_GIB)
