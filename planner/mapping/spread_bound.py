"""How far groups must reach, by counting: no assignment touches fewer pods or leaves.

A block that r stages and c replicas touch holds at most r c slots. With at most D blocks a stage and P a
replica, over S stages and N replicas,

    sum_b r_b <= S D,   sum_b c_b <= N P,   sum_b min(free_b, r_b c_b) >= S N,

which CP-SAT decides over the blocks' choices of (r, c). For equal blocks it comes to D P >= the number of
blocks that are filled: reaching less far one way is reaching farther the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from meshwright.planner.solvers.cp_sat import repeatable_solver


@dataclass(frozen=True, kw_only=True)
class ReachBoundParams:
    """How fine and how long the counting is."""

    most_steps: int = 64
    """Values of c by r; beyond it they are taken in steps, which keeps the bound valid."""
    work: float = 4.0
    """CP-SAT's deterministic time for one pair of limits, about seconds."""


DEFAULT_REACH_BOUND = ReachBoundParams()


@dataclass(frozen=True, kw_only=True)
class ReachWeights:
    """What a block that a group touches counts, per mille: the weights of Arnold's objective.

    He et al., arXiv 2509.15940, section 5.2, equation 2: alpha for data-parallel groups, beta = 1 - alpha for
    pipelines.
    """

    data_parallel: int = 500

    @property
    def pipeline(self) -> int:
        """Per mille."""
        return 1000 - self.data_parallel

    def key(self, reach: Reach) -> tuple[int, int]:
        """What is minimised: the most that any group counts, then both kinds' most together."""
        rows, columns = self.data_parallel * reach[0], self.pipeline * reach[1]
        return max(rows, columns), rows + columns


Reach = tuple[int, int]
"""Blocks that a data-parallel group touches at most, and a pipeline."""


class ReachBound:
    """Which reaches are possible at one level, as far as counting says."""

    def __init__(
        self,
        blocks: Sequence[int],
        stages: int,
        slots: int,
        params: ReachBoundParams = DEFAULT_REACH_BOUND,
    ) -> None:
        """`blocks` are the free slots of each block; the job has `slots` in each of its stages."""
        self._free = sorted((free for free in blocks if free), reverse=True)
        self.stages, self.slots = stages, slots
        self._most = (min(len(self._free), slots), min(len(self._free), stages))
        """Blocks that a stage and a replica touch where each slot is in a block of its own."""
        self._params = params
        self._refuted: list[Reach] = []

    def least(self, weights: ReachWeights) -> Reach:
        """The first reach, in the order of the weights, that is not refuted."""
        pairs = sorted(self._pairs(), key=lambda pair: (weights.key(pair), pair))
        first = 0
        while True:
            level = weights.key(pairs[first])[0]
            end = first
            while end < len(pairs) and weights.key(pairs[end])[0] == level:
                end += 1
            # Where even the most of both kinds is refuted, so is every pair up to this level.
            corner = (max(row for row, _ in pairs[:end]), max(column for _, column in pairs[:end]))
            if end == len(pairs) or self.possible(corner):
                for pair in pairs[first:end]:
                    if self.possible(pair):
                        return pair
            first = end

    def _pairs(self) -> Iterator[Reach]:
        """Every reach that single groups allow: a stage and a replica need so many of the largest blocks."""
        rows = range(self._fewest(self.slots), self._most[0] + 1)
        columns = range(self._fewest(self.stages), self._most[1] + 1)
        return product(rows, columns)

    def _fewest(self, members: int) -> int:
        slots = 0
        for number, free in enumerate(self._free, start=1):
            slots += free
            if slots >= members:
                return number
        return len(self._free)

    def possible(self, reach: Reach) -> bool:
        """False where counting refutes it."""
        if reach[0] >= self._most[0] and reach[1] >= self._most[1]:
            return True
        if any(reach[0] <= row and reach[1] <= column for row, column in self._refuted):
            return False
        if self._refutes(reach):
            self._refuted.append(reach)
            return False
        return True

    def _refutes(self, reach: Reach) -> bool:
        from meshwright.planner.solvers.or_tools import cp_model

        model = cp_model.CpModel()
        rows, columns, hosted = [], [], []
        idle = sum(self._free) - self.stages * self.slots
        for free, blocks in Counter(self._free).items():
            numbers = []
            for r, c, slots in self._choices(free, idle):
                number = model.new_int_var(0, blocks, "")
                numbers.append(number)
                rows.append(r * number)
                columns.append(c * number)
                hosted.append(slots * number)
            model.add(sum(numbers) <= blocks)
        model.add(sum(rows) <= self.stages * reach[0])
        model.add(sum(columns) <= self.slots * reach[1])
        model.add(sum(hosted) >= self.stages * self.slots)
        solver = repeatable_solver(work=self._params.work)
        return solver.solve(model) == cp_model.INFEASIBLE

    def _choices(self, free: int, idle: int) -> Iterator[tuple[int, int, int]]:
        """(r, c, slots held) of a block that are of use: it is filled but for `idle` slots at most."""
        for r in range(1, min(self.stages, free) + 1):
            largest = min(-(-free // r), self.slots)
            fewest = max(1, -(-(free - idle) // r))
            step = max(1, (largest - fewest + 1) // self._params.most_steps)
            for c in range(fewest, largest + 1, step):
                yield r, c, min(free, r * min(c + step - 1, largest))
