"""What the dispatchers of tokens differ in, and the all-gather of one of them.

Megatron's `--moe-token-dispatcher-type allgather` gathers the tokens of all etp ep ranks of a group on each
of them, which keeps those of its own experts, and scatters the sums of what the experts return
(megatron-core 0.19, megatron/core/transformer/moe/token_dispatcher.py, MoEAllGatherTokenDispatcher). The
routing goes with them: a byte and a probability for each expert. What is summed has the type of the
probabilities, 32 bits with `--moe-router-dtype fp32`, as in every launch file.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import Floats, Layout, Placement
from meshwright.costmodel.workload import Workload

GATHERS = "allgather"
TOKEN_BYTES, SUM_BYTES = 2.0, 4.0
"""Of an element of a gathered token, and of a sum that is scattered; backward their gradients, each in the
other direction."""
PROBABILITY_BYTES, CHOICE_BYTES = 4.0, 1.0
"""Of the routing of a token to an expert: both forward, the gradient of the first backward."""


def deduplicates(workload: Workload) -> bool:
    """Whether a token travels once to each rank that holds some of its experts.

    Parameters
    ----------
    workload : Workload
        Its `moe_dispatch`.

    Returns
    -------
    bool
    """
    return workload.moe_dispatch not in ("alltoall", GATHERS)


def gathered_ranks(layout: Layout) -> Floats:
    """Ranks of a group, etp ep, whose tokens each of them gathers.

    Parameters
    ----------
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    float or array
    """
    ranks: Floats = np.asarray(layout.etp, dtype=np.float64) * layout.ep
    return ranks


def gathering_members(placement: Placement) -> NDArray[np.int64]:
    """Members of such a group inside a block of each level: expert-tensor groups nest in it.

    Parameters
    ----------
    placement : Placement
        Of arrays [..., levels].

    Returns
    -------
    array of int, shape [..., levels]
    """
    return np.asarray(placement.ep * placement.etp)


def pass_bytes(workload: Workload) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bytes a token of each ring pass of a layer, forward and backward.

    Parameters
    ----------
    workload : Workload
        Of a model with experts.

    Returns
    -------
    tuple of two tuples of float
        Tokens, sums, probabilities and choices.
    """
    moe, hidden = workload.model.moe, workload.model.hidden
    assert moe is not None
    both = (TOKEN_BYTES * hidden, SUM_BYTES * hidden, PROBABILITY_BYTES * moe.experts)
    return (*both, CHOICE_BYTES * moe.experts), both
