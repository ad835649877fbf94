"""From what a user types to a request for sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from meshwright.errors import InputError
from meshwright.planner.many.batch.cache import chosen_folder
from meshwright.planner.many.recommend.answer import SizeRequest

MOST_NUMBERS = 1000
"""Sizes, or reserves, of a sweep."""
LARGEST_NUMBER = 10**7
_PLAN_OPTIONS = ("global_batch", "seq_len", "precision", "optimizer", "framework")


def read_size_request(model: str, options: Mapping[str, Any]) -> SizeRequest:
    """The request that the options of `recommend` mean.

    Parameters
    ----------
    model
        Catalog name or file.
    options
        By their names in `commands.options.recommend_options`.

    Raises
    ------
    InputError
        For two targets, or numbers that cannot be read or are out of range.
    """
    step_time_s, tokens_per_s = options["step_time"], options["tokens_per_s"]
    if step_time_s is not None and tokens_per_s is not None:
        raise InputError("one target at a time", where="--step-time and --tokens-per-s")
    for name, value in (("--step-time", step_time_s), ("--tokens-per-s", tokens_per_s)):
        if value is not None and not 0 < value < 1e18:
            raise InputError("must be more than 0", where=name, value=value)
    plan = {name: options[name] for name in _PLAN_OPTIONS}
    sizes = {int(size) for size in _numbers("--sizes", options["sizes"], int)}
    reserves_gib = {0.0, *_numbers("--reserve-gib", options["reserves"], float)}
    return SizeRequest(
        model=model,
        clusters=tuple(dict.fromkeys(options["clusters"])),
        plan={**plan, "pin": ",".join(options["pins"]), "forbid": options["forbids"]},
        step_time_s=step_time_s,
        tokens_per_s=tokens_per_s,
        most_gpus=options["gpus"],
        sizes=tuple(sorted(sizes)),
        reserves_gib=tuple(sorted(reserves_gib)),
        workers=options["workers"],
        cache=chosen_folder(options["cache"], options["no_cache"]),
    )


def _numbers(
    option: str, texts: Iterable[str], kind: Callable[[str], int | float]
) -> list[int | float]:
    """Numbers from texts such as `8,16`."""
    numbers = []
    for part in ",".join(texts).split(",") if texts else ():
        try:
            number = kind(part.strip())
        except ValueError:
            what = "must be numbers with commas between them"
            raise InputError(what, where=option, value=part.strip()) from None
        if not 0 <= number < LARGEST_NUMBER:
            raise InputError("out of range", where=option, value=number)
        numbers.append(number)
    if len(numbers) > MOST_NUMBERS:
        raise InputError(f"at most {MOST_NUMBERS:,} of them", where=option, value=len(numbers))
    return numbers
