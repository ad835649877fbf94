"""Flags and fields that train less than the whole model: adapters such as LoRA, and frozen parts.

They have no price yet, and the price of full training is not theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from meshwright.errors import InputError

_NAME = re.compile(
    r"(?:^|[-_.])(?:q?lora(?:plus)?|dora|loha|lokr|ia3|peft|p[-_]?tuning|prefix[-_]tuning|prompt[-_]tuning"
    r"|adapter|adapters|unfreeze|freeze|frozen)(?:$|[-_.\d])"
)
_SIZES = re.compile(
    r"(?:^|[-_.])(?:q|kv|o|qk|v|kq|gate)[-_]lora[-_]rank$|freeze[-_]?gc|^no[-_.]freeze"
)
"""Ranks of latent attention, and pauses of Python's garbage collector."""
_KIND = re.compile(
    r"(?:^|[-_.])(?:train|tuner|tuning|finetune|finetuning|sft|peft|adapter|training|component|converters|kind)"
    r"(?:[-_](?:type|scheme|method|mode|strategy))?_?$|^config$|_component_$"
)
"""Names whose value says what is trained."""
_KINDS = re.compile(
    r"(?:^|[-_./\"'\[ ])(?:q?lora|dora|longlora|loha|lokr|ia3|adalora|adapter|freeze|peft|prefix_tuning"
    r"|prompt_tuning|p_tuning|canonical_lora|dpo_lora)(?:$|[-_./\"'\], \d])"
)
_SWITCHED_OFF = frozenset(("false", "none", "null", "0", "off", "no", "[]", "{}", "full"))
_DEEPEST = 12
"""Levels of a document that are looked through; a launch file has two or three."""


def refuse_adapters(pairs: Iterable[tuple[str, str]], where: str) -> None:
    """Raises InputError for the first flag or field by which a run trains adapters or part of the model.

    Parameters
    ----------
    pairs
        Names and values: flags with what follows them, keys of a document as `section.key`, overrides.
    where
        The file's name.
    """
    for name, value in pairs:
        if trains_a_part(name, value):
            raise InputError(
                "training of adapters (LoRA and its kin) or of part of a model has no price yet, and that of "
                "full training would be wrong: take the flag out to price full training of the same layout",
                where=f"{where}: {name}",
                value=value or None,
            )


def trains_a_part(name: str, value: str = "") -> bool:
    """Whether a flag or a field says that adapters or part of the model are trained.

    >>> trains_a_part("--lora-rank", "8"), trains_a_part("--kv-lora-rank", "512")
    (True, False)
    >>> trains_a_part("--train-type", "lora"), trains_a_part("--train-type", "full")
    (True, False)
    """
    bare = name.lstrip("-").lower()
    said = value.strip().lower()
    if said in _SWITCHED_OFF:
        return False
    if _KIND.search(bare) and _KINDS.search(said):
        return True
    return _NAME.search(bare) is not None and _SIZES.search(bare) is None


def fields_of(document: object, place: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Every key of a document with its value in words, those of inner mappings as `section.key`.

    A section that is there and not empty is a pair of its own.
    """
    if depth > _DEEPEST:
        return
    if isinstance(document, list):
        for item in document:
            if isinstance(item, dict | list):
                yield from fields_of(item, place, depth + 1)
    if not isinstance(document, Mapping):
        return
    for key, value in document.items():
        name = f"{place}.{key}" if place else str(key)
        if isinstance(value, Mapping):
            yield name, "true" if _is_on(value) else "false"
            if not _is_on(value):
                continue
        else:
            yield name, str(value)
        yield from fields_of(value, name, depth + 1)


def _is_on(section: Mapping[object, object]) -> bool:
    return bool(section) and not any(
        section.get(name) is False for name in ("enabled", "enable", "use")
    )
