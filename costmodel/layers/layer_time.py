"""Seconds of a layer by named part, and arithmetic on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.costmodel.layout import Floats

Parts = dict[str, Floats]


@dataclass(frozen=True)
class LayerTime:
    """Forward and backward seconds of one layer by part, and what selective recomputation runs again."""

    forward: Parts
    backward: Parts
    recompute: Parts


def add(*many: Parts) -> Parts:
    """Part-wise sum."""
    out: Parts = {}
    for parts in many:
        for name, seconds in parts.items():
            out[name] = out[name] + seconds if name in out else seconds
    return out


def scaled(parts: Parts, factor: Floats) -> Parts:
    """Part-wise product."""
    return {name: seconds * factor for name, seconds in parts.items()}


def total(parts: Parts) -> Floats:
    """Sum over the parts."""
    out: Floats = sum(parts.values(), start=np.float64(0.0))
    return out


def joined(*blocks: LayerTime) -> LayerTime:
    """Blocks run one after the other."""
    return LayerTime(
        add(*(b.forward for b in blocks)),
        add(*(b.backward for b in blocks)),
        add(*(b.recompute for b in blocks)),
    )
