"""The files of `costmodel/data`, each read once."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import yaml

_LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""As safe as the other, and six times as fast."""


@cache
def data_table(name: str) -> dict[str, Any]:
    """One file as plain data, shared by all who ask: nobody may change it."""
    text = resources.files("meshwright.costmodel.data").joinpath(name).read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.load(text, Loader=_LOADER)  # noqa: S506
    return loaded
