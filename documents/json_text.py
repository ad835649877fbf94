"""Documents as the JSON that commands print."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def finite(value: Any) -> Any:
    """The same plain data with None in place of every number that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value


def json_text(document: Mapping[str, Any]) -> str:
    """One JSON document on one line, `"schema": 1` included whatever the mapping says of it."""
    return json.dumps(finite({"schema": 1, **document}), ensure_ascii=False, allow_nan=False)
