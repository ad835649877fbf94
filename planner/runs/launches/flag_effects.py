"""What flags and keys that no reader takes do to the price: nothing, something, or nobody knows.

flag_effects.yaml beside this file lists them by program.
"""

from __future__ import annotations

import re
from fnmatch import translate
from functools import cache
from typing import NamedTuple

from meshwright.documents.reader import packaged_document

_LAUNCHERS = "launchers"
_OFF = re.compile(r"(--[\w-]+\.)no-(.+)")
"""A switch of torchtitan that is turned off."""
_AS_DEFAULT = frozenset(("auto", "none"))
"""Values that leave a setting to the program."""


class _Effects(NamedTuple):
    no_effect: tuple[re.Pattern[str], ...]
    changes: tuple[tuple[re.Pattern[str], str | None], ...]
    """Names, and the value that asks for nothing."""


def has_no_effect(kind: str, name: str, value: str = "true") -> bool:
    """Whether a flag or a key that is not read leaves the price as it is.

    Parameters
    ----------
    kind
        The program whose it is, by its section of the file; flags of launchers such as torchrun and srun are
        known beside every program's.
    name
        A flag with its dashes, `section.key` of a document, or an override.
    value
        What follows it, in any case of letters; `true` for a switch.

    >>> has_no_effect("megatron", "--log-interval", "10")
    True
    >>> has_no_effect("torchtitan", "--parallelism.no-enable-async-tensor-parallel")
    True
    >>> has_no_effect("megatron", "--some-new-flag")
    False
    """
    off = _OFF.fullmatch(name)
    said = value.strip().lower()
    effects = (_effects(_LAUNCHERS), _effects(kind))
    if any(pattern.fullmatch(name) for each in effects for pattern in each.no_effect):
        return True
    if off is not None:
        name, said = off[1] + off[2], "false"
    return any(
        default is not None and pattern.fullmatch(name) and _same(said, default)
        for each in effects
        for pattern, default in each.changes
    )


def changes_price(name: str) -> bool:
    """Whether a flag or a key is known to change the price of a step, of whichever program it is."""
    kinds = [section for section in _sections() if section != _LAUNCHERS]
    return any(pattern.fullmatch(name) for kind in kinds for pattern, _ in _effects(kind).changes)


def unread_words(name: str) -> str:
    """What is said of a flag or a key that no reader takes."""
    if changes_price(name):
        return f"{name} is not read, and changes the price"
    return f"{name} is not read: nothing is known of it, and it may change the price"


def _same(value: str, default: str) -> bool:
    """Whether a value is a default, also where numbers are written in other ways."""
    if value in _AS_DEFAULT or value == default:
        return True
    try:
        return float(value) == float(default)
    except ValueError:
        return False


@cache
def _sections() -> dict[str, dict[str, str]]:
    sections: dict[str, dict[str, str]] = packaged_document(
        "meshwright.planner.runs.launches", "flag_effects.yaml"
    )
    return sections


@cache
def _effects(section: str) -> _Effects:
    entry = _sections()[section]
    no_effect = (re.compile(translate(name)) for name in entry["no_effect"].split())
    changes = (word.partition("=") for word in entry.get("changes", "").split())
    return _Effects(
        tuple(no_effect),
        tuple(
            (re.compile(translate(name)), value.lower() if sign else None)
            for name, sign, value in changes
        ),
    )
