"""What a rule is: one limit, stated three ways (`post`, `check`, `explain`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import Layout, Placement
from meshwright.costmodel.workload import Workload

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One rule broken by one plan: the value, the limit, and what would mend it."""

    rule: str
    value: float
    limit: float
    unit: str
    words: str
    """What is wrong, with the numbers in it."""
    remedy: str
    """What to change."""

    @property
    def line(self) -> str:
        """In one line: rule, value, limit, remedy."""
        return f"{self.rule}: {self.words}. {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class FinishedPlan:
    """What `check` reads: a layout of plain numbers, its stages, and the memory of every stage."""

    workload: Workload
    layout: Layout
    stages: tuple[tuple[int, ...], ...]
    """`stages[rank][virtual stage]`: transformer layers."""
    memory_gib: tuple[float, ...]
    """Peak per pipeline rank, recomputed by the caller."""
    spans: dict[str, tuple[int, ...]]
    """For each axis the members of its widest-spread group inside one block of every fabric level."""
    cut_use: float | None = None
    """The largest share of a cut's capacity that is used in a phase; None where it was not counted."""


def spans_of(placement: Placement) -> dict[str, tuple[int, ...]]:
    """`FinishedPlan.spans` of groups that lie so."""
    return {
        axis: tuple(int(count) for count in np.asarray(members))
        for axis, members in vars(placement).items()
    }


class LayoutTable(Protocol):
    """What `excess` reads: many layouts at once. `layouts` arrays have shape [n]."""

    @property
    def workload(self) -> Workload: ...
    @property
    def layouts(self) -> Layout: ...
    @property
    def memory_gib(self) -> NDArray[np.float64]:
        """Peak over stages with the least recomputation that fits, or with all of it; shape [n]."""
        ...


_LARGEST = 1e9
"""Where `post` cuts an excess off, in the rule's unit; a million literals of 1e12 each fit into int64."""


class Rule(ABC):
    """One limit on a plan. Subclasses set `name` and `unit`."""

    name: str
    unit: str
    of_workload: ClassVar[bool] = False
    """Whether it asks for no choice of a layout: where one breaks it, all do, and no search is needed."""

    def applies(self, workload: Workload) -> bool:
        """Whether this rule has anything to say about this workload."""
        del workload
        return True

    def fields_read(self) -> frozenset[str] | None:
        """The fields of a layout on which `excess` depends; None where that may be any, and memory."""
        return None

    @abstractmethod
    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        """How far each layout is over the limit, in `unit`; legal where it is 0 or less. Shape [n]."""

    @abstractmethod
    def check(self, plan: FinishedPlan) -> Finding | None:
        """The second opinion: plain arithmetic on one finished plan, sharing no code with `excess`."""

    def finding(self, *, value: float, words: str, remedy: str, limit: float = 0) -> Finding:
        """This rule broken: `value` against `limit`, both in the rule's unit."""
        return Finding(
            rule=self.name, value=value, limit=limit, unit=self.unit, words=words, remedy=remedy
        )

    def post(
        self,
        model: cp_model.CpModel,
        literals: Sequence[cp_model.IntVar],
        excess: NDArray[np.float64],
    ) -> cp_model.Constraint:
        """Adds `sum(over[i] * literal[i]) <= 0` with over[i] = excess rounded up, floored at 0.

        Exactly one literal is true, so this is the limit itself, and its linear relaxation is tight. The
        caller may make the returned constraint conditional (`only_enforce_if`) to explain a conflict.
        """
        # Capped, so that an infinite or undefined excess stays a positive coefficient and no sum overflows.
        finite = np.nan_to_num(
            np.asarray(excess, dtype=np.float64), nan=_LARGEST, posinf=_LARGEST, neginf=0.0
        )
        over = np.ceil(np.clip(finite, 0.0, _LARGEST) * 1000).astype(np.int64)
        if len(over) != len(literals):
            raise ValueError(f"{self.name}: {len(over)} excesses for {len(literals)} literals")
        return model.add(sum(int(c) * x for c, x in zip(over, literals, strict=True) if c) <= 0)

    def explain(self, finding: Finding) -> str:
        """The finding in one line: value, limit, remedy."""
        return finding.line
