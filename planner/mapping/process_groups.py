"""Process groups of every axis, as the framework makes them from the same degrees and order.

Megatron-core 0.19 builds two grids (`RankGenerator` in `parallel_state`): a dense one of tp, cp, dp, pp,
and one of the experts in which etp stands for tp, edp for dp, and cp is 1. torchtitan's and DeepSpeed's
meshes, tp innermost and pp outermost, are the same grid in the default order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import Ints
from meshwright.errors import InfeasibleError
from meshwright.planner.bounds.matrices import MEGATRON_DEFAULT, MEGATRON_TP_PP_DP

Groups = NDArray[np.int64]
"""Shape [groups, ranks in a group]."""

DENSE = ("tp", "cp", "dp", "pp")
DENSE_GROUPS: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp-cp": ("dp", "cp"),
    "tp-cp": ("tp", "cp"),
    "tp-pp": ("tp", "pp"),
    "tp-dp-cp": ("tp", "dp", "cp"),
}
EXPERT_GROUPS: Mapping[str, tuple[str, ...]] = {
    "etp": ("tp",),
    "ep": ("ep",),
    "edp": ("dp",),
    "etp-ep": ("tp", "ep"),
    "etp-ep-pp": ("tp", "ep", "pp"),
}


class Degrees(Protocol):
    """The parallel degrees of one layout."""

    @property
    def tp(self) -> Ints: ...
    @property
    def cp(self) -> Ints: ...
    @property
    def dp(self) -> Ints: ...
    @property
    def pp(self) -> Ints: ...
    @property
    def ep(self) -> Ints: ...
    @property
    def etp(self) -> Ints: ...


def megatron_order(pipeline_before_data: bool) -> tuple[str, ...]:
    """Megatron's default order, or that of `--use-tp-pp-dp-mapping`."""
    return MEGATRON_TP_PP_DP if pipeline_before_data else MEGATRON_DEFAULT


def grid_groups(sizes: Mapping[str, int], order: Sequence[str], axes: Sequence[str]) -> Groups:
    """The groups that run along `axes` of a grid, as Megatron's generate_masked_orthogonal_rank_groups lists
    them: ranks count in `order`, its first axis fastest, both among the groups and inside of one.
    """
    shape = [sizes[axis] for axis in order]
    ranks = np.arange(prod(shape), dtype=np.int64).reshape(shape[::-1])
    # Array axes run the other way round: the last is the fastest.
    position = {axis: len(order) - 1 - index for index, axis in enumerate(order)}
    along = sorted(position[axis] for axis in axes)
    across = sorted(set(position.values()) - set(along))
    members = prod(sizes[axis] for axis in axes)
    return ranks.transpose([*across, *along]).reshape(-1, members)


def process_groups(
    layout: Degrees, order: Sequence[str] = MEGATRON_DEFAULT, *, experts: bool
) -> dict[str, Groups]:
    """Every group by name: the dense axes and their products, and with `experts` the expert axes.

    `order` names tp, cp, ep, dp and pp. Raises InfeasibleError where Megatron could not make the expert
    grid: it wants as many expert as dense replicas if pp is not outermost.
    """
    tp, cp, dp, pp = int(layout.tp), int(layout.cp), int(layout.dp), int(layout.pp)
    etp, ep = int(layout.etp), int(layout.ep)
    dense = {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": 1}
    groups = {name: grid_groups(dense, order, axes) for name, axes in DENSE_GROUPS.items()}
    if not experts:
        return groups
    expert_replicas, rest = divmod(tp * cp * dp, etp * ep)
    if rest:
        raise InfeasibleError(
            f"etp {etp} x ep {ep} does not divide tp x cp x dp, {tp} x {cp} x {dp}."
        )
    if pp > 1 and order[-1] != "pp" and expert_replicas != dp:
        raise InfeasibleError(
            f"the order {'-'.join(order)} needs as many expert replicas as dp: "
            f"{expert_replicas}, not {dp}."
        )
    expert = {"tp": etp, "cp": 1, "ep": ep, "dp": expert_replicas, "pp": pp}
    return groups | {name: grid_groups(expert, order, axes) for name, axes in EXPERT_GROUPS.items()}


def coordinates(groups: Mapping[str, Groups], axis: str) -> NDArray[np.int64]:
    """The place of every rank inside its group of one axis, shape [ranks]."""
    table = groups[axis]
    places = np.empty(table.size, dtype=np.int64)
    places[table.ravel()] = np.tile(np.arange(table.shape[1]), table.shape[0])
    return places
