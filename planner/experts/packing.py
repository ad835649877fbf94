"""Replica counts, packing and its improvement by swaps, for many layers at once in numpy.

A batch row is one independent packing (a layer, or one node of a layer when groups are kept). Loads have the
shape [rows, windows, experts]; a replica's load is its expert's over its replica count. Longest processing
time first (Graham 1969), then the best exchange from the fullest GPU until none helps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.problem import Ids, Loads, Slots, SlotShape
from meshwright.planner.solvers.clock import current_end_s, is_over, until
from meshwright.planner.solvers.processes import ProcessPool

# Independent packings of one shape, solved together: a row is a layer, or one node of a layer.


LOAD_ROUNDING = 1e-6
"""Relative. CP-SAT's loads are rounded to a ten-millionth of the mean: a smaller gap is none."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Packings of one shape.

    Parameters
    ----------
    loads
        [rows, windows, experts], in units of the mean GPU load of the layer.
    needed
        [rows], value that a row need not be below: what another node of the layer reaches at best.
    spread_nodes
        Nodes over which replicas of an expert are spread; 1 for no such limit.
    """

    loads: Loads
    slots: int
    gpus: int
    needed: Loads
    spread_nodes: int = 1

    def take(self, index: NDArray[np.int64]) -> Rows:
        """The rows of `index`."""
        return replace(self, loads=self.loads[index], needed=self.needed[index])


@dataclass(frozen=True, kw_only=True)
class Solved:
    """Slots [rows, gpus, slots of a GPU], value = largest GPU load over the mean [rows], its bound [rows]."""

    slots: Slots
    value: Loads
    bound: Loads

    @property
    def gap(self) -> Loads:
        """Value over bound, minus 1; 0 below what rounding can tell."""
        gap = self.value / self.bound - 1
        return np.asarray(np.where(gap <= LOAD_ROUNDING, 0.0, gap))


@dataclass
class State:
    """Best slots, value and bound of every row so far."""

    slots: Slots
    value: Loads
    bound: Loads

    def target(self, rows: Rows, index: NDArray[np.int64]) -> Loads:
        """The least value that is worth reaching, for the rows of `index`.

        Parameters
        ----------
        rows
            Layers that are placed.
        index
            Numbers of the rows that are asked for.
        """
        return np.maximum(self.bound[index], rows.needed[index])

    def unsolved(self, rows: Rows, gap: float) -> NDArray[np.int64]:
        """Rows whose value is more than `gap` above their target, those without a placement among them.

        Parameters
        ----------
        rows
            Layers that are placed.
        gap
            Share above the target, from 0.
        """
        target = np.maximum(self.bound, rows.needed)
        return np.flatnonzero(self.value > target * (1 + gap))

    def offer(self, rows: Rows, index: NDArray[np.int64], slots: Slots) -> None:
        """Takes over the valid placements among `slots` that are better than the rows of `index`.

        Parameters
        ----------
        rows
            What is placed.
        index
            Rows that placements are offered to, [n].
        slots
            A placement for each, [n, gpus, slots of a GPU].
        """
        part = rows.take(index)
        value = value_of(part, slots)
        value[is_invalid(part, slots)] = np.inf
        better = value < self.value[index]
        self.slots[index[better]] = slots[better]
        self.value[index[better]] = value[better]

    def offer_best(self, rows: Rows, row: int, slots: Slots) -> None:
        """The same for several placements [tries, gpus, slots of a GPU] of one row.

        Parameters
        ----------
        rows
            What is placed.
        row
            That placements are offered to.
        slots
            Placements of it, [tries, gpus, slots of a GPU].
        """
        for tried in slots:
            self.offer(rows, np.array([row]), tried[None])


def value_of(rows: Rows, slots: Slots) -> Loads:
    """Largest GPU load over the mean, worst window, [rows].

    Parameters
    ----------
    rows
        Layers that are placed, with loads [rows, windows, experts].
    slots
        Expert of each slot, [rows, gpus, slots of a GPU].
    """
    gpu = SlotPacking(slots=slots, loads=rows.loads).gpu_loads()
    return np.asarray(gpu.max(axis=(1, 2)))


def is_invalid(rows: Rows, slots: Slots) -> NDArray[np.bool_]:
    """Rows whose slots hold an expert twice on a GPU or break the spread.

    Parameters
    ----------
    rows
        Layers that are placed, and over how many nodes replicas are to be spread.
    slots
        Expert of each slot, [rows, gpus, slots of a GPU].
    """
    invalid = has_duplicates(slots)
    if rows.spread_nodes > 1:
        experts = rows.loads.shape[2]
        for row, row_slots in enumerate(slots):
            by_node = row_slots.reshape(rows.spread_nodes, -1)
            counts = np.stack([np.bincount(node, minlength=experts) for node in by_node])
            allowed = -(-counts.sum(axis=0) // rows.spread_nodes)
            invalid[row] |= bool((counts.max(axis=0) > allowed).any())
    return np.asarray(invalid)


def by_layer(loads: Loads, gpus: int) -> Loads:
    """Loads over the mean GPU load, [layers, windows, experts], from [windows, layers, experts].

    Parameters
    ----------
    loads
        Tokens of each expert, [windows, layers, experts].
    gpus
        That share them.
    """
    relative = loads * (gpus / loads.sum(axis=2, keepdims=True))
    return np.ascontiguousarray(np.swapaxes(relative, 0, 1))


# Processes that share out independent rows. What comes back does not depend on how many there are.


Job = TypeVar("Job")
JobResult = TypeVar("JobResult")


def _done_until(end_s: float, work: Callable[[Job], JobResult], job: Job) -> JobResult:
    """A job in another process, under the time limit of this one."""
    with until(end_s):
        return work(job)


class Crew:
    """Starts its processes when first needed, and ends them on leaving the `with` block."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool = ProcessPool(workers)

    def map(self, work: Callable[[Job], JobResult], jobs: Sequence[Job]) -> list[JobResult]:
        """`work` done on every job, in their order; here if there is one worker or one job.

        Parameters
        ----------
        work
            What is done; a function that other processes can import.
        jobs
            What it is done on.
        """
        if self.workers <= 1 or len(jobs) < 2:
            return [work(job) for job in jobs]
        done = partial(_done_until, current_end_s(), work)
        tasks = ((index, partial(done, job)) for index, job in enumerate(jobs))
        # What no process could do, this one does itself.
        results = dict(self._pool.results(tasks, lambda index: work(jobs[index])))
        return [results[index] for index in range(len(jobs))]

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        # No job is under way, or nobody wants its result any more.
        self._pool.end()


_BIG = 1e30


@dataclass
class SlotPacking:
    """Slots of every row, GPU by GPU."""

    slots: Slots
    """Expert in each slot, [rows, gpus, slots of a GPU]."""
    loads: Loads
    """[rows, windows, experts]."""

    @property
    def counts(self) -> Slots:
        """Replicas of each expert, [rows, experts]."""
        rows, experts = len(self.slots), self.loads.shape[2]
        flat = (self.slots.reshape(rows, -1) + experts * np.arange(rows)[:, None]).ravel()
        return np.asarray(np.bincount(flat, minlength=rows * experts).reshape(rows, experts))

    def gpu_loads(self) -> Loads:
        """Load of each GPU, [rows, windows, gpus]."""
        return np.asarray(slot_loads(self.loads / self.counts[:, None, :], self.slots).sum(axis=3))

    def balance(self) -> Loads:
        """Largest over mean GPU load, the worst window, [rows]."""
        gpu = self.gpu_loads()
        return np.asarray((gpu.max(axis=2) / gpu.mean(axis=2)).max(axis=1))


def slot_loads(replica: Loads, slots: Slots) -> Loads:
    """Loads of replicas [rows, windows, experts] laid out by slot, [rows, windows, gpus, slots].

    Parameters
    ----------
    replica
        Load of one replica of each expert, [rows, windows, experts].
    slots
        Expert of each slot, [rows, gpus, slots of a GPU].
    """
    rows, windows, _ = replica.shape
    index = np.broadcast_to(slots.reshape(rows, 1, -1), (rows, windows, slots[0].size))
    laid = np.take_along_axis(replica, index, axis=2)
    return np.asarray(laid.reshape(rows, windows, *slots.shape[1:]))


def greedy_counts(load: Loads, slots: int, most_replicas: int) -> Slots:
    """Replica counts [rows, experts] that minimise the largest replica load, by one window [rows, experts].

    One replica more for the hottest until `slots` are used. Exact: an exchange
    argument shows that no other counts have a smaller largest share.

    Parameters
    ----------
    load
        Of one window, [rows, experts].
    slots
        Of a row.
    most_replicas
        Of an expert.
    """
    rows, experts = load.shape
    counts = np.ones((rows, experts), dtype=np.int64)
    share = load.copy() if most_replicas > 1 else np.full_like(load, -1.0)
    everyone = np.arange(rows)
    for _ in range(slots - experts):
        hottest = share.argmax(axis=1)
        counts[everyone, hottest] += 1
        now = counts[everyone, hottest]
        share[everyone, hottest] = np.where(
            now < most_replicas, load[everyone, hottest] / now, -1.0
        )
    return counts


def pack(loads: Loads, counts: Slots, gpus: int, spread_nodes: int = 1) -> SlotPacking:
    """Longest processing time first: replicas in falling order, each to the least loaded GPU that may.

    All replicas of an expert are laid at once, on as many different GPUs. A replica for which only GPUs that
    hold its expert have room left is stranded; `_repair` mends those few cases.
    With `spread_nodes` N, a node, one of N equal runs of GPUs, gets at most ceil(c / N) of c replicas.

    Parameters
    ----------
    loads
        [rows, windows, experts].
    counts
        Replicas of each expert, [rows, experts].
    gpus
        Of a row.
    spread_nodes
        Equal runs of GPUs over which replicas are spread; 1 for no such limit.
    """
    rows, windows, experts = loads.shape
    total = int(counts[0].sum())
    per_gpu = total // gpus
    replica = loads / counts[:, None, :]
    size = replica.max(axis=1)
    order = np.argsort(-size, axis=1, kind="stable")
    by_slot = np.repeat(order.ravel(), np.take_along_axis(counts, order, axis=1).ravel()).reshape(
        rows, total
    )
    slots = np.full((rows, gpus, per_gpu), -1, dtype=np.int64)
    is_on_gpu = np.zeros((rows, gpus, experts), dtype=bool)
    used = np.zeros((rows, gpus), dtype=np.int64)
    load = np.zeros((rows, windows, gpus))
    everyone = np.arange(rows)
    for step in range(total):
        expert = by_slot[:, step]
        weight = replica[everyone, :, expert]
        score = load[:, 0] if windows == 1 else (load + weight[:, :, None]).max(axis=1)
        barred = used >= per_gpu
        taken = is_on_gpu[everyone, :, expert]
        if spread_nodes > 1:
            there = taken.reshape(rows, spread_nodes, -1).sum(axis=2)
            full = there >= -(-counts[everyone, expert] // spread_nodes)[:, None]
            taken = taken | np.repeat(full, gpus // spread_nodes, axis=1)
        score = score + _BIG * (barred * 2 + taken)
        gpu = score.argmin(axis=1)
        slots[everyone, gpu, used[everyone, gpu]] = expert
        is_on_gpu[everyone, gpu, expert] = True
        used[everyone, gpu] += 1
        load[everyone, :, gpu] += weight
    packing = SlotPacking(slots=slots, loads=loads)
    _repair(packing)
    return packing


def _repair(packing: SlotPacking) -> None:
    """Exchanges an expert that a GPU holds twice with a slot elsewhere, so that neither GPU has one twice."""
    for row in np.flatnonzero(has_duplicates(packing.slots)):
        slots = packing.slots[row]
        for gpu in range(len(slots)):
            while True:
                here = slots[gpu]
                twice = [i for i in range(len(here)) if here[i] in here[:i]]
                if not twice or not _exchange(slots, gpu, twice[0]):
                    break


def _exchange(slots: Slots, gpu: int, index: int) -> bool:
    expert = slots[gpu, index]
    for other_gpu in range(len(slots)):
        if other_gpu == gpu or expert in slots[other_gpu]:
            continue
        for place, candidate in enumerate(slots[other_gpu]):
            if candidate not in slots[gpu]:
                slots[gpu, index], slots[other_gpu, place] = candidate, expert
                return True
    return False


def has_duplicates(slots: Slots) -> NDArray[np.bool_]:
    """Whether a GPU holds an expert twice, [...] for slots [..., gpus, slots of a GPU].

    Parameters
    ----------
    slots
        Expert of each slot, [..., gpus, slots of a GPU].
    """
    ordered = np.sort(slots, axis=-1)
    return np.asarray((ordered[..., 1:] == ordered[..., :-1]).any(axis=(-1, -2)))


def exchange_to_improve(
    packing: SlotPacking, rounds: int, stop_at: Loads, spread_nodes: int = 1
) -> None:
    """Best exchange between the fullest GPU and any other, in place, until none helps.

    Each round takes one
    exchange in every open row: that whose larger GPU load afterwards, over the windows, is smallest.

    Parameters
    ----------
    packing
        Slots and loads of all rows.
    rounds
        Exchanges of a row, at most.
    stop_at
        Largest GPU loads that are good enough, [rows], in the unit of the loads.
    spread_nodes
        As `pack` takes it.
    """
    counts = packing.counts
    weight = slot_loads(packing.loads / counts[:, None, :], packing.slots)
    is_on_gpu = np.zeros(
        (len(packing.slots), packing.slots.shape[1], packing.loads.shape[2]), dtype=bool
    )
    np.put_along_axis(is_on_gpu, packing.slots, True, axis=2)
    most_on_node = -(-counts // spread_nodes) if spread_nodes > 1 else None
    open_rows = np.arange(len(packing.slots))
    for _ in range(rounds):
        gpu = weight[open_rows].sum(axis=3)
        open_rows = open_rows[gpu.max(axis=(1, 2)) > stop_at[open_rows]]
        if not len(open_rows) or is_over():
            return
        open_rows = _round(
            packing.slots,
            weight,
            is_on_gpu,
            open_rows,
            most_on_node=most_on_node,
            nodes=spread_nodes,
        )


def _round(
    slots: Slots,
    weight: Loads,
    is_on_gpu: NDArray[np.bool_],
    rows: NDArray[np.int64],
    *,
    most_on_node: Slots | None,
    nodes: int,
) -> NDArray[np.int64]:
    """One exchange in each row; returns the rows where there was one that helps."""
    w, s = weight[rows], slots[rows]
    n, _, gpus, per_gpu = w.shape
    load = w.sum(axis=3)
    every = np.arange(n)
    worst = load.max(axis=1).argmax(axis=1)
    top = load.max(axis=(1, 2))
    worst_weight, worst_experts = w[every, :, worst], s[every, worst]
    # shed[r, k, i, g, j]: what the fullest GPU sheds when its slot i changes places with slot j of GPU g.
    shed = worst_weight[:, :, :, None, None] - w[:, :, None, :, :]
    remaining = load[every, :, worst][:, :, None, None, None] - shed
    gained = load[:, :, None, :, None] + shed
    after = np.maximum(remaining, gained).max(axis=1)
    has_worst_expert = is_on_gpu[
        rows[:, None, None], np.arange(gpus)[None, None, :], worst_experts[:, :, None]
    ]
    worst_has_expert = is_on_gpu[rows[:, None, None], worst[:, None, None], s]
    if most_on_node is not None:
        away_is_full, home_is_full = _spread_limits(
            is_on_gpu, rows, slots, worst=worst, most_on_node=most_on_node, nodes=nodes
        )
        has_worst_expert, worst_has_expert = (
            has_worst_expert | away_is_full,
            worst_has_expert | home_is_full,
        )
    after += _BIG * has_worst_expert[:, :, :, None]
    after += _BIG * worst_has_expert[:, None, :, :]
    flat = after.reshape(n, -1)
    best = flat.argmin(axis=1)
    helps = flat[every, best] < top * (1 - 1e-9)
    i, g, j = np.unravel_index(best, (per_gpu, gpus, per_gpu))
    improved = np.flatnonzero(helps)
    row = rows[improved]
    a = worst[improved]
    g = g[improved]
    i = i[improved]
    j = j[improved]
    worst_expert = slots[row, a, i].copy()
    other_expert = slots[row, g, j].copy()
    slots[row, a, i], slots[row, g, j] = other_expert, worst_expert
    worst_load = weight[row, :, a, i].copy()
    other_load = weight[row, :, g, j].copy()
    weight[row, :, a, i], weight[row, :, g, j] = other_load, worst_load
    is_on_gpu[row, a, worst_expert], is_on_gpu[row, a, other_expert] = False, True
    is_on_gpu[row, g, other_expert], is_on_gpu[row, g, worst_expert] = False, True
    return np.asarray(row)


def _spread_limits(
    is_on_gpu: NDArray[np.bool_],
    rows: NDArray[np.int64],
    slots: Slots,
    *,
    worst: NDArray[np.int64],
    most_on_node: Slots,
    nodes: int,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Where an exchange would put more replicas of an expert on a node than `most_on_node` allows.

    [rows, slots of the fullest GPU, gpus] for what it gives, [rows, gpus, slots] for what it gets.
    """
    n, gpus, experts = len(rows), is_on_gpu.shape[1], is_on_gpu.shape[2]
    size = gpus // nodes
    full = (
        is_on_gpu[rows].reshape(n, nodes, size, experts).sum(axis=2)
        >= most_on_node[rows][:, None, :]
    )
    home = worst // size
    node_of = np.arange(gpus) // size
    worst_experts = slots[rows, worst]
    every = np.arange(n)
    away = node_of[None, :] != home[:, None]
    gives = (
        full[every[:, None, None], node_of[None, None, :], worst_experts[:, :, None]]
        & away[:, None, :]
    )
    gets = full[every[:, None, None], home[:, None, None], slots[rows]] & away[:, :, None]
    return gives, gets


# What others start with: experts in order, and the greedy balancer of DeepSeek's EPLB.
#
# The greedy is written from its description (github.com/deepseek-ai/EPLB): the hottest replica gets the next
# slot, then replicas go by falling load to the least loaded GPU with room; groups go to nodes first, whole.
# It does not forbid two replicas of an expert on one GPU.


def in_order(layers: int, experts: int, shape: SlotShape) -> Slots:
    """Slot s holds expert s modulo their number, as vLLM, SGLang and Megatron start.

    Parameters
    ----------
    layers, experts
        Of the model.
    shape
        Of slots, GPUs and nodes.

    Returns
    -------
    Slots
        [layers, gpus, slots of a GPU].
    """
    row = np.arange(shape.slots) % experts
    return np.tile(row, (layers, 1)).reshape(layers, shape.gpus, shape.per_gpu)


def greedy_placement(load: Loads, shape: SlotShape, groups: int = 1) -> Slots:
    """The greedy balancer's placement of one layer.

    Parameters
    ----------
    load
        Of each expert, [experts].
    shape
        Slots, GPUs and nodes.
    groups
        Routing groups kept whole on a node; 1 for none. They divide evenly over the nodes.

    Returns
    -------
    Slots
        [gpus, slots of a GPU].
    """
    nodes = shape.nodes if groups > 1 else 1
    size = len(load) // groups
    of_groups = load.reshape(groups, size).sum(axis=1)
    rows = []
    for part in _least_loaded(of_groups, nodes):
        of_part = np.concatenate([np.arange(group * size, (group + 1) * size) for group in part])
        counts = greedy_counts(load[of_part][None], shape.slots // nodes, shape.slots)[0]
        replicas = np.repeat(of_part, counts)
        weights = np.repeat(load[of_part] / counts, counts)
        rows += [replicas[gpu] for gpu in _least_loaded(weights, shape.gpus // nodes)]
    return np.stack(rows)


def _least_loaded(weights: Loads, bins: int) -> list[Ids]:
    """Items to bins of one size: falling weights, each to the lightest bin with room."""
    room = np.full(bins, len(weights) // bins)
    load = np.zeros(bins)
    chosen: list[list[int]] = [[] for _ in range(bins)]
    for item in np.argsort(-weights, kind="stable"):
        target = int(np.argmin(np.where(room > 0, load, np.inf)))
        chosen[target].append(int(item))
        room[target] -= 1
        load[target] += weights[item]
    return [np.array(items, dtype=np.int64) for items in chosen]
