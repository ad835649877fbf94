"""OR-tools' CP-SAT: every model of this package imports `cp_model` from here.

`ortools.sat.python.cp_model` loads pandas, which takes longer than most searches, for methods not used here.
It is loaded with a stand-in, which hands everything to pandas as soon as anybody asks it for anything.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from meshwright.planner.solvers.processes import others_run


class _PandasLater(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("pandas"), name)


@contextmanager
def _without_pandas() -> Iterator[None]:
    """What is imported inside finds the stand-in, unless pandas is loaded or a thread of others may look."""
    if "pandas" in sys.modules or others_run():
        yield
        return
    stand_in = _PandasLater("pandas")
    for name in ("Index", "Series"):
        # Types in annotations are looked up while the module is loaded.
        setattr(stand_in, name, type(name, (), {}))
    sys.modules["pandas"] = stand_in
    try:
        yield
    finally:
        del sys.modules["pandas"], stand_in.Index, stand_in.Series


with _without_pandas():
    from ortools.sat.python import cp_model

__all__ = ["cp_model"]
