"""Transfers between pipeline stages, and of what two of them hold alike."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.collectives.on_levels import members_inside, point_to_point_s
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layout import Floats
from meshwright.costmodel.memory.states import table_parameters


def pipeline_p2p_s(c: Context, chunk_s: Floats) -> Floats:
    """Boundary transfers on the critical path: T h of 2 bytes, 1 / tp of it from each tensor rank.

    docs/cost_model.md, "The step", has the sources.

    Plain 1F1B waits for both directions of every micro-batch. The interleaved schedule, when asked to, runs
    them beside the compute of a virtual stage, which holds a layer at the least (`chunk_s`): what that does
    not cover is exposed, and the two slow each other down. Fill and drain are always exposed.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and links.
    chunk_s : float or array
        Of the cheapest layer, seconds, at least 0; infinite for transfers hidden as far as can be.

    Returns
    -------
    float or array
        Seconds of a step.
    """
    layout, framework = c.layout, c.constants.framework
    pp, vpp, m = (np.asarray(x) for x in (layout.pp, layout.vpp, layout.num_micro_batches))
    once, flushes = 2.0 * boundary_s(c), c.workload.flushes
    beside = np.maximum(once - chunk_s, framework.dp_interference * once)
    hidden = (vpp > 1) & c.workload.overlap.pp
    steady = np.where(hidden, beside, framework.p2p_exposed * once)
    return np.where(pp > 1, steady * m * vpp + flushes * once * (pp - 1), 0.0)


def tied_tables_s(c: Context) -> Floats:
    """All-reduce of the token table's gradient between the first and the last stage, which both hold it.

    With tied embeddings or MTP modules, after everything else (megatron/core/distributed/
    finalize_model_grads.py, _allreduce_embedding_grad; DeepSpeed runtime/pipe/engine.py, ReduceTiedGrads).

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and links.

    Returns
    -------
    float or array
        Seconds of a step.
    """
    model = c.workload.model
    if not model.tied_embeddings and not model.mtp_layers:
        return 0.0
    table = np.asarray(table_parameters(model, c.layout))
    payload = float(c.constants.framework.gradient_bytes) * table
    sent_s = point_to_point_s(payload, _outermost_level(c), c.links)
    return np.where(np.asarray(c.layout.pp) > 1, sent_s, 0.0)


def boundary_s(c: Context) -> Floats:
    """One micro-batch's activations from a stage to the next, over the outermost level that this crosses.

    docs/cost_model.md, "The step", has the sources.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and links.

    Returns
    -------
    float or array
        Seconds in one direction, in the common shape of layouts and placements.
    """
    payload = c.activation_bytes / c.layout.tp
    return point_to_point_s(payload, _outermost_level(c), c.links)


def _outermost_level(c: Context) -> NDArray[np.int64]:
    """Index of the outermost level that a pipeline group crosses, 0 where it crosses none."""
    crossed = c.placement.pp > members_inside(c.placement.pp)
    return np.asarray(np.max(np.where(crossed, np.arange(crossed.shape[-1]), 0), axis=-1))
