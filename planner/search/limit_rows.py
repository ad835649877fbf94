"""Rows of the model on mappings: groups that must not leave a domain, cuts that must not be filled.

    a group of 8 experts has 8 members in one domain    sum_v v ep_v <= ep_members_inside
    no cut is used beyond the limit                     cut_use_leaf_uplink_gradients <= limit

Mappings that break a row are in the model: they are what the rows decide on. What a mapping keeps inside is
known before it is priced. What it makes of the cuts comes with its price, at its fastest split, and stands at
nothing before: the model may then choose it, and learns what it uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING

from meshwright.constraints.bisection import ROUNDING

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model

BILLIONTHS = 10**9
MOST_USE = 1_000
"""Times its capacity: a cut that is used more counts as this."""


def keep_inside(
    model: cp_model.CpModel,
    literals: Sequence[cp_model.IntVar],
    axis: str,
    degrees: Sequence[int],
    inside: Sequence[int],
) -> None:
    """Groups of one axis have all their members in one domain.

    Parameters
    ----------
    model
        Where the row goes.
    literals
        Of the choices, of which one is true.
    axis
        As `Layout` names it.
    degrees
        Members of a group with each choice.
    inside
        How many of them share a domain with each choice.
    """
    members = model.new_int_var(0, max(inside), f"{axis}_members_inside")
    model.add(members == sum(count * x for count, x in zip(inside, literals, strict=True)))
    asked = sum(degree * x for degree, x in zip(degrees, literals, strict=True))
    model.add(asked <= members).with_name(f"nvlink_domain_{axis}")


def spare_cuts(
    model: cp_model.CpModel,
    literals: Sequence[cp_model.IntVar],
    uses: Sequence[Mapping[str, float]],
    limit: float,
) -> None:
    """No cut is used beyond a share of its capacity.

    Parameters
    ----------
    model
        Where the rows go.
    literals
        Of the choices, of which one is true.
    uses
        Of each choice, the share of each cut that it uses as far as that is known, from 0 on.
    limit
        From above 0 to 1.
    """
    allowed = int(limit * BILLIONTHS)
    for name in sorted({name for own in uses for name in own}):
        shares = [_billionths(own.get(name, 0.0), limit, allowed) for own in uses]
        used = model.new_int_var(0, max(shares), f"cut_use_{name}")
        model.add(used == sum(share * x for share, x in zip(shares, literals, strict=True)))
        model.add(used <= allowed).with_name(f"bisection_{name}")


def _billionths(use: float, limit: float, allowed: int) -> int:
    """At most what is allowed where the use keeps to the limit, as `constraints.bisection` judges it."""
    share = ceil(min(use, MOST_USE) * BILLIONTHS)
    return min(share, allowed) if use <= limit * ROUNDING else max(share, allowed + 1)
