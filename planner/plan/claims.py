"""What may be said of a figure by the search behind it, in the same words wherever a search is told of."""

from __future__ import annotations

from typing import Literal

Claim = Literal["optimal", "feasible", "infeasible", "not searched"]
"""What a search lets one say: proven best, a plan without that proof, proven that there is none, or nothing
(the search was not made, or ended without a plan)."""


WORDS = {"infeasible": "no plan exists", "not searched": "not searched", "unknown": "not searched"}
"""Of searches that left no plan."""
_SAME = 5e-8
"""Gap that would be written as 0."""


def claim_of(status: str) -> Claim:
    """What the status of a search lets one say.

    Parameters
    ----------
    status
        Of an `Outcome` or a plan.
    """
    if status == "optimal":
        return "optimal"
    if status == "feasible":
        return "feasible"
    return "infeasible" if status == "infeasible" else "not searched"


def claim_words(status: str, step_time_s: float | None, lower_bound_s: float | None) -> str:
    """What a table says of a search: optimal, within X % of the best, feasible, no plan exists, not searched.

    Parameters
    ----------
    status
        Of an `Outcome`, a plan or a claim.
    step_time_s
        Of the plan that was found; None without one.
    lower_bound_s
        No plan is faster; None where nothing is known.
    """
    if step_time_s is None or status == "optimal":
        return WORDS.get(status, status)
    if not lower_bound_s or lower_bound_s <= 0:
        return "feasible"
    gap = max(step_time_s / lower_bound_s - 1.0, _SAME)
    return f"within {100 * gap:.2g} % of the best"


def is_closed(claim: Claim) -> bool:
    """Whether the search behind a claim was made to its end: only then its figure is proven."""
    return claim in ("optimal", "infeasible")
