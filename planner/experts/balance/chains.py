"""Two exchanges in a row from the fullest GPU: what it sheds is passed on, where one does not help."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.balance.packing import SlotPacking, slot_loads
from meshwright.planner.experts.problem import Loads, Slots

_WIDE = 48
"""First exchanges, those that fill the other GPU least, for which every second one is tried."""
_BIG = 1e30


def pass_on(packing: SlotPacking, rounds: int, stop_at: Loads) -> None:
    """Improves every row in place until neither one exchange with the fullest GPU nor two help.

    `stop_at` [rows] is a largest GPU load that is good enough.
    """
    if packing.slots.shape[1] < 2:
        return
    replica = packing.loads / packing.counts[:, None, :]
    weight = slot_loads(replica, packing.slots)
    for row, slots in enumerate(packing.slots):
        _Chain(slots, weight[row], packing.loads.shape[2]).run(rounds, float(stop_at[row]))


class _Chain:
    """One row; slots [gpus, slots of a GPU] change in place."""

    def __init__(self, slots: Slots, weight: Loads, experts: int) -> None:
        self._slots, self._weight = slots, weight
        self._load = weight.sum(axis=2)
        self._held = np.zeros((len(slots), experts), dtype=bool)
        np.put_along_axis(self._held, slots, True, axis=1)

    def run(self, rounds: int, stop_at: float) -> None:
        for _ in range(rounds):
            full = self._load.max(axis=0)
            a = int(full.argmax())
            if full[a] <= stop_at or not self._step(a, float(full[a]), stop_at):
                return

    def _step(self, a: int, top: float, stop_at: float) -> bool:
        """The better of the best exchange and the best two in a row; False if neither lowers the fullest."""
        shape = (self._slots.shape[1], *self._slots.shape)
        left, gained = self._after(self._weight[:, a], self._load[:, a])
        barred = self._barred(self._held[a][None], self._slots[a][None])[0]
        barred[:, a] = True
        one = np.maximum(left, gained) + _BIG * barred
        best = int(one.argmin())
        reached = float(one.flat[best])
        second: tuple[int, int, int] | None = None
        if reached > stop_at:
            starts = np.flatnonzero(~barred.ravel() & (left.ravel() < top * (1 - 1e-9)))
            starts = starts[np.argsort(gained.ravel()[starts], kind="stable")[:_WIDE]]
            if len(starts):
                two = self._two(a, starts, shape, left.ravel()[starts])
                if two[0] < min(reached, top) * (1 - 1e-9):
                    reached, best, second = two[0], two[1], two[2]
        if reached >= top * (1 - 1e-9):
            return False
        i, b, j = (int(x) for x in np.unravel_index(best, shape))
        self._swap(a, i, b, j)
        if second is not None:
            self._swap(b, *second)
        return True

    def _two(
        self, a: int, starts: NDArray[np.int64], shape: tuple[int, ...], left: Loads
    ) -> tuple[float, int, tuple[int, int, int]]:
        """Largest load of the GPUs touched after the best two exchanges, the first one, the second one."""
        i, b, j = np.unravel_index(starts, shape)
        every = np.arange(len(starts))
        slots, held = self._slots[b], self._held[b]
        weight = np.moveaxis(self._weight[:, b], 1, 0)
        load = self._load[:, b].T + (self._weight[:, a, i] - self._weight[:, b, j]).T
        held[every, slots[every, j]], held[every, self._slots[a, i]] = False, True
        slots[every, j] = self._slots[a, i]
        weight[every, :, j] = self._weight[:, a, i].T
        gone, gained = self._after(weight, load)
        barred = self._barred(held, slots)
        barred[:, :, a] = True
        barred[every, :, b] = True
        value = np.maximum(np.maximum(gone, gained), left[:, None, None, None]) + _BIG * barred
        best = int(value.argmin())
        k, p, g, q = (int(x) for x in np.unravel_index(best, value.shape))
        return float(value.flat[best]), int(starts[k]), (p, g, q)

    def _after(self, weight: Loads, load: Loads) -> tuple[Loads, Loads]:
        """Loads, worst window, of a GPU [..., windows, slots] and of every other after each exchange."""
        given = weight[..., :, None, None] - self._weight[:, None]
        own = load[..., None, None, None] - given
        other = self._load[:, None, :, None] + given
        return np.asarray(own.max(axis=-4)), np.asarray(other.max(axis=-4))

    def _barred(self, held: NDArray[np.bool_], slots: Slots) -> NDArray[np.bool_]:
        """Exchanges that put an expert twice on a GPU, [n, slots, gpus, slots], for n GPUs' slots."""
        theirs = np.moveaxis(self._held[:, slots], 0, 2)
        mine = held[:, self._slots]
        return np.asarray(theirs[..., None] | mine[:, None])

    def _swap(self, a: int, i: int, b: int, j: int) -> None:
        mine, theirs = self._slots[a, i], self._slots[b, j]
        self._held[a, mine], self._held[a, theirs] = False, True
        self._held[b, theirs], self._held[b, mine] = False, True
        self._slots[a, i], self._slots[b, j] = theirs, mine
        kept = self._weight[:, a, i].copy()
        self._weight[:, a, i], self._weight[:, b, j] = self._weight[:, b, j].copy(), kept
        self._load[:, a], self._load[:, b] = (
            self._weight[:, a].sum(axis=1),
            self._weight[:, b].sum(axis=1),
        )
