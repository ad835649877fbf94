"""Typed, bounded access to the fields of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import overload

from meshwright.errors import InputError, near_miss

LARGEST_COUNT = 10_000_000
"""As in the schema: no width, vocabulary or number of anything is larger."""
MOST_LAYERS = 2000


class ConfigFields:
    """One mapping of a config.json; every reader raises InputError naming file and field on a wrong value.

    A field that is absent and one that is null read the same.
    """

    def __init__(self, data: Mapping[str, object], where: str, prefix: str = "") -> None:
        self._data = data
        self.where = where
        self._prefix = prefix
        self._read: set[str] = set()
        self._sections: dict[str, ConfigFields] = {}

    def _value(self, name: str) -> object:
        self._read.add(name)
        return self._data.get(name)

    def passed_over(self, *names: str) -> None:
        """Counts fields as read that say nothing beside what the others say."""
        self._read.update(names)

    def unread(self) -> Iterator[tuple[str, object]]:
        """Dotted names and values of the fields that no reader has asked for, but for those that are null."""
        for name, value in self._data.items():
            if name in self._sections:
                yield from ((f"{name}.{inner}", x) for inner, x in self._sections[name].unread())
            elif value is not None and name not in self._read:
                yield name, value

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._value(name) is not None

    def names(self, name: str) -> bool:
        """Whether the field is there, be it null: where null stands for none, and absence for a default."""
        return name in self._data

    def fail(self, name: str, what: str, value: object = ...) -> InputError:
        """An error about one field, for the caller to raise."""
        return InputError(what, where=f"{self.where}: {self._prefix}{name}", value=value)

    @overload
    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int: ...
    @overload
    def count(
        self, name: str, default: int | None = None, *, least: int = 1, optional: bool
    ) -> int | None: ...
    def count(
        self, name: str, default: int | None = None, *, least: int = 1, optional: bool = False
    ) -> int | None:
        """An integer from `least` to ten million; `default` where absent, else an error unless `optional`."""
        value = self._value(name)
        if value is None:
            if default is None and not optional:
                raise self._missing(name)
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(name, "must be an integer", value)
        if not least <= value <= LARGEST_COUNT:
            raise self.fail(name, f"must be from {least} to {LARGEST_COUNT}", value)
        return value

    def layers(self, name: str = "num_hidden_layers") -> int:
        """The number of layers, from 1 to 2000 as in the schema, so that loops over them stay short."""
        value = self.count(name)
        if value > MOST_LAYERS:
            raise self.fail(name, f"must be from 1 to {MOST_LAYERS}", value)
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, "must be true or false", value)
        return value

    @overload
    def number(self, name: str, default: float) -> float: ...
    @overload
    def number(self, name: str, default: None = None) -> float | None: ...
    def number(self, name: str, default: float | None = None) -> float | None:
        """A number; the schema bounds it."""
        value = self._value(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(name, "must be a number", value)
        return float(value)

    def section(self, name: str) -> ConfigFields | None:
        """The fields of a mapping inside; None where absent."""
        value = self._value(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fail(name, "must be a mapping of fields", value)
        if name not in self._sections:
            self._sections[name] = ConfigFields(value, self.where, f"{self._prefix}{name}.")
        return self._sections[name]

    def text(self, name: str, default: str) -> str:
        """A text."""
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fail(name, "must be a text", value)
        return value

    def is_text(self, name: str) -> bool:
        """Whether a field holds a text."""
        return isinstance(self._value(name), str)

    def entries(self, name: str) -> list[object]:
        """A list; empty where absent."""
        value = self._value(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.fail(name, "must be a list", value)
        return value

    def _missing(self, name: str) -> InputError:
        return InputError(
            "this field is required and missing",
            where=f"{self.where}: {self._prefix}{name}",
            did_you_mean=near_miss(name, [key for key in self._data if isinstance(key, str)]),
        )
