"""From what a user types to a wish."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from meshwright.errors import InputError
from meshwright.planner.many.batch.cache import chosen_folder
from meshwright.planner.many.recommend.service import Wish

Number = TypeVar("Number", int, float)


def read_wish(model: str, options: Mapping[str, Any]) -> Wish:
    """The wish that the options of `recommend` mean. Raises InputError."""
    step_time_s, tokens_per_s = options["step_time"], options["tokens_per_s"]
    if step_time_s is not None and tokens_per_s is not None:
        raise InputError("one target at a time", where="--step-time and --tokens-per-s")
    for name, value in (("--step-time", step_time_s), ("--tokens-per-s", tokens_per_s)):
        if value is not None and not 0 < value < 1e18:
            raise InputError("must be more than 0", where=name, value=value)
    plan = {
        name: options[name]
        for name in ("global_batch", "seq_len", "precision", "optimizer", "framework")
    }
    return Wish(
        model=model,
        clusters=tuple(dict.fromkeys(options["clusters"])),
        plan={**plan, "pin": ",".join(options["pins"]), "forbid": options["forbids"]},
        step_time_s=step_time_s,
        tokens_per_s=tokens_per_s,
        most_gpus=options["gpus"],
        sizes=tuple(sorted(set(_numbers("--sizes", options["sizes"], int)))),
        reserves_gib=tuple(sorted({0.0, *_numbers("--reserve-gib", options["reserves"], float)})),
        workers=options["workers"],
        cache=chosen_folder(options["cache"], options["no_cache"]),
    )


def _numbers(name: str, texts: Iterable[str], kind: Callable[[str], Number]) -> list[Number]:
    """Numbers from texts such as `8,16`; at most 1,000."""
    found = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        try:
            number = kind(part)
        except ValueError:
            raise InputError(
                "must be numbers with commas between them", where=name, value=part
            ) from None
        if not 0 <= number < 10**7:
            raise InputError("out of range", where=name, value=number)
        found.append(number)
    if len(found) > 1000:
        raise InputError("at most 1,000 of them", where=name, value=len(found))
    return found
