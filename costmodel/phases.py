"""The bisection rule: what must cross a cut of the fabric within a phase of the step takes no longer than it.

A step has two phases: the micro-batches, in which tensor, context, expert and pipeline groups talk, and the
synchronisation of gradients and parameters, which may run beside the last micro-batch (all of them with
ZeRO-3) and then alone. Groups that are active in one phase share the links, so their bytes add up.

Two cuts of every level: the up-link of one sub-block, and the two halves of a block. Up to where the table of
levels is a tree their capacities follow from it; `cluster_specs.graph` computes them by maximum flow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster_specs.fabric import fabric_levels
from costmodel.collectives import members_inside
from costmodel.layout import Layout, Placement
from costmodel.operators import Context
from costmodel.traffic import LevelBytes

FloatArray = NDArray[np.float64]

GRADIENT_AXES = ("dp",)
ALL_TO_ALL_AXES = ("ep",)
BESIDE = ("dp_comm", "optimizer", "step_overhead")
"""Parts of a step in which no micro-batch runs."""


@dataclass(frozen=True, kw_only=True)
class CutUse:
    """One cut of one level in one phase."""

    level: str
    cut: str
    """uplink or bisection."""
    phase: str
    """micro-batches or gradients."""
    bytes_per_gpu: float
    """That cross in a step, one direction: per GPU below the up-link, or per GPU of one half."""
    busy_s: float
    phase_s: float

    @property
    def utilisation(self) -> float:
        """Share of the phase in which the cut is busy; above 1 the phase cannot be kept."""
        return self.busy_s / self.phase_s if self.phase_s > 0 else float("inf") if self.busy_s else 0.0


def phase_seconds(c: Context, breakdown_s: dict[str, float]) -> dict[str, float]:
    """Seconds of the two phases. They overlap: gradients may be reduced beside the last micro-batch."""
    layout = c.layout
    together = sum(breakdown_s.values())
    alone = sum(breakdown_s.get(name, 0.0) for name in BESIDE)
    working = together - alone - breakdown_s.get("scale", 0.0)
    m, pp, vpp = (int(np.asarray(x)) for x in (layout.num_micro_batches, layout.pp, layout.vpp))
    if int(np.asarray(layout.zero_stage)) == 3:
        beside = working
    else:
        beside = working / (m + (pp - 1) / vpp) if c.workload.overlap.dp else 0.0
    return {"micro-batches": working, "gradients": breakdown_s.get("dp_comm", 0.0) + beside}


def cut_uses(
    c: Context, levels: tuple[LevelBytes, ...], breakdown_s: dict[str, float], halves_gb_per_s: FloatArray
) -> tuple[CutUse, ...]:
    """Every cut that something crosses, from the inside out. `halves_gb_per_s` are nominal minimum cuts.

    Of what leaves a sub-block on a ring over b sub-blocks, 1 / b of the block's sum passes from one half to
    the other; of an all-to-all, half of b / 2 / (b - 1).
    """
    seconds = phase_seconds(c, breakdown_s)
    blocks = _sub_blocks(c.placement)
    found = []
    for at, level in enumerate(levels):
        attained = float(c.links.bytes_per_s[at])
        for phase in ("micro-batches", "gradients"):
            mine = {
                axis: sent for axis, sent in level.by_axis.items()
                if (axis in GRADIENT_AXES) == (phase == "gradients")
            }  # fmt: skip
            sent = sum(mine.values())
            if sent <= 0:
                continue
            found.append(
                CutUse(
                    level=level.level,
                    cut="uplink",
                    phase=phase,
                    bytes_per_gpu=sent,
                    busy_s=sent / attained,
                    phase_s=seconds[phase],
                )
            )
            crossing = sum(n * _share(axis, int(blocks[axis][at])) for axis, n in mine.items())
            gpus = float(c.workload.gpus if at == len(levels) - 1 else _block_gpus(c, at))
            capacity = float(halves_gb_per_s[at]) * 1e9 * attained / _nominal(c, at)
            found.append(
                CutUse(
                    level=level.level,
                    cut="bisection",
                    phase=phase,
                    bytes_per_gpu=2 * crossing,
                    busy_s=crossing * gpus / capacity,
                    phase_s=seconds[phase],
                )
            )
    return tuple(found)


def _share(axis: str, blocks: int) -> float:
    """Of all that leaves the sub-blocks of a block, what passes from one half to the other."""
    if blocks < 2:
        return 0.0
    return blocks / 4 / (blocks - 1) if axis in ALL_TO_ALL_AXES else 1.0 / blocks


def _sub_blocks(placement: Placement) -> dict[str, NDArray[np.int64]]:
    """Sub-blocks of each level that a group of each axis spans."""
    members = {"dp": placement.dp_cp, "edp": placement.edp} | {
        axis: getattr(placement, axis) for axis in ("tp", "cp", "pp", "ep", "etp")
    }
    return {axis: np.asarray(m // members_inside(m), dtype=np.int64) for axis, m in members.items()}


def _block_gpus(c: Context, level: int) -> int:

    return int(fabric_levels(c.workload.cluster, c.workload.gpus).blocks[level])


def _nominal(c: Context, level: int) -> float:

    return float(fabric_levels(c.workload.cluster, c.workload.gpus).gb_per_s[level]) * 1e9


def axis_pattern(axis: str, layout: Layout) -> dict[str, object]:
    """What kind of traffic an axis makes, for people: pattern, fan-out, predictability, incast, ECMP."""
    size = int(np.asarray(getattr(layout, axis)))
    known = {
        "tp": ("ring", 1, "every layer, fixed size", "none", "few large flows: several channels help"),
        "cp": ("ring", 1, "every layer, fixed size", "none", "few large flows: several channels help"),
        "dp": ("ring", 1, "one burst a step, fixed size", "none", "few large flows: may collide"),
        "pp": ("chain", 1, "every micro-batch, fixed size", "none", "few flows: may collide"),
        "ep": ("all-to-all", size - 1, "by routing, not known ahead", "hot experts", "many flows: suited"),
        "etp": (
            "ring",
            1,
            "every layer, by routing",
            "none",
            "few large flows: several channels help",
        ),
    }
    pattern, fan_out, predictable, incast, ecmp = known[axis]
    return {
        "pattern": pattern, "fan_out": fan_out, "predictability": predictable, "incast": incast, "ecmp": ecmp,
    }  # fmt: skip
