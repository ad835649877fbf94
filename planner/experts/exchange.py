"""One dispatch of a layer's tokens: which GPUs exchange anything, what stays near, and who is waited for."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.planner.experts.balance.packing import SlotPacking
from meshwright.planner.experts.case import PlacementCase
from meshwright.planner.experts.problem import Loads, Slots


def exchange_row(case: PlacementCase, loads: Loads, slots: Slots) -> dict[str, Any]:
    """Figures of one dispatch of `tokens_per_gpu` tokens from every GPU of a layer.

    Parameters
    ----------
    case
        The request with its files; its model, where one is named, gives top-k and bytes.
    loads
        Tokens of each expert, [windows, experts]; the sum over the windows counts.
    slots
        Expert of each slot, [gpus, slots of a GPU].

    Returns
    -------
    dict
        `permutation_density`, and shares and seconds that need a model or several leaves, else None.
    """
    ground, request = case.ground, case.request
    share = _gpu_shares(loads, slots)
    choices = request.tokens_per_gpu * _top_k(case)
    leaf_gpus = ground.levels[1].gpus if len(ground.levels) > 1 else None
    row: dict[str, Any] = {
        "permutation_density": permutation_density(share, choices),
        "inside_node_share": inside_share(ground.shape.node_gpus, ground.shape.gpus),
        "inside_leaf_share": None,
        "even_all_to_all_s": None,
        "straggler_all_to_all_s": None,
    }
    if leaf_gpus is not None:
        row["inside_leaf_share"] = inside_share(leaf_gpus, ground.shape.gpus)
    if ground.model is not None:
        away = 1.0 - row["inside_node_share"]
        received_bytes = choices * away * ground.model.hidden * 2.0
        even_s = received_bytes / (ground.gb_per_s * 1e9)
        row["even_all_to_all_s"] = even_s
        row["straggler_all_to_all_s"] = even_s * float(share.max()) * ground.shape.gpus
    return row


def permutation_density(share: Loads, choices: int) -> float:
    """Share of the ordered pairs of GPUs that exchange at least one token in a dispatch.

    A source makes `choices` independent choices, each of GPU j by chance p_j: it sends j nothing by chance
    (1 - p_j)^choices. The mean over j is the share of pairs, a GPU with itself among them. Source: occupancy
    of cells, Feller, An Introduction to Probability Theory, volume 1, section IV.2.

    Parameters
    ----------
    share
        Chance of each GPU to be chosen, [gpus]; sums to 1.
    choices
        Experts that the tokens of one GPU choose in all, at least 1.

    Returns
    -------
    float
        From 0 to 1.
    """
    return float(np.mean(1.0 - (1.0 - share) ** choices))


def inside_share(block_gpus: int, gpus: int) -> float:
    """Share of the choices that stay in the source's block, where sources and experts are unrelated.

    Parameters
    ----------
    block_gpus, gpus
        GPUs of a node or leaf, and all of them.

    Returns
    -------
    float
        Above 0, at most 1.
    """
    return min(block_gpus / gpus, 1.0)


def _gpu_shares(loads: Loads, slots: Slots) -> Loads:
    """Chance of each GPU to be chosen, [gpus]: an expert's replicas take turns."""
    total = loads.sum(axis=0)
    by_row = np.ascontiguousarray(total[None, None])
    gpu = SlotPacking(slots=slots[None], loads=by_row).gpu_loads()[0, 0]
    return np.asarray(gpu / gpu.sum())


def _top_k(case: PlacementCase) -> int:
    """Experts of a token: the trace's, else the model's, else 1."""
    if case.routing.tokens is not None:
        return int(case.routing.tokens.shape[2])
    if case.ground.model is not None and case.ground.model.moe is not None:
        return case.ground.model.moe.top_k
    return 1
