"""The mapping problem on an irregular allocation, and what an assignment of it costs, exactly.

A *slot* is what one cell of the grid of pipeline stages and replicas runs on: a node, or a few nodes that
one tensor group fills, or an equal share of a node. Slots of one leaf are interchangeable. An assignment
gives the leaf of slot j of stage s; the cost counts what crosses the up-links of leaves and pods.

Bytes are those of one step, sent up one up-link in one direction; what comes down is as much again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InfeasibleError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

LARGEST_SLOTS = 32_768


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a step puts on an up-link, by the groups that it cuts.

    A ring over a group sends its volume up every block that holds some but not all of the group. An
    all-to-all over E slots of which k are in a block sends `expert_bytes` k (E - k) / E.
    """

    ring_bytes: float = 0.0
    """All data-parallel rings of one stage, a block that holds some but not all of its slots."""
    hop_bytes: float = 0.0
    """Between a slot and the same slot of the next stage."""
    wrap_bytes: float = 0.0
    """Between the last stage and the first, with virtual stages."""
    context_slots: int = 1
    """Consecutive slots that one context-parallel group spans."""
    context_bytes: float = 0.0
    """Rings of one context group."""
    expert_slots: int = 1
    """Consecutive slots that one expert-parallel group spans."""
    expert_bytes: float = 0.0
    """What a slot sends to its whole expert group, itself among the receivers."""
    expert_ring_bytes: float = 0.0
    """Gradient rings of the experts that one slot holds, over the slots with the same experts."""


@dataclass(frozen=True, kw_only=True)
class MappingProblem:
    """Stages to place, leaves to place them on, and what crossing an up-link costs."""

    stages: int
    slots: int
    """Slots of one stage: replicas times what one replica of a stage spans."""
    traffic: Traffic
    leaf_slots: tuple[int, ...]
    """Free slots of each leaf."""
    leaf_s_per_byte: tuple[float, ...]
    leaf_pod: tuple[int, ...]
    """The pod of each leaf, from 0."""
    pod_s_per_byte: tuple[float, ...]
    host_leaves: tuple[int, ...] = field(default=())
    """The leaf of every free slot in hostname order; leaf by leaf where it is not given."""

    def __post_init__(self) -> None:
        if len({len(self.leaf_slots), len(self.leaf_s_per_byte), len(self.leaf_pod)}) != 1:
            raise InfeasibleError("leaves: slots, costs and pods must have one entry each")
        if self.leaf_pod and not 0 <= min(self.leaf_pod) <= max(self.leaf_pod) < len(
            self.pod_s_per_byte
        ):
            raise InfeasibleError("leaf_pod: a leaf hangs on a pod without a cost")
        if self.needed > LARGEST_SLOTS:
            raise InfeasibleError(
                f"{self.needed} slots are more than the {LARGEST_SLOTS} that are mapped"
            )
        for size in (self.traffic.context_slots, self.traffic.expert_slots):
            if self.slots % size:
                raise InfeasibleError(
                    f"groups of {size} slots do not fill the {self.slots} of a stage"
                )

    @property
    def needed(self) -> int:
        """Slots in use."""
        return self.stages * self.slots

    @property
    def pods(self) -> int:
        """Pods."""
        return len(self.pod_s_per_byte)

    @cached_property
    def pod_of(self) -> IntArray:
        """The pod of each leaf, shape [leaves]."""
        return np.asarray(self.leaf_pod, dtype=np.int64)

    @cached_property
    def host_order(self) -> IntArray:
        """The leaf of every free slot in hostname order."""
        if self.host_leaves:
            return np.asarray(self.host_leaves, dtype=np.int64)
        return np.repeat(np.arange(len(self.leaf_slots)), self.leaf_slots)

    def check_room(self) -> None:
        """Raises InfeasibleError where there are fewer slots than needed."""
        if self.needed > sum(self.leaf_slots):
            raise InfeasibleError(f"{self.needed} slots needed, {sum(self.leaf_slots)} are free")

    def hostname_assignment(self) -> IntArray:
        """Ranks through the nodes in hostname order, stage by stage: what happens when nobody chooses."""
        return self.host_order[: self.needed].reshape(self.stages, self.slots)

    def group_bytes(self, largest: int) -> FloatArray:
        """The least that n slots of one stage in one block send up, without the pipeline.

        Exact where every group is one slot. Slots of a cut group are best together: k (E - k) is concave.

        Parameters
        ----------
        largest
            The largest n, at least 0.

        Returns
        -------
        FloatArray
            Bytes by n, shape [largest + 1].
        """
        t, n = self.traffic, np.arange(largest + 1)
        cut = (n > 0) & (n < self.slots)
        sent = np.where(cut, t.ring_bytes, 0.0)
        sent = sent + np.where(n % t.context_slots > 0, t.context_bytes, 0.0)
        if t.expert_slots > 1 or t.expert_ring_bytes:
            sent = sent + np.where(cut, [self._expert_bytes(int(k)) for k in n], 0.0)
        return np.asarray(sent, dtype=np.float64)

    def _expert_bytes(self, n: int) -> float:
        """With parts of at most m slots of a group: n // m parts of m and the rest.

        They touch m rings or more; those that the block holds whole, at most n over the groups, are not
        cut.
        """
        t, groups = self.traffic, self.slots // self.traffic.expert_slots

        def cut(k: int) -> float:
            return t.expert_bytes * k * (t.expert_slots - k) / t.expert_slots

        least = inf
        for m in range(1, max(min(n, t.expert_slots), 1) + 1):
            all_to_all = n // m * cut(m) + cut(n % m)
            cut_rings = max(m - n // groups, 0)
            least = min(least, all_to_all + cut_rings * t.expert_ring_bytes)
        return least

    @property
    def table_states(self) -> int:
        """Entries of a dynamic programme over the patterns of all leaves (`patterns.PatternPricing`)."""
        room = min(max(self.leaf_slots), self.needed)
        per_leaf = (room + 1) * (min(room, self.slots) + 1) * self.stages
        return len(self.leaf_slots) * per_leaf

    def without_pods(self) -> MappingProblem:
        """The same with one pod."""
        return replace(self, leaf_pod=(0,) * len(self.leaf_slots), pod_s_per_byte=(0.0,))

    def only_pods(self) -> MappingProblem:
        """The same with pods that are one leaf each: what pods' up-links cost, and nothing else."""
        room = np.bincount(self.pod_of, weights=self.leaf_slots, minlength=self.pods)
        return replace(
            self,
            leaf_slots=tuple(int(slots) for slots in room),
            leaf_s_per_byte=self.pod_s_per_byte,
            leaf_pod=(0,) * self.pods,
            pod_s_per_byte=(0.0,),
            host_leaves=tuple(self.pod_of[self.host_order].tolist()),
        )


@dataclass(frozen=True, kw_only=True)
class Loads:
    """What an assignment puts on the up-links, bytes and seconds; arrays [leaves] and [pods]."""

    leaf_bytes: FloatArray
    pod_bytes: FloatArray
    leaf_s: FloatArray
    pod_s: FloatArray

    @property
    def total_s(self) -> float:
        """Busy seconds of all up-links together."""
        return float(self.leaf_s.sum() + self.pod_s.sum())

    @property
    def busiest_s(self) -> float:
        """Busy seconds of the busiest up-link."""
        return float(max(self.leaf_s.max(initial=0.0), self.pod_s.max(initial=0.0)))


def loads_of(problem: MappingProblem, assignment: IntArray) -> Loads:
    """What an assignment sends over every up-link, group by group.

    Parameters
    ----------
    assignment
        The leaf of every slot, shape [stages, slots].
    """
    leaf_bytes = _sent_up(problem, assignment, len(problem.leaf_slots))
    pod_bytes = _sent_up(problem, problem.pod_of[assignment], problem.pods)
    return Loads(
        leaf_bytes=leaf_bytes,
        pod_bytes=pod_bytes,
        leaf_s=leaf_bytes * np.asarray(problem.leaf_s_per_byte),
        pod_s=pod_bytes * np.asarray(problem.pod_s_per_byte),
    )


def check_assignment(problem: MappingProblem, assignment: IntArray) -> None:
    """Raises InfeasibleError where an assignment is not one of this problem.

    Parameters
    ----------
    problem
        Whose grid and leaves the assignment must fit.
    assignment
        The leaf of every slot; any shape is looked at, [stages, slots] accepted.

    Raises
    ------
    InfeasibleError
        For another shape, or where a leaf gives more slots than it has free.
    """
    if assignment.shape != (problem.stages, problem.slots):
        raise InfeasibleError(f"an assignment of shape {assignment.shape}")
    used = np.bincount(assignment.ravel(), minlength=len(problem.leaf_slots))
    if np.any(used > np.asarray(problem.leaf_slots)):
        raise InfeasibleError("an assignment uses more slots of a leaf than are free")


def _sent_up(problem: MappingProblem, where: IntArray, blocks: int) -> FloatArray:
    """Bytes up the link of every block, for the block `where[s, j]` of each slot; shape [blocks]."""
    t, sent = problem.traffic, np.zeros(blocks)
    sent += t.ring_bytes * cut_groups(where, blocks)
    stages, slots = where.shape
    if t.context_slots > 1:
        sent += t.context_bytes * cut_groups(where.reshape(-1, t.context_slots), blocks)
    if t.expert_slots > 1:
        members = held_by(where.reshape(-1, t.expert_slots), blocks)
        pairs = np.sum(members * (t.expert_slots - members), axis=0)
        sent += t.expert_bytes * pairs / t.expert_slots
    if t.expert_ring_bytes:
        rings = where.reshape(stages, -1, t.expert_slots).transpose(0, 2, 1)
        sent += t.expert_ring_bytes * cut_groups(rings.reshape(-1, slots // t.expert_slots), blocks)
    if stages > 1:
        sent += t.hop_bytes * _hops(where[:-1], where[1:], blocks)
        sent += t.wrap_bytes * _hops(where[-1:], where[:1], blocks)
    return sent


def counts_of(problem: MappingProblem, assignment: IntArray) -> IntArray:
    """Slots of each stage in each leaf, shape [leaves, stages].

    Parameters
    ----------
    problem
        Of the assignment.
    assignment
        The leaf of every slot, shape [stages, slots].
    """
    counts = np.zeros((len(problem.leaf_slots), problem.stages), dtype=np.int64)
    stages = np.repeat(np.arange(problem.stages), problem.slots)
    np.add.at(counts, (assignment.ravel(), stages), 1)
    return counts


def pod_counts_of(problem: MappingProblem, assignment: IntArray) -> IntArray:
    """Slots of each stage in each pod, shape [pods, stages].

    Parameters
    ----------
    problem
        Of the assignment.
    assignment
        The leaf of every slot, shape [stages, slots].
    """
    counts = np.zeros((problem.pods, problem.stages), dtype=np.int64)
    np.add.at(counts, problem.pod_of, counts_of(problem, assignment))
    return counts


def held_by(groups: IntArray, blocks: int) -> IntArray:
    """Members of each group [groups, members] in each block, shape [groups, blocks].

    Parameters
    ----------
    groups
        The block, from 0, of every member of every group; shape [groups, members].
    blocks
        How many blocks there are, above every number in `groups`.
    """
    rows = np.arange(len(groups))[:, None] * blocks
    counts = np.bincount((rows + groups).ravel(), minlength=len(groups) * blocks)
    return counts.reshape(len(groups), blocks)


def cut_groups(groups: IntArray, blocks: int) -> IntArray:
    """Groups of which a block holds some but not all members, shape [blocks].

    Parameters
    ----------
    groups
        The block of every member of every group, shape [groups, members].
    blocks
        How many blocks there are.
    """
    members = held_by(groups, blocks)
    return np.asarray(np.sum((members > 0) & (members < groups.shape[1]), axis=0), dtype=np.int64)


def _hops(first: IntArray, second: IntArray, blocks: int) -> IntArray:
    """Neighbours in different blocks, counted at both ends, shape [blocks]."""
    apart = first != second
    ends = np.concatenate([first[apart], second[apart]])
    return np.bincount(ends, minlength=blocks)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Blocks that a group touches: the most over all groups, and the mean."""

    data_parallel_max: int
    data_parallel_mean: float
    pipeline_max: int
    pipeline_mean: float

    @property
    def most(self) -> int:
        """Over groups of both kinds."""
        return max(self.data_parallel_max, self.pipeline_max)


def spread_of(where: IntArray) -> Spread:
    """How far groups reach, for the block `where[s, j]` of slot j of stage s.

    Parameters
    ----------
    where
        Blocks from 0, shape [stages, slots]: leaves, or the pods of leaves.
    """
    by_stage = [len(np.unique(row)) for row in where]
    by_replica = [len(np.unique(column)) for column in where.T]
    return Spread(
        data_parallel_max=max(by_stage),
        data_parallel_mean=float(np.mean(by_stage)),
        pipeline_max=max(by_replica),
        pipeline_mean=float(np.mean(by_replica)),
    )
