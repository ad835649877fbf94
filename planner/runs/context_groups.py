"""Sizes of hierarchical context parallelism that a run file or a launch script gives."""

from __future__ import annotations

from math import prod
from typing import Any

from meshwright.costmodel.context_groups import HIERARCHICAL, swapping_ranks
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.workload import Workload
from meshwright.errors import InputError
from meshwright.planner.runs.launches.flags import CommandLine
from meshwright.planner.runs.run_terms import cp_comm_kind

_EXCHANGE, _SIZES = "--cp-comm-type", "--hierarchical-context-parallel-sizes"


def check_context_groups(workload: Workload, layout: Layout) -> None:
    """Raises InputError for a number of neighbours that a run of plain degrees cannot have."""
    model, inner = workload.model, workload.cp_inner
    tp, cp = int(layout.tp), int(layout.cp)
    if workload.cp_comm != HIERARCHICAL:
        if inner is not None:
            raise InputError(f"run.cp_inner: goes with cp_comm {HIERARCHICAL} only")
        return
    if inner is None:
        if cp > 1 and int(swapping_ranks(workload, layout)) == 1:
            raise InputError(
                f"run.cp_inner: is needed: with tp {tp} and cp {cp} no group of two or more neighbours lies "
                "in a scale-up domain, divides the heads and leaves a ring"
            )
        return
    if cp % inner:
        raise InputError(f"run.cp_inner: {inner} does not divide cp {cp}")
    heads = {"attention heads": model.heads, "key-value heads": model.kv_heads}
    for name, number in heads.items():
        if inner > 1 and number % (tp * inner):
            raise InputError(
                f"run.cp_inner: {number} {name} do not divide by tp {tp} x {inner} ranks that swap them"
            )


def megatron_exchange(line: CommandLine, cp: int) -> dict[str, Any]:
    """`cp_comm` and `cp_inner` of Megatron's flags. Raises InputError for what it would not start."""
    kinds = dict.fromkeys(line.several(_EXCHANGE))
    sizes = line.several(_SIZES)
    if len(kinds) > 1:
        raise InputError(
            "differs from layer to layer, which has no price here",
            where=f"{line.where}: {_EXCHANGE}",
        )
    kind = next(iter(kinds), "p2p")
    if kind != HIERARCHICAL:
        named = cp_comm_kind(kind)
        return {} if named == "p2p" else {"cp_comm": named}
    if len(sizes) != 2 or not all(size.isdigit() and len(size) < 8 for size in sizes):
        raise InputError(
            f"has to be two whole numbers where {_EXCHANGE} is {HIERARCHICAL}",
            where=f"{line.where}: {_SIZES}",
            value=" ".join(sizes),
        )
    degrees = [int(size) for size in sizes]
    if prod(degrees) != cp:
        raise InputError(
            f"must multiply to the context-parallel size {cp}",
            where=f"{line.where}: {_SIZES}",
            value=" ".join(sizes),
        )
    return {"cp_comm": HIERARCHICAL, "cp_inner": degrees[0]}
