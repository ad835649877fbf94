"""Which nodes a plan takes, where more are free than it needs or the links of some are nearly full.

Nodes of one leaf are alike, so a choice of nodes is how many to take of each leaf. The fullest leaves come
first. If the plan on them is as fast as one inside a single leaf of any size, no other choice is faster. Else
few choices are all searched, and the best is proven; of many, those most likely: equal parts of as few leaves
as can be, and the nodes that a mapping over everything free would take. Sets of fewer nodes, the others idle,
are searched by themselves where so few might be faster.

Where nodes are part-filled, a mapping over everything free comes first: it may leave any GPU out, and its
bound holds for whole nodes alone as well. They are searched where that leaves a gap, as the mappings listed
for them are others, and only for plans that are faster.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, product
from math import inf, prod
from typing import Any, Protocol

import numpy as np

from meshwright.cluster_specs.allocation import (
    allocation_of,
    first_gpus,
    full_levels,
    is_irregular,
    node_name,
    nodes_in_turn,
)
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import (
    Key,
    Uplink,
    first_outside_a_leaf,
    free_of,
    nominal_nic_gb_per_s,
    unlisted_gb_per_s,
    uplinks,
)
from meshwright.costmodel.layout import AXES, ROUNDING, Layout
from meshwright.costmodel.placement import placement_in, position_of_ranks
from meshwright.costmodel.workload import Execution, Workload
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.mapping.effective import free_gpus_of
from meshwright.planner.mapping.slots import Place, idle_nodes
from meshwright.planner.plan.document import IdleDoc, MoreBlocksDoc
from meshwright.planner.plan.texts import Setup
from meshwright.planner.request.choices import IDLE_GPUS
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.pricing import ALL_PLANS, Outcome, Sought
from meshwright.planner.solvers.clock import Shares, is_over, limit_left_s, within

# GPUs that a plan leaves idle: where that is faster than every layout known on all of them.


SHARE_OF_TIME = 0.1
"""Of a time limit, kept for the search over layouts on all GPUs."""


class Searched(Protocol):
    """Runs one search for the plans `sought`; `begin_with` is a layout to price first, `counts` whether its
    counts are read then. `run_as` is how plans are likely run, where no layout is known.
    """

    def __call__(
        self,
        request: PlanRequest,
        /,
        *,
        begin_with: Layout | None = None,
        run_as: Execution | None = None,
        counts: bool = False,
        sought: Sought = ALL_PLANS,
    ) -> Outcome: ...


@dataclass(frozen=True, kw_only=True)
class IdleDecision:
    """What is planned, and what the search over layouts on all GPUs gave where one was run."""

    outcome: Outcome
    full: Outcome | None
    comparison: Callable[[], Outcome] | None = None
    """The search over layouts on all GPUs, where it was left for later."""


def decide_on_idle_gpus(
    request: PlanRequest,
    searched: Searched,
    *,
    compares: bool = True,
    later: Searched | None = None,
    sought: Sought = ALL_PLANS,
) -> IdleDecision:
    """Searches; where the best layout leaves GPUs idle, searches those on all GPUs too and chooses.

    A faster layout that is known is never given up for a slower one on all GPUs; of equally fast ones the
    one on all GPUs is planned. Without `compares` only the first search runs: no layout on all GPUs is faster
    than what it finds. The first search is for the plans `sought`. With `later` the second one is left to
    the caller, who runs it by that.

    Parameters
    ----------
    request
        On nodes that are chosen; its time limit is that of both searches.
    searched
        Runs one search.
    compares
        Whether a layout that leaves GPUs idle is held against the best on all of them.
    later
        Runs the second search where the caller makes it; None where it is made here.
    sought
        Which plans the first search is for.
    """
    limit, began = request.time_limit_s, time.monotonic()
    first = request
    if limit is not None and compares and IDLE_GPUS not in request.forbids:
        first = replace(request, time_limit_s=limit * (1 - SHARE_OF_TIME))
    outcome = searched(first, counts=True, sought=sought)
    if not compares:
        return IdleDecision(outcome=outcome, full=None)
    remaining_s = None if limit is None else max(limit - (time.monotonic() - began), 0.0)
    if later is None:
        return _against_all_gpus(request, outcome, searched, remaining_s)
    comparison = _comparison(request, outcome, later, remaining_s)
    return IdleDecision(outcome=outcome, full=None, comparison=comparison)


def _against_all_gpus(
    request: PlanRequest, outcome: Outcome, searched: Searched, remaining_s: float | None
) -> IdleDecision:
    """An outcome whose best layout leaves GPUs idle against the best on all of them, where time is left."""
    comparison = _comparison(request, outcome, searched, remaining_s)
    if comparison is None:
        return IdleDecision(outcome=outcome, full=None)
    full = comparison()
    return IdleDecision(outcome=better_of(outcome, full), full=full)


def _comparison(
    request: PlanRequest, outcome: Outcome, searched: Searched, remaining_s: float | None
) -> Callable[[], Outcome] | None:
    """The search for the best layout on all GPUs; None where there is nothing to compare, or no time."""
    uses_all = not outcome.best or int(outcome.best[0].layout.gpus) == request.gpus
    if uses_all or remaining_s == 0:
        return None
    end_s = None if remaining_s is None else time.monotonic() + remaining_s
    run_as = outcome.best[0].execution
    return partial(_on_all_gpus, request, outcome.on_all_gpus, run_as, searched, end_s)


def _on_all_gpus(
    request: PlanRequest,
    likely: Layout | None,
    run_as: Execution,
    searched: Searched,
    end_s: float | None,
) -> Outcome:
    """The best layout on all GPUs, until then on the monotonic clock."""
    left_s = None if end_s is None else max(end_s - time.monotonic(), 0.0)
    forbids = (*request.forbids, IDLE_GPUS)
    every = replace(request, forbids=forbids, time_limit_s=left_s, top_k=1)
    if likely is None:
        return searched(every, run_as=run_as)
    return searched(every, begin_with=replace(likely, recompute_layers=0))


def better_of(outcome: Outcome, full: Outcome) -> Outcome:
    """The plan on all GPUs where it is as fast as the one that leaves some idle, else the latter.

    Parameters
    ----------
    outcome
        Of the search over all layouts; its best one leaves GPUs idle.
    full
        Of the search over layouts on all GPUs.

    Returns
    -------
    Outcome
        `outcome` itself where its plan stays.
    """
    if not full.best or full.best[0].step_time_s > outcome.best[0].step_time_s * (1 + ROUNDING):
        return outcome
    all_of_them = full.best[0]
    bounds = [s for s in (outcome.lower_bound_s, all_of_them.step_time_s) if s is not None]
    bound_s = min(bounds) if outcome.lower_bound_s is not None else None
    proven = outcome.status == "optimal"
    runners_up = [priced for priced in outcome.best if priced.layout != all_of_them.layout]
    return replace(
        outcome,
        status="optimal" if proven else "feasible",
        best=(all_of_them, *runners_up[: len(outcome.best) - 1]),
        lower_bound_s=all_of_them.step_time_s if proven else bound_s,
    )


def idle_document(request: PlanRequest, best: Priced, full: Outcome | None) -> IdleDoc | None:
    """What stays idle and why; None where nothing does.

    Parameters
    ----------
    request
        Whose GPUs are all there are.
    best
        The plan.
    full
        How the search over layouts on all GPUs ended; None where there was none.
    """
    gpus = request.gpus - int(best.layout.gpus)
    if not gpus:
        return None
    full_s = full.best[0].step_time_s if full is not None and full.best else None
    return IdleDoc(
        gpus=gpus,
        nodes=unused_nodes(request, best),
        full_step_time_s=full_s,
        full_lower_bound_s=None if full is None else full.lower_bound_s,
        reason=_reason(request, best, full),
    )


def _reason(request: PlanRequest, best: Priced, full: Outcome | None) -> str:
    if full is None or full.status == "unknown":
        return f"no layout on all {request.gpus} GPUs was found in time"
    if not full.best:
        below, above = (request.global_batch // request.gpus + n for n in (0, 1))
        nearest = " or ".join(f"{n * request.gpus}" for n in (below, above) if n)
        hint = f"; {nearest} would" if request.global_batch % request.gpus else ""
        return (
            f"no layout in this space uses all {request.gpus} GPUs (degrees and a global batch of "
            f"{request.global_batch} must divide among them{hint}, and every rule must hold)"
        )
    words = words_of_full(full.best[0].step_time_s, best.step_time_s)
    bound_s = full.lower_bound_s
    how = ""
    if full.status != "optimal":
        slower_by_bound = bound_s is not None and bound_s > best.step_time_s
        how = ", proven slower by its bound" if slower_by_bound else ", as far as was searched"
    return f"the best layout on all {request.gpus} GPUs {words}{how}"


def words_of_full(full_s: float, step_s: float) -> str:
    """That the step on all GPUs is so much longer than that of a plan on fewer, both in seconds.

    Parameters
    ----------
    full_s
        Of the best layout on all GPUs.
    step_s
        Of the plan, above 0 and no more than that.
    """
    return f"takes {full_s:.4g} s, {100.0 * (full_s / step_s - 1.0):.3g} % longer"


def unused_nodes(request: PlanRequest, best: Priced) -> list[str]:
    """Nodes of the allocation without a rank: of the blocks in use, as many of each as of the others.

    Parameters
    ----------
    request
        Whose cluster has the nodes.
    best
        With the GPU of every rank, or with a matrix, which takes the allocation in turn.
    """
    cluster = request.cluster
    if best.ranks is not None:
        return [node_name(cluster, node) for node in idle_nodes(cluster, list(best.ranks))]
    gpus = int(best.layout.gpus)
    allocation = allocation_of(cluster, gpus)
    used = set(allocation.places[:, 0].tolist())
    full = full_levels(cluster)
    larger = full.blocks[full.blocks > cluster.gpus_per_node]
    block = int(larger[0]) if len(larger) else cluster.gpus
    touched = {node * cluster.gpus_per_node // block for node in used}
    in_block: Counter[int] = Counter()
    turns = []
    for node in idle_nodes(cluster, [(node, 0) for node in used]):
        number = node * cluster.gpus_per_node // block
        turns.append((number not in touched, in_block[number], node))
        in_block[number] += 1
    idle = (request.gpus - gpus) // cluster.gpus_per_node
    return [node_name(cluster, node) for node in sorted(node for *_, node in sorted(turns)[:idle])]


MOST_CHOICES = 12
"""Choices of nodes that are all searched."""
MOST_ALIKE_SETS = 4
"""Sets of nodes that are all searched by themselves where a search over all nodes may take any of them."""
CLOSE = 1.001
"""A plan that close to the bound ends the search for better nodes."""
MOST_WHOLE = 2
"""Choices of whole nodes that are searched beside part-filled ones."""
EVERYTHING_SHARE = 2 / 3
"""Of a time limit, the most that everything free takes where whole nodes are searched after it."""
RACK_SHARE = 1 / 6
"""Of a time limit, the most that the fullest rack takes ahead of everything free."""
MOST_RANGES = 32
"""Ranges of kinds of links that are searched."""
MOST_COUNTED = 20_000
"""Counts by leaf that are looked through for those that differ."""
MOST_RATES = 4
"""Rates of adapters that nodes are searched for: of more the slowest and the fastest, without a bound."""
AT_ONCE_GB_PER_S = 1e5
"""Of a GPU, where what is sent is to take next to no time."""
NEARLY_FULL = 0.25
"""Of the best link of its kind for each GPU: a block with less left is not used where the others suffice."""


@dataclass(frozen=True, kw_only=True)
class NodeDecision:
    """What is planned, on which nodes."""

    request: PlanRequest
    """With the nodes taken, and no others, free; its GPUs are theirs."""
    settled: IdleDecision
    note: str | None = None
    """What was left out and why, in a sentence."""

    @classmethod
    def of_search(cls, request: PlanRequest, outcome: Outcome) -> NodeDecision:
        """Of one search, which is held against no layouts on all GPUs.

        Parameters
        ----------
        request
            What was searched, on nodes that are all taken.
        outcome
            How the search ended.
        """
        return cls(request=request, settled=IdleDecision(outcome=outcome, full=None))


def decide_on_nodes(
    request: PlanRequest,
    searched: Searched,
    *,
    compares: bool = True,
    later: Searched | None = None,
) -> NodeDecision:
    """Searches the choices of nodes; of equally fast ones the first, which is the fullest leaves.

    A time limit is shared out evenly. Where all nodes are alike, or all are needed, there is one choice.
    `compares` is what `decide_on_idle_gpus` takes, and `later` too where all nodes are alike.

    Where nodes stand on several leaves, sets of them that may be faster are searched after that.

    Parameters
    ----------
    request
        What to plan, on all that is free; its time limit is that of all searches.
    searched
        Runs one search.
    compares
        As `decide_on_idle_gpus` takes it.
    later
        As `decide_on_idle_gpus` takes it; used where all nodes are alike.
    """
    if not _has_sets_apart(request):
        with within(request.time_limit_s):
            decided = _decide_by_adapters(request, searched, compares=compares, later=later)
            return _against_uneven_parts(request, decided, searched)
    with within(request.time_limit_s):
        limit_s = limit_left_s()
        share_s = None if limit_s is None else limit_s * (1 - SHARE_OF_TIME)
        limited = replace(request, time_limit_s=share_s)
        best = _decide_by_adapters(limited, searched, compares=compares, later=later)
        if best.settled.outcome.best and _has_searchable_sets(request):
            best = _against_sets(request, best, searched, compares=compares)
            return _against_uneven_parts(request, best, searched)
        return _against_fewer_gpus(request, best, searched)


def _against_uneven_parts(
    request: PlanRequest, best: NodeDecision, searched: Searched
) -> NodeDecision:
    """The faster of a decision on whole listed nodes and of the plans that leave any of their GPUs idle, with
    a bound for both.

    A search of such nodes takes equal parts of them for GPUs that are no number of nodes: 20 of 24 as five
    times four, and not as 7, 7 and 6. Where GPUs that send nothing would be faster, the other plans are
    searched if the nodes are alike; else those GPUs are the bound.
    """
    cluster, bound_s = request.cluster, best.settled.outcome.lower_bound_s
    may_idle = IDLE_GPUS not in request.forbids and bool(best.settled.outcome.best)
    is_whole = bool(cluster.nodes) and not _takes_parts(cluster, request.gpus)
    if not (is_whole and may_idle) or bound_s is None or request.gpus == 1:
        return best
    before = best
    fewer = replace(request, gpus=request.gpus - 1, top_k=1, time_limit_s=limit_left_s())
    outcome = _on_parts(replace(fewer, max_cut_use=1.0), searched, below_s=_seconds(best))
    if outcome.best and _has_alike_nodes(request):
        is_named = any(node.leaf is not None for node in cluster.nodes)
        there = replace(request, cluster=cluster if is_named else _by_position(cluster))
        outcome = searched(
            replace(fewer, cluster=there.cluster.with_any_gpus(), time_limit_s=limit_left_s()),
            begin_with=replace(outcome.best[0].layout, recompute_layers=0),
            sought=Sought(below_s=_seconds(best), parts_only=True),
        )
        if outcome.best:
            best = min(best, _as_mapped(there, outcome), key=_seconds)
    return _in_place_of(before, best, request, min(bound_s, _least_s(outcome) or 0.0) or None)


def _in_place_of(
    before: NodeDecision, best: NodeDecision, request: PlanRequest, bound_s: float | None
) -> NodeDecision:
    """The better decision with a bound for all that was to decide on, and a note where it is another one."""
    best = _bounded(best, bound_s)
    if best.request is before.request:
        return best
    return replace(_as_asked(request, best), note=_note_on_idle(request, best.request))


def _has_alike_nodes(request: PlanRequest) -> bool:
    """Whether a search over any GPUs of a list prices those that it takes as if nothing else were free."""
    cluster = request.cluster
    is_rack = cluster.nvlink_domain > cluster.gpus_per_node
    is_even = not is_irregular(cluster) and _links_are_alike(cluster)
    return is_even and not (is_rack or cluster.measured or request.max_cut_use < 1)


def _has_sets_apart(request: PlanRequest) -> bool:
    """Whether a plan on some of the nodes may be priced lower where nothing else is free.

    A search over everything that is free prices a layout on fewer GPUs as if the links and adapters of all
    nodes paced it, and as equal parts of the leaves where these are alike. On leaves of unlike sizes whose
    links are alike, and of parts of nodes, it has every set.
    """
    cluster = request.cluster
    leaves = {(node.pod, node.leaf) for node in cluster.nodes if node.leaf and node.free_gpus != 0}
    is_all, may_idle = request.gpus == cluster.gpus, IDLE_GPUS not in request.forbids
    has_every = _takes_parts(cluster, request.gpus) or (is_all and is_irregular(cluster))
    return (
        len(leaves) > 1
        and (may_idle or (not is_all and not is_irregular(cluster)))
        and not (has_every and _links_are_alike(cluster))
    )


def _has_searchable_sets(request: PlanRequest) -> bool:
    """Whether sets of whole nodes are searched by themselves, and nodes of one leaf bound them."""
    cluster = request.cluster
    is_rack = cluster.nvlink_domain > cluster.gpus_per_node
    is_limited = request.max_cut_use < 1 or _takes_parts(cluster, request.gpus)
    return not (is_rack or is_limited or cluster.measured)


def _against_fewer_gpus(
    request: PlanRequest, best: NodeDecision, searched: Searched
) -> NodeDecision:
    """A decision with a bound that holds for fewer GPUs too, wherever they are.

    In racks and beside measured levels it is that of GPUs that send nothing.
    """
    cluster = request.cluster
    if cluster.nvlink_domain <= cluster.gpus_per_node and not cluster.measured:
        return _against_other_links(request, best, searched)
    bound_s = best.settled.outcome.lower_bound_s
    if bound_s is None or IDLE_GPUS in request.forbids or request.gpus == 1:
        return best
    fewer = replace(request, gpus=request.gpus - 1, top_k=1, time_limit_s=limit_left_s())
    floor_s = _least_s(_where_nothing_is_sent(fewer, searched, Sought(below_s=_seconds(best))))
    return _bounded(best, _least_known([bound_s, floor_s]))


# Plans on some of the free GPUs, by what they have of the links.
#
# Of unlike links three rates enter a price: that of the slowest adapter in use, and what the leaf and the pod
# with the least left have for each GPU that uses their up-link (`level_rates`). A leaf to which others leave
# C GB/s gives C / u to each of u GPUs, at most an adapter's rate, so that sets of GPUs fall into few kinds
# (adapter, leaf, pod). No plan whose leaf rate is in a range is faster than one with the upper end of it on
# every leaf, on the nodes that can have the lower end, and on no more GPUs than can have it together. Such
# ranges are searched, those of the least bounds first, and halved, until none may beat the best plan.


@dataclass(frozen=True, kw_only=True)
class KindsOfLinks:
    """Sets of GPUs by their links: one rate of adapters, and of leaves and pods some rates, GB/s of a GPU."""

    cluster: ClusterSpec
    """All its nodes have these adapters; those with slower ones are not free."""
    leaves: tuple[float, ...]
    """In rising order; one where nothing is sent through up-links of leaves."""
    pods: tuple[float, ...]

    @classmethod
    def of_adapters(cls, cluster: ClusterSpec, gbps: float) -> KindsOfLinks:
        """All kinds with one rate of adapters, Gbit/s of a GPU.

        Parameters
        ----------
        cluster
            With listed nodes.
        gbps
            Of one of its nodes' adapters; nodes with slower ones are left out.
        """
        fast = _with_adapters(cluster, gbps)
        nodes = tuple(node.model_copy(update={"nic_gbps_per_gpu": gbps}) for node in fast.nodes)
        fast = fast.model_copy(update={"nodes": nodes})
        links, first = uplinks(fast), first_outside_a_leaf(fast)
        rates: list[tuple[float, ...]] = []
        for depth, blocks in ((first, links.leaves), (first + 1, links.pods)):
            if depth >= len(fast.levels):
                rates.append((gbps / 8,))
                continue
            beside = [] if blocks else [unlisted_gb_per_s(fast, depth)]
            rates.append(_rates_of(blocks, gbps / 8, beside))
        return cls(cluster=fast, leaves=rates[0], pods=rates[1])

    @property
    def others(self) -> list[KindsOfLinks]:
        """All but the one with the least rates, which is that of all GPUs together."""
        parts = [replace(self, leaves=self.leaves[1:])] if self.leaves[1:] else []
        if self.pods[1:]:
            parts.append(replace(self, leaves=self.leaves[:1], pods=self.pods[1:]))
        return parts

    @property
    def halves(self) -> list[KindsOfLinks]:
        """Two halves; nothing where it is one kind."""
        half_leaves, half_pods = len(self.leaves) // 2, len(self.pods) // 2
        if max(half_leaves, half_pods) == 0:
            return []
        if half_leaves >= half_pods:
            return [
                replace(self, leaves=self.leaves[:half_leaves]),
                replace(self, leaves=self.leaves[half_leaves:]),
            ]
        return [
            replace(self, pods=self.pods[:half_pods]),
            replace(self, pods=self.pods[half_pods:]),
        ]

    @property
    def at_best(self) -> tuple[ClusterSpec, int]:
        """(the nodes that such sets may have, with the best links of all; how many GPUs of them at most)."""
        links, nic_gb_per_s = uplinks(self.cluster), self.cluster.slowest_nic_gbps_per_gpu / 8
        further = len(self.cluster.levels) - first_outside_a_leaf(self.cluster)
        has_leaves, has_pods = further > 0, further > 1
        room = {
            key: _most_at(link, nic_gb_per_s, self.leaves[0]) if has_leaves else link.free
            for key, link in links.leaves.items()
        }
        room_of_pod = {
            pod: _most_at(link, nic_gb_per_s, self.pods[0]) if has_pods else link.free
            for (pod, _), link in links.pods.items()
        }
        best, gpus, nodes = self._with_best_links(), 0, []
        for node in best.nodes:
            pod, free = node.pod or "", free_of(node, best.gpus_per_node)
            if node.leaf is None:
                gpus += free
            else:
                free = min(free, room.get((pod, node.leaf), 0), room_of_pod.get(pod, 0))
            nodes.append(node.model_copy(update={"free_gpus": free}))
        for pod, most in room_of_pod.items():
            gpus += min(most, sum(own for key, own in room.items() if key[0] == pod))
        free_gpus = sum(node.free_gpus or 0 for node in nodes)
        best = best.model_copy(update={"nodes": tuple(nodes), "gpus": free_gpus})
        return best.with_any_gpus(), gpus

    def _with_best_links(self) -> ClusterSpec:
        """The cluster with the upper ends of both ranges on every leaf and pod."""
        cluster, first = self.cluster, first_outside_a_leaf(self.cluster)
        nominal = nominal_nic_gb_per_s(cluster)
        levels = list(cluster.levels)
        for depth in range(first, len(levels)):
            rate = unlisted_gb_per_s(cluster, depth)
            rate = {first: self.leaves[-1], first + 1: self.pods[-1]}.get(depth, rate)
            if depth:
                levels[depth - 1] = levels[depth - 1].model_copy(update={"background": None})
            thinned = {"oversubscription": max(nominal / rate, 1.0)}
            levels[depth] = levels[depth].model_copy(update=thinned)
        return cluster.model_copy(update={"levels": tuple(levels), "blocks": ()})


def _rate_at(link: Uplink, nic_gb_per_s: float, gpus: int) -> float:
    """What each of so many GPUs has of an up-link, GB/s."""
    return min(nic_gb_per_s, link.gb_per_s / (gpus if link.stated else link.free))


def _rates_of(
    links: Mapping[Key, Uplink], nic_gb_per_s: float, beside: Sequence[float]
) -> tuple[float, ...]:
    """What GPUs of some blocks can have each, from what they have where all of them send, and beside them."""
    every = {
        _rate_at(link, nic_gb_per_s, gpus)
        for link in links.values()
        for gpus in range(1, link.free + 1)
    }
    outside = [min(rate, nic_gb_per_s) for rate in beside]
    least = min([*(_rate_at(link, nic_gb_per_s, link.free) for link in links.values()), *outside])
    return tuple(sorted({*outside, *(rate for rate in every if rate >= least)}))


def _most_at(link: Uplink, nic_gb_per_s: float, rate: float) -> int:
    """How many GPUs of a block can have a rate each; rates are compared as sums in another order."""
    counts = range(link.free, 0, -1)
    return next((n for n in counts if _rate_at(link, nic_gb_per_s, n) >= rate * (1 - ROUNDING)), 0)


def _against_other_links(
    request: PlanRequest, best: NodeDecision, searched: Searched
) -> NodeDecision:
    """The faster of a decision and the plans that are met on sets of GPUs with other links, with a bound for
    all of them.
    """
    before, cluster, may_idle = best, request.cluster, IDLE_GPUS not in request.forbids
    if not best.settled.outcome.best or (request.gpus == cluster.gpus and not may_idle):
        return best
    # The bound of a search over everything is that of the kind which all GPUs are.
    bound_s = best.settled.outcome.lower_bound_s
    bounds = [] if bound_s is None else [bound_s]
    waiting: list[tuple[float, int, KindsOfLinks]] = []
    for gbps in _adapter_rates(cluster):
        kinds = KindsOfLinks.of_adapters(cluster, gbps)
        every = [kinds] if bound_s is None else kinds.others
        waiting += [(0.0, len(waiting) + at, each) for at, each in enumerate(every)]
    on_whole = _of_whole(request)
    if bound_s is None and on_whole is not None:
        floor = _on_one_leaf(on_whole, searched, below_s=_seconds(best))
        bounds.append(_least_s(floor) or 0.0)
    number = len(waiting)
    for _ in range(MOST_RANGES):
        if not waiting or is_over():
            break
        least_s, _, kinds = waiting.pop(0)
        nodes, gpus = kinds.at_best
        if least_s >= _seconds(best) or not gpus or (gpus < request.gpus and not may_idle):
            continue
        left_s = limit_left_s()
        asked = replace(
            request, cluster=nodes, gpus=min(gpus, request.gpus), top_k=1, max_cut_use=1.0,
            time_limit_s=None if left_s is None else left_s / 2,
        )  # fmt: skip
        outcome = searched(
            asked, begin_with=_best_layout([best]), sought=Sought(below_s=_seconds(best))
        )
        least_s = max(least_s, _least_s(outcome) or 0.0)
        if outcome.best and request.max_cut_use == 1.0:
            best = min(best, _as_mapped(request, outcome), key=_seconds)
        halves = kinds.halves
        if least_s < _seconds(best) and not halves:
            bounds.append(least_s)
        waiting += [(least_s, number + at, half) for at, half in enumerate(halves)]
        number += len(halves)
        waiting.sort(key=lambda each: each[:2])
    proven_s = min([*bounds, *(each[0] for each in waiting)], default=inf)
    return _in_place_of(before, best, request, min(proven_s, _seconds(best)) or None)


def _of_whole(request: PlanRequest) -> PlanRequest | None:
    """The request on whole nodes alone where these can send tokens as parts of nodes cannot; else None."""
    per_node = request.cluster.gpus_per_node
    gpus = min(request.gpus, _of_whole_nodes(request.cluster).gpus) // per_node * per_node
    if not gpus:
        return None
    unlisted = request.cluster.model_copy(update={"nodes": (), "blocks": (), "levels": ()})
    sends = [
        each.execution_options.values["moe_dispatch"]
        for each in (request, replace(request, cluster=unlisted))
    ]
    return replace(request, gpus=gpus) if sends[0] != sends[1] else None


def _against_sets(
    request: PlanRequest,
    best: NodeDecision,
    searched: Searched,
    *,
    compares: bool,
) -> NodeDecision:
    """The faster of a decision and the plans on sets of whole nodes, with a bound for all of them."""
    before, may_idle = best, IDLE_GPUS not in request.forbids
    is_regular = not is_irregular(request.cluster)
    sets = _SearchOfSets(
        request=request,
        searched=searched,
        compares=compares,
        are_alike=is_regular and _links_are_alike(request.cluster),
        best=best,
        bounds=[best.settled.outcome.lower_bound_s],
        are_parts_open=may_idle,
    )
    # Of as many as are asked for, unlike leaves have had their choices.
    is_apart = is_regular and request.gpus < request.cluster.gpus
    most = request.gpus // request.cluster.gpus_per_node
    sets.look_at(range(most if is_apart else most - 1, 0 if may_idle else most - 1, -1))
    best, bounds = sets.best, sets.bounds
    if best is not before and compares:
        full = _against_all_gpus(best.request, best.settled.outcome, searched, limit_left_s())
        best = replace(best, settled=full)
    return _in_place_of(before, best, request, _least_known(bounds))


@dataclass(kw_only=True)
class _SearchOfSets:
    """Sets of whole nodes by their number, the most first, and what became of them so far.

    A number of nodes is left out where no plan on as many nodes of one leaf is faster; that is so of most.
    Of the others all sets are searched, if few differ. If many do and their links are alike, one search over
    all nodes may take any set; else the likely sets are searched, and the bound is that of one leaf.
    """

    request: PlanRequest
    searched: Searched
    compares: bool
    are_alike: bool
    """Whether one search over all nodes prices any set as it is."""
    best: NodeDecision
    bounds: list[float | None]
    """What no plan is faster than, of each part that was looked at; None where that is unknown."""
    is_whole_open: bool = True
    """Whether plans on whole nodes may still be faster."""
    are_parts_open: bool
    """Whether plans that take no number of whole nodes may be."""

    def look_at(self, counts: Sequence[int]) -> None:
        """Searches the sets of these numbers of nodes, until none may be faster.

        Parameters
        ----------
        counts
            Falling, each at least 1.
        """
        for count in counts:
            floors = self._floors(count, is_first=count == counts[0])
            if not any(floor.best for floor in floors):
                self.bounds += [_least_s(floor) for floor in floors]
                if not self.is_whole_open and not self.are_parts_open:
                    return
                continue
            gpus = count * self.request.cluster.gpus_per_node
            sets, is_every = _sets_of_nodes(self.request.cluster, gpus)
            if self.are_alike and (not is_every or len(sets) > MOST_ALIKE_SETS):
                self._take_any_set(gpus)
                return
            self.bounds += [] if is_every else [_least_s(floor) for floor in floors]
            likely = next(floor.best[0].layout for floor in floors if floor.best)
            for cluster in sets:
                self._take_set(cluster, gpus, replace(likely, recompute_layers=0))

    def _floors(self, count: int, *, is_first: bool) -> list[Outcome]:
        """Plans on so many nodes wherever they are, below the best: on one leaf, and on parts of nodes."""
        on_count, below_s = (
            self._on(count * self.request.cluster.gpus_per_node),
            _seconds(self.best),
        )
        exact, floors = _without_idle(on_count), []
        # The first of these tells whether any number of nodes is left.
        tells_all = is_first and IDLE_GPUS not in self.request.forbids
        if self.is_whole_open:
            floor = _on_one_leaf(on_count if tells_all else exact, self.searched, below_s=below_s)
            self.is_whole_open = bool(floor.best) or not tells_all
            if floor.best and int(floor.best[0].layout.gpus) < on_count.gpus:
                floor = _on_one_leaf(exact, self.searched, below_s=below_s)
            floors.append(floor)
        if self.are_parts_open:
            floors.append(_on_parts(on_count, self.searched, below_s=below_s))
            self.are_parts_open = bool(floors[-1].best)
        return floors

    def _on(self, gpus: int) -> PlanRequest:
        return replace(self.request, gpus=gpus, top_k=1)

    def _take_any_set(self, gpus: int) -> None:
        """One search over all nodes, of which any may be left out."""
        everything = replace(
            self.request,
            cluster=self.request.cluster.with_any_gpus(),
            gpus=min(self.request.gpus, gpus),
        )
        decisions, of_any = _of_everything(
            everything,
            self.searched,
            0,
            compares=self.compares,
            begin_with=_best_layout([self.best]),
        )
        self.best = min([self.best, *decisions], key=_seconds)
        self.bounds.append(_least_s(of_any))

    def _take_set(self, cluster: ClusterSpec, gpus: int, likely: Layout) -> None:
        """A search on one set of nodes, which begins with a layout."""
        top_k, on_count = self.request.top_k, self._on(gpus)
        on_set = replace(
            on_count if self.are_parts_open else _without_idle(on_count),
            cluster=cluster,
            top_k=top_k,
            time_limit_s=limit_left_s(),
        )
        below_s = _seconds(self.best) if top_k == 1 else inf
        outcome = self.searched(
            on_set, begin_with=likely, counts=True, sought=Sought(below_s=below_s)
        )
        decision = NodeDecision.of_search(on_set, outcome)
        decision = _against_uneven_parts(on_set, decision, self.searched)
        self.bounds.append(_least_s(decision.settled.outcome))
        self.best = min(self.best, decision, key=_seconds)


def _without_idle(request: PlanRequest) -> PlanRequest:
    """The request with all its GPUs in use."""
    return replace(request, forbids=tuple(dict.fromkeys((*request.forbids, IDLE_GPUS))))


def _sets_of_nodes(cluster: ClusterSpec, gpus: int) -> tuple[list[ClusterSpec], bool]:
    """Clusters with so many GPUs free, on whole nodes, and whether all that differ are among them."""
    sets: list[ClusterSpec] = []
    rates = _adapter_rates(cluster)
    complete = len(rates) <= MOST_RATES
    for rate in rates[:MOST_RATES]:
        fast = _with_adapters(cluster, rate)
        if fast.gpus < gpus:
            break
        choices, has_all = _choices(fast, gpus)
        sets += [nodes for nodes in choices if _adapter_rates(nodes)[0] == rate]
        complete = complete and has_all
    return sets, complete


def _note_on_idle(asked: PlanRequest, planned: PlanRequest) -> str | None:
    """That fewer GPUs are planned than were asked for, and which nodes are left out."""
    if planned.gpus == asked.gpus:
        return None
    per_node = asked.cluster.gpus_per_node
    nodes = [
        (before.name, free_of(before, per_node) - free_of(now, per_node), now.free_gpus)
        for before, now in zip(asked.cluster.nodes, planned.cluster.nodes, strict=True)
    ]
    without = [name for name, fewer, free in nodes if fewer and free == 0]
    some_of = [f"{fewer} of {name}" for name, fewer, free in nodes if fewer and free != 0]
    words = f"planned on {planned.gpus} of the {asked.gpus} GPUs asked for"
    if without:
        words += f"; faster without {', '.join(without[:8])}"
    return f"{words}; idle: {', '.join(some_of[:8])}" if some_of else words


def _decide_by_adapters(
    request: PlanRequest, searched: Searched, *, compares: bool, later: Searched | None
) -> NodeDecision:
    """The same without sets of nodes by themselves.

    The slowest adapter paces all nodes that are free, so that nodes with unlike ones are searched once for
    each rate: on those that have it or a faster one. A choice of nodes has its own price where its slowest
    adapter is the slowest there.
    """
    rates = _adapter_rates(request.cluster)
    if len(rates) == 1:
        return _decide_on_alike(request, searched, compares=compares, later=later)
    listed = rates if len(rates) <= MOST_RATES else [rates[0], *rates[1 - MOST_RATES :]]
    if request.max_cut_use < 1:
        listed = rates[:1]
    decisions: list[NodeDecision] = []
    with within(request.time_limit_s):
        shares = Shares(len(listed))
        for rate in listed:
            time_limit_s, cluster = shares.next_s(), _with_adapters(request.cluster, rate)
            gpus = min(request.gpus, cluster.gpus)
            if gpus == request.gpus or IDLE_GPUS not in request.forbids:
                asked = replace(request, cluster=cluster, gpus=gpus, time_limit_s=time_limit_s)
                decisions.append(_decide_on_alike(asked, searched, compares=compares))
    # Of plans that take as long the one with the fastest adapters.
    best = min(reversed(decisions), key=_seconds)
    if not best.settled.outcome.best:
        undecided = (each for each in decisions if each.settled.outcome.status != "infeasible")
        return next(undecided, best)
    bounds = [_least_s(decision.settled.outcome) for decision in decisions]
    best = _bounded(best, _least_known(bounds) if len(listed) == len(rates) else None)
    return replace(best, note=_note_on_adapters(request, best))


def _gbps_of_nodes(cluster: ClusterSpec) -> list[float]:
    """What adapters give each GPU of every listed node, Gbit/s."""
    return [node.nic_gbps_per_gpu or cluster.nic_gbps_per_gpu for node in cluster.nodes]


def _adapter_rates(cluster: ClusterSpec) -> list[float]:
    """Of the nodes that are free, each rate once, the slowest first; Gbit/s of a GPU."""
    own = _gbps_of_nodes(cluster)
    free = [free_of(node, cluster.gpus_per_node) > 0 for node in cluster.nodes]
    return sorted(set(compress(own, free))) or [cluster.nic_gbps_per_gpu]


def _with_adapters(cluster: ClusterSpec, rate_gbps: float) -> ClusterSpec:
    """The cluster with nothing free but nodes whose adapters are no slower; itself where all are."""
    if min(_adapter_rates(cluster)) >= rate_gbps:
        return cluster
    return _keeping(cluster, [own >= rate_gbps for own in _gbps_of_nodes(cluster)])


def _note_on_adapters(request: PlanRequest, best: NodeDecision) -> str | None:
    """What a decision says, and which nodes are left out for their adapters."""
    kept, slowest = best.request.cluster, _adapter_rates(best.request.cluster)[0]
    nodes = zip(request.cluster.nodes, kept.nodes, _gbps_of_nodes(kept), strict=True)
    names = [
        before.name
        for before, now, rate_gbps in nodes
        if before.free_gpus != now.free_gpus and rate_gbps < slowest
    ]
    if not names:
        return best.note
    fewer = f"planned on {best.request.gpus} of the {request.gpus} GPUs asked for"
    planned = best.note or (fewer if best.request.gpus < request.gpus else "")
    words = f"slower adapters: {', '.join(names[:8])}, left out"
    return f"{planned}; {words}" if planned else words


def _decide_on_alike(
    request: PlanRequest,
    searched: Searched,
    *,
    compares: bool,
    later: Searched | None = None,
) -> NodeDecision:
    """The same as if all nodes had the slowest adapter of those that are free."""
    given = request
    request = replace(request, cluster=_for_any_gpus(request))
    cluster = request.cluster
    if not is_irregular(cluster):
        settled = decide_on_idle_gpus(request, searched, compares=compares, later=later)
        return NodeDecision(request=request, settled=settled)
    usable = _without_full_links(cluster)
    on = partial(_on_nodes, searched=searched, compares=compares)
    with within(request.time_limit_s):
        if usable.gpus >= request.gpus:
            best = on(request, usable)
        elif IDLE_GPUS in request.forbids:
            best, usable = on(request, cluster), cluster
        else:
            best, usable = _with_full_links_or_without(request, usable, on, searched)
    return replace(_as_asked(given, best), note=_note(given, best.request, usable))


def _with_full_links_or_without(
    request: PlanRequest,
    usable: ClusterSpec,
    on: Callable[[PlanRequest, ClusterSpec], NodeDecision],
    searched: Searched,
) -> tuple[NodeDecision, ClusterSpec]:
    """The faster of two plans, with the cluster it is on: with the nodes whose links others nearly fill, and
    on the fewer GPUs without them.

    Each is searched on the nodes that it takes, so that neither bounds a third choice of nodes. Where whole
    nodes are chosen, the bound is the step on as many GPUs at one switch; where parts of nodes are, there is
    none.
    """
    shares, decisions = Shares(3), []
    for cluster in (request.cluster, usable):
        with within(shares.next_s()):
            asked = replace(request, gpus=min(request.gpus, cluster.gpus))
            decisions.append((on(asked, cluster), cluster))
    best, taken = min(decisions, key=lambda each: _seconds(each[0]))
    floor_s = None
    if best.settled.outcome.best and not _takes_parts(request.cluster, request.gpus):
        floor_s = _in_one_leaf(replace(request, time_limit_s=shares.next_s()), searched)
    return _bounded(best, floor_s), taken


def _on_nodes(
    request: PlanRequest, usable: ClusterSpec, searched: Searched, *, compares: bool
) -> NodeDecision:
    """The best on so many GPUs of those that are usable, all of the request's or some."""
    gpus = request.gpus
    if usable.takes_any_gpus or _takes_parts(usable, gpus):
        return _with_part_filled(request, usable, searched, compares=compares)
    choices, complete = _choices(usable, gpus)
    others = usable is not request.cluster or len(choices) > 1 or not complete
    # One search for the bound, two for a mapping over everything free where that is asked for below.
    over_all = not complete and len(choices) > 1
    shares = Shares(len(choices) + (1 if others else 0) + (2 if over_all else 0))
    floor_s = None
    if others:
        floor_s = _in_one_leaf(replace(request, time_limit_s=shares.next_s()), searched)
    decisions: list[NodeDecision] = []
    for nodes in choices:
        asked = replace(request, cluster=nodes, time_limit_s=shares.next_s())
        settled = decide_on_idle_gpus(asked, searched, compares=compares)
        whole = NodeDecision(request=asked, settled=settled)
        decisions.append(_against_uneven_parts(asked, whole, searched))
        best = min(decisions, key=_seconds)
        if floor_s is not None and _seconds(best) <= floor_s * CLOSE:
            complete = False
            break
    else:
        if over_all:
            asked = replace(request, cluster=usable)
            decisions += _on_nodes_of_all(asked, searched, shares)
            best = min(decisions, key=_seconds)
    complete = complete and usable is request.cluster
    return _with_bound(best, decisions, floor_s, complete)


def _for_any_gpus(request: PlanRequest) -> ClusterSpec:
    """The cluster as it is searched where parts of listed nodes are to be taken: nodes listed without leaves
    stand in the blocks of their positions in the list, and any GPU may be left out where some must be.

    Itself otherwise, and in racks, where neighbours of a list need not share one.
    """
    cluster, per_node = request.cluster, request.cluster.gpus_per_node
    racks = cluster.nvlink_domain > per_node
    if not cluster.nodes or racks or request.max_cut_use < 1:
        return cluster
    apart = any(node.free_gpus == 0 for node in cluster.nodes)
    labelled = any(node.leaf is not None for node in cluster.nodes)
    parts = _takes_parts(cluster, request.gpus)
    if not labelled and (parts or apart):
        cluster = _by_position(cluster)
    if parts and not is_irregular(cluster):
        return cluster.with_any_gpus()
    return cluster


def _takes_parts(cluster: ClusterSpec, gpus: int) -> bool:
    """Whether nodes are part-filled, or so many GPUs are no number of nodes."""
    return free_gpus_of(cluster).are_part_filled or gpus % cluster.gpus_per_node != 0


def _by_position(cluster: ClusterSpec) -> ClusterSpec:
    """Nodes with the leaves and pods that they are in if the list is the machine from its first node on."""
    sizes = [level.gpus for level in cluster.levels[:-1]] or [cluster.gpus_per_node]
    nodes = []
    for index, node in enumerate(cluster.nodes):
        first = index * cluster.gpus_per_node
        leaf = f"leaf-{first // sizes[0] + 1}" if cluster.levels[:-1] else "leaf-1"
        pod = f"pod-{first // sizes[1] + 1}" if len(sizes) > 1 else None
        nodes.append(node.model_copy(update={"leaf": leaf, "pod": pod}))
    return cluster.model_copy(update={"nodes": tuple(nodes)})


def _as_asked(given: PlanRequest, decision: NodeDecision) -> NodeDecision:
    """A decision that forbids no more than was asked."""
    forbids = tuple(word for word in decision.request.forbids if word in given.forbids)
    return replace(decision, request=replace(decision.request, forbids=forbids))


def _with_part_filled(
    request: PlanRequest, usable: ClusterSpec, searched: Searched, *, compares: bool
) -> NodeDecision:
    """The best of everything that is free, where some of it is on part-filled nodes, and of whole nodes.

    The bound of a search over everything free holds for whole nodes alone, unless the links or adapters of
    those left out are what slows all of it down, or whole nodes have execution choices that parts have not
    (tokens gathered from all ranks): then that of each choice counts, where all were searched. A search whose
    bound does not count leaves out what no list has.
    """
    gpus = request.gpus
    requests_on_whole = [
        replace(request, cluster=nodes, gpus=min(gpus, nodes.gpus))
        for nodes in _whole_nodes(request, usable)
    ]
    limit_s, everything = limit_left_s(), replace(request, cluster=usable)
    on_whole = _in_fullest_rack(request, usable, searched)
    if limit_s is not None:
        share = EVERYTHING_SHARE if requests_on_whole else 1.0
        everything = replace(everything, time_limit_s=limit_s * share)
    alike = _links_are_alike(usable)
    complete = alike or gpus == usable.gpus
    covers = alike and all(
        each.execution_options == everything.execution_options for each in requests_on_whole
    )
    later = len(requests_on_whole)
    decisions, outcome = _of_everything(
        everything, searched, later, compares=compares, begin_with=_best_layout(on_whole)
    )
    shares = Shares(later)
    bounds = [_least_s(outcome)]
    for request_there in requests_on_whole:
        best = min([*decisions, *on_whole], key=_seconds, default=None)
        if covers and best is not None and _is_closed(best, bounds[0]):
            break
        if is_over():
            bounds.append(None if not covers else inf)
            break
        limited = replace(request_there, time_limit_s=shares.next_s())
        # Of several plans that are asked for, the next best ones may be slower than what is known.
        below_s = inf if best is None or request.top_k > 1 else _seconds(best)
        outcome_there = searched(
            limited,
            begin_with=_best_layout(on_whole),
            counts=True,
            sought=Sought(below_s=below_s, listed_only=covers),
        )
        on_whole.append(NodeDecision.of_search(limited, outcome_there))
        if not covers:
            bounds.append(_least_s(outcome_there))
    best = min([*decisions, *on_whole], key=_seconds, default=None)
    if best is None:
        as_listed = usable.with_any_gpus(allowed=False)
        return NodeDecision.of_search(replace(everything, cluster=as_listed), outcome)
    if compares and any(best is each for each in on_whole):
        settled = _against_all_gpus(best.request, best.settled.outcome, searched, limit_left_s())
        best = replace(best, settled=settled)
    closed = complete and usable is request.cluster
    return _bounded(best, _least_known(bounds) if closed else None)


def _of_everything(
    request: PlanRequest,
    searched: Searched,
    later: int,
    *,
    compares: bool,
    begin_with: Layout | None = None,
) -> tuple[list[NodeDecision], Outcome]:
    """The plan on everything free, and how its search ended, before so many `later` searches.

    Where GPUs are left over, what is planned is the best on those that the mapping takes, found in as much of
    the time that is left then as each of the later searches has.
    """
    sought = Sought(until_priced_s=limit_left_s(), any_first=True)
    if request.gpus == request.cluster.gpus:
        settled = decide_on_idle_gpus(request, searched, compares=compares, sought=sought)
        return [NodeDecision(request=request, settled=settled)], settled.outcome
    outcome = searched(request, begin_with=begin_with, counts=True, sought=sought)
    if not outcome.best or outcome.best[0].ranks is None:
        return [], outcome
    on_these = _only_on(request, request.cluster, outcome.best[0].ranks)
    on_these = replace(on_these, time_limit_s=Shares(later + 1).next_s())
    likely = replace(outcome.best[0].layout, recompute_layers=0)
    best_there = searched(on_these, begin_with=likely, counts=True, sought=Sought(listed_only=True))
    mapped = _as_mapped(request, outcome).settled.outcome
    mapped_s = mapped.best[0].step_time_s * (1 + ROUNDING)
    if not best_there.best or mapped_s < best_there.best[0].step_time_s:
        best_there = mapped
    return [NodeDecision.of_search(on_these, best_there)], outcome


def _as_mapped(request: PlanRequest, outcome: Outcome) -> NodeDecision:
    """The plan of a search as it is mapped, priced where nothing else is free; without a bound."""
    plan = outcome.best[0]
    assert plan.ranks is not None
    there = _only_on(request, request.cluster, plan.ranks)
    workload = there.workload(plan.execution.of_layout(plan.layout)).on(int(plan.layout.gpus))
    priced = replace(plan, step_time_s=Setup.of_priced(workload, plan).step_time_s)
    mapped = replace(outcome, status="feasible", best=(priced,), lower_bound_s=None)
    return NodeDecision.of_search(there, mapped)


def _best_layout(decisions: list[NodeDecision]) -> Layout | None:
    """The layout of the fastest plan among some decisions, its recomputation open; None without one."""
    best = min(decisions, key=_seconds, default=None)
    if best is None or not best.settled.outcome.best:
        return None
    return replace(best.settled.outcome.best[0].layout, recompute_layers=0)


def _is_closed(best: NodeDecision, bound_s: float | None) -> bool:
    """Whether a bound proves the plan of a decision."""
    plans = best.settled.outcome.best
    return bool(plans) and bound_s is not None and bound_s * (1 + ROUNDING) >= plans[0].step_time_s


def _bounded(best: NodeDecision, bound_s: float | None) -> NodeDecision:
    """A decision with a bound that holds for all that was to decide on."""
    outcome = best.settled.outcome
    if not outcome.best:
        return best
    closed = _is_closed(best, bound_s)
    outcome = replace(
        outcome,
        status="optimal" if closed else "feasible",
        lower_bound_s=outcome.best[0].step_time_s if closed else bound_s,
    )
    return replace(best, settled=replace(best.settled, outcome=outcome))


def _least_known(bounds: Sequence[float | None]) -> float | None:
    """The least of some bounds; None where any of them is unknown."""
    known = [bound_s for bound_s in bounds if bound_s is not None]
    return min(known) if len(known) == len(bounds) else None


def _links_are_alike(cluster: ClusterSpec) -> bool:
    """Whether no GPU would have more of any link if others were not there."""
    links = uplinks(cluster)
    stated = [link for side in (links.leaves, links.pods) for link in side.values() if link.stated]
    nics = {node.nic_gbps_per_gpu for node in cluster.nodes if node.free_gpus != 0}
    return not stated and len(nics) == 1


def _whole_nodes(request: PlanRequest, cluster: ClusterSpec) -> list[ClusterSpec]:
    """The cluster without its part-filled nodes, as far as GPUs are asked for; none if that is no choice."""
    on_whole, per_node = _of_whole_nodes(cluster), cluster.gpus_per_node
    gpus = min(on_whole.gpus, request.gpus) // per_node * per_node
    if not gpus or (gpus < request.gpus and IDLE_GPUS in request.forbids):
        return []
    choices, _ = _choices(on_whole, gpus)
    return choices[:MOST_WHOLE]


def _of_whole_nodes(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with nothing free but its whole nodes."""
    per_node = cluster.gpus_per_node
    whole = [free_of(node, per_node) == per_node for node in cluster.nodes]
    return _keeping(cluster.with_any_gpus(allowed=False), whole)


def _keeping(cluster: ClusterSpec, kept: Sequence[bool]) -> ClusterSpec:
    """The cluster with nothing free but what is free on the nodes that are kept, one truth value each."""
    nodes = tuple(
        node if stays else node.model_copy(update={"free_gpus": 0})
        for node, stays in zip(cluster.nodes, kept, strict=True)
    )
    free = sum(free_of(node, cluster.gpus_per_node) for node in nodes)
    return cluster.model_copy(update={"nodes": nodes, "gpus": free})


def _in_fullest_rack(
    request: PlanRequest, cluster: ClusterSpec, searched: Searched
) -> list[NodeDecision]:
    """The plan on the whole nodes of one rack, where few GPUs may do more than many apart; else nothing.

    Its search is short, and the one over everything free begins with what it finds.
    """
    per_node = cluster.gpus_per_node
    if cluster.nvlink_domain == per_node or IDLE_GPUS in request.forbids:
        return []
    on_whole = _of_whole_nodes(cluster)
    leaves = _nodes_of_leaves(on_whole)
    fullest = next(iter(leaves), None)
    if fullest is None or len(leaves[fullest]) * per_node >= request.gpus:
        return []
    rack = _taking(on_whole, leaves, {fullest: len(leaves[fullest])})
    limit_s = limit_left_s()
    share_s = None if limit_s is None else limit_s * RACK_SHARE
    there = replace(request, cluster=rack, gpus=rack.gpus, time_limit_s=share_s)
    return [NodeDecision.of_search(there, searched(there, counts=True))]


def _in_one_leaf(request: PlanRequest, searched: Searched) -> float | None:
    """What no choice of whole nodes beats; None where levels were measured: that speaks of these alone."""
    if request.cluster.measured:
        return None
    bound_s = _least_s(_on_one_leaf(request, searched))
    if bound_s is None or IDLE_GPUS in request.forbids:
        return bound_s
    return _least_known([bound_s, _least_s(_on_parts(request, searched, below_s=bound_s))])


def _on_one_leaf(request: PlanRequest, searched: Searched, *, below_s: float = inf) -> Outcome:
    """The plan, below so many seconds, on nodes at one switch of any size, all with the fastest adapter.

    No plan that takes whole nodes is faster, wherever they are.
    """
    return _unlisted(request, searched, Sought(below_s=below_s), {})


def _on_parts(request: PlanRequest, searched: Searched, *, below_s: float) -> Outcome:
    """The plan that takes no number of whole nodes, below so many seconds, where nothing is sent.

    At one switch such layouts are priced as equal parts of nodes, which listed nodes need not be.
    """
    return _where_nothing_is_sent(request, searched, Sought(below_s=below_s, parts_only=True))


def _where_nothing_is_sent(request: PlanRequest, searched: Searched, sought: Sought) -> Outcome:
    """The plan on as many GPUs in one NVLink domain that takes next to no time for what they send."""
    per_node = request.cluster.gpus_per_node
    joined = {
        "nvlink_domain": -(-request.gpus // per_node) * per_node,
        "nvlink_gb_per_s": AT_ONCE_GB_PER_S,
        "measured": (),
    }
    return _unlisted(request, searched, sought, joined)


def _unlisted(
    request: PlanRequest, searched: Searched, sought: Sought, changes: dict[str, Any]
) -> Outcome:
    """The plan on as many nodes that hang on one switch, with other changes to them."""
    cluster, per_node = request.cluster, request.cluster.gpus_per_node
    leaf = cluster.model_copy(
        update={
            "nodes": (),
            "blocks": (),
            "levels": (),
            "gpus": -(-request.gpus // per_node) * per_node,
            "nic_gbps_per_gpu": max(_gbps_of_nodes(cluster)),
            **changes,
        }
    )
    limited = replace(request, cluster=leaf, method="cp-sat", top_k=1)
    return searched(limited, sought=sought)


def _on_nodes_of_all(
    request: PlanRequest, searched: Searched, shares: Shares
) -> list[NodeDecision]:
    """The plan on the nodes that a mapping over everything free takes."""
    everything = searched(replace(request, time_limit_s=shares.next_s()))
    if not everything.best or everything.best[0].ranks is None:
        return []
    asked = _only_on(request, request.cluster, everything.best[0].ranks)
    asked = replace(asked, time_limit_s=shares.next_s())
    return [NodeDecision.of_search(asked, searched(asked))]


def _least_s(outcome: Outcome) -> float | None:
    """No plan of a search is faster than this: infinite where it is proven that there is none."""
    return inf if outcome.status == "infeasible" else outcome.lower_bound_s


def _seconds(decision: NodeDecision) -> float:
    best = decision.settled.outcome.best
    return best[0].step_time_s * (1 + ROUNDING) if best else inf


def _with_bound(
    best: NodeDecision, decisions: list[NodeDecision], floor_s: float | None, complete: bool
) -> NodeDecision:
    """The best decision with what is proven of all choices of nodes."""
    if complete and len(decisions) == 1:
        return best
    bound_s = _least_known([_least_s(decision.settled.outcome) for decision in decisions])
    return _bounded(best, floor_s if bound_s is None or not complete else bound_s)


def _only_on(request: PlanRequest, cluster: ClusterSpec, ranks: tuple[Place, ...]) -> PlanRequest:
    """The request on the GPUs of a mapping, with all of them used."""
    used = Counter(node for node, _ in ranks)
    nodes = tuple(
        node.model_copy(update={"free_gpus": used.get(index, 0)})
        for index, node in enumerate(cluster.nodes)
    )
    own = cluster.with_any_gpus(allowed=False)
    own = own.model_copy(update={"nodes": nodes, "gpus": len(ranks)})
    forbids = dict.fromkeys((*request.forbids, IDLE_GPUS))
    return replace(request, cluster=own, gpus=len(ranks), forbids=tuple(forbids))


def _without_full_links(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster without the leaves and pods whose links other jobs nearly fill; itself where there are none
    or nothing else is free.
    """
    links = uplinks(cluster)
    slow = _slow(links.leaves) | _slow(links.pods)
    fast = _keeping(
        cluster,
        [
            node.leaf is None or not {(node.pod or "", node.leaf), (node.pod or "", "")} & slow
            for node in cluster.nodes
        ],
    )
    return fast if slow and fast.gpus else cluster


def _slow(blocks: dict[Key, Uplink]) -> set[Key]:
    best = max((link.gb_per_s / link.free for link in blocks.values()), default=0.0)
    return {key for key, link in blocks.items() if link.gb_per_s / link.free < best * NEARLY_FULL}


def _choices(cluster: ClusterSpec, gpus: int) -> tuple[list[ClusterSpec], bool]:
    """Clusters with so many GPUs free, and whether no other choice could be better."""
    first = first_gpus(cluster, gpus)
    if gpus == cluster.gpus:
        return [first], True
    per_node = cluster.gpus_per_node
    whole = all(free_of(node, per_node) in (0, per_node) for node in cluster.nodes)
    if not whole or gpus % per_node:
        return [first], False
    leaves = _nodes_of_leaves(cluster)
    counts = list(_counts(cluster, leaves, gpus // per_node))
    complete = len(counts) <= MOST_CHOICES
    if not complete:
        counts = list(_equal_parts(leaves, gpus // per_node))
    choices: dict[tuple[int, ...], ClusterSpec] = {}
    for nodes in (first, *(_taking(cluster, leaves, taken) for taken in counts)):
        free = tuple(free_of(node, per_node) for node in nodes.nodes)
        choices.setdefault(free, nodes)
    return list(choices.values()), complete


def _nodes_of_leaves(cluster: ClusterSpec) -> dict[Key, list[int]]:
    """Free nodes by leaf, those of the fullest leaves first; in a leaf those with the slowest adapters first,
    so that a choice is priced with adapters that it has.
    """
    leaves: dict[Key, list[int]] = {}
    rates_gbps = _gbps_of_nodes(cluster)
    for index in sorted(range(len(rates_gbps)), key=rates_gbps.__getitem__):
        node = cluster.nodes[index]
        if free_of(node, cluster.gpus_per_node):
            leaves.setdefault((node.pod or "", node.leaf or ""), []).append(index)
    return dict(sorted(leaves.items(), key=lambda item: (-len(item[1]), item[0])))


def _counts(
    cluster: ClusterSpec, leaves: dict[Key, list[int]], wanted: int
) -> Iterator[dict[Key, int]]:
    """Nodes to take of every leaf, in all ways that differ in more than the names of leaves and pods."""
    free, links = [len(nodes) for nodes in leaves.values()], uplinks(cluster)
    rates_gbps = _gbps_of_nodes(cluster)
    if prod(count + 1 for count in free) > MOST_COUNTED:
        yield from ({} for _ in range(MOST_CHOICES + 1))
        return
    seen = set()

    def link_of(block: Key) -> float:
        """Of a leaf or a pod, GB/s, rounded so that equal shares are equal; 0 where no leaves are listed."""
        link = links.leaves.get(block, links.pods.get(block))
        return 0.0 if link is None else round(link.gb_per_s, 6)

    for counts in product(*(range(count, -1, -1) for count in free)):
        if sum(counts) != wanted:
            continue
        pods: dict[str, list[tuple[int, int, float, float]]] = {}
        for (key, nodes), count in zip(leaves.items(), counts, strict=True):
            if count:
                leaf = (count, len(nodes), link_of(key), rates_gbps[nodes[0]])
                pods.setdefault(key[0], []).append(leaf)
        kind = tuple(sorted((link_of((pod, "")), *sorted(own)) for pod, own in pods.items()))
        if kind not in seen:
            seen.add(kind)
            yield dict(zip(leaves, counts, strict=True))


def _equal_parts(leaves: dict[Key, list[int]], wanted: int) -> Iterator[dict[Key, int]]:
    """The same number of nodes from as few leaves as can be."""
    for many in range(1, len(leaves) + 1):
        each, rest = divmod(wanted, many)
        roomy = [key for key, nodes in leaves.items() if len(nodes) >= each]
        if not rest and len(roomy) >= many:
            pods = Counter(pod for pod, _ in roomy)
            roomy.sort(key=lambda key: (-pods[key[0]], key))
            yield dict.fromkeys(roomy[:many], each)
            return


def _taking(
    cluster: ClusterSpec, leaves: dict[Key, list[int]], counts: dict[Key, int]
) -> ClusterSpec:
    """The cluster with only so many nodes of each leaf free."""
    taken = {node for key, nodes in leaves.items() for node in nodes[: counts.get(key, 0)]}
    return _keeping(cluster, [index in taken for index in range(len(cluster.nodes))])


def _note(asked: PlanRequest, planned: PlanRequest, usable: ClusterSpec) -> str | None:
    """That fewer GPUs are planned than were asked for, and where links were too full."""
    names = sorted(
        {
            node.leaf or ""
            for node, kept in zip(asked.cluster.nodes, usable.nodes, strict=True)
            if kept.free_gpus != node.free_gpus
        }
    )
    left_out = ""
    if names:
        left_out = f"; other jobs nearly fill the links of {', '.join(names[:8])}, left out"
    if planned.gpus == asked.gpus and not names:
        return None
    fewer = planned.gpus < asked.gpus
    on_whole = ", those of whole nodes" if fewer and not names else ""
    return f"planned on {planned.gpus} of the {asked.gpus} GPUs asked for{on_whole}{left_out}"


# Blocks of the machine that a mapping takes beyond the fewest, and what that brings.


def more_blocks(workload: Workload, best: Priced) -> MoreBlocksDoc | None:
    """The levels at which a mapping by equal parts takes more blocks than its GPUs need, with the step on
    as few; None where it takes the fewest of all, or nodes are listed.

    Parameters
    ----------
    workload
        On the GPUs that the plan uses.
    best
        With a matrix.
    """
    cluster, layout, gpus = workload.cluster, best.layout, workload.gpus
    if cluster.nodes or best.ranks is not None or is_irregular(cluster):
        return None
    places = allocation_of(cluster, gpus).places
    numbers = places[:, 0] * cluster.gpus_per_node + places[:, 1]
    full = full_levels(cluster)
    sizes = dict(zip(full.names[:-1], full.blocks[:-1].tolist(), strict=True))
    if len(full.names) == 1:
        sizes = {}
    used = {name: len(np.unique(numbers // size)) for name, size in sizes.items()}
    fewest = {name: -(-gpus // size) for name, size in sizes.items()}
    more = [
        name
        for name, size in sizes.items()
        if size > cluster.gpus_per_node and used[name] > fewest[name]
    ]
    if not more:
        return None
    matrix = tuple(tuple(best.matrix[axis]) for axis in AXES)
    where = nodes_in_turn(cluster, gpus).blocks[:, position_of_ranks(matrix)]
    in_turn = Setup(
        workload=workload,
        layout=layout,
        stages=best.stages,
        placement=placement_in(where, layout),
    )
    return MoreBlocksDoc(
        used={name: used[name] for name in more},
        fewest={name: fewest[name] for name in more},
        step_time_s_on_fewest=in_turn.step_time_s,
    )
