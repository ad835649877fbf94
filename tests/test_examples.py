"""The examples in docstrings run, and print what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.test_structure import ROOT, module_name, modules

WITH_EXAMPLES = [
    module_name(path, ROOT) for path in modules(ROOT) if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_of(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert outcome.attempted > 0
    assert outcome.failed == 0
