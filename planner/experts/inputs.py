"""Measured routing: load arrays and token traces as systems record them, and the ways that tokens take."""

from __future__ import annotations

import csv
import io
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError
from meshwright.planner.experts.packing import Solved
from meshwright.planner.experts.problem import (
    MOST_ELEMENTS,
    TRAFFIC,
    Ids,
    Loads,
    Slots,
    SlotShape,
    check_loads,
)
from meshwright.planner.experts.recorders import (
    LARGEST_FILE_BYTES,
    LARGEST_TEXT_BYTES,
    MOST_EXPERTS,
    MOST_LAYERS,
    Routing,
    bounded_bytes,
    cut_steps,
    from_tokens,
    number_array,
    parsed_json,
    read_dump_folder,
    read_jsonl,
    read_statistics_folder,
    read_torch,
    to_logical,
    window_names,
)

LARGEST_UNPACKED_BYTES = 8 * MOST_ELEMENTS + 2**20
"""Of the arrays of an npz file: as many numbers of 64 bits as are read, and their headers."""
_PICKLES = (".pkl", ".pickle", ".joblib")
NOT_LOADS = ("num_groups", "topk", "top_k", "seed", "num_experts", "topk_groups", "token_topic")


_DAMAGED_ARRAY = (
    ArithmeticError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    tokenize.TokenError,
)
"""What numpy raises on a damaged header, which it reads as a Python literal."""
_DAMAGED_ARCHIVE = (
    EOFError,
    OSError,
    RuntimeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


def read_routing(path: Path, *, windows: tuple[str, ...] = (), split: int = 1) -> Routing:
    """The routing in a file or folder. Raises InputError where there is none that can be read.

    Parameters
    ----------
    path
        A file by its ending: npz, npy, json, csv; jsonl (Megatron); pt (SGLang, needs torch). Or a folder:
        with meta_info.json (TensorRT-LLM), or of pt files.
    windows
        Names of arrays that are a window each; none for what systems call them.
    split
        Windows that recorded steps are cut into, from 1.
    """
    if split < 1:
        raise InputError(f"windows: must be cut into at least 1, got {split}")
    if path.is_dir():
        dumps = not (path / "meta_info.json").is_file() and any(path.glob("*.pt"))
        return read_dump_folder(path, split) if dumps else read_statistics_folder(path, split)
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        raise InputError(
            f"{path}: pickles are refused, loading one can run any code; save as npz, npy or json"
        )
    arrays = read_arrays(path)
    if arrays is not None:
        routing = _from_arrays(arrays, path, () if suffix == ".npy" else windows, split)
    else:
        readers: dict[str, Callable[[bytes], Routing]] = {
            ".csv": lambda data: _csv(data, path),
            ".jsonl": lambda data: read_jsonl(data, path, split),
            ".pt": lambda data: read_torch(data, path, split),
        }
        if suffix not in readers:
            raise InputError(
                f"{path}: a file {f'with {suffix}' if suffix else 'without an ending'} is not read; allowed: "
                f".npz, .npy, .json, {', '.join(readers)}, or a folder"
            )
        largest = LARGEST_FILE_BYTES if suffix == ".pt" else LARGEST_TEXT_BYTES
        data = bounded_bytes(path, largest)
        if suffix != ".pt":
            _refuse_pickle(data, path)
        routing = readers[suffix](data)
    check_loads(routing.loads, str(path))
    return routing


def read_arrays(path: Path) -> dict[str, NDArray[Any]] | None:
    """The arrays of an npz, npy (called `load`) or JSON file; None for other endings. Raises InputError.

    Parameters
    ----------
    path
        Of a file; its ending says how it is read.
    """
    readers: dict[str, Callable[[bytes], dict[str, NDArray[Any]]]] = {
        ".npz": lambda data: _npz(data, path),
        ".npy": lambda data: {"load": _npy(io.BytesIO(data), str(path))},
        ".json": lambda data: _json_arrays(data, path),
    }
    suffix = path.suffix.lower()
    if suffix not in readers or path.is_dir():
        return None
    data = bounded_bytes(path, LARGEST_TEXT_BYTES if suffix == ".json" else LARGEST_FILE_BYTES)
    _refuse_pickle(data, path)
    return readers[suffix](data)


def _refuse_pickle(data: bytes, path: Path) -> None:
    if data[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise InputError(
            f"{path}: this is a pickle; pickles are refused, loading one can run any code"
        )


def _npy(stream: IO[bytes], where: str) -> NDArray[Any]:
    try:
        with warnings.catch_warnings():
            # A header that Python 2 wrote is read as well, only slower.
            warnings.simplefilter("ignore", UserWarning)
            array = np.load(stream, allow_pickle=False)
    except _DAMAGED_ARRAY as error:
        if "allow_pickle" in str(error):
            raise InputError(
                f"{where}: holds pickled objects; pickles are refused, loading one can run any code"
            ) from None
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise InputError(f"{where}: not a numpy array ({reason})") from None
    return np.asarray(array)


def _npz(data: bytes, path: Path) -> dict[str, NDArray[Any]]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > LARGEST_UNPACKED_BYTES:
                raise InputError(f"{path}: unpacks to more than {LARGEST_UNPACKED_BYTES} bytes")
            names = [name for name in archive.namelist() if name.endswith(".npy")]
            arrays = {}
            for name in names[:256]:
                # Unpacked into its array at once: the bytes in between would take as much again.
                with archive.open(name) as stream:
                    arrays[name.removesuffix(".npy")] = _npy(stream, f"{path}: {name}")
            return arrays
    except InputError:
        raise
    except _DAMAGED_ARCHIVE as error:
        raise InputError(f"{path}: not an npz file ({str(error)[:100]})") from None


def _json_arrays(data: bytes, path: Path) -> dict[str, NDArray[Any]]:
    document = parsed_json(data, str(path))
    fields = document if isinstance(document, Mapping) else {"load": document}
    arrays: dict[str, NDArray[Any]] = {}
    for name, value in fields.items():
        if isinstance(value, list | int) and not isinstance(value, bool):
            arrays[str(name)] = number_array(value, f"{path}: {str(name)[:60]}")
    return arrays


def _csv(data: bytes, path: Path) -> Routing:
    """A matrix [layers, experts], or columns layer, expert, load with a head."""
    try:
        rows = [row for row in csv.reader(io.StringIO(data.decode("utf-8-sig"))) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not readable as CSV ({error})") from None
    if not rows:
        raise InputError(f"{path}: empty; give one line of loads per layer")
    head = [cell.strip().lower() for cell in rows[0]]
    named = "layer" in head
    numbers: list[list[float]] = []
    for line, row in enumerate(rows[1:] if named else rows, start=2 if named else 1):
        try:
            numbers.append([float(cell) for cell in row])
        except ValueError:
            raise InputError(
                f"{path}: line {line}: must be numbers, got {','.join(row)[:60]!r}"
            ) from None
    table = number_array(numbers, str(path))
    if not named:
        return Routing(loads=np.asarray(table, dtype=np.float64)[None], windows=("all",))
    if not {"layer", "expert", "load"} <= set(head) or table.ndim != 2:
        raise InputError(
            f"{path}: line 1: columns must be layer, expert, load; got {', '.join(head)[:80]}"
        )
    if table.shape[1] != len(head):
        raise InputError(
            f"{path}: {table.shape[1]} numbers a line, but {len(head)} columns are named"
        )
    layer = _whole(table[:, head.index("layer")], MOST_LAYERS, f"{path}: layer")
    expert = _whole(table[:, head.index("expert")], MOST_EXPERTS, f"{path}: expert")
    ids, index = np.unique(layer, return_inverse=True)
    loads = np.zeros((1, len(ids), int(expert.max()) + 1))
    np.add.at(loads[0], (index, expert), table[:, head.index("load")])
    return Routing(loads=loads, windows=("all",), layer_ids=tuple(int(i) for i in ids))


def _whole(column: NDArray[np.float64], count: int, where: str) -> NDArray[np.int64]:
    """Numbers from 0 to below `count`, as integers. Raises InputError for any other."""
    wrong = ~((column >= 0) & (column < count) & (column == np.floor(column)))
    if wrong.any():
        raise InputError(
            f"must be a whole number from 0 to {count - 1}",
            where=where,
            value=float(column[wrong][0]),
        )
    return column.astype(np.int64)


def _from_arrays(
    arrays: Mapping[str, NDArray[Any]], path: Path, windows: tuple[str, ...], split: int
) -> Routing:
    """Loads by name. A name that is asked for is a window; `load`, `topk_ids` and what systems call them."""
    groups = _count(arrays, "num_groups")
    extra = Routing(
        loads=np.ones((1, 1, 1)),
        windows=("all",),
        groups=groups,
        co_activation=_optional(arrays, "co_activation", path),
        affinity=_optional(arrays, "affinity", path),
    )
    if windows:
        return replace(extra, loads=_named(arrays, path, windows), windows=windows)
    if "topk_ids" in arrays:
        return from_tokens(
            arrays["topk_ids"], _count(arrays, "num_experts", 0), f"{path}: topk_ids", extra
        )
    for name in ("load", "logical_count", "expert_load_window", "expert_popularity"):
        if name in arrays:
            table = number_array(arrays[name], f"{path}: {name}")
            if not table.size:
                raise InputError(f"{path}: {name}: holds nothing, its shape is {list(table.shape)}")
            if name == "expert_load_window" and "physical_to_logical_map" in arrays:
                table = to_logical(table, arrays["physical_to_logical_map"], str(path))
            steps = name != "load" and table.ndim == 3
            loads = cut_steps(table, split) if steps else _windows(table, f"{path}: {name}")
            return replace(extra, loads=loads, windows=window_names(len(loads)))
    choices = [name for name, array in arrays.items() if array.ndim == 2 and name not in NOT_LOADS]
    if len(choices) == 1:
        return replace(extra, loads=_named(arrays, path, tuple(choices)), windows=tuple(choices))
    raise InputError(
        f"{path}: no array called load, topk_ids or logical_count; choose windows by name with --window: "
        f"{', '.join(choices[:20]) or 'this file has none of shape [layers, experts]'}"
    )


def _count(arrays: Mapping[str, NDArray[Any]], name: str, default: int = 1) -> int:
    value = arrays.get(name)
    return (
        int(value)
        if value is not None and value.size == 1 and value.dtype.kind in "iu"
        else default
    )


def _optional(arrays: Mapping[str, NDArray[Any]], name: str, path: Path) -> Loads | None:
    """An array that stands for all windows together."""
    if name not in arrays:
        return None
    return np.asarray(number_array(arrays[name], f"{path}: {name}"), dtype=np.float64)[None]


def _windows(table: NDArray[Any], where: str) -> Loads:
    if table.ndim not in (2, 3) or table.dtype.kind not in "iuf":
        raise InputError(
            f"{where}: must be numbers of shape [layers, experts] or [windows, layers, experts], got "
            f"{table.dtype} {list(table.shape)}"
        )
    return np.asarray(table if table.ndim == 3 else table[None], dtype=np.float64)


def _named(arrays: Mapping[str, NDArray[Any]], path: Path, names: tuple[str, ...]) -> Loads:
    from difflib import get_close_matches

    tables = []
    for name in names:
        if name not in arrays:
            near = get_close_matches(name, list(arrays), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(
                f"{path}: no window {name!r}{hint}; it has {', '.join(list(arrays)[:20])}"
            )
        tables.append(_windows(arrays[name], f"{path}: {name}"))
    shapes = {tuple(window.shape) for window in tables}
    if len(shapes) > 1:
        raise InputError(
            f"{path}: windows of different shapes: {', '.join(str(list(s)) for s in sorted(shapes))}"
        )
    # Of one, no copy: the largest file holds its numbers twice already.
    return np.concatenate(tables) if len(tables) > 1 else tables[0]


# Which node of a placement stands where: tokens of a source rank find their experts on its node.


_UNIT = 10**9


def check_affinity(affinity: Loads, layers: int, experts: int, shape: SlotShape) -> None:
    """Raises InputError unless affinity is finite, not negative, of shape [layers, GPUs, experts].

    Parameters
    ----------
    affinity
        Tokens from each source rank to each expert.
    layers, experts
        Of the loads.
    shape
        Whose GPUs are the source ranks.
    """
    expected = (layers, shape.gpus, experts)
    if affinity.shape != expected:
        raise InputError(
            f"affinity: must have the shape [layers, source ranks, experts], one rank for each GPU, "
            f"{list(expected)}; got {list(affinity.shape)}"
        )
    if not np.isfinite(affinity).all() or affinity.min() < 0:
        raise InputError("affinity: token counts must be finite and not negative")


def local_choices(slots: Slots, affinity: Loads, nodes: int) -> Loads:
    """Choices that stay if the experts of a node stood at a source's node, [sources' nodes, experts' nodes].

    For one layer's slots [gpus, per GPU]. Replicas serve even shares, near sources first.

    Parameters
    ----------
    slots
        Of one layer, [gpus, slots of a GPU].
    affinity
        Tokens from each rank to each expert, [ranks, experts].
    nodes
        That GPUs and ranks are divided over.
    """
    experts = affinity.shape[1]
    replicas = np.stack([np.bincount(node, minlength=experts) for node in slots.reshape(nodes, -1)])
    at_node = affinity.reshape(nodes, -1, experts).sum(axis=1)
    share = replicas * (at_node.sum(axis=0) / np.maximum(replicas.sum(axis=0), 1))
    return np.stack([np.minimum(source, share).sum(axis=1) for source in at_node])


def cross_node_share(slots: Slots, affinity: Loads, nodes: int) -> float:
    """Part of all choices of one layer that leave the source's node, replicas serving near sources first.

    Parameters
    ----------
    slots
        Of one layer, [gpus, slots of a GPU].
    affinity
        Tokens from each rank to each expert, [ranks, experts].
    nodes
        That GPUs and ranks are divided over.
    """
    local = np.trace(local_choices(slots, affinity, nodes))
    return float(1 - local / max(affinity.sum(), 1e-300))


def near_sources(solved: Solved, affinity: Loads, shape: SlotShape) -> Solved:
    """The placement with whole nodes in the order in which the most choices stay: an assignment problem.

    Nodes are alike: balance, bound, replicas and the nodes that a token touches stay as they are.

    Parameters
    ----------
    solved
        The placement.
    affinity
        Tokens from each rank to each expert, [layers, ranks, experts].
    shape
        Of slots, GPUs and nodes.
    """
    slots = solved.slots.copy()
    for layer, counts in enumerate(affinity):
        order = best_order(local_choices(slots[layer], counts, shape.nodes))
        blocks = slots[layer].reshape(shape.nodes, shape.node_gpus, -1)
        slots[layer] = blocks[order].reshape(slots[layer].shape)
    return replace(solved, slots=slots)


def best_order(benefit: Loads) -> Slots:
    """Which node goes to each place, for the largest sum of kept [places, nodes]; who stays, among equals.

    Parameters
    ----------
    benefit
        Choices that stay where a node stands at a place, at least 0, [places, nodes].
    """
    from ortools.graph.python import linear_sum_assignment

    nodes = len(benefit)
    cost = np.rint((1 - benefit / max(float(benefit.max()), 1e-300)) * _UNIT).astype(np.int64)
    cost[np.arange(nodes), np.arange(nodes)] -= 1
    place, node = (x.ravel() for x in np.indices(cost.shape))
    problem = linear_sum_assignment.SimpleLinearSumAssignment()
    problem.add_arcs_with_cost(place, node, cost.ravel())
    if problem.solve() != problem.OPTIMAL:
        raise RuntimeError("the assignment of nodes to sources did not end with an optimum")
    return np.array([problem.right_mate(i) for i in range(nodes)], dtype=np.int64)


# What is known of the ways that tokens take: which experts go together, and where tokens come from.


@dataclass(frozen=True, kw_only=True)
class Flows:
    """What is known of the tokens' ways, of all layers."""

    tokens: NDArray[np.int32] | None = None
    """Experts that each token chose, [layers, tokens, top-k]; -1 for a choice that was dropped."""
    pairs: Loads | None = None
    """Co-activation, [layers, experts, experts]; counts where there are no tokens."""
    sources: Loads | None = None
    """Tokens from each GPU to each expert, [layers, gpus, experts]."""

    @property
    def known(self) -> bool:
        """Whether there is anything to place by."""
        return any(x is not None for x in (self.tokens, self.pairs, self.sources))

    @property
    def by_token(self) -> bool:
        """Whether it is known which experts go together."""
        return self.tokens is not None or self.pairs is not None

    def layer(self, index: int) -> Flows:
        """One layer's, thinned."""
        tokens = self.tokens
        if tokens is not None:
            tokens = tokens[index : index + 1, :: -(-tokens.shape[1] // TRAFFIC.most_tokens)]
        pairs = self.pairs[index : index + 1] if self.pairs is not None else None
        sources = self.sources[index : index + 1] if self.sources is not None else None
        return Flows(tokens=tokens, pairs=pairs, sources=sources)


def read_flows(routing: Routing, co_activation: Path | None, shape: SlotShape) -> Flows:
    """Of the loads' own file, or of `co_activation`: a token trace, or counts of pairs of experts.

    Pairs count where there is no trace. Raises InputError for another shape than the loads.

    Parameters
    ----------
    routing
        What the file of the loads holds.
    co_activation
        Another file with a trace or counts of pairs, None for none.
    shape
        Whose GPUs are the source ranks.
    """
    _, layers, experts = routing.loads.shape
    where = "co-activation" if co_activation is None else str(co_activation)
    sources, pairs = (
        None if of_windows is None else of_windows.sum(axis=0)
        for of_windows in (routing.affinity, routing.co_activation)
    )
    if routing.affinity_recorded and sources is not None and sources.shape[1] != shape.gpus:
        sources = None
    if sources is not None:
        check_affinity(sources, layers, experts, shape)
    tokens = routing.tokens
    if co_activation is not None:
        tokens, pairs = _read_together(co_activation)
    if tokens is not None and (len(tokens) != layers or tokens.max() >= experts):
        raise InputError(
            f"{where}: a trace of {len(tokens)} layers and experts up to {tokens.max()}; the loads have "
            f"{layers} layers of {experts} experts"
        )
    if co_activation is not None and tokens is None and pairs is None:
        raise InputError(f"{where}: no topk_ids and no co_activation in it")
    if pairs is not None:
        # Symmetric with a zero diagonal.
        if pairs.shape != (layers, experts, experts):
            raise InputError(
                f"{where}: co-activation must have the shape [layers, experts, experts], "
                f"{[layers, experts, experts]}; got {list(pairs.shape)}"
            )
        if not np.isfinite(pairs).all() or pairs.min() < 0:
            raise InputError(f"{where}: co-activation must be finite and not negative")
        pairs = np.asarray((pairs + np.swapaxes(pairs, 1, 2)) / 2)
        pairs[:, np.arange(experts), np.arange(experts)] = 0.0
    return Flows(tokens=tokens, pairs=None if tokens is not None else pairs, sources=sources)


def _read_together(path: Path) -> tuple[NDArray[np.int32] | None, Loads | None]:
    """A trace, or else pair counts [layers, experts, experts], one matrix standing for one layer."""
    arrays = read_arrays(path)
    if arrays is None or "topk_ids" in arrays:
        routing = read_routing(path)
        if (
            routing.tokens is None
            and routing.co_activation is None
            and path.suffix.lower() == ".csv"
        ):
            return None, routing.loads
        pairs = routing.co_activation
        return routing.tokens, None if pairs is None else pairs.sum(axis=0)
    names = [name for name in ("co_activation", "load") if name in arrays] or list(arrays)[:1]
    if not names or arrays[names[0]].dtype.kind not in "iuf" or arrays[names[0]].ndim not in (2, 3):
        raise InputError(f"{path}: must hold topk_ids, or co_activation [layers, experts, experts]")
    pairs = np.asarray(arrays[names[0]], dtype=np.float64)
    return None, pairs if pairs.ndim == 3 else pairs[None]


# Which blocks of the fabric a token's experts lie in, and which replica of an expert a token goes to.
#
# By `turns` the n-th token that chose an expert takes replica n mod c, as the dispatchers of serving systems
# do or come close to. By `touched` it takes a replica in a node that its other experts lie in, as far as
# even shares of the replicas allow. What is modelled is a count over the trace, so the two agree exactly.


REPLICA_RULES = ("turns", "touched")


@dataclass(frozen=True, kw_only=True)
class Level:
    """A level of the fabric: blocks of `gpus` GPUs, and what touching one more of them costs a token."""

    name: str
    gpus: int
    weight: float


def slot_choices(
    tokens: NDArray[np.int32], slots: Slots, experts: int, near_gpus: int | None = None
) -> Ids:
    """The slot each choice goes to, [tokens, top-k], for tokens [tokens, top-k] and slots [gpus, per GPU].

    Replicas take turns in the order of the tokens; with `near_gpus`, the GPUs of a node, tokens take replicas
    by `touched`. -1 where the choice was dropped.

    Parameters
    ----------
    tokens
        Experts that each token chose, [tokens, top-k]; -1 for a choice that was dropped.
    slots
        Of one layer, [gpus, slots of a GPU].
    experts
        How many there are.
    near_gpus
        GPUs of a node, where tokens take replicas by `touched`; None for turns.
    """
    flat = slots.ravel()
    order = np.argsort(flat, kind="stable")
    counts = np.bincount(flat, minlength=experts)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    chosen = tokens.ravel()
    turn = _turns(chosen)
    safe = np.maximum(chosen, 0)
    slot = np.where(chosen >= 0, order[first[safe] + turn % counts[safe]], -1).reshape(tokens.shape)
    if near_gpus is not None and near_gpus < len(slots):
        _prefer_touched(tokens, slot, flat, slots.shape[1] * near_gpus)
    return slot


def _turns(key: NDArray[np.int32] | Ids) -> Ids:
    """How many equal entries come before each."""
    turn = np.zeros(len(key), dtype=np.int64)
    by_key = np.argsort(key, kind="stable")
    ordered = key[by_key]
    turn[by_key] = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
    return turn


def _prefer_touched(
    tokens: NDArray[np.int32], slot: Ids, slot_experts: Ids, node_slots: int
) -> None:
    """Changes the slots of choices whose expert, one after the other, has replicas on several nodes.

    Every replica keeps its even share. Tokens with the fewest such nodes choose first, in their order; who
    finds no share left on a node that it touches takes what is left.
    """
    nodes = len(slot_experts) // node_slots
    node_of = np.arange(len(slot_experts)) // node_slots
    spread = [
        e
        for e in np.unique(slot_experts).tolist()
        if len(set(node_of[slot_experts == e].tolist())) > 1
    ]
    fixed = ~np.isin(tokens, spread) & (tokens >= 0)
    touched = np.zeros((len(tokens), nodes), dtype=bool)
    row, column = np.nonzero(fixed)
    touched[row, slot[row, column] // node_slots] = True
    for expert in spread:
        replicas = np.flatnonzero(slot_experts == expert)
        row, column = np.nonzero(tokens == expert)
        share = len(row) // len(replicas) + (np.arange(len(replicas)) < len(row) % len(replicas))
        quota = np.bincount(node_of[replicas], weights=share, minlength=nodes).astype(np.int64)
        node = _shared_out(touched[row], quota)
        # On one node the replicas' shares follow in the order of the tokens.
        by_node = np.argsort(node, kind="stable")
        slot[row[by_node], column[by_node]] = np.repeat(replicas, share)
        touched[row, node] = True


def _shared_out(touched: NDArray[np.bool_], quota: Ids) -> Ids:
    """A node for each token [tokens], `quota` [nodes] in all, touched [tokens, nodes] ones where possible."""
    node = np.full(len(touched), -1, dtype=np.int64)
    remaining = quota.copy()
    wanted = touched & (quota > 0)
    options = wanted.sum(axis=1)
    for count in range(1, int(options.max(initial=0)) + 1):
        for block in np.flatnonzero(quota).tolist():
            takers = np.flatnonzero((node < 0) & (options == count) & wanted[:, block])[
                : remaining[block]
            ]
            node[takers] = block
            remaining[block] -= len(takers)
    node[node < 0] = np.repeat(np.arange(len(quota)), remaining)
    return node


def blocks_per_token(
    tokens: NDArray[np.int32],
    slots: Slots,
    experts: int,
    block_gpus: int,
    near_gpus: int | None = None,
) -> float:
    """Mean number of different blocks of `block_gpus` GPUs that a token's experts lie in.

    Parameters
    ----------
    tokens
        Experts that each token chose, [tokens, top-k].
    slots
        Of one layer, [gpus, slots of a GPU].
    experts
        How many there are.
    block_gpus
        GPUs of a block.
    near_gpus
        As `slot_choices` takes it.
    """
    choice = slot_choices(tokens, slots, experts, near_gpus)
    return float(distinct(choice // (slots.shape[1] * block_gpus)).mean())


def distinct(block: Ids) -> Ids:
    """Different non-negative numbers in each row.

    Parameters
    ----------
    block
        Numbers of blocks, [rows, any]; negative ones count as none.
    """
    ordered = np.sort(np.where(block >= 0, block, -1), axis=1)
    fresh = np.concatenate(
        [ordered[:, :1] >= 0, (ordered[:, 1:] != ordered[:, :-1]) & (ordered[:, 1:] >= 0)], axis=1
    )
    return np.asarray(fresh.sum(axis=1))
