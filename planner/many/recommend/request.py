"""From what a user asks of `recommend` to a request for sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.planner.many.recommend.answer import SizeRequest
from meshwright.planner.plan.training_cost import SECONDS_PER_DAY, Budget


def read_size_request(
    *,
    model: str,
    clusters: Iterable[str],
    plan: Mapping[str, Any],
    gpus: int | None,
    step_time_s: float | None,
    tokens_per_s: float | None,
    days: float | None = None,
    sizes: Iterable[int],
    reserves_gib: Iterable[float],
    workers: int | None,
    cache: Path | None,
) -> SizeRequest:
    """The request that the arguments of `recommend` mean.

    Parameters
    ----------
    model, clusters
        Catalog names or files.
    plan
        Fields of a JobDoc, without `model`, `cluster` and `gpus`.
    gpus
        The most that may be taken; all of the cluster's when None.
    step_time_s, tokens_per_s
        The target, one of them; none for a sweep.
    days
        The target too: in which `tokens` of `plan` are to be trained.
    sizes, reserves_gib
        GPUs, and GiB of HBM to keep free, to sweep over.
    workers, cache
        Processes, and the folder of kept answers.

    Raises
    ------
    InputError
        For two targets, or one that is not positive.
    """
    budget = Budget.of(plan)
    if sum(target is not None for target in (step_time_s, tokens_per_s, days)) > 1:
        raise InputError("one target at a time", where="--step-time, --tokens-per-s and --days")
    if days is not None:
        if budget.tokens is None:
            raise InputError("in which what is trained? Give --tokens", where="--days", value=days)
        tokens_per_s = budget.tokens / (days * SECONDS_PER_DAY)
    for name, target in (("--step-time", step_time_s), ("--tokens-per-s", tokens_per_s)):
        if target is not None and not 0 < target < 1e18:
            raise InputError("must be more than 0 and below 1e18", where=name, value=target)
    return SizeRequest(
        model=model,
        clusters=tuple(dict.fromkeys(clusters)),
        plan=plan,
        step_time_s=step_time_s,
        tokens_per_s=tokens_per_s,
        most_gpus=gpus,
        sizes=tuple(sorted(set(sizes))),
        reserves_gib=tuple(sorted({0.0, *reserves_gib})),
        workers=workers,
        cache=cache,
    )
