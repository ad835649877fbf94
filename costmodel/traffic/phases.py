"""Phases of a step, how busy a cut of the fabric is in one, and what kind of traffic an axis makes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.costmodel.data_parallel import hiding_windows
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layout import Layout

_BESIDE = ("dp_comm", "optimizer", "step_overhead")
"""Parts of a step in which no micro-batch runs."""


@dataclass(frozen=True, kw_only=True)
class CutUse:
    """One cut of one level in one phase."""

    level: str
    cut: str
    """uplink or bisection."""
    phase: str
    """micro-batches or gradients."""
    block: str
    """Whose up-link, or which block's halves: the busiest of the level."""
    bytes_per_gpu: float
    """That cross in a step, one direction: per GPU below the up-link, or per GPU of one half."""
    gb_per_s: float
    """Nominal capacity of the cut, one direction, as far as it is the job's."""
    busy_s: float
    phase_s: float
    others_share: float = 0.0
    """Of the cut's links, what other jobs use, where the cluster's levels state it."""

    @property
    def total_use(self) -> float:
        """Share of the whole links that this job and others use in the phase."""
        return self.others_share + (1.0 - self.others_share) * self.utilisation

    @property
    def utilisation(self) -> float:
        """Share of the phase in which the cut is busy; above 1 the phase cannot be kept."""
        if self.phase_s > 0:
            return self.busy_s / self.phase_s
        return float("inf") if self.busy_s else 0.0


def phase_seconds(c: Context, breakdown_s: dict[str, float]) -> dict[str, float]:
    """Seconds of the two phases of a step: micro-batches, and gradients.

    They overlap: gradients are reduced beside as many micro-batches as hide them (`hiding_windows`), with
    ZeRO-3 beside all.

    docs/cost_model.md, "The step", has the sources.

    Parameters
    ----------
    c : Context
        Workload and one layout.
    breakdown_s : dict of str to float
        Parts of the step, seconds (`estimate.Estimate`).

    Returns
    -------
    dict of str to float
        Seconds of `micro-batches` and of `gradients`.
    """
    layout = c.layout
    alone = sum(breakdown_s.get(name, 0.0) for name in _BESIDE)
    working = sum(breakdown_s.values()) - alone - breakdown_s.get("scale", 0.0)
    m, pp, vpp = (int(np.asarray(x)) for x in (layout.num_micro_batches, layout.pp, layout.vpp))
    beside = working
    if int(np.asarray(layout.zero_stage)) != 3:
        beside = float(hiding_windows(c)) * working / (m + (pp - 1) / vpp)
    return {"micro-batches": working, "gradients": breakdown_s.get("dp_comm", 0.0) + beside}


@dataclass(frozen=True, kw_only=True)
class AxisPattern:
    """What kind of traffic an axis makes, for people who plan or watch a network."""

    pattern: str
    fan_out: int
    """Peers that a rank sends to."""
    predictability: str
    incast: str
    """Risk that several senders meet at one receiver."""
    ecmp: str
    """How well hashing flows over equal paths (ECMP) spreads them."""
    suits_network: str
    """What a network engineer's guide says of its load on ECMP and priority flow control (PFC) together."""


_RING_ECMP = "few large flows collide: adaptive routing, or several queue pairs a connection"
_KINDS = {
    "tp": ("ring or in-switch", "every layer, fixed size", "none: one sender a receiver", _RING_ECMP),
    "cp": ("ring", "every layer, fixed size", "none: one sender a receiver", _RING_ECMP),
    "dp": ("ring", "one burst a step, fixed size", "none: one sender a receiver", _RING_ECMP),
    "edp": ("ring", "one burst a step, fixed size", "none: one sender a receiver", _RING_ECMP),
    "pp": ("chain", "every micro-batch, fixed size", "none: one sender a receiver", "few flows may collide"),
    "ep": (
        "all-to-all", "by the router, not known ahead", "hot experts: many senders meet",
        "many flows of unequal size spread well",
    ),
    "etp": ("ring", "every layer, by the router", "none: one sender a receiver", _RING_ECMP),
    "cp-swaps": (
        "all-to-all", "every layer, fixed size", "low: as much from every sender",
        "many flows of equal size spread well",
    ),
    "cp-rings": (
        "rings of groups that swap", "every layer, fixed size", "none: one sender a receiver", _RING_ECMP,
    ),
    "ep-gathers": ("ring", "every layer, fixed size", "none: one sender a receiver", _RING_ECMP),
}  # fmt: skip


_INSIDE = "no hashing inside the scale-up domain"
_GOOD = "good: steady flows of known size, few pauses"
_SUITS = {
    "ep": "poor: hot destinations overload single paths, and their pauses (PFC) spread to other flows",
    "etp": "poor: sizes follow the router",
}
"""By axis; the others are `_GOOD`."""


def axis_pattern(
    axis: str,
    layout: Layout,
    *,
    sent_as: str | None = None,
    inside_scale_up: bool = False,
    burst: bool = True,
) -> AxisPattern:
    """Pattern, fan-out, predictability, incast risk and ECMP suitability of an axis' traffic.

    A ring has one peer, a stage in the middle of a pipeline sends on to one, a member of an all-to-all to all
    others.

    Parameters
    ----------
    axis : str
        tp, cp, dp, edp, pp, ep or etp.
    layout : Layout
        One layout.
    sent_as : str, optional
        Where it is not the axis' usual traffic: cp-swaps (all-to-all), cp-rings (both) or ep-gathers.
    inside_scale_up : bool
        Whether the groups do not leave their NVLink domain, where nothing is hashed.
    burst : bool
        Whether gradients are exchanged once a step; not so with ZeRO-3.

    Returns
    -------
    AxisPattern
    """
    pattern, when, incast, ecmp = _KINDS[sent_as or axis]
    if axis in ("dp", "edp") and not burst:
        when = "every layer and micro-batch, fixed size"
    if inside_scale_up:
        ecmp = _INSIDE
    size = int(np.asarray(getattr(layout, axis)))
    return AxisPattern(
        pattern=pattern,
        fan_out=size - 1 if pattern == "all-to-all" else 1,
        predictability=when,
        incast=incast,
        ecmp=ecmp,
        suits_network=_INSIDE if inside_scale_up else _SUITS.get(sent_as or axis, _GOOD),
    )
