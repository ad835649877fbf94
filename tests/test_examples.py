"""The examples in docstrings run, and print what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.test_structure import PACKAGE, ROOT, module_name, modules

PLANS = f"{PACKAGE}.api"
"""Its examples plan."""
WITH_EXAMPLES = [
    pytest.param(name, marks=pytest.mark.slow if name == PLANS else ())
    for name, path in ((module_name(path, ROOT), path) for path in modules(ROOT))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_of(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert outcome.attempted > 0
    assert outcome.failed == 0
