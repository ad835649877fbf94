"""Layouts (all degrees and schedule choices) and placements (members of a group in a block of each level).

Every field is an integer or an integer array; arrays broadcast against each other, so one `Layout` is one
layout or a hundred thousand of them, and every formula of the cost model is written once for both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import IntFlag
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Ints = int | NDArray[np.int64]
Floats = float | NDArray[np.float64]
Bools = bool | NDArray[np.bool_]
ROUNDING = 1e-9
"""Relative, by which sums in another order may differ: bounds leave as much, and what is as near is equal."""


class Recompute(IntFlag):
    """Which activations are dropped after the forward pass and computed again in the backward pass.

    Beside an array a member is written as an integer: NumPy takes three times as long beside an
    enumeration.
    """

    NONE = 0
    CORE_ATTENTION = 1
    LAYERNORM = 2
    MOE_ACTIVATION = 4
    MLA_UP_PROJECTION = 8
    MLP = 16
    FULL = 32
    OPERATORS = 64
    """torchtitan's operator-level choice: all but attention and every second matrix product is run again."""
    EXPERTS = 128
    """A whole layer of experts behind its norm: router, dispatch, routed and shared experts, combine
    (Megatron's `--recompute-modules moe`)."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees, batch split, sharding and recomputation of one or many layouts.

    gpus = tp * cp * pp * dp; the experts use the same GPUs as etp * ep * edp * pp. `dp` excludes `cp`.
    Degrees, `vpp`, batch numbers and `shard_groups` are at least 1.
    """

    tp: Ints = 1
    cp: Ints = 1
    pp: Ints = 1
    dp: Ints = 1
    ep: Ints = 1
    etp: Ints = 1
    vpp: Ints = 1
    micro_batch: Ints = 1
    """Sequences per micro-batch and data-parallel replica."""
    num_micro_batches: Ints = 1
    """Micro-batches per step and replica."""
    sequence_parallel: Bools = False
    zero_stage: Ints = 0
    """0 to 3: nothing sharded; optimizer states, from 2 on gradients too, and under 3 parameters (FSDP)."""
    shard_groups: Ints = 1
    """Groups of replicas that each hold all that ZeRO shards (HSDP; Megatron's distributed optimizer
    instances); the innermost ranks form one. 1 shards over all replicas."""
    optimizer_offload: Ints = 0
    """Percent, 0 to 100, of the parameters whose optimizer states, fp32 weights among them, lie in the host's
    memory and are updated by its CPU."""
    recompute: Ints = 0
    """A `Recompute` mask."""
    recompute_layers: Ints = 0
    """With FULL: how many layers of each virtual stage are recomputed (a large number means all)."""
    schedule: Ints = 0
    """A `meshwright.costmodel.schedules.Schedule`; 0 is 1F1B, interleaved where vpp > 1."""

    @property
    def gpus(self) -> Ints:
        """GPUs in use: tp * cp * pp * dp."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def expert_group(self) -> Ints:
        """Ranks that hold one replica of a layer's experts: etp * ep."""
        return self.etp * self.ep

    @property
    def edp(self) -> Ints:
        """Replicas of an expert: tp * cp * dp / (etp * ep)."""
        return (self.tp * self.cp * self.dp) // self.expert_group

    @property
    def recomputes_layers(self) -> NDArray[np.bool_]:
        """Whether whole layers are recomputed, `recompute_layers` of each virtual stage."""
        return np.asarray((np.asarray(self.recompute) & int(Recompute.FULL)) != 0)

    def take(self, index: Any) -> Self:
        """The layouts at some positions of an array layout.

        Parameters
        ----------
        index : int, slice, or array of integers or truth values
            Anything that indexes an array of shape `broadcast_shape()`.

        Returns
        -------
        Layout
            Fields indexed so, as arrays; fields that share one array share the result too.

        Raises
        ------
        IndexError
            For a position that is not there.
        """
        shape, values = self.broadcast_shape(), vars(self)
        taken: dict[int, NDArray[Any]] = {}
        for value in values.values():
            if id(value) not in taken:
                taken[id(value)] = in_shape(value, shape)[index]
        return self._with_fields({name: taken[id(value)] for name, value in values.items()})

    def _with_fields(self, values: dict[str, Any]) -> Self:
        # Setting frozen fields one by one takes ten times as long.
        layouts = object.__new__(type(self))
        vars(layouts).update(values)
        return layouts

    def followed_by(self, others: Self) -> Self:
        """The layouts of two one-dimensional array layouts.

        Parameters
        ----------
        others : Layout
            Array layouts of shape [k], k 0 or more.

        Returns
        -------
        Layout
            Shape [n + k], these ones first.
        """
        first, second = self._broadcast(), others._broadcast()
        both = {name: np.concatenate([first[name], second[name]]) for name in first}
        return self._with_fields(both)

    def scalar(self, index: int) -> Self:
        """One layout of a one-dimensional array layout.

        Parameters
        ----------
        index : int
            Position, 0 to n - 1.

        Returns
        -------
        Layout
            With plain Python numbers.

        Raises
        ------
        IndexError
            For a position that is not there.
        """
        values = self._broadcast()
        return type(self)(**{name: array[index].item() for name, array in values.items()})

    def with_axis(self) -> Self:
        """The same layouts with a trailing axis of length one, to broadcast against pipeline ranks.

        Returns
        -------
        Layout
            Fields of shape [..., 1].
        """
        return self._with_fields(
            {name: np.asarray(value)[..., None] for name, value in vars(self).items()}
        )

    def flat(self) -> Self:
        """The same layouts, one after the other.

        Returns
        -------
        Layout
            Fields of shape [n].
        """
        values = self._broadcast()
        return self._with_fields({name: array.ravel() for name, array in values.items()})

    def broadcast_shape(self) -> tuple[int, ...]:
        """The common shape of the fields.

        Returns
        -------
        tuple of int
            () for a single layout.

        Raises
        ------
        ValueError
            Where the fields do not broadcast against each other.
        """
        shape: tuple[int, ...] = ()
        for value in vars(self).values():
            field_shape = getattr(value, "shape", ())
            if field_shape and field_shape != shape:
                if shape:
                    return np.broadcast_shapes(*map(np.shape, vars(self).values()))
                shape = field_shape
        return shape

    def _broadcast(self) -> dict[str, Any]:
        """Every field in the common shape."""
        shape = self.broadcast_shape()
        return {name: in_shape(value, shape) for name, value in vars(self).items()}


def in_shape(values: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """An array or a number in a shape that it broadcasts to; itself where it has that shape.

    Parameters
    ----------
    values : number or array
        Any that NumPy broadcasts to `shape`.
    shape : tuple of int
        Of what is returned.

    Returns
    -------
    array, shape `shape`
        Read-only where it had to be broadcast.

    Raises
    ------
    ValueError
        Where the values do not broadcast to the shape.
    """
    array = np.asarray(values)
    if array.shape == shape:
        return array
    if array.ndim:
        return np.broadcast_to(array, shape)
    # As NumPy broadcasts a number, in less than half of its time.
    same: NDArray[Any] = np.ndarray(shape, array.dtype, array, strides=(0,) * len(shape))
    same.flags.writeable = False
    return same


def is_among(values: Ints, allowed: Iterable[int]) -> NDArray[np.bool_]:
    """Whether values are among a handful of others, in a fifth of the time of NumPy's `isin`.

    Parameters
    ----------
    values : int or array, shape [...]
        Any.
    allowed : iterable of int
        Each is compared with all of the values.

    Returns
    -------
    array of bool, shape [...]
        All false where nothing is allowed.
    """
    found = np.zeros(np.shape(values), dtype=np.bool_)
    for value in allowed:
        found |= values == value
    return found


AXES = ("tp", "cp", "dp", "pp")
"""The axes that tile the cluster, in Megatron's order without the expert axes."""
STAGE_AXES = AXES[:-1]
"""Of the ranks of one pipeline stage."""
PLACED_AXES = (*AXES, "ep", "etp")
"""Degrees on which mappings and placements depend."""
EXPERT_AXES = ("etp", "ep", "edp")
"""The axes of the experts on the ranks of a stage, innermost first."""
LAYER_AXES = ("tp", "cp", "ep", "etp")
"""Axes whose groups talk within the layers of a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where groups lie: for each axis, the members of one group inside one block of each fabric level.

    Arrays have shape [..., levels]; the last level holds the whole group. Build one with
    `meshwright.costmodel.placement`.
    """

    tp: NDArray[np.int64]
    cp: NDArray[np.int64]
    dp: NDArray[np.int64]
    pp: NDArray[np.int64]
    ep: NDArray[np.int64]
    etp: NDArray[np.int64]
    edp: NDArray[np.int64]
    dp_cp: NDArray[np.int64]
    """The group over which dense gradients are reduced."""

    def take(self, index: Any) -> Self:
        """Some of many placements.

        Parameters
        ----------
        index : int, array of integers or truth values, or None
            Along the first axis of arrays [k, levels]; None puts an axis of length one before all others.

        Returns
        -------
        Placement
            Arrays as NumPy indexes them.
        """
        return replace(self, **{name: np.asarray(m)[index] for name, m in vars(self).items()})


GROUPS = tuple(field.name for field in fields(Placement))
"""Every kind of group that has a place."""


@dataclass(frozen=True, kw_only=True)
class StagedPlacement(Placement):
    """A placement under which expert groups of some pipeline stages lie closer together than those of others.

    `ep` has those that reach least far.
    """

    stage_ep: NDArray[np.int64]
    """Of each stage's expert groups, shape [..., pp, levels]."""

    def by_stage(self) -> Placement:
        """Every stage as a placement of its own.

        Returns
        -------
        Placement
            Arrays of shape [n * pp, levels] for those of shape [n, levels], and [pp, levels] for [levels].
        """
        stages, levels = self.stage_ep.shape[-2:]
        columns = {
            name: np.repeat(np.asarray(getattr(self, name)).reshape(-1, levels), stages, axis=0)
            for name in GROUPS
        }
        return Placement(**{**columns, "ep": self.stage_ep.reshape(-1, levels)})


def recomputes_experts(layout: Layout) -> NDArray[np.bool_]:
    """Whether selective recomputation runs whole layers of experts again.

    Their transfers too: the checkpoint is around dispatch and combine (megatron-core 0.16,
    megatron/core/transformer/moe/moe_layer.py, MoELayer.forward).

    Parameters
    ----------
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    bool, or array of bool of shape [n]
    """
    marked: NDArray[np.bool_] = (np.asarray(layout.recompute) & int(Recompute.EXPERTS)) != 0
    return marked
