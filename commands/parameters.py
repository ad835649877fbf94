"""Kinds of option values that `click` does not have."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import click

from meshwright.errors import shown, suggestion

MOST_NUMBERS = 1000
LARGEST_NUMBER = 10**7


class NearMissChoice(click.Choice[str]):
    """One of some names; a misspelt one is told its near miss."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name itself, or a usage error."""
        if value in self.choices:
            return str(value)
        self.fail(f"{shown(value)} is not known{suggestion(value, self.choices)}", param, ctx)


class ChoiceIn(NearMissChoice):
    """One of the names that a module of meshwright holds, which is imported when they are needed.

    `spelled` turns what others call something into the name.
    """

    def __init__(
        self, module: str, collection: str, spelled: Callable[[str], str] = lambda text: text
    ) -> None:
        self.case_sensitive = True
        self._module = module
        self._collection = collection
        self._spelled = spelled

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name that the value spells, or a usage error."""
        return super().convert(self._spelled(value), param, ctx)

    def __getattr__(self, name: str) -> Any:
        if name != "choices":
            raise AttributeError(name)
        module = import_module(f"meshwright.{self._module}")
        self.choices = tuple(getattr(module, self._collection))
        return self.choices


class NumberList(click.ParamType[tuple[float, ...]]):
    """Numbers with commas between them, such as `8,16`."""

    name = "numbers"

    def __init__(self, kind: type[float]) -> None:
        self._kind = kind

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """The numbers, or a usage error."""
        parts = [part.strip() for part in str(value).split(",")]
        if len(parts) > MOST_NUMBERS:
            self.fail(f"at most {MOST_NUMBERS} numbers, got {len(parts)}", param, ctx)
        return tuple(self._number(part, param, ctx) for part in parts)

    def _number(self, text: str, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = self._kind(text)
        except ValueError:
            self.fail(f"must be numbers with commas between them, got {shown(text)}", param, ctx)
        if not 0 <= number <= LARGEST_NUMBER:
            self.fail(f"must be from 0 to {LARGEST_NUMBER}, got {shown(number)}", param, ctx)
        return number
