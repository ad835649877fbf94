"""Bytes that one GPU sends across each fabric level in a step, by axis, and how long its links are busy.

A mean over the ranks of the pipeline; embedding, head and MTP modules are left out. A ring puts (P-1)/P n on
every member; of the hops of a group, those between sub-blocks cross the level, shared by the members inside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.fabric import fabric_levels
from meshwright.costmodel.collectives.on_levels import Links, cross_rail_bytes, members_inside
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.experts import dispatch_links, routed_copies
from meshwright.costmodel.memory.states import rank_parameters
from meshwright.costmodel.pipeline.rank_load import rank_counts
from meshwright.costmodel.pipeline.split import Stages

FloatArray = NDArray[np.float64]

ADDED_PER_LAYER = 4.0
"""Transfers of an activation per block of a layer: in and out, forward and backward."""


@dataclass(frozen=True)
class LevelBytes:
    """Traffic of one fabric level, per GPU and step, one direction."""

    level: str
    bytes_per_step: float
    by_axis: dict[str, float]
    busy_s: float
    utilisation: float
    """`busy_s` over the step time."""


def level_traffic(c: Context, stages: Stages, step_time_s: float) -> tuple[LevelBytes, ...]:
    """One entry per fabric level, inside out, for one layout and placement."""
    names = fabric_levels(c.workload.cluster, c.workload.gpus).names
    axes = {axis: sent for axis, sent in _bytes_by_axis(c, stages).items() if np.any(sent > 0)}
    out = []
    for level, name in enumerate(names):
        by_axis = {axis: float(sent[level]) for axis, sent in axes.items() if sent[level] > 0}
        everything = sum(by_axis.values())
        busy = everything / float(c.links.bytes_per_s[level])
        out.append(LevelBytes(name, everything, by_axis, busy, busy / step_time_s))
    return tuple(out)


def ring_bytes(volume: float, members: NDArray[np.int64]) -> FloatArray:
    """Bytes a GPU sends over each level in one ring pass of a buffer of `volume` bytes; shape [levels]."""
    inside, size = members_inside(members), int(members[-1])
    return np.where(members > inside, volume * (size - 1) / size / inside, 0.0)


def all_to_all_bytes(
    sent: float, members: NDArray[np.int64], copies: FloatArray | float = 1.0
) -> FloatArray:
    """The same for an all-to-all in which a GPU sends `sent` bytes, `copies` times over; shape [levels]."""
    inside, size = members_inside(members), int(members[-1])
    return np.where(members > inside, copies * sent * (size - inside) / size, 0.0)


def rail_changes(exchanged: FloatArray, members: NDArray[np.int64], links: Links) -> FloatArray:
    """What an all-to-all also sends over the level that joins rails, to change them; shape [levels]."""
    out = np.zeros(len(members))
    if links.rails is None or not np.any(links.rails > 1):
        return out
    joining = int(np.flatnonzero(links.rails > 1)[-1]) + 1
    if joining < len(out):
        out[joining] = float(cross_rail_bytes(exchanged, members, links.rails)) - exchanged[joining]
    return out


def _bytes_by_axis(c: Context, stages: Stages) -> dict[str, FloatArray]:
    """Each transfer of a layer runs forward and backward, and once more where the layer is recomputed."""
    model, layout, place = c.workload.model, c.layout, c.placement
    pp = len(stages)
    m = int(np.asarray(layout.num_micro_batches))
    hidden = 2.0 * float(np.asarray(c.tokens)) * model.hidden
    counts = rank_counts(c, stages)
    layers = m * model.layers / pp
    again = m * float(np.sum(counts.dense_recomputed + counts.moe_recomputed)) / pp
    again_moe = m * float(np.sum(counts.moe_recomputed)) / pp
    blocks = 2.0 * layers - m * model.moe_layers / pp
    blocks_again = 2.0 * again - again_moe
    out = {
        "tp": ring_bytes(hidden, place.tp) * tensor_passes(c, blocks, blocks_again),
        "cp": _context_bytes(c, layers, again),
        "dp": _data_parallel_bytes(c, stages, m),
        "pp": _pipeline_bytes(c, hidden / int(np.asarray(layout.tp)), m),
    }
    moe = model.moe
    if moe is not None:
        passes = ADDED_PER_LAYER * m * model.moe_layers / pp + 2.0 * again_moe
        sent = (
            hidden
            / int(np.asarray(layout.tp))
            * float(c.workload.imbalance(int(np.asarray(layout.ep))))
        )
        copies = routed_copies(c.workload, place.ep[-1:] / members_inside(place.ep), layout.ep)
        gathered = ring_bytes(sent * moe.top_k * int(np.asarray(layout.etp)), place.etp)
        exchanged = all_to_all_bytes(sent, place.ep, copies)
        out["ep"] = (exchanged + rail_changes(exchanged, place.ep, dispatch_links(c))) * passes
        out["etp"] = gathered * passes
    return out


def tensor_passes(c: Context, blocks: float, blocks_again: float) -> float:
    """Ring passes of an activation over the tensor group in a step; a gather of cast values counts less."""
    narrow = float(c.gathered_share) if np.all(c.layout.sequence_parallel) else 1.0
    return (ADDED_PER_LAYER / 2.0 * blocks + blocks_again) * (1.0 + narrow)


def _context_bytes(c: Context, layers: float, again: float) -> FloatArray:
    volume = context_volume(c, layers, again)
    if c.workload.cp_comm == "a2a":
        exchanged = all_to_all_bytes(volume, c.placement.cp)
        return exchanged + rail_changes(exchanged, c.placement.cp, c.links)
    return ring_bytes(volume, c.placement.cp)


def context_volume(c: Context, layers: float, again: float) -> float:
    """Keys and values once round the ring forward, and with their gradients backward; or heads for tokens.

    Bytes of a step: of the whole ring's buffer, or what one GPU sends in an all-to-all.
    """
    model, tp, cp = c.workload.model, int(np.asarray(c.layout.tp)), int(np.asarray(c.layout.cp))
    heads, width = model.heads / tp, model.qk_head_dim + model.v_head_dim
    kv_heads = heads if model.attention is not None else max(model.kv_heads / tp, 1.0)
    held = 2.0 * float(np.asarray(c.tokens))
    if c.workload.cp_comm == "a2a":
        return held * (heads + kv_heads) * width * (2.0 * layers + again)
    return held * kv_heads * width * cp * (3.0 * layers + again)


def gradient_element_bytes(c: Context, m: int) -> float:
    """Bytes that pass round the data-parallel ring in a step for each parameter, m micro-batches a step."""
    grad, zero = float(c.constants.framework.gradient_bytes), int(np.asarray(c.layout.zero_stage))
    scattered = 2.0 * grad if c.constants.framework.zero1_all_reduces else grad
    weight = c.gathered_weight_bytes
    return {0: 2.0 * grad, 3: (2.0 * weight + grad) * m}.get(zero, scattered + weight)


def _data_parallel_bytes(c: Context, stages: Stages, m: int) -> FloatArray:
    """Of the rank with the most parameters."""
    dense, expert = (float(np.max(x)) for x in rank_parameters(c.workload.model, c.layout, stages))
    each = gradient_element_bytes(c, m)
    return ring_bytes(dense * each, c.placement.dp_cp) + ring_bytes(expert * each, c.placement.edp)


def _pipeline_bytes(c: Context, payload: float, m: int) -> FloatArray:
    """Every boundary between chunks carries an activation forward and a gradient backward.

    Of the hops along a group, size / inside - size / members cross a level; with vpp > 1 the last rank also
    feeds the first, across the outermost level that the group spans.
    """
    members, inside = c.placement.pp, members_inside(c.placement.pp)
    size, vpp = int(members[-1]), int(np.asarray(c.layout.vpp))
    if size == 1:
        return np.zeros(members.shape)
    hops = np.where(members > inside, size / inside - size / members, 0.0)
    outermost = np.arange(len(members)) == np.flatnonzero(members > inside)[-1]
    crossing = vpp * hops + (vpp - 1) * outermost
    out: FloatArray = 2.0 * payload * m * crossing / size
    return out
