"""Seconds of a layer by named part, and arithmetic on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.costmodel.layout import Floats

Parts = dict[str, Floats]
"""Seconds by part: gemm, expert_gemm, attention, memory_bound, tp_comm, cp_comm, ep_comm, host, recompute."""


@dataclass(frozen=True)
class LayerTime:
    """Forward and backward seconds of one layer by part, and what selective recomputation runs again."""

    forward: Parts
    backward: Parts
    recompute: Parts


def add(*summands: Parts) -> Parts:
    """Part-wise sum.

    Parameters
    ----------
    *summands : dict of str to float or array
        Seconds by part; a missing part counts as 0.

    Returns
    -------
    dict of str to float or array
        Seconds of every part that some summand has.
    """
    result: Parts = {}
    for parts in summands:
        for name, seconds in parts.items():
            result[name] = result[name] + seconds if name in result else seconds
    return result


def scaled(parts: Parts, factor: Floats) -> Parts:
    """Part-wise product.

    Parameters
    ----------
    parts : dict of str to float or array
        Seconds by part.
    factor : float or array
        A number without unit, at least 0.

    Returns
    -------
    dict of str to float or array
        Seconds of the same parts.
    """
    return {name: seconds * factor for name, seconds in parts.items()}


def total(parts: Parts) -> Floats:
    """Sum over the parts.

    Parameters
    ----------
    parts : dict of str to float or array
        Seconds by part, shapes that broadcast.

    Returns
    -------
    float or array
        Seconds; 0 without parts.
    """
    seconds: Floats = sum(parts.values(), start=np.float64(0.0))
    return seconds


def joined(*blocks: LayerTime) -> LayerTime:
    """Blocks run one after the other.

    Parameters
    ----------
    *blocks : LayerTime
        Attention and feed-forward of a layer.

    Returns
    -------
    LayerTime
        Part-wise sums.
    """
    return LayerTime(
        add(*(b.forward for b in blocks)),
        add(*(b.backward for b in blocks)),
        add(*(b.recompute for b in blocks)),
    )


def shared_out(first: LayerTime, second: LayerTime, share: float) -> LayerTime:
    """The mean of two blocks of which some layers have one and the others the other.

    Parameters
    ----------
    first, second : LayerTime
        The blocks.
    share : float
        Layers with the first over all, 0 to 1.

    Returns
    -------
    LayerTime
        Part-wise means.
    """
    rest = 1.0 - share
    return LayerTime(
        add(scaled(first.forward, share), scaled(second.forward, rest)),
        add(scaled(first.backward, share), scaled(second.backward, rest)),
        add(scaled(first.recompute, share), scaled(second.recompute, rest)),
    )


def portion(block: LayerTime, share: float) -> LayerTime:
    """What the mean layer has of a block that some layers have.

    Parameters
    ----------
    block : LayerTime
        The block.
    share : float
        Layers with it over all, 0 to 1.

    Returns
    -------
    LayerTime
        The block itself where every layer has it, else its parts times the share.
    """
    if share == 1.0:
        return block
    return LayerTime(
        scaled(block.forward, share), scaled(block.backward, share), scaled(block.recompute, share)
    )
