"""Property tests repeat: the same examples on every machine, and no deadline that a busy one could miss."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
# Examples would take constants from whichever modules are imported: others for one file than for all.
providers._get_local_constants = lambda: providers._local_constants

TESTS = Path(__file__).parent
IS_SECOND = os.environ.get("PYTEST_XDIST_WORKER") == "gw1"
"""Of the processes that share the tests; each imports all of them first."""


def pytest_configure(config: pytest.Config) -> None:
    """The second process compiles the files from the other end: each finds half of them compiled."""
    if IS_SECOND and config.args == [TESTS.name]:
        entries = sorted(
            path for path in TESTS.iterdir() if path.name not in ("data", "__pycache__")
        )
        config.args = [str(path) for path in reversed(entries) if is_collected(path)]


def is_collected(path: Path) -> bool:
    """Whether it may hold tests."""
    return path.is_dir() or path.name.startswith("test_")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the order of all other processes."""
    if IS_SECOND:
        items.sort(key=lambda item: item.path.relative_to(TESTS).parts[0])
