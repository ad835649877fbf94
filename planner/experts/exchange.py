"""Exchanges of replicas between GPUs that lower the blocks that tokens touch, under a cap that tightens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.experts.problem import Loads, Slots

Counts = NDArray[np.float32]
_MOST_PER_PASS = 400
_OVERLOAD = 20.0
"""What a token count's worth of load above the cap costs, in blocks."""


class Exchange:
    """Where every replica is; blocks touched and loads are kept up to date, exchange by exchange."""

    def __init__(
        self,
        *,
        expert: Slots,
        gpu: Slots,
        member: Counts,
        weight: Loads,
        levels: tuple[tuple[float, int], ...],
        most: Slots,
        node_gpus: int,
    ) -> None:
        """For each replica: `expert` and `gpu` [replicas], tokens that go to it `member` [replicas, tokens].

        `weight` [windows, replicas] is load over the mean GPU load, `levels` pairs of weight and GPUs of a
        block, `most` [experts] how often an expert may be on a node of `node_gpus`.
        """
        self.gpu = gpu.copy()
        self._expert, self._member, self._weight, self._most = expert, member, weight, most
        self._node_gpus = node_gpus
        gpus = int(gpu.max()) + 1
        self._levels = [(w, n, _sums(member, gpu // n)) for w, n in levels]
        self._load = np.stack([weight[:, gpu == g].sum(axis=1) for g in range(gpus)], axis=1)
        self._on_gpu = np.zeros((gpus, int(expert.max()) + 1), dtype=np.int64)
        np.add.at(self._on_gpu, (gpu, expert), 1)
        self._unit = _OVERLOAD * member.shape[1]

    def blocks(self) -> float:
        """Weighted number of blocks that all tokens touch."""
        return float(sum(w * int((here > 0).sum()) for w, _, here in self._levels))

    def overload(self, cap: float) -> float:
        """Largest GPU load above the cap."""
        return max(float(self._load.max()) - cap, 0.0)

    def settle(self, cap: float, passes: int) -> None:
        """Passes until none helps."""
        for _ in range(passes):
            if not self._one_pass(cap):
                return

    def kick(self, chance: np.random.Generator, size: int = 6) -> None:
        """Exchanges up to `size` pairs at random."""
        for a, b in chance.integers(0, len(self.gpu), (4 * size, 2)).tolist():
            if size and self._allowed(a, b):
                self._swap(a, b)
                size -= 1

    def _one_pass(self, cap: float) -> bool:
        """Prices every exchange at once, takes those that still help one by one; False if there was none."""
        cost = np.triu(self._block_change() + self._load_change(cap), 1)
        flat = cost.ravel()
        some = np.flatnonzero(flat < -0.5)
        some = some[np.argsort(flat[some], kind="stable")[:_MOST_PER_PASS]]
        taken = False
        for index in some.tolist():
            a, b = divmod(index, len(self.gpu))
            if self._allowed(a, b) and self._change(a, b, cap) < -0.5:
                self._swap(a, b)
                taken = True
        return taken

    def _block_change(self) -> NDArray[np.float64]:
        """Change of the weighted blocks if two replicas change places, [replicas, replicas]."""
        total = np.zeros((len(self.gpu), len(self.gpu)))
        for weight, n, here in self._levels:
            block = self.gpu // n
            alone = self._member * (here[block] == 1)
            enters = self._member @ (here == 0).T.astype(np.float32)
            both = alone @ self._member.T
            delta = enters[:, block] + enters[:, block].T + both + both.T
            delta -= alone.sum(axis=1)[:, None] + alone.sum(axis=1)[None, :]
            total += weight * np.where(block[:, None] == block[None, :], 0.0, delta)
        return total

    def _load_change(self, cap: float) -> NDArray[np.float64]:
        total = np.zeros((len(self.gpu), len(self.gpu)))
        for weight, load in zip(self._weight, self._load, strict=True):
            over = np.maximum(load - cap, 0)[self.gpu]
            given = weight[None, :] - weight[:, None]
            mine = load[self.gpu]
            total += np.maximum(mine[:, None] + given - cap, 0) - over[:, None]
            total += np.maximum(mine[None, :] - given - cap, 0) - over[None, :]
        total[self.gpu[:, None] == self.gpu[None, :]] = 0.0
        return np.asarray(total * self._unit)

    def _change(self, a: int, b: int, cap: float) -> float:
        """The exact change for one pair as things are now."""
        total = 0.0
        for weight, n, here in self._levels:
            home, away = int(self.gpu[a]) // n, int(self.gpu[b]) // n
            if home != away:
                only_a = (self._member[a] > self._member[b]).astype(bool)
                only_b = (self._member[b] > self._member[a]).astype(bool)
                total += weight * float(
                    (here[away][only_a] == 0).sum()
                    - (here[home][only_a] == 1).sum()
                    + (here[home][only_b] == 0).sum()
                    - (here[away][only_b] == 1).sum()
                )
        given = self._weight[:, b] - self._weight[:, a]
        for gpu, more in ((self.gpu[a], given), (self.gpu[b], -given)):
            load = self._load[:, gpu]
            change = np.maximum(load + more - cap, 0) - np.maximum(load - cap, 0)
            total += float(change.sum()) * self._unit
        return total

    def _allowed(self, a: int, b: int) -> bool:
        home, away = int(self.gpu[a]), int(self.gpu[b])
        first, second = int(self._expert[a]), int(self._expert[b])
        if home == away or first == second or self._on_gpu[away, first] or self._on_gpu[home, second]:
            return False
        if home // self._node_gpus == away // self._node_gpus:
            return True
        return self._room(away, first) and self._room(home, second)

    def _room(self, gpu: int, expert: int) -> bool:
        """Whether the node of a GPU may take one more replica of an expert."""
        start = gpu // self._node_gpus * self._node_gpus
        here = self._on_gpu[start : start + self._node_gpus, expert].sum()
        return bool(here < self._most[expert])

    def _swap(self, a: int, b: int) -> None:
        home, away = int(self.gpu[a]), int(self.gpu[b])
        for _, n, here in self._levels:
            gain = self._member[b] - self._member[a]
            here[home // n] += gain
            here[away // n] -= gain
        given = self._weight[:, b] - self._weight[:, a]
        self._load[:, home] += given
        self._load[:, away] -= given
        for replica, old, new in ((a, home, away), (b, away, home)):
            self._on_gpu[old, self._expert[replica]] -= 1
            self._on_gpu[new, self._expert[replica]] += 1
        self.gpu[a], self.gpu[b] = away, home


def _sums(member: Counts, block: Slots) -> Counts:
    """Replicas of each token in each block, [blocks, tokens]."""
    return np.stack([member[block == b].sum(axis=0) for b in range(int(block.max()) + 1)])
