"""What TensorRT-LLM and Megatron record of their routing; safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError
from meshwright.planner.experts.files.routing import (
    LARGEST_FILE_BYTES,
    LARGEST_TEXT_BYTES,
    Routing,
    bounded_bytes,
    cut_steps,
    from_tokens,
    number_array,
    parsed_json,
    window_names,
)
from meshwright.planner.experts.problem import Loads, check_loads

_SAFETENSORS = {
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "U8": "u1",
    "F32": "<f4",
    "F64": "<f8",
    "F16": "<f2",
}
_LARGEST_HEADER = 64 * 2**20


def read_safetensors(data: bytes, where: str) -> dict[str, NDArray[Any]]:
    """The tensors of a safetensors file: 8 bytes length, a JSON head, raw little-endian data.

    Format: the safetensors README of Hugging Face. Raises InputError for a head that does not fit the data.
    """
    size = int.from_bytes(data[:8], "little") if len(data) >= 8 else -1
    if not 0 < size <= min(_LARGEST_HEADER, len(data) - 8):
        raise InputError(f"{where}: not a safetensors file")
    head = parsed_json(data[8 : 8 + size], where)
    if not isinstance(head, Mapping):
        raise InputError(f"{where}: not a safetensors file, its head is no mapping")
    body, tensors = data[8 + size :], {}
    for name, entry in head.items():
        if name == "__metadata__":
            continue
        try:
            kind = np.dtype(_SAFETENSORS[entry["dtype"]])
            start, stop = entry["data_offsets"]
            if not 0 <= start <= stop <= len(body):
                raise ValueError("data_offsets")
            tensors[str(name)] = np.frombuffer(body[start:stop], dtype=kind).reshape(entry["shape"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise InputError(
                f"{where}: tensor {str(name)[:60]!r}: its dtype, shape or offsets are not usable"
            ) from None
    return tensors


def read_statistics_folder(path: Path, split: int) -> Routing:
    """TensorRT-LLM's expert statistics: meta_info.json and rank*.safetensors, tensors named ITERATION_LAYER.

    Ranks are summed, iterations cut into `split` windows; every rank's own counts are kept as its choices.
    rank*_raw.safetensors, the experts that each token chose, are read as a trace, and
    cooccurrence_rank*.safetensors as pair counts.
    (NVIDIA/TensorRT-LLM examples/wide_ep/ep_load_balancer/utils.py)
    """
    if not (path / "meta_info.json").is_file():
        raise InputError(
            f"{path}: a folder without meta_info.json; give TensorRT-LLM's statistics folder or a file"
        )
    meta = parsed_json(
        bounded_bytes(path / "meta_info.json", LARGEST_TEXT_BYTES), f"{path}/meta_info.json"
    )
    files = [
        file for file in sorted(path.glob("rank*.safetensors")) if not file.stem.endswith("_raw")
    ]
    stated = meta.get("num_experts") if isinstance(meta, Mapping) else None
    trace = _raw_trace(path, stated if isinstance(stated, int) else 0)
    if not files and trace is not None:
        return trace
    counts = _summed(files)
    if not counts:
        raise InputError(f"{path}: no rank*.safetensors beside meta_info.json")
    iterations = sorted({key[0] for key in counts})
    layers = sorted({key[1] for key in counts})
    _check_counts(counts, iterations, layers, stated, path)
    table = np.stack([[counts[i, layer] for layer in layers] for i in iterations])
    loads = cut_steps(table, split)
    check_loads(loads, str(path))
    same = (
        trace is not None
        and trace.layer_ids == tuple(layers)
        and trace.loads.shape[2] == table.shape[2]
    )
    return Routing(
        loads=loads,
        windows=window_names(len(loads)),
        tokens=trace.tokens if trace is not None and same else None,
        co_activation=_pair_counts(path, layers, table.shape[2]),
        affinity=_by_rank(files, layers) if len(files) > 1 else None,
        affinity_recorded=True,
        layer_ids=tuple(layers),
    )


def _check_counts(
    counts: Mapping[tuple[int, int], NDArray[Any]],
    iterations: list[int],
    layers: list[int],
    stated: object,
    path: Path,
) -> None:
    """Raises InputError unless every iteration and layer has one count for each of the stated experts."""
    missing = [(i, layer) for i in iterations for layer in layers if (i, layer) not in counts]
    if missing:
        raise InputError(f"{path}: no tensor for iteration {missing[0][0]}, layer {missing[0][1]}")
    experts = {len(value) for value in counts.values() if value.ndim == 1}
    if (
        len(experts) != 1
        or any(value.ndim != 1 for value in counts.values())
        or {stated} - {None} - experts
    ):
        raise InputError(
            f"{path}: tensors must have one count per expert, num_experts is {str(stated)[:20]}"
        )


def _pair_counts(path: Path, layers: list[int], experts: int) -> Loads | None:
    """Pair counts [layers, experts, experts] of all iterations; None where a layer has none of that shape."""
    totals = np.zeros((len(layers), experts, experts))
    counted = set()
    for (_, layer), pairs in _summed(sorted(path.glob("cooccurrence_rank*.safetensors"))).items():
        if layer in layers:
            if pairs.shape != (experts, experts):
                return None
            totals[layers.index(layer)] += pairs
            counted.add(layer)
    return totals if len(counted) == len(layers) else None


def _by_rank(files: list[Path], layers: list[int]) -> Loads:
    """Choices of each rank's tokens, [layers, ranks, experts], ranks by the numbers in the files' names."""
    for file in files:
        if not file.stem.removeprefix("rank").isdecimal():
            raise InputError(f"{file}: the name must be rank and a number, as rank0.safetensors")
    numbered = sorted(files, key=lambda file: int(file.stem.removeprefix("rank")))
    sums = []
    for file in numbered:
        counts = _summed([file])
        sums.append([sum(v for (_, k), v in counts.items() if k == layer) for layer in layers])
    return np.ascontiguousarray(np.swapaxes(np.array(sums, dtype=np.float64), 0, 1))


def _raw_trace(path: Path, experts: int) -> Routing | None:
    """Experts that each token chose, from rank*_raw.safetensors: tensors ITERATION_LAYER [tokens, top-k]."""
    tensors_by_layer: dict[int, list[tuple[int, str, NDArray[Any]]]] = {}
    for file in sorted(path.glob("rank*_raw.safetensors")):
        for name, tensor in read_safetensors(
            bounded_bytes(file, LARGEST_FILE_BYTES), str(file)
        ).items():
            step, layer = _key(name, file)
            if tensor.ndim != 2 or tensor.dtype.kind not in "iu":
                raise InputError(f"{file}: tensor {name[:60]!r}: must be integers [tokens, top-k]")
            tensors_by_layer.setdefault(layer, []).append((step, file.name, tensor))
    if not tensors_by_layer:
        return None
    layers = sorted(tensors_by_layer)
    parts = [
        [tensor for *_, tensor in sorted(tensors_by_layer[k], key=lambda item: item[:2])]
        for k in layers
    ]
    shapes = {tuple(tensor.shape for tensor in tensors) for tensors in parts}
    if len(shapes) > 1 or len({shape[1] for shape in next(iter(shapes))}) > 1:
        raise InputError(f"{path}: rank*_raw.safetensors: layers or iterations have other shapes")
    ids = np.stack([np.concatenate(tensors) for tensors in parts])
    blank = Routing(loads=np.ones((1, 1, 1)), windows=("all",), layer_ids=tuple(layers))
    return from_tokens(ids, experts, f"{path}: rank*_raw.safetensors", blank)


def _key(name: str, path: Path) -> tuple[int, int]:
    first, _, second = name.partition("_")
    if not (first.isdecimal() and second.isdecimal()):
        raise InputError(f"{path}: tensor {name[:60]!r}: names must be ITERATION_LAYER")
    return int(first), int(second)


def _summed(paths: list[Path]) -> dict[tuple[int, int], NDArray[Any]]:
    total: dict[tuple[int, int], NDArray[Any]] = {}
    for path in paths:
        for name, tensor in read_safetensors(
            bounded_bytes(path, LARGEST_FILE_BYTES), str(path)
        ).items():
            key = _key(name, path)
            if key in total and total[key].shape != tensor.shape:
                raise InputError(f"{path}: tensor {name[:60]!r}: ranks disagree on its shape")
            total[key] = total.get(key, 0) + tensor.astype(np.float64)
    return total


def read_jsonl(data: bytes, path: Path, split: int) -> Routing:
    """Megatron's tokens_per_expert, a JSON object a line; `layer` and `iteration` where known.

    tokens_per_expert is a list [experts] with `layer` (or layer_number), or a list [layers, experts].
    """
    lines = [line for line in data.splitlines() if line.strip()]
    steps: dict[int, dict[int, Loads]] = {}
    for number, line in enumerate(lines, start=1):
        where = f"{path}: line {number}"
        entry = parsed_json(line, where)
        if not isinstance(entry, Mapping) or "tokens_per_expert" not in entry:
            raise InputError(f"{where}: no field tokens_per_expert")
        counts = number_array(entry["tokens_per_expert"], f"{where}: tokens_per_expert").astype(
            np.float64
        )
        layer = entry.get("layer", entry.get("layer_number", 0))
        step = entry.get("iteration", entry.get("step", 0))
        if not isinstance(layer, int) or not isinstance(step, int) or counts.ndim not in (1, 2):
            raise InputError(
                f"{where}: layer and iteration must be integers, tokens_per_expert a list of counts"
            )
        for offset, row in enumerate(counts if counts.ndim == 2 else counts[None]):
            by_layer = steps.setdefault(step, {})
            earlier = by_layer.get(layer + offset)
            if earlier is not None and earlier.shape != row.shape:
                raise InputError(f"{where}: {len(row)} experts, {len(earlier)} on an earlier line")
            by_layer[layer + offset] = row if earlier is None else earlier + row
    layers = sorted({layer for by_layer in steps.values() for layer in by_layer})
    sizes = {len(row) for by_layer in steps.values() for row in by_layer.values()}
    if not layers or len(sizes) != 1:
        raise InputError(
            f"{path}: every line needs the same number of experts, got {sorted(sizes)[:5]}"
        )
    short = next((step for step, by_layer in steps.items() if len(by_layer) != len(layers)), None)
    if short is not None:
        raise InputError(
            f"{path}: iteration {short} has {len(steps[short])} of {len(layers)} layers"
        )
    table = np.stack([[steps[step][layer] for layer in layers] for step in sorted(steps)])
    loads = cut_steps(table, split)
    names = window_names(len(loads))
    return Routing(loads=loads, windows=names, layer_ids=tuple(layers))
