"""What a check of an audit is, and those that hold for every kind of plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshwright.documents.versions import program_version
from meshwright.errors import MeshwrightError
from meshwright.planner.mixed.document import MixedPlan, MixedSolverDoc
from meshwright.planner.plan.digest import digest_of
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.solver_document import SolverReport
from meshwright.planner.search.model import solver_version

MOST_LISTED = 20
"""Faults of one check that are listed; the others are counted."""
_UNREADABLE = (MeshwrightError, ValueError, ArithmeticError, LookupError, AssertionError)
"""What arithmetic on a damaged plan may end with."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    broken: tuple[str, ...] | None
    """What is wrong, in words; None where there was nothing to look at."""


def checked(name: str, faults: Callable[[], Iterator[str]]) -> Check:
    """The check of these faults; what cannot even be worked out is one of them."""
    broken: list[str] = []
    try:
        broken.extend(dict.fromkeys(faults()))
    except _UNREADABLE as error:
        reason = str(error) or type(error).__name__
        broken.append(f"cannot be worked out: {reason}")
    beyond = len(broken) - MOST_LISTED
    if beyond > 0:
        broken[MOST_LISTED:] = [f"and {beyond} more"]
    return Check(name=name, broken=tuple(broken))


def version_faults(solver: SolverReport | MixedSolverDoc) -> Iterator[str]:
    """A plan of another version may have other prices and other launch files by right."""
    made_by, this = solver.program, program_version()
    if made_by != this:
        stated = "an earlier version" if made_by is None else made_by
        yield f"made by {stated}, checked by {this}: plan again with this version"
    if solver.version != solver_version():
        yield f"made with {solver.version}, here is {solver_version()}: plan again"


def edit_faults(plan: Plan | MixedPlan) -> Iterator[str]:
    """Whether a document is the one that was written, by its digest."""
    if plan.digest is None:
        yield "the plan has no digest: it was made by an earlier version, or the line was taken out"
    elif plan.digest != digest_of(plan):
        yield "the document is not the one that was written: its digest differs"
