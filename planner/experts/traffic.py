"""Which blocks of the fabric a token's experts lie in, and fewer of them by exchanging replicas.

A token's choice of a replicated expert goes to its replicas in turn: the n-th token that chose it
takes replica n mod c. So what is modelled is a count over the trace, and the two agree exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.experts.exchange import Exchange
from planner.experts.problem import Loads, Shape, Slots

MOST_TOKENS = 16_384
"""Tokens of a trace that the search looks at; more are thinned evenly. Reports count all."""
_LOOSER = (1.0, 0.5, 0.3, 0.2, 0.12, 0.08, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002, 0.0)
Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Level:
    """A level of the fabric: blocks of `gpus` GPUs, and what touching one more of them costs a token."""

    name: str
    gpus: int
    weight: float


def slot_choices(tokens: NDArray[np.int32], slots: Slots, experts: int) -> Ids:
    """The slot each choice goes to, [tokens, top-k], for tokens [tokens, top-k] and slots [gpus, per GPU].

    Replicas take turns in the order of the tokens; -1 where the choice was dropped.
    """
    flat = slots.ravel()
    order = np.argsort(flat, kind="stable")
    counts = np.bincount(flat, minlength=experts)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    chosen = tokens.ravel()
    turn = np.zeros(len(chosen), dtype=np.int64)
    by_expert = np.argsort(chosen, kind="stable")
    ordered = chosen[by_expert]
    starts = np.searchsorted(ordered, ordered)
    turn[by_expert] = np.arange(len(ordered)) - starts
    safe = np.maximum(chosen, 0)
    slot = order[first[safe] + turn % counts[safe]]
    return np.where(chosen >= 0, slot, -1).reshape(tokens.shape)


def blocks_per_token(tokens: NDArray[np.int32], slots: Slots, experts: int, block_gpus: int) -> float:
    """Mean number of different blocks of `block_gpus` GPUs that a token's experts lie in."""
    choice = slot_choices(tokens, slots, experts)
    block = choice // (slots.shape[1] * block_gpus)
    return float(_distinct(block).mean())


def _distinct(block: Ids) -> Ids:
    """Different non-negative numbers in each row."""
    ordered = np.sort(np.where(block >= 0, block, -1), axis=1)
    fresh = np.concatenate(
        [ordered[:, :1] >= 0, (ordered[:, 1:] != ordered[:, :-1]) & (ordered[:, 1:] >= 0)], axis=1
    )
    return np.asarray(fresh.sum(axis=1))


@dataclass(frozen=True, kw_only=True)
class Search:
    """One layer's exchange of replicas between blocks."""

    tokens: NDArray[np.int32]
    experts: int
    shape: Shape
    levels: tuple[Level, ...]
    cap: float
    """Largest load of a GPU over the mean."""
    loads: Loads
    """Over the mean GPU load, [windows, experts]."""
    spread: bool = False
    """Whether replicas of an expert are kept on different nodes, as far as there are nodes."""


def fewer_blocks(search: Search, slots: Slots, kicks: int = 4) -> Slots:
    """Slots [gpus, per GPU] with replicas exchanged between GPUs, so that tokens touch fewer blocks.

    The cap on a GPU's load starts loose and tightens, so that exchanges that only help together are found.
    Then a few random exchanges and the search again, `kicks` times. The best state within the cap is kept,
    `slots` if there is none. An expert stays at most once on a GPU.
    """
    shape, expert = search.shape, slots.ravel()
    step = max(1, len(search.tokens) // MOST_TOKENS)
    choice = slot_choices(search.tokens[::step], slots, search.experts)
    member = np.zeros((shape.slots, len(choice)), dtype=np.float32)
    row = np.broadcast_to(np.arange(len(choice))[:, None], choice.shape)
    member[choice[choice >= 0], row[choice >= 0]] = 1.0
    counts = np.bincount(expert, minlength=search.experts)
    state = Exchange(
        expert=expert,
        gpu=np.arange(shape.slots) // shape.per_gpu,
        member=member,
        weight=(search.loads / counts)[:, expert],
        levels=tuple((level.weight, level.gpus) for level in search.levels if level.weight > 0),
        most=-(-counts // shape.nodes) if search.spread else np.full(search.experts, shape.node_gpus),
        node_gpus=shape.node_gpus,
    )
    chance = np.random.default_rng(0)
    start = state.blocks()
    best, least = None, np.inf
    for turn in range(kicks + 1):
        for looser in _LOOSER if turn == 0 else _LOOSER[2:]:
            state.settle(search.cap + looser, 40)
        if state.blocks() < least and state.overload(search.cap) <= 1e-9:
            best, least = state.gpu.copy(), state.blocks()
        state.kick(chance)
    if best is None or least >= start:
        return slots
    return np.sort(expert[np.argsort(best, kind="stable")].reshape(slots.shape), axis=1)
