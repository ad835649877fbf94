"""What SGLang's expert distribution recorder writes: torch files of counts, of passes, or of tokens.

Mode `stat`: logical_count [steps, layers, experts]. `per_pass` and `per_token`: records, one a forward pass
and rank, with global_physical_count [layers, slots] and, per token, topk_ids_of_layer [layers, tokens, 8], -1
where a token chose fewer. Both number slots, not experts: last_physical_to_logical_map [layers, slots] tells
which expert a slot holds. (sgl-project/sglang python/sglang/srt/eplb/expert_distribution.py; ids are recorded
after topk_ids_logical_to_physical in python/sglang/srt/layers/moe/topk.py)
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError
from meshwright.planner.experts.files.routing import (
    LARGEST_FILE_BYTES,
    MOST_EXPERTS,
    Routing,
    bounded_bytes,
    cut_steps,
    from_tokens,
    to_logical,
    token_loads,
    window_names,
)
from meshwright.planner.experts.problem import MOST_ELEMENTS

MOST_FILES = 4096


def read_torch(data: bytes, path: Path, split: int) -> Routing:
    """One dump, read with torch.load(weights_only=True): no code is run. Raises InputError."""
    return recorded([_loaded(data, path)], path, split)


def read_dump_folder(path: Path, split: int) -> Routing:
    """All dumps of a folder, as one: every rank of the detail modes writes its own."""
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
        dump = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  torch raises its own kinds for anything that is not plain data
        raise InputError(
            f"{path}: refused by torch's weights_only reader: {str(error).splitlines()[0][:120]}"
        ) from None
    if not isinstance(dump, Mapping):
        raise InputError(f"{path}: must hold a mapping with logical_count or records")
    return dump


def recorded(dumps: Sequence[Mapping[str, Any]], path: Path, split: int) -> Routing:
    """Dumps of one mode as one routing. Raises InputError."""
    if all("logical_count" in dump for dump in dumps):
        tables = [np.asarray(dump["logical_count"]) for dump in dumps]
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
    mapping = np.asarray(dumps[-1].get("last_physical_to_logical_map", ()))
    if mapping.ndim != 2 or mapping.dtype.kind not in "iu":
        raise InputError(f"{path}: last_physical_to_logical_map must be integers [layers, slots]")
    records.sort(key=lambda record: (_number(record, "forward_pass_id"), _number(record, "rank")))
    if all("topk_ids_of_layer" in record for record in records):
        return _tokens(records, mapping, path)
    if all("global_physical_count" in record for record in records):
        return _passes(records, mapping, path, split)
    raise InputError(f"{path}: records without topk_ids_of_layer or global_physical_count")


def _records_of(dump: Mapping[str, Any], path: Path) -> list[Mapping[str, Any]]:
    records = dump.get("records")
    if not isinstance(records, list) or not all(isinstance(record, Mapping) for record in records):
        raise InputError(f"{path}: no logical_count and no records")
    return records


def _number(record: Mapping[str, Any], name: str) -> int:
    value = record.get(name, 0)
    return int(value) if isinstance(value, int) else 0


def _steps(table: NDArray[Any], path: Path, split: int) -> Routing:
    if table.size > MOST_ELEMENTS:
        raise InputError(
            f"{path}: {table.size} counts, more than the {MOST_ELEMENTS} that are read"
        )
    loads = cut_steps(table, split)
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
    for record in records:
        count = np.asarray(record["global_physical_count"], dtype=np.int64)
        if count.shape != mapping.shape:
            raise InputError(
                f"{path}: global_physical_count must have the shape {list(mapping.shape)} of "
                f"last_physical_to_logical_map, got {list(count.shape)}"
            )
        step = _number(record, "forward_pass_id")
        sums[step] = sums[step] + count if step in sums else count
    table = np.stack([sums[step] for step in sorted(sums)])
    return _steps(to_logical(table, mapping, str(path)), path, split)


def _tokens(records: list[Mapping[str, Any]], mapping: NDArray[Any], path: Path) -> Routing:
    """A trace of experts, and with several ranks what each rank's tokens chose."""
    parts = [np.asarray(record["topk_ids_of_layer"]) for record in records]
    where = f"{path}: topk_ids_of_layer"
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
    if slots.size > MOST_ELEMENTS:
        raise InputError(
            f"{where}: {slots.size} choices, more than the {MOST_ELEMENTS} that are read"
        )
    if slots.size and (slots.max() >= mapping.shape[1] or slots.min() < -1):
        raise InputError(
            f"{where}: slots must be from 0 to {mapping.shape[1] - 1} (-1: none), got {slots.max()}"
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
    by_rank = [token_loads(routing.tokens[:, source == rank], experts) for rank in range(ranks)]
    return replace(routing, affinity=np.stack(by_rank, axis=1), affinity_recorded=True)
