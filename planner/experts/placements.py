"""Placements in use, from any of the files that `experts` writes: our own, and those of other systems."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.documents import read_mapping
from meshwright.errors import InputError
from meshwright.frameworks.megatron import MEGATRON
from meshwright.planner.experts.bound import balance_bound
from meshwright.planner.experts.packing import Solved, by_layer, has_duplicates
from meshwright.planner.experts.problem import MOVES, Loads, PlacementLimits, Slots, SlotShape
from meshwright.planner.experts.recorders import LARGEST_TEXT_BYTES, MOST_EXPERTS, number_array
from meshwright.planner.solvers.clock import is_over

_KEYS = ("physical_to_logical_map", "initial_global_assignments", "layer_list", "permutation")


def read_placement(
    path: Path, *, layers: int, gpus: int, experts: int, layer_ids: tuple[int, ...] = ()
) -> Slots:
    """Slots [layers, gpus, slots of a GPU] from any file that `experts` writes. Raises InputError.

    Parameters
    ----------
    path
        Our own JSON, SGLang's, TensorRT-LLM's YAML, vLLM-ascend's JSON, or a Megatron permutation.
    layers
        With experts.
    gpus
        That slots must divide over.
    experts
        Of a layer.
    layer_ids
        Numbers of these layers in the model; empty where they are not known.
    """
    document = read_mapping(path, LARGEST_TEXT_BYTES)
    key = next((name for name in _KEYS if name in document), None)
    if key is None:
        raise InputError(
            f"{path}: no {', '.join(_KEYS[:-1])} or {_KEYS[-1]}; give a placement written by `experts`"
        )
    where = f"{path}: {key}"
    assignments = document[key]
    if key == "layer_list":
        assignments = _by_device(assignments, where)
    elif isinstance(assignments, Mapping):
        assignments = [assignments[layer] for layer in _numbered(assignments, where)]
    table = number_array(assignments, where)
    if (
        table.ndim != 2
        or table.dtype.kind not in "iu"
        or len(table) < layers
        or table.shape[1] % gpus
    ):
        raise InputError(
            f"{where} must be integers [{layers} layers, slots], slots a multiple of {gpus} GPUs, got "
            f"{list(table.shape)}"
        )
    table = _with_experts(table, layers, layer_ids)
    if table.min() < 0 or table.max() >= min(experts, MOST_EXPERTS):
        raise InputError(f"{where}: experts must be from 0 to {experts - 1}")
    for layer, row in enumerate(table):
        missing = sorted(set(range(experts)) - set(row.tolist()))
        if missing:
            raise InputError(f"{where}[{layer}]: expert {missing[0]} is in no slot")
    return np.asarray(table, dtype=np.int64).reshape(layers, gpus, -1)


def _numbered(assignments: Mapping[Any, Any], where: str) -> list[Any]:
    """Keys in the order of their layers."""
    keys = {key: str(key) for key in assignments}
    if not keys or not all(text.isdecimal() and len(text) < 10 for text in keys.values()):
        raise InputError(
            f"{where}: keys must be the numbers of layers, got {list(keys.values())[:4]}"
        )
    return sorted(keys, key=lambda key: int(keys[key]))


def _by_device(layer_list: object, where: str) -> list[list[Any]]:
    """Rows of vLLM-ascend's layer_list, devices one after the other."""
    try:
        rows = [
            [
                device["device_expert"]
                for device in sorted(layer["device_list"], key=lambda d: d["device_id"])
            ]
            for layer in sorted(layer_list, key=lambda entry: entry["layer_id"])  # type: ignore[call-overload]
        ]
        return [[expert for device in row for expert in device] for row in rows]
    except (KeyError, TypeError):
        raise InputError(
            f"{where}: every layer needs layer_id and device_list, every device device_id and device_expert"
        ) from None


def _with_experts(table: NDArray[Any], layers: int, layer_ids: tuple[int, ...]) -> NDArray[Any]:
    """The rows of layers with experts: SGLang's file has one for every layer, dense ones come first."""
    if len(table) > layers == len(layer_ids) and max(layer_ids) < len(table):
        return table[list(layer_ids)]
    return table[len(table) - layers :]


# Placement files: our own JSON, and what SGLang, TensorRT-LLM, vLLM-ascend and Megatron checkpoints load.


READERS = {
    "json": "meshwright experts --from FILE",
    "sglang": "SGLang: --init-expert-location FILE",
    "trtllm": "TensorRT-LLM: moe_config: {load_balancer: FILE} in the YAML of --config",
    "vllm": (
        'vLLM on Ascend: --additional-config \'{"eplb_config": {"expert_map_path": "FILE"}}\' '
        "(before vllm-ascend 0.13 without eplb_config)"
    ),
    MEGATRON.name: "Megatron checkpoints: no option; permute experts and router rows by it",
}
"""By format: the program that reads the file, and the option that loads it. nvidia.github.io/TensorRT-LLM
(MoeConfig); docs.vllm.ai/projects/ascend (Additional Configuration); SGLang server arguments."""
PLACEMENT_FORMATS = tuple(READERS)


@dataclass(frozen=True, kw_only=True)
class PlacementFile:
    """A placement as files hold it: slots [layers, gpus, slots of a GPU]."""

    slots: Slots
    experts: int
    nodes: int
    layer_ids: tuple[int, ...]
    """The model's layer of each row; dense layers are the numbers that are left out below."""
    summary: Mapping[str, Any]


def placement_text(placed: PlacementFile, form: str) -> str:
    """The text of the file. Raises InputError for an unknown format or a placement that it cannot hold.

    Parameters
    ----------
    placed
        What is where.
    form
        `json`, or whose file it is: sglang, trtllm, vllm or Megatron's.
    """
    writers = {
        "json": _own,
        "sglang": _sglang,
        "trtllm": _trtllm,
        "vllm": _vllm_ascend,
        MEGATRON.name: _megatron,
    }
    if form not in writers:
        raise InputError(f"format: no format {form[:40]!r}; allowed: {', '.join(writers)}")
    return writers[form](placed)


def _own(placed: PlacementFile) -> str:
    flat = placed.slots.reshape(len(placed.slots), -1)
    document = {
        "schema": 1,
        "kind": "expert_placement",
        "experts": placed.experts,
        "gpus": placed.slots.shape[1],
        "nodes": placed.nodes,
        "slots": flat.shape[1],
        "layer_ids": list(placed.layer_ids),
        "physical_to_logical_map": flat.tolist(),
        "summary": dict(placed.summary),
    }
    return json.dumps(document) + "\n"


def _sglang(placed: PlacementFile) -> str:
    """For --init-expert-location: one map and no other key; every layer of the model has a row."""
    # Slots of every layer up to the last, [layers, slots]; dense layers hold the experts in order.
    flat = placed.slots.reshape(len(placed.slots), -1)
    table = np.tile(np.arange(flat.shape[1]) % placed.experts, (max(placed.layer_ids) + 1, 1))
    table[list(placed.layer_ids)] = flat
    return json.dumps({"physical_to_logical_map": table.tolist()}) + "\n"


def _trtllm(placed: PlacementFile) -> str:
    """TensorRT-LLM's load balancer: assignments by the model's layer number, no updates while running."""
    flat = placed.slots.reshape(len(placed.slots), -1)
    lines = [f"num_slots: {flat.shape[1]}", "initial_global_assignments:"]
    lines += [
        f"  {layer}: {row.tolist()}" for layer, row in zip(placed.layer_ids, flat, strict=True)
    ]
    return "\n".join([*lines, "layer_updates_per_iter: 0"]) + "\n"


def _vllm_ascend(placed: PlacementFile) -> str:
    """vLLM-ascend's expert_map_path: the experts of each device, layer by layer, MoE layers only."""
    layers = [
        {
            "layer_id": index,
            "device_count": len(layer),
            "device_list": [
                {"device_id": gpu, "device_expert": experts.tolist()}
                for gpu, experts in enumerate(layer)
            ],
        }
        for index, layer in enumerate(placed.slots)
    ]
    return json.dumps({"moe_layer_count": len(layers), "layer_list": layers}) + "\n"


def _megatron(placed: PlacementFile) -> str:
    """A permutation for checkpoints: position p of a layer takes weights and router row of expert old[p]."""
    flat = placed.slots.reshape(len(placed.slots), -1)
    if flat.shape[1] != placed.experts:
        raise InputError(
            f"format: megatron trains every expert once: {flat.shape[1]} slots for {placed.experts} experts "
            f"hold replicas; use --slots {placed.experts}"
        )
    document = {
        "permutation": {
            str(i): row.tolist() for i, row in zip(placed.layer_ids, flat, strict=True)
        },
        "inverse": {
            str(i): np.argsort(row).tolist() for i, row in zip(placed.layer_ids, flat, strict=True)
        },
        "expert_model_parallel_size": placed.slots.shape[1],
    }
    return json.dumps(document) + "\n"


# From a placement in use to a better one by few moves: moving an expert's weights costs.
#
# A move puts an expert on a GPU that does not hold it in the current placement. What is minimised is the
# balance, mean over layers, since layers run one after the other. Every layer gets a curve of balance by
# moves, one change after another: two experts change places (two moves), or a slot of an expert with
# other replicas takes another expert (one move, and the replica counts change). Dynamic programming
# shares the moves out.


Changes = tuple[Loads, NDArray[np.int64]]
"""Norms of the GPU loads after each change [n]; gpu, slot, expert that comes, and the slot elsewhere that
takes the one that goes, or -1 [n, 4]."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The placement, moves of each layer [layers], and a bound on the mean balance within the limit."""

    solved: Solved
    moves: Slots
    mean_bound: float
    before: Loads
    """Balance of the current placement, [layers]."""
    optimal: bool
    """Whether the mean balance is at its bound."""


def improve_from(
    loads: Loads,
    current: Slots,
    shape: SlotShape,
    max_moves: int,
    *,
    limits: PlacementLimits | None = None,
    time_limit_s: float = 30.0,
) -> Moved:
    """The best placement found with at most `max_moves` moves from the current one.

    Parameters
    ----------
    loads
        Tokens of each expert, [windows, layers, experts]; the worst window counts.
    current
        Placement in use, [layers, gpus, slots of a GPU].
    shape
        Slots, GPUs and nodes.
    max_moves
        Over all layers, at least 0.
    limits
        Groups stay on the nodes where they are; spread replicas stay spread.
    time_limit_s
        Shared out over the layers as steps of their curves.

    Raises
    ------
    InputError
        If the current placement has another shape, an expert twice on a GPU, or breaks the limits.
    """
    limits = limits or PlacementLimits()
    _check(current, shape, limits, loads.shape[2])
    rows = by_layer(loads, shape.gpus)
    # Half of the limit, so that the clock does not end what is counted in steps.
    candidates = shape.slots * (2 * shape.per_gpu + 1) + rows.shape[2] * shape.per_gpu
    step_s = MOVES.candidate_s * candidates * shape.gpus * rows.shape[1] + 5e-4
    most_steps = int(np.clip(0.5 * time_limit_s / (step_s * len(rows)), 2, MOVES.most_steps))
    curves, bounds = [], []
    for row, slots in zip(rows, current, strict=True):
        layer = _Layer(
            slots=slots,
            loads=row,
            spread_nodes=shape.nodes if limits.spread else 1,
            block=shape.node_gpus if limits.groups > 1 else shape.gpus,
        )
        curves.append(layer.curve(min(max_moves, shape.slots), most_steps))
        bound = float(balance_bound(row[None], shape.slots, shape.gpus)[0])
        bounds.append(bound_curve(row, slots, min(max_moves, shape.slots), bound))
    _, spent = _shared([np.array([step.value for step in curve]) for curve in curves], max_moves)
    picked = [curve[moves] for curve, moves in zip(curves, spent, strict=True)]
    value = np.array([step.value for step in picked])
    mean_bound = min(_shared(bounds, max_moves)[0] / len(rows), float(value.mean()))
    return Moved(
        solved=Solved(
            slots=np.sort(np.stack([step.slots for step in picked]), axis=2),
            value=value,
            bound=np.minimum(np.array([curve[-1] for curve in bounds]), value),
        ),
        moves=np.array([step.moves for step in picked]),
        mean_bound=mean_bound,
        before=np.array([curve[0].value for curve in curves]),
        optimal=bool(value.mean() <= mean_bound * (1 + 1e-9)),
    )


def count_moves(before: Slots, after: Slots) -> int:
    """(expert, GPU) pairs of `after` that `before` does not hold; slots [gpus, slots of a GPU].

    Parameters
    ----------
    before
        Experts as they lie.
    after
        As they are to lie.
    """
    return sum(
        len(set(new.tolist()) - set(old.tolist())) for old, new in zip(before, after, strict=True)
    )


def bound_curve(load: Loads, slots: Slots, moves: int, least_bound: float) -> Loads:
    """Bounds on a layer's largest GPU load after 0 .. `moves` moves, [moves + 1], convex and falling.

    Two arguments for a GPU of load W. One: what leaves it needs a move onto it, and a further replica
    elsewhere is a move too and takes less than the whole; so k moves take at most its k largest replicas.
    Two: a move puts out one replica somewhere, and takes at most w / (c + 1) off the other GPUs that hold the
    expert that comes; so m moves take at most m times the largest of both from all GPUs above any level.

    Parameters
    ----------
    load
        Of one layer, [windows, experts].
    slots
        The placement in use, [gpus, slots of a GPU].
    moves
        Most of the curve.
    least_bound
        No placement at all is below it.
    """
    counts = np.bincount(slots.ravel(), minlength=load.shape[1])
    share = load / np.maximum(counts, 1)
    steps = np.arange(moves + 1)
    curve = np.full(moves + 1, least_bound)
    for window in range(len(load)):
        replica_loads = -np.sort(-share[window][slots], axis=1)
        gpu = replica_loads.sum(axis=1)
        taken = np.concatenate(
            [np.zeros((len(slots), 1)), np.cumsum(replica_loads, axis=1)], axis=1
        )
        for total, taken_of_gpu in zip(gpu, taken, strict=True):
            curve = np.maximum(
                curve, total - taken_of_gpu[np.minimum(steps, len(taken_of_gpu) - 1)]
            )
        each = share[window].max() + (load[window] / (counts + 1)).max()
        curve = np.maximum(curve, _level(gpu, steps * each))
    return curve


def _level(gpu: Loads, taken: Loads) -> Loads:
    """The level T for which the loads above T, sum of max(0, load - T), are `taken`, for each of them."""
    ordered = -np.sort(-gpu)
    load_above = np.cumsum(ordered) - np.arange(1, len(gpu) + 1) * ordered
    count = np.searchsorted(load_above, taken, side="right")
    return np.asarray((np.cumsum(ordered)[count - 1] - taken) / count)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A placement on the way: slots [gpus, per GPU], moves from the start, largest GPU load."""

    slots: Slots
    moves: int
    value: float


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """A layer's placement in use: slots [gpus, per GPU], loads [windows, experts] over the mean GPU load."""

    slots: Slots
    loads: Loads
    spread_nodes: int
    block: int
    """GPUs of a block that no expert leaves."""

    def curve(self, most_moves: int, most_steps: int) -> list[_Step]:
        """The best placement found for 0 .. n moves; the first is the current one.

        Parameters
        ----------
        most_moves
            Of the layer; the curve has one point more than it gets to.
        most_steps
            Changes that are made one after the other, at most.
        """
        step = self._step(self.slots)
        best = [step]
        # Going back over a move frees it, so the count of steps is bounded apart from that of moves.
        for _ in range(min(most_steps, 2 * most_moves)):
            slots = None if is_over() else self._changed(step, most_moves)
            if slots is None:
                break
            step = self._step(slots)
            best += [best[-1]] * (step.moves + 1 - len(best))
            best[step.moves :] = [min(b, step, key=_value) for b in best[step.moves :]]
        return best

    def _step(self, slots: Slots) -> _Step:
        value = float(self._gpu_loads(slots).max())
        return _Step(slots=slots, moves=self._moves(slots), value=value)

    def _moves(self, slots: Slots) -> int:
        is_held = (slots[:, :, None] == self.slots[:, None, :]).any(axis=2)
        return int((~is_held).sum())

    def _gpu_loads(self, slots: Slots) -> Loads:
        counts = np.maximum(self._counts(slots), 1)
        return np.asarray((self.loads / counts)[:, slots].sum(axis=2))

    def _counts(self, slots: Slots) -> NDArray[np.int64]:
        return np.bincount(slots.ravel(), minlength=self.loads.shape[1])

    def _changed(self, step: _Step, most_moves: int) -> Slots | None:
        """The change with the largest fall of the norm for each move that it costs; None where none helps."""
        slots, load = step.slots, self._gpu_loads(step.slots)
        hottest, norm = int(load.max(axis=0).argmax()), _norm(load[None])[0]
        is_on_gpu = np.zeros((len(slots), self.loads.shape[1]), dtype=bool)
        np.put_along_axis(is_on_gpu, slots, True, axis=1)
        swaps = self._swaps(slots, load, hottest, is_on_gpu)
        takes = self._takes(slots, load, hottest, is_on_gpu)
        norms, where = (np.concatenate(each) for each in zip(swaps, takes, strict=True))
        best, best_gain = None, 0.0
        for change in np.argsort(norms, kind="stable")[: MOVES.candidates]:
            gain = float(norm - norms[change])
            if gain <= 1e-9 * norm:
                break
            gpu, slot, expert, other_slot = where[change].tolist()
            new = slots.copy()
            if other_slot >= 0:
                new.ravel()[other_slot] = new[gpu, slot]
            new[gpu, slot] = expert
            moves = self._moves(new)
            if moves > most_moves or not _is_spread(new, self.loads.shape[1], self.spread_nodes):
                continue
            gain_per_move = gain / max(moves - step.moves, 0.5)
            if gain_per_move > best_gain:
                best, best_gain = new, gain_per_move
        return best

    def _swaps(self, slots: Slots, load: Loads, gpu: int, is_on_gpu: NDArray[np.bool_]) -> Changes:
        """Each exchange of a slot of `gpu` with one elsewhere in its block."""
        weight = (self.loads / np.maximum(self._counts(slots), 1))[:, slots]
        slot, away, place = np.indices((slots.shape[1], *slots.shape)).reshape(3, -1)
        leaving, coming = slots[gpu][slot], slots[away, place]
        keep = (away != gpu) & ~is_on_gpu[away, leaving] & ~is_on_gpu[gpu, coming]
        keep &= away // self.block == gpu // self.block
        slot = slot[keep]
        away = away[keep]
        place = place[keep]
        coming = coming[keep]
        shed = (weight[:, gpu, slot] - weight[:, away, place]).T
        after = np.repeat(load[None], len(slot), axis=0)
        after[:, :, gpu] -= shed
        after[np.arange(len(slot)), :, away] += shed
        here = np.full(len(slot), gpu)
        return _norm(after), np.stack([here, slot, coming, away * slots.shape[1] + place], axis=1)

    def _takes(self, slots: Slots, load: Loads, gpu: int, is_on_gpu: NDArray[np.bool_]) -> Changes:
        """Each slot of `gpu` that takes an expert of its block, each elsewhere that takes one of `gpu`."""
        counts = self._counts(slots)
        here = np.indices((1, slots.shape[1], len(counts))).reshape(3, -1)
        here[0] = gpu
        elsewhere = np.indices((*slots.shape, slots.shape[1])).reshape(3, -1)
        elsewhere[2] = slots[gpu][elsewhere[2]]
        g, slot, new = np.concatenate([here, elsewhere], axis=1)
        in_block = np.any(is_on_gpu.reshape(-1, self.block, len(counts)), axis=1)
        keep = (counts[slots[g, slot]] > 1) & ~is_on_gpu[g, new] & in_block[g // self.block, new]
        g, slot, new = g[keep], slot[keep], new[keep]
        old = slots[g, slot]
        share = self.loads / np.maximum(counts, 1)
        share_of_new = (self.loads / (counts + 1))[:, new]
        rise_of_old = (self.loads / np.maximum(counts - 1, 1) - share)[:, old]
        fall_of_new = share_of_new - share[:, new]
        after = (
            load[None]
            + rise_of_old.T[:, :, None] * is_on_gpu.T[old][:, None, :]
            + fall_of_new.T[:, :, None] * is_on_gpu.T[new][:, None, :]
        )
        after[np.arange(len(g)), :, g] += (share_of_new - share[:, old] - rise_of_old).T
        return _norm(after), np.stack([g, slot, new, np.full(len(g), -1)], axis=1)


def _value(step: _Step) -> float:
    return step.value


def _norm(load: Loads) -> Loads:
    """Sum of a high power of the loads [candidates, windows, gpus], [candidates]."""
    return np.asarray((load**MOVES.norm_power).sum(axis=(1, 2)))


def _is_spread(slots: Slots, experts: int, nodes: int) -> bool:
    """Whether replicas are on as many nodes as they have to be."""
    by_node = [np.bincount(node, minlength=experts) for node in slots.reshape(nodes, -1)]
    here = np.stack(by_node)
    return bool((here.max(axis=0) <= -(-here.sum(axis=0) // nodes)).all())


def _check(current: Slots, shape: SlotShape, limits: PlacementLimits, experts: int) -> None:
    if current.shape[1:] != (shape.gpus, shape.per_gpu):
        raise InputError(
            f"from: the placement has {current[0].size} slots on {current.shape[1]} GPUs, {shape.slots} on "
            f"{shape.gpus} are asked for"
        )
    if has_duplicates(current).any():
        raise InputError(
            "from: the placement holds an expert twice on a GPU; place anew without --max-moves"
        )
    for layer, slots in enumerate(current):
        if limits.spread and not _is_spread(slots, experts, shape.nodes):
            raise InputError(
                f"from: layer {layer}: replicas of an expert share a node though others have none; leave "
                "--spread out, or place anew without --max-moves"
            )
        if limits.groups > 1 and shape.nodes > 1:
            group = slots.reshape(shape.nodes, -1) // (experts // limits.groups)
            node_groups = [set(node.tolist()) for node in group]
            split_groups = {
                g
                for node in node_groups
                for g in node
                if sum(g in groups for groups in node_groups) > 1
            }
            if split_groups:
                raise InputError(
                    f"from: layer {layer}: group {min(split_groups)} is on several nodes; use "
                    "--groups 1, or place anew without --max-moves"
                )


def _shared(curves: list[Loads], moves: int) -> tuple[float, list[int]]:
    """The least sum of one point of each curve whose numbers sum to at most `moves`, and the numbers."""
    total = min(moves, sum(len(curve) - 1 for curve in curves))
    best = np.zeros(total + 1)
    taken = []
    for curve in curves:
        now = np.full(total + 1, np.inf)
        pick = np.zeros(total + 1, dtype=np.int64)
        for m in _corners(curve, total):
            cost = np.full(total + 1, np.inf)
            cost[m:] = best[: total + 1 - m] + curve[m]
            better = cost < now
            now[better], pick[better] = cost[better], m
        best = now
        taken.append(pick)
    remaining, spent = int(best.argmin()), []
    for pick in reversed(taken):
        spent.append(int(pick[remaining]))
        remaining -= spent[-1]
    return float(best.min()), spent[::-1]


def _corners(curve: Loads, most_moves: int) -> list[int]:
    """Where the curve falls, and its start."""
    falls = [m for m, (a, b) in enumerate(pairwise(curve.tolist()), start=1) if b < a]
    return [0, *(m for m in falls if m <= most_moves)]
