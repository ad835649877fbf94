"""What a plan is, in the words that every view of it shares: how good, what lies on the hosts."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from meshwright.planner.drawing.quantities import percent

NEAR_OPTIMAL = 0.001
"""Of the step: a proven gap below it counts as an answer, whatever is missing to the proof."""


def status_words(status: str, gap: float | None) -> str:
    """The status of a plan as people read it.

    Parameters
    ----------
    status
        As documents carry it.
    gap
        Step time minus bound, over the step time, at least 0; None where no bound is known.

    Returns
    -------
    str
        >>> status_words("feasible", 0.00008)
        'within 0.01 % of the best'
        >>> status_words("feasible", 0.03)
        'feasible'
    """
    if status != "feasible" or gap is None or gap >= NEAR_OPTIMAL:
        return status
    return f"within {at_most(gap)} of the best"


def status_meaning(status: str, gap: float | None, meanings: Mapping[str, str]) -> str:
    """What a status says, with the gap of a plan that was not proven.

    Parameters
    ----------
    status, gap
        As for `status_words`.
    meanings
        Of each status, without a gap.
    """
    if status != "feasible" or gap is None:
        return meanings[status]
    bound = f"none is proven to save more than {at_most(gap)} of the step"
    if gap < NEAR_OPTIMAL:
        return bound.replace("none", "no layout in this space", 1)
    return f"a plan that works; {bound}"


def at_most(share: float) -> str:
    """A share rounded up to a hundredth of a percent, so that it stays a bound: 0.00008 is 0.01 %."""
    return percent(max(ceil(share * 1e4 - 1e-6), 1) / 1e4, 2)


def host_words(optimizer_offload: int | None, host_memory_gib: float | None) -> str:
    """What of a plan lies in the hosts' memory, and how much of it; empty where nothing does.

    Parameters
    ----------
    optimizer_offload
        Percent of the optimizer's states, 0 to 100.
    host_memory_gib
        Of a node.

    Returns
    -------
    str
        >>> host_words(50, 1028.4)
        '1,028 GiB of every host: 50 % of the optimizer'
    """
    if not optimizer_offload and not host_memory_gib:
        return ""
    what = f"{optimizer_offload} % of the optimizer" if optimizer_offload else "activations"
    if host_memory_gib is None:
        return f"on the hosts: {what}"
    return f"{host_memory_gib:,.0f} GiB of every host: {what}"


def row_host_words(row: Mapping[str, Any]) -> str:
    """The same of a row of results."""
    return host_words(row.get("optimizer_offload"), row.get("host_memory_gib"))
