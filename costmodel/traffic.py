"""Bytes that one GPU sends across each fabric level in a step, by axis, and how long they keep its links busy.

Counted for the busiest kind of rank (mean layers per rank). A ring puts (P-1)/P n on every member; of the hops of
a group, those between sub-blocks cross the level, shared by the members inside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster_specs.fabric import fabric_levels
from costmodel.memory import rank_parameters
from costmodel.operators import Context
from costmodel.stage import Stages


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


def _inside(members: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.ones_like(members[:1]), members[:-1]])


def _ring(volume: float, members: NDArray[np.int64]) -> NDArray[np.float64]:
    """Bytes a GPU sends over each level in one ring pass of a buffer of `volume` bytes."""
    inside, size = _inside(members), int(members[-1])
    crossed = members > inside
    return np.where(crossed, volume * (size - 1) / size / inside, 0.0)


def _bytes_by_axis(c: Context, stages: Stages) -> dict[str, NDArray[np.float64]]:
    model, layout, place = c.workload.model, c.layout, c.placement
    m, pp = int(np.asarray(layout.num_micro_batches)), int(np.asarray(layout.pp))
    tokens, layers = float(np.asarray(c.tokens)), model.layers / pp
    hidden = 2.0 * tokens * model.hidden
    dense, expert = (float(np.max(x)) for x in rank_parameters(model, layout, stages))
    grad = float(c.constants.framework.gradient_bytes)
    zero = int(np.asarray(layout.zero_stage))
    per_parameter = {0: 2 * grad, 3: (4.0 + grad) * m}.get(zero, grad + 2.0)
    kv = (
        2.0
        * tokens
        * max(model.kv_heads / int(np.asarray(layout.tp)), 1.0)
        * (model.qk_head_dim + model.v_head_dim)
    )
    cp = int(np.asarray(layout.cp))
    out = {
        "tp": _ring(hidden, place.tp) * 8.0 * layers * m,
        "cp": _ring(kv * cp, place.cp) * 3.0 * layers * m,
        "dp": _ring(dense * per_parameter, place.dp_cp) + _ring(expert * per_parameter, place.edp),
        "pp": _pipeline(c, hidden / float(np.asarray(c.sequence_shards)), m),
    }
    if model.moe is not None:
        share = model.moe_layers / pp
        size, inside = int(place.ep[-1]), _inside(place.ep)
        blocks = size / inside
        reach = blocks * (1.0 - (1.0 - 1.0 / blocks) ** model.moe.top_k)
        if c.workload.moe_dispatch == "alltoall":
            reach = np.full(reach.shape, float(model.moe.top_k))
        crossing = np.where(place.ep > inside, reach * (size - inside) / size, 0.0)
        out["ep"] = hidden / int(np.asarray(layout.tp)) * crossing * 4.0 * share * m
    return out


def _pipeline(c: Context, payload: float, m: int) -> NDArray[np.float64]:
    """A boundary between neighbouring stages: activation forward, gradient backward, for every virtual stage."""
    members, inside = c.placement.pp, _inside(c.placement.pp)
    size = int(members[-1])
    if size == 1:
        return np.zeros(members.shape)
    ring = int(np.asarray(c.layout.vpp)) > 1
    hops = np.where(members > inside, size / inside - size / members, 0.0)
    share = hops / (size if ring else size - 1)
    out: NDArray[np.float64] = share * payload * m * int(np.asarray(c.layout.vpp))
    return out
