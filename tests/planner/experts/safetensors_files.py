"""Safetensors files for the readers' tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAMES = {"i8": "I64", "i4": "I32", "i2": "I16", "u1": "U8", "f4": "F32", "f8": "F64"}


def write_safetensors(tensors: Mapping[str, NDArray[Any]]) -> bytes:
    """The bytes of a safetensors file."""
    head, body = {}, b""
    for name, tensor in tensors.items():
        raw = np.ascontiguousarray(tensor).tobytes()
        head[name] = {
            "dtype": NAMES[tensor.dtype.str[1:]],
            "shape": list(tensor.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + body
