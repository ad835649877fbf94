"""What a search looked at, and how it ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshwright.planner.bounds.exact_cost import Priced

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model


@dataclass
class Certificate:
    """What was looked at, what was left out and why."""

    layouts: int = 0
    """Layouts in the degrees that were considered, of every execution."""
    ruled_out: dict[str, int] = field(default_factory=dict)
    """Layouts that a rule forbids, by the first rule that does."""
    bounded_out: int = 0
    """Layouts whose bound is no better than the plan's price."""
    priced: int = 0
    """Layouts priced exactly."""
    rounds: int = 0
    """CP-SAT models solved."""
    executions: int = 1
    """Combinations of execution choices, each with layouts of its own."""
    fewest_gpus: int = 1
    """Layouts on fewer GPUs than this cannot beat the plan; they were not enumerated."""
    combinations: int = 0
    """Of kernel, execution, recomputed modules and ZeRO stage in the last CP-SAT model."""
    kernels: int = 0
    """In the last CP-SAT model."""
    least_cut_use: float | None = None
    """Of mappings that fill a cut beyond what is allowed, the least share of its fullest cut."""
    model_bound_s: float | None = None
    """What the last CP-SAT model proved of its combinations."""
    model: cp_model.CpModel | None = field(default=None, repr=False, compare=False)
    """The last CP-SAT model; None where none was built, and on irregular fabrics."""

    def overfull(self, cut_uses: Iterable[tuple[str, float]]) -> None:
        """Takes note of a mapping that fills a cut beyond what is allowed."""
        fullest = max(use for _, use in cut_uses)
        self.least_cut_use = min(fullest, self.least_cut_use or fullest)

    def rule_out(self, name: str, count: int) -> None:
        """Counts layouts under a rule."""
        if count:
            self.ruled_out[name] = self.ruled_out.get(name, 0) + count


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a search ended. `best` is sorted by price; `lower_bound_s` is None where nothing is known."""

    status: str
    best: tuple[Priced, ...]
    lower_bound_s: float | None
    certificate: Certificate
