"""From what a user asks of `recommend` to a wish."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.planner.many.recommend.service import Wish


def read_wish(
    *,
    model: str,
    clusters: Iterable[str],
    plan: Mapping[str, Any],
    gpus: int | None,
    step_time_s: float | None,
    tokens_per_s: float | None,
    sizes: Iterable[int],
    reserves_gib: Iterable[float],
    workers: int | None,
    cache: Path | None,
) -> Wish:
    """The wish that the arguments of `recommend` mean; `plan` are fields of a JobDoc. Raises InputError."""
    if step_time_s is not None and tokens_per_s is not None:
        raise InputError("one target at a time", where="--step-time and --tokens-per-s")
    for name, target in (("--step-time", step_time_s), ("--tokens-per-s", tokens_per_s)):
        if target is not None and not 0 < target < 1e18:
            raise InputError("must be more than 0", where=name, value=target)
    return Wish(
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
