"""How far groups of several kinds reach at once, where ranks lie on parts of nodes.

`most_members` bounds each kind of group on its own, and the sum of separate best cases is mostly out of
reach: data-parallel groups that lie in nodes leave pipelines none. Here all kinds are asked about together:
is there a mapping under which each reaches so far? CP-SAT answers with a mapping, or proves that there is
none; then some kind of each mapping reaches less far, and what no mapping beats falls into smaller rows
(`Cover`). Answers are of degrees and free GPUs alone: layouts of other micro-batches, and other executions,
share them.

Blocks nest, so that a group's members in a block, as the cost model counts them, are never fewer further out:
with u GPUs in use in each inner block for v rings that it cuts, an outer block holds the sum of its inner
ones and cuts no ring that none of them cuts; parts of an all-to-all's groups are sums of inner parts; and a
pipeline that leaves an outer block leaves an inner one. So each level can be asked about by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import SameCluster
from meshwright.costmodel.layout import GROUPS, Layout, Placement
from meshwright.costmodel.placement import members_by_level
from meshwright.errors import InternalError
from meshwright.planner.mapping.counted import Degrees, degrees_of, layout_of, most_members
from meshwright.planner.mapping.effective import free_gpus_of
from meshwright.planner.mapping.problem import IntArray
from meshwright.planner.mapping.slots import Place
from meshwright.planner.solvers.cp_sat import repeatable_solver

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model

RINGS = ("cp", "etp", "edp", "dp_cp")
ASKED = (*RINGS, "ep", "pp")
"""Kinds of groups whose members in a block are asked for."""

Row = tuple[int, ...]
"""Members in the block of each level, of each kind of `ASKED` in turn, level by level."""


@dataclass(frozen=True, kw_only=True)
class ReachParams:
    """How much is asked. Work is CP-SAT's deterministic time, about seconds on an idle core."""

    question_work: float = 0.5
    """For one question."""
    all_work: float = 20.0
    """For all questions about the same degrees."""
    most_variables: int = 6_000
    """Tensor groups times nodes, or groups times blocks, in one question."""


DEFAULT_REACH = ReachParams()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Kind:
    """Groups of one kind, as members by tensor group."""

    size: int
    groups: tuple[tuple[tuple[tuple[int, int], ...], int], ...]
    """(members of each tensor group that has some, how many groups are alike); none of one tensor group."""


class KindsReach:
    """What is known of the mappings of layouts with the same degrees."""

    def __init__(self, cluster: ClusterSpec, key: Degrees, params: ReachParams) -> None:
        self._params, self._work_left = params, params.all_work
        self._degrees, self._etp, self._ep = key
        self._free = free_gpus_of(cluster)
        layout = layout_of(key)
        self._world = int(layout.gpus)
        self.blocks = self._free.blocks(self._world)
        """Of every free GPU at each level, [levels, free GPUs]."""
        self._racks = cluster.nvlink_domain > cluster.gpus_per_node
        self.most = most_members(cluster, self._free, layout)
        self._known: list[tuple[IntArray, IntArray]] = []
        """What mappings reach, and the GPU of every rank."""
        self._impossible: list[IntArray] = []
        self._undecided: list[IntArray] = []

    @property
    def levels(self) -> int:
        """Levels of the allocation."""
        return len(self.blocks)

    @cached_property
    def can_be_asked(self) -> bool:
        """Whether tensor groups lie in nodes, nodes in one block each, and a model is not too large."""
        tp = self._degrees[0]
        used = np.flatnonzero(self._free.free // tp)
        first = self._first[self._free.places[:, 0]]
        groups = sum(len(kind.groups) for kind in self._kinds.values())
        variables = max(self._world // tp, groups) * len(used)
        return bool(
            not self._racks
            and np.array_equal(self.blocks, self.blocks[:, first])
            and variables <= self._params.most_variables
        )

    @cached_property
    def _first(self) -> IntArray:
        """The number of each node's first free GPU."""
        return np.asarray(np.cumsum(self._free.free) - self._free.free, dtype=np.int64)

    def row(self, placement: Placement) -> Row:
        """Of one placement, arrays [levels]."""
        return tuple(int(x) for kind in ASKED for x in getattr(placement, kind))

    def placement(self, rows: Sequence[Row]) -> Placement:
        """Arrays [rows, levels]; what is not asked for is the most."""
        table = np.array(rows, dtype=np.int64).reshape(len(rows), len(ASKED), self.levels)
        columns = {
            name: np.repeat(np.asarray(getattr(self.most, name))[None], len(rows), axis=0)
            for name in GROUPS
        }
        return Placement(
            **columns | {kind: table[:, position] for position, kind in enumerate(ASKED)}
        )

    def members(self, gpus: IntArray) -> dict[str, IntArray]:
        """Of the groups of a mapping, by kind, [levels]."""
        return members_by_level(self.blocks[:, gpus], self._degrees, self._etp, self._ep)

    def ranks(self, gpus: IntArray) -> tuple[Place, ...]:
        """(node, local GPU) of every rank of a mapping."""
        return tuple((node, gpu) for node, gpu in self._free.places[gpus].tolist())

    def add(self, gpus: IntArray) -> None:
        """A mapping that is known from elsewhere: the GPU of every rank."""
        members = self.members(gpus)
        reached = np.concatenate([members[kind] for kind in ASKED])
        if not any(np.array_equal(reached, reached_before) for reached_before, _ in self._known):
            self._known.append((reached, np.asarray(gpus, dtype=np.int64)))

    def find(self, row: Row) -> IntArray | None:
        """The GPU of every rank under a mapping that reaches as far as a row everywhere; None where there is
        none, or none was found: `is_impossible` tells the two apart.
        """
        wanted = np.array(row, dtype=np.int64)
        fits = [pair for pair in self._known if np.all(pair[0] >= wanted)]
        if fits:
            return fits[0][1]
        if self.is_impossible(row) or any(np.all(wanted >= open_) for open_ in self._undecided):
            return None
        if not self.can_be_asked or self._work_left <= 0:
            return None
        gpus, decided = self._solved(wanted)
        if gpus is not None:
            self.add(gpus)
            if not any(np.all(reached >= wanted) for reached, _ in self._known):
                raise InternalError("a mapping that CP-SAT found does not reach as far as asked")
        elif decided:
            self._impossible.append(wanted)
        else:
            self._undecided.append(wanted)
        return gpus

    def is_impossible(self, row: Row) -> bool:
        """Whether it is known that no mapping reaches so far."""
        wanted = np.array(row, dtype=np.int64)
        return any(bool(np.all(wanted >= refuted)) for refuted in self._impossible)

    def less(self, row: Row) -> list[Row]:
        """Rows of which one at least is reached no further by each mapping that reaches no further than a
        row that is impossible.

        Kinds are let off one by one as long as the rest stays impossible. Each mapping then has one of those
        that are left, at some level, where it reaches less far than asked.
        """
        demanded = np.array(row, dtype=np.int64)
        for position in np.flatnonzero(demanded > 1):
            trial = demanded.copy()
            trial[position] = 1
            if self._refuted(trial):
                demanded = trial
        for position in np.flatnonzero(demanded > 1):
            while demanded[position] > 2:
                trial = demanded.copy()
                trial[position] = self._lower(int(position), int(demanded[position]))
                if trial[position] < 2 or not self._refuted(trial):
                    break
                demanded = trial
        rows = []
        for position in np.flatnonzero(demanded > 1):
            child = np.array(row, dtype=np.int64)
            child[position] = self._lower(int(position), int(demanded[position]))
            # A group's members in a block are never fewer further out.
            first = position - position % self.levels
            child[first:position] = np.minimum(child[first:position], child[position])
            rows.append(tuple(child.tolist()))
        return rows

    def _refuted(self, wanted: IntArray) -> bool:
        row = tuple(wanted.tolist())
        return self.find(row) is None and self.is_impossible(row)

    def _lower(self, position: int, value: int) -> int:
        """The most below a value that groups of a place in a row can have."""
        kind = ASKED[position // self.levels]
        if kind == "ep" and value == self._ep:
            return max(1, value // 2)
        if kind == "pp":
            stages = self._degrees[3]
            return stages // (stages // value + 1)
        return value - 1

    @cached_property
    def _kinds(self) -> dict[str, _Kind]:
        tp, cp, dp, pp = self._degrees
        unit = np.arange(self._world) // tp
        dense = unit.reshape(pp, dp, cp, tp)
        experts = unit.reshape(pp, -1, self._ep, self._etp)
        members = (
            dense.transpose(0, 1, 3, 2).reshape(-1, cp),
            experts.reshape(-1, self._etp),
            experts.transpose(0, 2, 3, 1).reshape(-1, experts.shape[1]),
            dense.transpose(0, 3, 1, 2).reshape(-1, dp * cp),
            experts.transpose(0, 1, 3, 2).reshape(-1, self._ep),
        )
        kinds = {}
        for kind, groups in zip(ASKED[: len(members)], members, strict=True):
            alike = Counter(tuple(sorted(Counter(group).items())) for group in groups.tolist())
            cut = tuple((group, count) for group, count in alike.items() if len(group) > 1)
            kinds[kind] = _Kind(size=groups.shape[1], groups=cut)
        return kinds

    def _solved(self, wanted: IntArray) -> tuple[IntArray | None, bool]:
        """(mapping, whether the question is decided)."""
        from meshwright.planner.solvers.or_tools import cp_model

        tp = self._degrees[0]
        nodes = np.flatnonzero(self._free.free // tp)
        model = cp_model.CpModel()
        on = [[model.new_bool_var("") for _ in range(self._world // tp)] for _ in nodes]
        for unit in zip(*on, strict=True):
            model.add_exactly_one(unit)
        paths = self.blocks[:, self._first[nodes]]
        used = [sum(row) for row in on]
        last: dict[tuple[int, ...], int] = {}
        for position, node in enumerate(nodes):
            room = int(self._free.free[node] // tp)
            model.add(used[position] <= room)
            # Nodes that are alike can be told apart by what they give: the first gives most.
            like = (room, *paths[:, position].tolist()[1:])
            if like in last:
                model.add(used[last[like]] >= used[position])
            last[like] = position
        self._post_order_of_replicas(model, on)
        by_kind = wanted.reshape(len(ASKED), self.levels)
        for level in range(self.levels):
            units_of = {}
            for block in np.unique(paths[level]).tolist():
                rows = [on[position] for position in np.flatnonzero(paths[level] == block)]
                units_of[block] = rows[0] if len(rows) == 1 else _joined(model, rows)
            for position, kind in enumerate(ASKED):
                demanded = int(by_kind[position, level])
                if demanded == 1:
                    continue
                if kind == "pp":
                    self._post_chain(model, list(units_of.values()), demanded)
                elif kind == "ep":
                    self._post_exchange(model, list(units_of.values()), demanded)
                else:
                    self._post_ring(model, list(units_of.values()), self._kinds[kind], demanded)
        solver = repeatable_solver(work=min(self._params.question_work, self._work_left))
        status = solver.solve(model)
        self._work_left -= solver.response_proto.deterministic_time
        if status == cp_model.INFEASIBLE:
            return None, True
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, False
        order = [
            next(position for position, row in enumerate(on) if solver.boolean_value(row[unit]))
            for unit in range(self._world // tp)
        ]
        return self._free.in_order(nodes, tuple(order), tp), True

    def _post_order_of_replicas(
        self, model: cp_model.CpModel, on: list[list[cp_model.IntVar]]
    ) -> None:
        """Whole replicas, or sets of them that share experts, can be exchanged in all stages at once: those
        whose first tensor group is on the first nodes come first.
        """
        tp, cp, dp, _ = self._degrees
        size = max(cp * tp, self._ep * self._etp)
        if size % (cp * tp) or size % (self._ep * self._etp):
            return
        stage, units = cp * dp, size // tp
        where = [
            sum(position * row[first] for position, row in enumerate(on))
            for first in range(0, stage, units)
        ]
        for before, after in pairwise(where):
            model.add(before <= after)

    def _post_ring(
        self,
        model: cp_model.CpModel,
        blocks: list[list[cp_model.IntVar]],
        kind: _Kind,
        demanded: int,
    ) -> None:
        """A block uses `demanded` GPUs at least for each ring that it cuts, or it cuts none."""
        tp = self._degrees[0]
        for block in blocks:
            cuts = []
            for group, alike in kind.groups:
                members = sum(count * block[unit] for unit, count in group)
                uncut = model.new_bool_var("")
                if demanded >= kind.size:
                    model.add(members == kind.size * uncut)
                    continue
                cut = model.new_bool_var("")
                model.add(members <= (kind.size - 1) * cut + kind.size * uncut)
                model.add(members >= kind.size * uncut)
                cuts.append(alike * cut)
            if cuts:
                model.add(demanded * sum(cuts) <= tp * sum(block))

    def _post_exchange(
        self, model: cp_model.CpModel, blocks: list[list[cp_model.IntVar]], demanded: int
    ) -> None:
        """Of each group a block holds nothing, or `demanded` members at least."""
        for block in blocks:
            for group, _ in self._kinds["ep"].groups:
                members = sum(count * block[unit] for unit, count in group)
                holds_any = model.new_bool_var("")
                model.add(members >= demanded * holds_any)
                model.add(members <= self._ep * holds_any)

    def _post_chain(
        self, model: cp_model.CpModel, blocks: list[list[cp_model.IntVar]], demanded: int
    ) -> None:
        """Each pipeline leaves its block so rarely that its parts have `demanded` stages on average."""
        _, cp, dp, pp = self._degrees
        most_exits = pp // demanded - 1
        for pipeline in range(cp * dp):
            chain = range(pipeline, cp * dp * pp, cp * dp)
            exits = []
            for unit, after in pairwise(chain):
                leaves = model.new_bool_var("")
                for block in blocks:
                    model.add(block[unit] - block[after] <= leaves)
                exits.append(leaves)
            model.add(sum(exits) <= most_exits)


def _joined(model: cp_model.CpModel, rows: list[list[cp_model.IntVar]]) -> list[cp_model.IntVar]:
    """Whether each tensor group is in one of some nodes."""
    joined = []
    for unit in zip(*rows, strict=True):
        trial = model.new_bool_var("")
        model.add(trial == sum(unit))
        joined.append(trial)
    return joined


class Cover:
    """Rows one of which at least is reached no further by each mapping of some degrees."""

    def __init__(self, reach: KindsReach) -> None:
        self.reach = reach
        self.rows: dict[Row, None] = {reach.row(reach.most): None}

    def split(self, row: Row) -> None:
        """Puts smaller rows in the place of one that is impossible, but for those within another."""
        del self.rows[row]
        for child in self.reach.less(row):
            if not any(_is_within(child, wider) for wider in self.rows):
                self.rows[child] = None


def _is_within(row: Row, wider: Row) -> bool:
    return all(fewer <= further for fewer, further in zip(row, wider, strict=True))


def cover_of(cluster: ClusterSpec, layout: Layout) -> Cover:
    """What is known of the degrees of a layout on a cluster; kept for the cluster."""
    return _cover(SameCluster(cluster), degrees_of(layout))


@lru_cache(maxsize=512)
def _cover(same: SameCluster, key: Degrees) -> Cover:
    return Cover(KindsReach(same.cluster, key, DEFAULT_REACH))
