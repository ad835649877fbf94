"""Numbers that tune the placement solvers, each with its unit and why it has that value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BalanceParams:
    """How the search for an even placement spends its work.

    Parameters
    ----------
    search_share
        Share of the gap asked for above which a layer is searched further, so that the mean over layers
        ends well within the gap.
    stop_share
        Share of the gap asked for at which one packing is not improved further.
    limit_fractions
        Limits on the GPU load whose replica counts are tried, as fractions of the way from bound to value.
    hot_load
        Load of an expert over the mean GPU load above which it may crowd other experts out of its GPUs,
        so that the bound by replica counts is worth its time.
    count_work
        Deterministic time of CP-SAT for one limit of the bound by replica counts.
    exchange_rounds
        Exchanges of one packing, at most; about ten times what packings of 72 GPUs need.
    exact_share
        Share of the time limit that CP-SAT gets for whole layers.
    least_exact_work
        Deterministic time of CP-SAT below which it does not get past its start on a layer.
    parallel_slots
        Slots of all layers under search above which starting processes takes less time than it saves.
    """

    search_share: float = 0.2
    stop_share: float = 0.12
    limit_fractions: tuple[float, ...] = (0.0005, 0.02, 0.06, 0.15, 0.3, 0.6)
    hot_load: float = 0.3
    count_work: float = 0.1
    exchange_rounds: int = 600
    exact_share: float = 0.6
    least_exact_work: float = 0.05
    parallel_slots: int = 4000


BALANCE = BalanceParams()


@dataclass(frozen=True, kw_only=True)
class RecountParams:
    """How replica counts are drawn at random where slots are few.

    Parameters
    ----------
    most_slots
        Slots of a row above which too small a part of its counts could be tried.
    finalists
        Packings that are improved by new splits of GPU pairs.
    parents
        Best counts near which new ones are drawn.
    stages
        Rounds of such draws.
    slots_at_once
        Slots packed in one batch, to bound memory.
    """

    most_slots: int = 96
    finalists: int = 12
    parents: int = 4
    stages: int = 3
    slots_at_once: int = 120_000


RECOUNT = RecountParams()
