"""Values of nested documents by their path, taken one at a time so that the rest is known."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from meshwright.errors import InputError
from meshwright.model_specs.adapters import ALL_LINEAR
from meshwright.planner.runs.launches.finetuning import (
    adapter_targets,
    adapters_mapping,
)
from meshwright.planner.runs.launches.launch_run import is_harmless

_DEEPEST = 12
MOST_LETTERS = 2_000
"""Of a value once references in it are put in."""


class NestedFields:
    """Values of a nested document by their path, `section.key`; what is asked for counts as read."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = dict(values)
        self.where = where
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """A value, or a default where it is absent or null."""
        self._read.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def on(self, name: str, *, default: bool = False) -> bool:
        return self.get(name, default) is True

    def first(self, names: Iterable[str], default: Any = None) -> Any:
        """The first of some values that is there; all count as read."""
        there = [self.get(name) for name in names]
        return next((value for value in there if value is not None), default)

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1. Raises InputError for anything else, and where there is none."""
        value = self.get(name, default)
        if value is None:
            raise InputError("is needed", where=f"{self.where}: {name}")
        if type(value) is not int or value < 1:
            what = "must be a whole number of at least 1"
            raise InputError(what, where=f"{self.where}: {name}", value=value)
        return value

    def names(self, name: str) -> list[str]:
        """A list of texts, empty where it is absent. Raises InputError for anything else."""
        value = self.get(name, [])
        if not isinstance(value, list):
            raise InputError("must be a list", where=f"{self.where}: {name}", value=value)
        return [str(each) for each in value]

    def half(self, name: str) -> str:
        """bf16 or fp16 by the name of a type, bfloat16 by default. Raises InputError for other types."""
        said = self.get(name, "bfloat16")
        if said not in ("bfloat16", "float16"):
            what = "training in 32 bits has no price"
            raise InputError(what, where=f"{self.where}: {name}", value=said)
        return "bf16" if said == "bfloat16" else "fp16"

    def lora(self, rank: int, modules: str) -> tuple[dict[str, Any], list[str]]:
        """Adapters of the modules that a value names, by default all linear ones; and what is not read."""
        self.get(modules)
        targets, unread = adapter_targets(self.values, modules, self.where, (ALL_LINEAR,))
        return adapters_mapping("lora", rank, targets), unread

    def degrees(self, section: str, axes: Mapping[str, str]) -> dict[str, Any]:
        """Degrees of the axes by the fields of a section that say them, 1 where they do not."""
        return {axis: self.count(f"{section}{field}", 1) for field, axis in axes.items()}

    def refuse(self, what: str, *names: str) -> None:
        """Raises InputError for the first of some values that is there and not off."""
        for name in names:
            if self.get(name):
                raise InputError(what, where=f"{self.where}: {name}", value=self.values[name])

    def has_section(self, name: str) -> bool:
        return name in self.values or any(key.startswith(f"{name}.") for key in self.values)

    def unread(self, kind: str) -> list[str]:
        """Paths that nobody has asked for and that may change the price."""
        return [
            name
            for name, value in self.values.items()
            # A null or an empty section leaves a field to its default, as if it were not there.
            if value not in (None, {}, [])
            and name not in self._read
            and not is_harmless(kind, name, _word(value))
        ]


def _word(value: object) -> str:
    return "none" if value in (None, [], {}, "") else str(value)


def nested_fields(document: Mapping[str, Any], place: str = "", depth: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in document.items():
        name = f"{place}.{key}" if place else str(key)
        if isinstance(value, dict) and value and depth < _DEEPEST:
            found |= nested_fields(value, name, depth + 1)
        else:
            found[name] = value
    return found


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_PRODUCT = re.compile(r"\$\{mul: *(\d{1,12}), *(\d{1,12})\}")


def with_references(values: dict[str, Any]) -> dict[str, Any]:
    """Values with what `${a.b}` and `${mul:2, 3}` stand for, as OmegaConf and NeMo-RL resolve them."""
    found = dict(values)
    for _ in range(_DEEPEST):
        texts = {n: v for n, v in found.items() if isinstance(v, str) and "${" in v}
        if not texts:
            break
        found |= {name: _resolved(text, found) for name, text in texts.items()}
    return found


def _resolved(text: str, values: Mapping[str, Any]) -> Any:
    whole = _REFERENCE.fullmatch(text)
    if whole is not None:
        return values.get(whole[1])
    product = _PRODUCT.fullmatch(text)
    if product is not None:
        return int(product[1]) * int(product[2])
    return _REFERENCE.sub(lambda name: str(values.get(name[1]))[:MOST_LETTERS], text)[:MOST_LETTERS]
