"""What a rule is: one limit, stated three ways (`post`, `excess`, `check`).

Kinds of rules: a rule of one of these kinds is its sentence, its numbers and its words.

    Divides    number mod divisor = 0
    AtMost     value <= limit
    AtLeast    value >= limit
    Equals     value = to
    Requires   a condition holds wherever others do
    Excludes   none of some conditions holds
    Refuses    no layout of a workload

Number, divisor, value and limit are `Product`s of fields of the layout and of a number of the workload. Each
kind is evaluated twice, by code that has nothing in common: `excess` by arrays over a table of layouts,
`check` by plain integers on one finished plan.

>>> HEADS = Divides(
...     name="heads-by-tp",
...     sentence="heads mod tp = 0",
...     unit="heads left over",
...     number=of(number=lambda work: work.model.heads),
...     by=of("tp"),
...     words="{number} attention heads do not divide by tp {tp}",
...     remedy="Take a tp that divides {number}.",
... )
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import GROUPS, Layout, Placement, in_shape, is_among
from meshwright.costmodel.schedules import traits
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
    memory_gib: tuple[float, ...] = ()
    """Peak per pipeline rank, recomputed by the caller."""
    spans: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """For each axis the members of its widest-spread group inside one block of every fabric level."""
    cut_use: float | None = None
    """The largest share of a cut's capacity that is used in a phase; None where it was not counted."""


def spans_of(placement: Placement) -> dict[str, tuple[int, ...]]:
    """How far the groups of every axis spread, as `FinishedPlan.spans` has it.

    Parameters
    ----------
    placement : Placement
        Of one layout, arrays of shape [levels].

    Returns
    -------
    dict
        By axis the members of a group inside one block of every fabric level, inside out.
    """
    return {
        axis: tuple(int(count) for count in np.asarray(getattr(placement, axis))) for axis in GROUPS
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
        """Whether this rule has anything to say about this workload.

        Parameters
        ----------
        workload : Workload
            What is planned, whatever its layout.
        """
        del workload
        return True

    def fields_read(self) -> frozenset[str] | None:
        """The fields of a layout on which `excess` depends; None where that may be any, and memory."""
        return None

    @abstractmethod
    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        """How far each layout is over the limit, in `unit`; legal where it is 0 or less. Shape [n].

        Parameters
        ----------
        table : LayoutTable
            Of n layouts, for a workload that the rule applies to.
        """

    @abstractmethod
    def check(self, plan: FinishedPlan) -> Finding | None:
        """The second opinion: plain arithmetic on one finished plan, sharing no code with `excess`.

        Parameters
        ----------
        plan : FinishedPlan
            With plain numbers.

        Returns
        -------
        Finding or None
            None where the plan keeps the rule.
        """

    def finding(self, *, value: float, words: str, remedy: str, limit: float = 0) -> Finding:
        """This rule broken: `value` against `limit`, both in the rule's unit.

        Parameters
        ----------
        value : float
            What the plan has, in the rule's unit.
        words : str
            What is wrong, with the numbers in it, without a stop.
        remedy : str
            What to change, a sentence.
        limit : float
            What it may have, in the rule's unit.
        """
        return Finding(
            rule=self.name, value=value, limit=limit, unit=self.unit, words=words, remedy=remedy
        )

    def over(self, *, value: float, words: str, remedy: str, limit: float = 0) -> Finding | None:
        """`finding` where `value` is above `limit`; None where it is not.

        Parameters
        ----------
        value : float
            What the plan has, in the rule's unit.
        words : str
            What is wrong where that is too much, without a stop.
        remedy : str
            What to change then, a sentence.
        limit : float
            The most that it may have, in the rule's unit.
        """
        if value <= limit:
            return None
        return self.finding(value=value, words=words, remedy=remedy, limit=limit)

    def post(
        self,
        model: cp_model.CpModel,
        literals: Sequence[cp_model.IntVar],
        excess: NDArray[np.float64],
    ) -> cp_model.Constraint:
        """Adds `sum(over[i] * literal[i]) <= 0` with over[i] = excess rounded up, floored at 0.

        Exactly one literal is true, so this is the limit itself, and its linear relaxation is tight. The
        caller may make the returned constraint conditional (`only_enforce_if`) to explain a conflict.

        Parameters
        ----------
        model : CpModel
            The constraint is added to it.
        literals : sequence of IntVar
            One for each of n layouts: true of the one that is chosen.
        excess : array of float, shape [n]
            As `excess` has it.

        Raises
        ------
        ValueError
            Where there are not as many excesses as literals.
        """
        # Capped, so that an infinite or undefined excess stays a positive coefficient and no sum overflows.
        finite = np.nan_to_num(
            np.asarray(excess, dtype=np.float64), nan=_LARGEST, posinf=_LARGEST, neginf=0.0
        )
        over = np.ceil(np.clip(finite, 0.0, _LARGEST) * 1000).astype(np.int64)
        if len(over) != len(literals):
            raise ValueError(f"{self.name}: {len(over)} excesses for {len(literals)} literals")
        return model.add(sum(int(c) * x for c, x in zip(over, literals, strict=True) if c) <= 0)


# Array arithmetic on a table of layouts that several rules need for `excess` (never for `check`).


IntArray = NDArray[np.int64]


def column(table: LayoutTable, name: str) -> IntArray:
    """One field of every layout, shape [n]; booleans become 0 and 1.

    Parameters
    ----------
    table : LayoutTable
        Of n layouts.
    name : str
        A field of `Layout`.
    """
    values = np.asarray(getattr(table.layouts, name), dtype=np.int64)
    shape = np.shape(table.memory_gib)
    if values.shape == shape and len(shape) == 1 and shape != (1,):
        return values
    rows = table.layouts.broadcast_shape()
    if shape != rows:
        shape = np.broadcast_shapes(rows, shape)
    return in_shape(values, shape)


def as_excess(
    values: NDArray[np.int64] | NDArray[np.bool_] | NDArray[np.float64],
) -> NDArray[np.float64]:
    """A count or a truth value as an excess.

    Parameters
    ----------
    values : array
        Counts, or truth values of which True is 1 too many.

    Returns
    -------
    array of float
        Shaped likewise.
    """
    return np.asarray(values, dtype=np.float64)


def set_bits(masks: IntArray) -> IntArray:
    """How many bits of each mask are set.

    Parameters
    ----------
    masks : array of int
        Each 0 or above.

    Returns
    -------
    array of int
        Shaped likewise.
    """
    count = np.zeros_like(masks)
    union = int(np.bitwise_or.reduce(masks, axis=None, initial=0))
    for bit in range(union.bit_length()):
        count += (masks >> bit) & 1
    return count


@dataclass(frozen=True)
class Product:
    """Fields of the layout, multiplied together and by a number of the workload."""

    factors: tuple[str, ...]
    number: Callable[[Workload], int]


def of(*factors: str, number: int | Callable[[Workload], int] = 1) -> Product:
    """The product of some fields of the layout and a number.

    Parameters
    ----------
    *factors : str
        Fields of `Layout`.
    number : int or callable
        One for all, or what a workload has.
    """
    return Product(factors, number if callable(number) else lambda workload: number)


ONE = of(number=1)


@dataclass(frozen=True)
class When:
    """A condition on one field of the layout: it lies in a range, or among some values, or as a mask of bits
    it has some and lacks others.
    """

    name: str
    least: int = 0
    most: int = np.iinfo(np.int64).max
    among: tuple[int, ...] | None = None
    has: int = 0
    """Bits of which one at least is set, where any are named."""
    lacks: int = 0
    """Bits of which none is."""


def every_workload(workload: Workload) -> bool:
    """The condition of rules that bind every workload."""
    del workload
    return True


@dataclass(frozen=True, kw_only=True)
class DeclaredRule(Rule):
    """What rules of all kinds state.

    `words` and `remedy` are format strings. They may name every field of the layout, what `_words_of` has of
    the workload, and the numbers of the kind.
    """

    name: str
    sentence: str
    """The rule as mathematics, in one line."""
    unit: str
    words: str
    remedy: str
    when: tuple[When, ...] = ()
    """Conditions on the layout; where one of them fails the rule says nothing."""
    binds: Callable[[Workload], bool] = every_workload
    """Which workloads the rule binds."""

    def applies(self, workload: Workload) -> bool:
        return self.binds(workload)

    def fields_read(self) -> frozenset[str]:
        names = {condition.name for condition in self.when}
        for stated in fields(self):
            number = getattr(self, stated.name)
            if isinstance(number, Product):
                names.update(number.factors)
            elif isinstance(number, When):
                names.add(number.name)
        return frozenset(names)

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        over = np.zeros_like(column(table, "tp"))
        if self.binds(table.workload):
            over = self._over(table)
        for condition in self.when:
            over = np.where(_true_of_each(condition, table), over, 0)
        return as_excess(over)

    def check(self, plan: FinishedPlan) -> Finding | None:
        if not self.binds(plan.workload):
            return None
        if not all(_true_of_one(condition, plan.layout) for condition in self.when):
            return None
        numbers = self._broken(plan)
        if numbers is None:
            return None
        words = _words_of(plan) | numbers
        return self.finding(
            value=int(numbers["value"]),
            limit=int(numbers["limit"]),
            words=self.words.format(**words),
            remedy=self.remedy.format(**words),
        )

    @abstractmethod
    def _over(self, table: LayoutTable) -> IntArray:
        """How far each layout is over the limit, conditions aside; shape [n]."""

    @abstractmethod
    def _broken(self, plan: FinishedPlan) -> dict[str, int | str] | None:
        """None where the plan keeps the rule; else `value`, `limit` and the other numbers of the words."""


@dataclass(frozen=True, kw_only=True)
class Divides(DeclaredRule):
    """number mod divisor = 0. Words may name {number} and {divisor}; the value is what is left over."""

    number: Product
    by: Product

    def _over(self, table: LayoutTable) -> IntArray:
        return _of_each(self.number, table) % _of_each(self.by, table)

    def _broken(self, plan: FinishedPlan) -> dict[str, int | str] | None:
        number, divisor = _of_one(self.number, plan), _of_one(self.by, plan)
        remainder = number - (number // divisor) * divisor
        if remainder == 0:
            return None
        return {"value": remainder, "limit": 0, "number": number, "divisor": divisor}


@dataclass(frozen=True, kw_only=True)
class AtMost(DeclaredRule):
    """value <= limit, which is 1 where none is given. Words may name {value} and {limit}."""

    unit: str = "ranks"
    value: Product
    limit: Product = ONE

    def _over(self, table: LayoutTable) -> IntArray:
        return _of_each(self.value, table) - _of_each(self.limit, table)

    def _broken(self, plan: FinishedPlan) -> dict[str, int | str] | None:
        value, limit = _of_one(self.value, plan), _of_one(self.limit, plan)
        return {"value": value, "limit": limit} if value > limit else None


@dataclass(frozen=True, kw_only=True)
class AtLeast(DeclaredRule):
    """value >= limit. Words may name {value} and {limit}."""

    value: Product
    limit: Product

    def _over(self, table: LayoutTable) -> IntArray:
        return _of_each(self.limit, table) - _of_each(self.value, table)

    def _broken(self, plan: FinishedPlan) -> dict[str, int | str] | None:
        value, limit = _of_one(self.value, plan), _of_one(self.limit, plan)
        return {"value": value, "limit": limit} if value < limit else None


@dataclass(frozen=True, kw_only=True)
class Equals(DeclaredRule):
    """value = to. Words may name {value} and {limit}."""

    value: Product
    to: Product

    def _over(self, table: LayoutTable) -> IntArray:
        difference = _of_each(self.value, table) - _of_each(self.to, table)
        return np.asarray(np.abs(difference), dtype=np.int64)

    def _broken(self, plan: FinishedPlan) -> dict[str, int | str] | None:
        value, limit = _of_one(self.value, plan), _of_one(self.to, plan)
        return {"value": value, "limit": limit} if value != limit else None


@dataclass(frozen=True, kw_only=True)
class Requires(DeclaredRule):
    """Where the conditions of `when` hold, so does `needs`."""

    needs: When
    unit: str = "settings"

    def _over(self, table: LayoutTable) -> IntArray:
        return np.asarray(~_true_of_each(self.needs, table), dtype=np.int64)

    def _broken(self, plan: FinishedPlan) -> dict[str, int | str] | None:
        return None if _true_of_one(self.needs, plan.layout) else {"value": 1, "limit": 0}


@dataclass(frozen=True)
class Condition:
    """What a rule excludes, in words as those of a rule: it holds for some workloads, on some layouts."""

    words: str
    binds: Callable[[Workload], bool] = every_workload
    when: tuple[When, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Excludes(DeclaredRule):
    """None of some conditions holds. Words may name those that do, {broken}; the value is their number."""

    conditions: tuple[Condition, ...]
    unit: str = "conditions"
    joined_by: str = " and "

    def fields_read(self) -> frozenset[str]:
        named = (condition.name for each in self.conditions for condition in each.when)
        return super().fields_read().union(named)

    def _over(self, table: LayoutTable) -> IntArray:
        over = np.zeros_like(column(table, "tp"))
        for each in self.conditions:
            if each.binds(table.workload):
                parts = [_true_of_each(condition, table) for condition in each.when]
                over = over + np.logical_and.reduce(parts)
        return over

    def _broken(self, plan: FinishedPlan) -> dict[str, int | str] | None:
        broken = [
            each.words.format(**_words_of(plan))
            for each in self.conditions
            if each.binds(plan.workload)
            and all(_true_of_one(condition, plan.layout) for condition in each.when)
        ]
        if not broken:
            return None
        return {"value": len(broken), "limit": 0, "broken": self.joined_by.join(broken)}


@dataclass(frozen=True, kw_only=True)
class Refuses(DeclaredRule):
    """No layout is allowed of a workload that it binds and in which it finds something `broken`.

    Both evaluations ask the same two functions: no numbers are compared that could be compared twice. Words
    may name what is {broken}.
    """

    of_workload: ClassVar[bool] = True
    broken: Callable[[Workload], Sequence[str]] = lambda _: ("",)
    """What of a workload is refused, in words."""
    unit: str = "conditions"
    joined_by: str = ", "

    def applies(self, workload: Workload) -> bool:
        return self.binds(workload) and len(self.broken(workload)) > 0

    def _over(self, table: LayoutTable) -> IntArray:
        return np.full_like(column(table, "tp"), len(self.broken(table.workload)), dtype=np.int64)

    def _broken(self, plan: FinishedPlan) -> dict[str, int | str] | None:
        broken = self.broken(plan.workload)
        if not broken:
            return None
        return {"value": len(broken), "limit": 0, "broken": self.joined_by.join(broken)}


def _of_each(product: Product, table: LayoutTable) -> IntArray:
    """A product for every layout of a table, shape [n]; of no fields a single number."""
    values = np.asarray(product.number(table.workload), dtype=np.int64)
    for name in product.factors:
        values = values * column(table, name)
    return values


def _true_of_each(condition: When, table: LayoutTable) -> NDArray[np.bool_]:
    """Whether a condition holds, for every layout of a table; shape [n]."""
    values = column(table, condition.name)
    if condition.among is not None:
        return is_among(values, condition.among)
    is_true: NDArray[np.bool_] = (values >= condition.least) & (values <= condition.most)
    if condition.has:
        is_true &= (values & condition.has) != 0
    if condition.lacks:
        is_true &= (values & condition.lacks) == 0
    return is_true


def _of_one(product: Product, plan: FinishedPlan) -> int:
    """A product for one plan."""
    value = product.number(plan.workload)
    for name in product.factors:
        value *= int(getattr(plan.layout, name))
    return value


def _true_of_one(condition: When, layout: Layout) -> bool:
    """Whether a condition holds for one layout."""
    value = int(getattr(layout, condition.name))
    if condition.among is not None:
        return any(value == allowed for allowed in condition.among)
    bits = {1 << place for place, digit in enumerate(f"{value:b}"[::-1]) if digit == "1"}
    has, lacks = (
        {bit for bit in bits if mask // bit % 2} for mask in (condition.has, condition.lacks)
    )
    in_range = condition.least <= value <= condition.most
    return in_range and not lacks and (not condition.has or len(has) > 0)


def _words_of(plan: FinishedPlan) -> dict[str, int | str]:
    """What words may name of a plan."""
    words: dict[str, int | str] = {
        field.name: int(getattr(plan.layout, field.name)) for field in fields(Layout)
    }
    words["schedule"] = traits(int(plan.layout.schedule)).name
    words["optimizer"] = plan.workload.optimizer
    words["precision"] = plan.workload.precision
    words["cuda_graph"] = plan.workload.cuda_graph
    words["offload_modules"] = plan.workload.offload_modules.replace("+", " ")
    words["moe_dispatch"] = plan.workload.moe_dispatch
    words["device"] = plan.workload.cluster.device.name
    words["architecture"] = plan.workload.cluster.device.architecture
    words["mtp_layers"] = plan.workload.model.mtp_layers
    return words
