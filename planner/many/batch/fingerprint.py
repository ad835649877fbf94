"""What a result depends on: the request, and the code and data that answer it."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import numpy as np

from meshwright.planner.request.plan_request import PlanRequest

ROOT = Path(__file__).resolve().parents[3]
"""The folder of the package."""
_NOT_ANSWERING = {"tests", "benchmarks", "docs", "build"}
"""Folders beside the program, where it runs from its repository."""


def code_files() -> list[Path]:
    """Every file of code and data of this program, in order."""
    tops = [
        path
        for path in sorted(ROOT.iterdir())
        if path.name not in _NOT_ANSWERING and not path.name.startswith(".")
    ]
    files = [path for top in tops for path in ([top] if top.is_file() else sorted(top.rglob("*")))]
    return [path for path in files if path.suffix in (".py", ".yaml")]


@cache
def code_fingerprint() -> str:
    """Changes with any line of code or data of this program, and with the versions of solver and arrays."""
    from importlib.metadata import version

    digest = hashlib.sha256(f"ortools {version('ortools')} numpy {np.__version__}".encode())
    for path in code_files():
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
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
