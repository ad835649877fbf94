"""Rounds in which Megatron's own scheduler deals samples to ranks; asked by test_dealt_samples.py.

Standard input is a list of [ranks, tokens of a rank, lengths]; standard output the rounds of each: teams as
[ranks, lengths], in the order of their ranks.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


class Group:
    """Stands for the process group of all ranks, of which the scheduler asks the size."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks


def rounds(ranks: int, rank_tokens: int, lengths: list[int]) -> list[Any]:
    module = importlib.import_module("megatron.core.pipeline_parallel.hybrid_cp_schedule")
    scheduler = module.BalancedCPScheduler(rank_tokens, Group(ranks))
    groups, ids = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    dealt = []
    for of_ranks, samples in zip(groups, ids, strict=True):
        teams: list[Any] = []
        for rank in range(ranks):
            if teams and samples[rank] == samples[rank - 1]:
                teams[-1][0] += 1
            else:
                teams.append([1, list(of_ranks[rank])])
        dealt.append(teams)
    return dealt


if __name__ == "__main__":
    print(json.dumps([rounds(*case) for case in json.load(sys.stdin)]))
