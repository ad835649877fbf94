"""What TensorRT-LLM and Megatron record of their routing; safetensors."""

from __future__ import annotations

import io
import json
import zipfile
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError
from meshwright.planner.experts.problem import MOST_ELEMENTS, Loads, check_loads, check_size

# Measured routing as every reader of a file hands it on, and the checks that readers share.
#
# Nothing is ever unpickled. Sizes are bounded before anything is decoded.


LARGEST_FILE_BYTES = 512 * 2**20
LARGEST_TEXT_BYTES = 64 * 2**20
MOST_EXPERTS = 65_536
MOST_LAYERS = 100_000
"""Numbers of layers, far above those of any model."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What was measured. Layers are those with experts, in order."""

    loads: Loads
    """Tokens of each expert, [windows, layers, experts]."""
    windows: tuple[str, ...]
    tokens: NDArray[np.int32] | None = None
    """Experts that each token chose, [layers, tokens, top-k]; -1 for a choice that was dropped."""
    token_ranks: NDArray[np.int64] | None = None
    """Source rank of each token, where that is recorded."""
    co_activation: Loads | None = None
    """How often two experts were chosen together, [windows, layers, experts, experts], symmetric; one window
    where only all of them together are known."""
    affinity: Loads | None = None
    """Tokens from each source rank to each expert, [windows, layers, ranks, experts]; one window likewise."""
    affinity_recorded: bool = False
    """Whether `affinity` is what a recorder's ranks saw: it counts where there are as many GPUs as ranks."""
    groups: int = 1
    """Routing groups that the file states."""
    layer_ids: tuple[int, ...] = field(default=())
    """The model's layer of each row, where the file names it."""


def bounded_bytes(path: Path, largest: int) -> bytes:
    """The file's bytes. Raises InputError if it is no file, cannot be read, or is larger.

    Parameters
    ----------
    path
        Of the file.
    largest
        Most bytes that are read.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        with path.open("rb") as stream:
            data = stream.read(largest + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or 'system error'})") from None
    if len(data) > largest:
        raise InputError(
            f"{path}: larger than the {largest} bytes that are read; sum over steps first"
        )
    return data


def parsed_json(data: bytes, where: str) -> Any:
    """Plain data; NaN and Infinity are refused. Raises InputError with line and column.

    Parameters
    ----------
    data
        The bytes of a JSON text in UTF-8.
    where
        What errors call it.
    """

    def refuse(word: str) -> float:
        raise InputError(f"{where}: {word} is not a number that a load can have")

    try:
        return json.loads(data.decode("utf-8-sig"), parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON ({type(error).__name__})") from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where}: a number cannot be read") from None


def number_array(value: object, where: str) -> NDArray[Any]:
    """A nested list of numbers as an array. Raises InputError if it is ragged or holds anything else.

    Parameters
    ----------
    value
        Lists in lists, all of one length at each depth, or an array.
    where
        What errors call it.
    """
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        raise InputError(
            f"{where}: lists of different lengths; every layer needs the same experts"
        ) from None
    if array.dtype.kind not in "iuf":
        raise InputError(f"{where}: must be numbers, got {array.dtype}")
    return array


def window_names(count: int) -> tuple[str, ...]:
    """`all` for one window, else `window 0`, `window 1`, ..."""
    return ("all",) if count == 1 else tuple(f"window {i}" for i in range(count))


def cut_steps(table: NDArray[Any], split: int) -> Loads:
    """Sums steps [steps, layers, experts] to `split` windows, each a run of steps.

    Parameters
    ----------
    table
        Tokens of each expert in each step.
    split
        Windows to make, from 1; one for each step where there are fewer steps.
    """
    parts = np.array_split(np.asarray(table, dtype=np.float64), min(split, len(table)))
    return np.stack([part.sum(axis=0) for part in parts])


def to_logical(table: NDArray[Any], mapping: NDArray[Any], where: str) -> Loads:
    """Loads of physical slots [steps, layers, slots] summed by the experts they hold, by [layers, slots].

    Parameters
    ----------
    table
        Loads of slots, [steps, layers, slots].
    mapping
        Expert of each slot, [layers, slots].
    where
        The file's name, for messages.
    """
    fits = table.ndim == 3 and mapping.shape == table.shape[1:] and mapping.size
    if not fits or mapping.dtype.kind not in "iu":
        raise InputError(
            f"{where}: physical_to_logical_map must be integers, not empty, of the shape "
            f"{list(table.shape[1:])}, got {list(mapping.shape)} of {mapping.dtype}"
        )
    if mapping.min() < 0 or mapping.max() >= MOST_EXPERTS:
        raise InputError(
            f"{where}: physical_to_logical_map: experts must be from 0 to {MOST_EXPERTS - 1}"
        )
    by_expert = np.zeros((*table.shape[:2], int(mapping.max()) + 1))
    for layer in range(table.shape[1]):
        np.add.at(
            by_expert[:, layer].T, mapping[layer], np.asarray(table[:, layer], dtype=np.float64).T
        )
    return by_expert


def from_tokens(ids: NDArray[Any], experts: int, where: str, extra: Routing) -> Routing:
    """Routing from the experts that each token chose, [layers, tokens, top-k].

    Parameters
    ----------
    ids
        Experts that each token chose, [layers, tokens, top-k]; -1 for a choice that was dropped.
    experts
        How many there are; 0 for one more than the largest number.
    where
        The file's name, for messages.
    extra
        What else is known, whose loads are replaced.
    """
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or 0 in ids.shape:
        raise InputError(
            f"{where}: must be integers of shape [layers, tokens, top-k], got {ids.dtype} {list(ids.shape)}"
        )
    check_size(ids.size, "choices", where)
    top = int(ids.max())
    count = experts or top + 1
    if top >= count or count > MOST_EXPERTS or int(ids.min()) < -1:
        raise InputError(
            f"{where}: expert numbers must be from 0 to {min(count, MOST_EXPERTS) - 1} (-1: dropped), got "
            f"{top if top >= count else int(ids.min())}"
        )
    tokens = ids.astype(np.int32)
    return replace(extra, loads=token_loads(tokens, count)[None], tokens=tokens)


def token_loads(tokens: NDArray[np.int32], experts: int) -> Loads:
    """How many tokens chose each expert, [layers, experts].

    Parameters
    ----------
    tokens
        Experts that each token chose, [layers, tokens, top-k], -1 for none.
    experts
        Of a layer.
    """
    return np.stack(
        [
            np.bincount(layer[layer >= 0].ravel(), minlength=experts).astype(np.float64)
            for layer in tokens
        ]
    )


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

    Parameters
    ----------
    data
        The bytes of the file.
    where
        What errors call it.
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

    Parameters
    ----------
    path
        Of the folder.
    split
        Windows to make of its iterations, from 1.
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
    starts = [int(part[0]) for part in np.array_split(iterations, len(loads))]
    if loads.size * max(len(files), table.shape[2]) > MOST_ELEMENTS:
        starts = starts[:1]
    same = (
        trace is not None
        and trace.layer_ids == tuple(layers)
        and trace.loads.shape[2] == table.shape[2]
    )
    return Routing(
        loads=loads,
        windows=window_names(len(loads)),
        tokens=trace.tokens if trace is not None and same else None,
        token_ranks=_ranks_of_tokens(trace, len(files)) if same else None,
        co_activation=_pair_counts(path, starts, layers, table.shape[2]),
        affinity=_by_rank(files, starts, layers, table.shape[2]) if len(files) > 1 else None,
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


def _window_of(iteration: int, starts: list[int]) -> int:
    """Of windows that start with these iterations."""
    return max(bisect_right(starts, iteration) - 1, 0)


def _pair_counts(path: Path, starts: list[int], layers: list[int], experts: int) -> Loads | None:
    """Pair counts [windows, layers, experts, experts]; None where a layer has none of that shape."""
    totals = np.zeros((len(starts), len(layers), experts, experts))
    counted = set()
    summed = _summed(sorted(path.glob("cooccurrence_rank*.safetensors")))
    for (iteration, layer), pairs in summed.items():
        if layer in layers:
            if pairs.shape != (experts, experts):
                return None
            totals[_window_of(iteration, starts), layers.index(layer)] += pairs
            counted.add(layer)
    return totals if len(counted) == len(layers) else None


def _by_rank(files: list[Path], starts: list[int], layers: list[int], experts: int) -> Loads:
    """Choices of each rank's tokens, [windows, layers, ranks, experts], ranks by the numbers in files' names.

    A rank that has no tensor of a layer routed nothing there.
    """
    by_rank = np.zeros((len(starts), len(layers), len(files), experts))
    for rank, file in enumerate(sorted(files, key=_rank_of)):
        for (iteration, layer), counts in _summed([file]).items():
            by_rank[_window_of(iteration, starts), layers.index(layer), rank] += counts
    return by_rank


def _rank_of(file: Path) -> int:
    number = file.stem.removeprefix("rank").removesuffix("_raw")
    if not number.isdecimal():
        raise InputError(f"{file}: the name must be rank and a number, as rank0.safetensors")
    return int(number)


def _raw_trace(path: Path, experts: int) -> Routing | None:
    """Experts that each token chose, from rank*_raw.safetensors: tensors ITERATION_LAYER [tokens, top-k]."""
    tensors_by_layer: dict[int, list[tuple[int, int, NDArray[Any]]]] = {}
    for file in sorted(path.glob("rank*_raw.safetensors")):
        for name, tensor in read_safetensors(
            bounded_bytes(file, LARGEST_FILE_BYTES), str(file)
        ).items():
            step, layer = _key(name, file)
            if tensor.ndim != 2 or tensor.dtype.kind not in "iu":
                raise InputError(f"{file}: tensor {name[:60]!r}: must be integers [tokens, top-k]")
            tensors_by_layer.setdefault(layer, []).append((step, _rank_of(file), tensor))
    if not tensors_by_layer:
        return None
    layers = sorted(tensors_by_layer)
    in_order = [sorted(tensors_by_layer[layer], key=lambda item: item[:2]) for layer in layers]
    parts = [[tensor for *_, tensor in of_layer] for of_layer in in_order]
    shapes = {tuple(tensor.shape for tensor in tensors) for tensors in parts}
    if len(shapes) > 1 or len({shape[1] for shape in next(iter(shapes))}) > 1:
        raise InputError(f"{path}: rank*_raw.safetensors: layers or iterations have other shapes")
    ids = np.stack([np.concatenate(tensors) for tensors in parts])
    of_tokens = np.array([(rank, len(tensor)) for _, rank, tensor in in_order[0]], dtype=np.int64)
    _, rank = np.unique(of_tokens[:, 0], return_inverse=True)
    blank = Routing(
        loads=np.ones((1, 1, 1)),
        windows=("all",),
        layer_ids=tuple(layers),
        token_ranks=np.repeat(rank, of_tokens[:, 1]),
    )
    return from_tokens(ids, experts, f"{path}: rank*_raw.safetensors", blank)


def _ranks_of_tokens(trace: Routing | None, ranks: int) -> NDArray[np.int64] | None:
    """Where the trace is of as many ranks as the counts."""
    numbers = None if trace is None else trace.token_ranks
    return numbers if numbers is not None and int(numbers.max()) + 1 == ranks else None


def _key(name: str, path: Path) -> tuple[int, int]:
    first, _, second = name.partition("_")
    if (
        len(name) > 40
        or not (first.isdecimal() and second.isdecimal())
        or int(second) >= MOST_LAYERS
    ):
        raise InputError(
            f"{path}: tensor {name[:60]!r}: names must be ITERATION_LAYER, layers below {MOST_LAYERS:,}"
        )
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

    Parameters
    ----------
    data
        Bytes of the file.
    path
        Of it, for messages.
    split
        Windows that iterations are cut into.
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
        if not 0 <= layer < MOST_LAYERS:
            raise InputError(f"{where}: layer must be from 0 to {MOST_LAYERS - 1}, got {layer}")
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


# What SGLang's expert distribution recorder writes: torch files of counts, of passes, or of tokens.
#
# Mode `stat`: logical_count [steps, layers, experts]. `per_pass` and `per_token`: records, one a forward
# pass and rank, with global_physical_count [layers, slots] and, per token, topk_ids_of_layer [layers,
# tokens, 8], -1 where a token chose fewer. Both number slots, not experts: last_physical_to_logical_map
# [layers, slots] tells which expert a slot holds. (sgl-project/sglang
# python/sglang/srt/eplb/expert_distribution.py; ids are recorded after topk_ids_logical_to_physical in
# python/sglang/srt/layers/moe/topk.py)


MOST_FILES = 4096


def read_torch(data: bytes, path: Path, split: int) -> Routing:
    """One dump, read with torch.load(weights_only=True): no code is run. Raises InputError.

    Parameters
    ----------
    data
        Bytes of the file.
    path
        Of it, for messages.
    split
        Windows that steps are cut into.
    """
    return recorded([_loaded(data, path)], path, split)


def read_dump_folder(path: Path, split: int) -> Routing:
    """All dumps of a folder, as one: every rank of the detail modes writes its own.

    Parameters
    ----------
    path
        Of the folder, with `.pt` files.
    split
        Windows to make of the steps, from 1.
    """
    files = sorted(path.glob("*.pt"))
    if len(files) > MOST_FILES:
        raise InputError(
            f"{path}: {len(files)} .pt files, more than the {MOST_FILES} that are read"
        )
    dumps = [_loaded(bounded_bytes(file, LARGEST_FILE_BYTES), file) for file in files]
    return recorded(dumps, path, split)


def _loaded(data: bytes, path: Path) -> Mapping[str, Any]:
    try:
        import torch
    except ImportError:
        raise InputError(
            f"{path}: reading .pt needs torch, which is not installed; pip install torch, or save "
            "logical_count as npy"
        ) from None
    if data[:2] != b"PK":
        raise InputError(
            f"{path}: not a torch zip file; older torch files are plain pickles, which are refused"
        )
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (OSError, ValueError, zipfile.BadZipFile):
        raise InputError(f"{path}: not a torch zip file") from None
    if unpacked > LARGEST_FILE_BYTES:
        raise InputError(f"{path}: unpacks to more than {LARGEST_FILE_BYTES} bytes")
    try:
        dump = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  torch raises its own kinds for anything that is not plain data
        raise InputError(
            f"{path}: refused by torch's weights_only reader: {str(error).splitlines()[0][:120]}"
        ) from None
    if not isinstance(dump, Mapping):
        raise InputError(f"{path}: must hold a mapping with logical_count or records")
    return dump


def recorded(dumps: Sequence[Mapping[str, Any]], path: Path, split: int) -> Routing:
    """Dumps of one mode as one routing. Raises InputError.

    Parameters
    ----------
    dumps
        What the files of all ranks hold.
    path
        Of the file or folder, for messages.
    split
        Windows that steps are cut into.
    """
    if all("logical_count" in dump for dump in dumps):
        tables = _arrays([dump["logical_count"] for dump in dumps], "counts", str(path))
        tables = [table if table.ndim == 3 else table[None] for table in tables]
        if len({table.shape[1:] for table in tables}) > 1 or tables[0].ndim != 3:
            raise InputError(
                f"{path}: logical_count must have the shape [steps, layers, experts] in every dump, got "
                f"{', '.join(str(list(table.shape)) for table in tables[:4])}"
            )
        return _steps(np.concatenate(tables), path, split)
    records = [record for dump in dumps for record in _records_of(dump, path)]
    if not records:
        raise InputError(f"{path}: no logical_count and no records")
    last = dumps[-1].get("last_physical_to_logical_map", np.empty(0))
    (mapping,) = _arrays([last], "slots", f"{path}: last_physical_to_logical_map")
    if mapping.ndim != 2 or mapping.dtype.kind not in "iu":
        raise InputError(f"{path}: last_physical_to_logical_map must be integers [layers, slots]")
    records.sort(key=lambda record: (_number(record, "forward_pass_id"), _number(record, "rank")))
    if all("topk_ids_of_layer" in record for record in records):
        return _tokens(records, mapping, path)
    if all("global_physical_count" in record for record in records):
        return _passes(records, mapping, path, split)
    raise InputError(f"{path}: records without topk_ids_of_layer or global_physical_count")


def _arrays(tensors: Sequence[Any], what: str, where: str) -> list[NDArray[Any]]:
    """Tensors of dumps, their sizes bounded together: a view may repeat one number without end.

    Raises InputError for too many numbers, and for lists, whose parts may be one another's.
    """
    if not all(hasattr(tensor, "shape") for tensor in tensors):
        raise InputError(f"{where}: must be tensors")
    try:
        arrays = [np.asarray(tensor) for tensor in tensors]
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{where}: {str(error)[:120]}") from None
    check_size(sum(array.size for array in arrays), what, where)
    return arrays


def _records_of(dump: Mapping[str, Any], path: Path) -> list[Mapping[str, Any]]:
    records = dump.get("records")
    if not isinstance(records, list) or not all(isinstance(record, Mapping) for record in records):
        raise InputError(f"{path}: no logical_count and no records")
    return records


def _number(record: Mapping[str, Any], name: str) -> int:
    value = record.get(name, 0)
    return int(value) if isinstance(value, int) else 0


def _steps(table: NDArray[Any], path: Path, split: int) -> Routing:
    check_size(table.size, "counts", str(path))
    if not table.size:
        raise InputError(f"{path}: logical_count: holds nothing, its shape is {list(table.shape)}")
    loads = cut_steps(number_array(table, f"{path}: logical_count"), split)
    moe = np.flatnonzero(loads.sum(axis=(0, 2)) > 0)
    if not len(moe):
        raise InputError(f"{path}: logical_count: nothing was routed in any layer")
    # SGLang counts dense layers too; nothing is routed there.
    return Routing(
        loads=loads[:, moe],
        windows=window_names(len(loads)),
        layer_ids=tuple(int(layer) for layer in moe),
    )


def _passes(
    records: list[Mapping[str, Any]], mapping: NDArray[Any], path: Path, split: int
) -> Routing:
    """A step for each forward pass, its ranks summed."""
    sums: dict[int, NDArray[Any]] = {}
    where = f"{path}: global_physical_count"
    for record in records:
        (count,) = _arrays([record["global_physical_count"]], "counts", where)
        count = count.astype(np.int64)
        if count.shape != mapping.shape:
            raise InputError(
                f"{where} must have the shape {list(mapping.shape)} of "
                f"last_physical_to_logical_map, got {list(count.shape)}"
            )
        step = _number(record, "forward_pass_id")
        sums[step] = sums[step] + count if step in sums else count
        check_size(len(sums) * count.size, "counts", where)
    table = np.stack([sums[step] for step in sorted(sums)])
    return _steps(to_logical(table, mapping, str(path)), path, split)


def _tokens(records: list[Mapping[str, Any]], mapping: NDArray[Any], path: Path) -> Routing:
    """A trace of experts, and with several ranks what each rank's tokens chose."""
    where = f"{path}: topk_ids_of_layer"
    parts = _arrays([record["topk_ids_of_layer"] for record in records], "choices", where)
    if any(p.ndim != 3 or p.dtype.kind not in "iu" or len(p) != len(mapping) for p in parts) or (
        len({part.shape[2] for part in parts}) > 1
    ):
        raise InputError(
            f"{where}: must be integers [{len(mapping)} layers, tokens, top-k] in every record"
        )
    if mapping.size and (mapping.min() < 0 or mapping.max() >= MOST_EXPERTS):
        raise InputError(
            f"{path}: last_physical_to_logical_map: must be from 0 to {MOST_EXPERTS - 1}"
        )
    slots = np.concatenate(parts, axis=1)
    if slots.size and (slots.max() >= mapping.shape[1] or slots.min() < -1):
        raise InputError(
            f"{where}: slots must be from 0 to {mapping.shape[1] - 1} (-1: none), got "
            f"{slots.min()} to {slots.max()}"
        )
    layers = np.flatnonzero((slots >= 0).any(axis=(1, 2)))
    columns = np.flatnonzero((slots >= 0).any(axis=(0, 1)))
    if not len(layers):
        raise InputError(f"{where}: nothing was routed in any layer")
    slots = slots[layers][:, :, columns]
    experts = int(mapping.max()) + 1
    slot_experts = mapping[layers][:, None, :]
    logical = np.take_along_axis(
        np.broadcast_to(slot_experts, (*slots.shape[:2], slot_experts.shape[2])),
        np.maximum(slots, 0),
        axis=2,
    )
    ids = np.where(slots >= 0, logical, -1)
    blank = Routing(
        loads=np.ones((1, 1, 1)), windows=("all",), layer_ids=tuple(int(i) for i in layers)
    )
    routing = from_tokens(ids, experts, where, blank)
    source = np.repeat([_number(record, "rank") for record in records], [p.shape[1] for p in parts])
    ranks = int(source.max()) + 1
    if routing.tokens is None or ranks < 2 or ranks * routing.loads.size > MOST_ELEMENTS:
        return routing
    affinity = affinity_of(routing.tokens, source, ranks, experts)
    return replace(routing, affinity=affinity, token_ranks=source, affinity_recorded=True)


def affinity_of(
    tokens: NDArray[np.int32], token_ranks: NDArray[np.int64], ranks: int, experts: int
) -> Loads:
    """Tokens from each source rank to each expert, [1, layers, ranks, experts].

    Parameters
    ----------
    tokens
        Experts that each token chose, [layers, tokens, top-k], -1 for none.
    token_ranks
        Source rank of each token, below `ranks`.
    ranks, experts
        How many there are.
    """
    by_rank = [token_loads(tokens[:, token_ranks == rank], experts) for rank in range(ranks)]
    return np.stack(by_rank, axis=1)[None]
