"""Few moves that help most, one after another, from a placement that is in use: a curve of balance by moves.

A move puts an expert's weights on a GPU that did not hold it. Two experts change places (two moves), or a
slot of an expert with other replicas takes another expert (one move, and the replica counts change).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.params import MOVES
from meshwright.planner.experts.problem import Loads, Slots


@dataclass(frozen=True, kw_only=True)
class Step:
    """A placement on the way: slots [gpus, per GPU], moves from the start, largest GPU load."""

    slots: Slots
    moves: int
    value: float


@dataclass(frozen=True, kw_only=True)
class Current:
    """One packing in use, a layer's or one of its nodes': slots [gpus, per GPU] of experts by number."""

    slots: Slots
    loads: Loads
    """Over the mean GPU load of the layer, [windows, experts]; experts that are not here have none."""
    spread_nodes: int = 1

    def value(self, slots: Slots) -> float:
        """Largest GPU load, the worst window."""
        return float(self._gpu_loads(slots).max())

    def _gpu_loads(self, slots: Slots) -> Loads:
        counts = np.maximum(np.bincount(slots.ravel(), minlength=self.loads.shape[1]), 1)
        return np.asarray((self.loads / counts)[:, slots].sum(axis=2))

    def moves(self, slots: Slots) -> int:
        """(expert, GPU) pairs of `slots` that the current placement does not hold."""
        return int((~_held_by(self.slots, slots)).sum())

    def spread(self, slots: Slots) -> bool:
        """Whether replicas are on as many nodes as they have to be."""
        if self.spread_nodes == 1:
            return True
        experts = self.loads.shape[1]
        by_node = [np.bincount(n, minlength=experts) for n in slots.reshape(self.spread_nodes, -1)]
        here = np.stack(by_node)
        return bool((here.max(axis=0) <= -(-here.sum(axis=0) // self.spread_nodes)).all())

    def steps(self, most_moves: int) -> Iterator[Step]:
        """The current placement, then better and better ones of at most so many moves."""
        slots, moves = self.slots, 0
        value = self.value(slots)
        yield Step(slots=slots, moves=0, value=value)
        # Going back over a move frees it, so the count of steps is bounded apart from that of moves.
        for _ in range(2 * most_moves):
            found = self._best(slots, moves, most_moves)
            if found is None:
                return
            slots, moves = found, self.moves(found)
            yield Step(slots=slots, moves=moves, value=self.value(slots))

    def _best(self, slots: Slots, moves: int, most_moves: int) -> Slots | None:
        """The candidate with the largest fall of the norm for each move that it costs."""
        load = self._gpu_loads(slots)
        hottest = int(load.max(axis=0).argmax())
        norm = _norm(load[None])[0]
        candidates = [
            (gain, gpu, slot, expert, other_slot)
            for gains, where in (
                self._swaps(slots, load, hottest),
                self._takes(slots, load, hottest),
            )
            for gain, (gpu, slot, expert, other_slot) in _largest(norm - gains, where)
        ]
        best: tuple[float, Slots] | None = None
        for gain, gpu, slot, expert, other_slot in sorted(candidates, key=lambda item: -item[0])[
            : MOVES.candidates
        ]:
            if gain <= 1e-9 * norm:
                break
            new = slots.copy()
            if other_slot >= 0:
                new.ravel()[other_slot] = new[gpu, slot]
            new[gpu, slot] = expert
            cost = self.moves(new) - moves
            if moves + cost > most_moves or not self.spread(new):
                continue
            gain_per_move = gain / max(cost, 0.5)
            if best is None or gain_per_move > best[0]:
                best = (gain_per_move, new)
        return None if best is None else best[1]

    def _swaps(self, slots: Slots, load: Loads, gpu: int) -> tuple[Loads, NDArray[np.int64]]:
        """Norms after each exchange of a slot of `gpu` with one elsewhere, and (gpu, slot, expert, other)."""
        counts = np.bincount(slots.ravel(), minlength=self.loads.shape[1])
        weight = (self.loads / np.maximum(counts, 1))[:, slots]
        is_on_gpu = np.zeros((len(slots), self.loads.shape[1]), dtype=bool)
        np.put_along_axis(is_on_gpu, slots, True, axis=1)
        slot, away, place = np.indices((slots.shape[1], *slots.shape)).reshape(3, -1)
        worst_expert, away_expert = slots[gpu][slot], slots[away, place]
        keep = (away != gpu) & ~is_on_gpu[away, worst_expert] & ~is_on_gpu[gpu, away_expert]
        slot, away, place, away_expert = slot[keep], away[keep], place[keep], away_expert[keep]
        shed = weight[:, gpu, slot] - weight[:, away, place]
        after = np.repeat(load[None], len(slot), axis=0)
        after[:, :, gpu] -= shed.T
        after[np.arange(len(slot)), :, away] += shed.T
        where = np.stack(
            [np.full(len(slot), gpu), slot, away_expert, away * slots.shape[1] + place], axis=1
        )
        return _norm(after), where

    def _takes(self, slots: Slots, load: Loads, gpu: int) -> tuple[Loads, NDArray[np.int64]]:
        """The same where a slot takes another expert: one of `gpu` any, one elsewhere an expert of `gpu`."""
        experts = self.loads.shape[1]
        counts = np.bincount(slots.ravel(), minlength=experts)
        is_on_gpu = np.zeros((len(slots), experts), dtype=bool)
        np.put_along_axis(is_on_gpu, slots, True, axis=1)
        here = np.stack(
            np.meshgrid(np.arange(slots.shape[1]), np.flatnonzero(counts), indexing="ij")
        )
        of_gpu = np.stack([np.full(here[0].size, gpu), here[0].ravel(), here[1].ravel()])
        elsewhere = np.indices((*slots.shape, slots.shape[1])).reshape(3, -1)
        elsewhere[2] = slots[gpu][elsewhere[2]]
        g, slot, new = np.concatenate([of_gpu, elsewhere], axis=1)
        old = slots[g, slot]
        keep = (counts[old] > 1) & ~is_on_gpu[g, new]
        g, slot, new, old = g[keep], slot[keep], new[keep], old[keep]
        share = self.loads / np.maximum(counts, 1)
        rise_of_old = (self.loads / np.maximum(counts - 1, 1) - share)[:, old]
        fall_of_new = (self.loads / (counts + 1) - share)[:, new]
        after = (
            load[None]
            + rise_of_old.T[:, :, None] * is_on_gpu.T[old][:, None, :]
            + fall_of_new.T[:, :, None] * (is_on_gpu.T[new][:, None, :])
        )
        rows = np.arange(len(g))
        after[rows, :, g] += ((self.loads / (counts + 1))[:, new] - (share[:, old] + rise_of_old)).T
        return _norm(after), np.stack([g, slot, new, np.full(len(g), -1)], axis=1)


def _held_by(current: Slots, slots: Slots) -> NDArray[np.bool_]:
    """Whether each slot's expert is on its GPU in `current` too, [gpus, per GPU]."""
    return np.asarray((slots[:, :, None] == current[:, None, :]).any(axis=2))


def _norm(load: Loads) -> Loads:
    """Sum of a high power of the loads [candidates, windows, gpus], [candidates]."""
    return np.asarray((load**MOVES.norm_power).sum(axis=(1, 2)))


def _largest(
    gain: Loads, where: NDArray[np.int64]
) -> list[tuple[float, tuple[int, int, int, int]]]:
    order = np.argsort(-gain, kind="stable")[: MOVES.candidates]
    return [
        (float(gain[i]), (int(w[0]), int(w[1]), int(w[2]), int(w[3])))
        for i in order
        for w in [where[i]]
    ]
