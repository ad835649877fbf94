"""What a result depends on: the request, and the code and data that answer it."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import numpy as np

from meshwright.planner.request.plan_request import PlanRequest

_ROOMS = ("planner", "constraints", "costmodel", "cluster_specs", "model_specs")


@cache
def code_fingerprint() -> str:
    """Changes with any line of code or data of this program, and with the versions of solver and arrays."""
    from importlib.metadata import version

    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256(f"ortools {version('ortools')} numpy {np.__version__}".encode())
    for room in _ROOMS:
        for path in sorted((root / room).rglob("*")):
            if path.suffix in (".py", ".yaml"):
                digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def request_key(request: PlanRequest) -> str:
    """A name for the answer to a request: equal requests have equal keys, whatever their jobs are called."""
    document = {
        "inputs": request.inputs().model_dump(mode="json"),
        "expert_imbalance": request.expert_imbalance,
        "method": request.method,
        "top_k": request.top_k,
        "time_limit_s": request.time_limit_s,
        "seed": request.seed,
        "code": code_fingerprint(),
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
