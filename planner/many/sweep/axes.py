"""What a sweep varies: `gpus=256:2048:x2,precision=bf16+fp8` as values by option."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from meshwright.errors import InputError, near_miss

Value = int | float | str
Axes = Mapping[str, Sequence[Value]]

COUNTS = ("gpus", "global_batch", "seq_len")
AMOUNTS = ("reserve_gib", "hbm_gib", "nic_gbps")
"""GiB to leave free, GiB of a GPU's HBM, gigabits per second of a GPU's share of the network."""
NAMES = ("precision", "optimizer", "framework", "cluster")
OPTIONS = (*COUNTS, *AMOUNTS, *NAMES)
_RANGE = re.compile(r"^([\d.]+):([\d.]+):([x+])([\d.]+)$")


@dataclass(frozen=True, kw_only=True)
class SweepParams:
    """Bounds of a sweep."""

    most_plans: int = 512
    """Combinations; each is a search of seconds."""


def read_axes(text: str | Axes, params: SweepParams | None = None) -> dict[str, tuple[Value, ...]]:
    """The options that a sweep varies, with their values.

    Parameters
    ----------
    text
        `gpus=256:2048:x2` doubles from 256 to 2048, `seq_len=4096:16384:+4096` adds, `precision=bf16+fp8`
        lists; several with commas between them. Or the values themselves by option.
    params
        Bounds.

    Raises
    ------
    InputError
        An unknown option, a value of the wrong kind, or too many combinations.

    >>> read_axes("gpus=8:32:x2,precision=bf16+fp8")
    {'gpus': (8, 16, 32), 'precision': ('bf16', 'fp8')}
    """
    axes: dict[str, tuple[Value, ...]] = {}
    if isinstance(text, str):
        for part in text.split(","):
            name, sign, values = part.strip().partition("=")
            if not sign or not values:
                raise InputError("must be OPTION=VALUES", where="--sweep", value=part)
            axes[_option(name)] = _values(_option(name), values)
    else:
        axes = {_option(name): tuple(values) for name, values in text.items()}
    count = prod(len(values) for values in axes.values())
    most = (params or SweepParams()).most_plans
    if not 1 <= count <= most:
        # Ranges are read up to one value more than is allowed.
        said = f"more than {most} combinations" if count > most else "no combination"
        raise InputError(f"has {said}; give 1 to {most}", where="--sweep")
    return axes


def combinations_of(axes: Axes) -> list[dict[str, Value]]:
    """Every combination of the values, the last option changing fastest."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def _option(name: str) -> str:
    option = name.strip().replace("-", "_")
    if option not in OPTIONS:
        raise InputError(
            "cannot be swept over",
            where="--sweep",
            value=name,
            did_you_mean=near_miss(option, OPTIONS),
            allowed=OPTIONS,
        )
    return option


def _values(option: str, text: str) -> tuple[Value, ...]:
    if option in NAMES:
        return tuple(dict.fromkeys(text.split("+")))
    span = _RANGE.match(text)
    numbers = _spanned(span, text) if span else [_number(part, text) for part in text.split("+")]
    if option in COUNTS:
        return tuple(dict.fromkeys(round(number) for number in numbers))
    return tuple(dict.fromkeys(numbers))


def _spanned(span: re.Match[str], text: str) -> list[float]:
    """From the first to the last number by factors or steps, both included where they are met."""
    first, last, step = (_number(span[group], text) for group in (1, 2, 4))
    grows = step > 1 if span[3] == "x" else step > 0
    if not grows or first <= 0 or last < first:
        raise InputError("must rise, as in 256:2048:x2 or 8:64:+8", where="--sweep", value=text)
    numbers = [first]
    while len(numbers) <= SweepParams().most_plans:
        number = numbers[-1] * step if span[3] == "x" else numbers[-1] + step
        if number > last * (1 + 1e-9):
            break
        numbers.append(number)
    return numbers


def _number(text: str, whole: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e12:
        raise InputError("must be numbers", where="--sweep", value=whole)
    return number
