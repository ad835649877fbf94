"""Which blocks of the fabric a token's experts lie in, and which replica of an expert a token goes to.

By `turns` the n-th token that chose an expert takes replica n mod c, as the dispatchers of serving systems do
or come close to. By `touched` it takes a replica in a node that its other experts lie in, as far as even
shares of the replicas allow. What is modelled is a count over the trace, so the two agree exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.problem import Ids, Slots

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
    """Mean number of different blocks of `block_gpus` GPUs that a token's experts lie in."""
    choice = slot_choices(tokens, slots, experts, near_gpus)
    return float(distinct(choice // (slots.shape[1] * block_gpus)).mean())


def distinct(block: Ids) -> Ids:
    """Different non-negative numbers in each row."""
    ordered = np.sort(np.where(block >= 0, block, -1), axis=1)
    fresh = np.concatenate(
        [ordered[:, :1] >= 0, (ordered[:, 1:] != ordered[:, :-1]) & (ordered[:, 1:] >= 0)], axis=1
    )
    return np.asarray(fresh.sum(axis=1))
