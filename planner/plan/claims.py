"""What may be said of a figure by the search behind it, in the same words wherever a search is told of."""

from __future__ import annotations

from typing import Literal

Claim = Literal["optimal", "feasible", "infeasible", "not searched"]
"""What a search lets one say: proven best, a plan without that proof, proven that there is none, or nothing
(the search was not made, or ended without a plan)."""


WORDS = {"infeasible": "no plan exists", "not searched": "not searched", "unknown": "not searched"}
"""Of searches that left no plan."""


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


def is_closed(claim: Claim) -> bool:
    """Whether the search behind a claim was made to its end: only then its figure is proven."""
    return claim in ("optimal", "infeasible")
