"""Which oracle tests run beside others: `make oracles` has two processes, one for all of a group."""

from __future__ import annotations

import pytest

WHOLE_MACHINE = {
    *("test_schedulers", "test_topology", "test_gloo", "test_measure", "test_mcp"),
    "test_distribution",
}
"""They start a daemon or several processes, bind ports or measure time."""
APART = {"test_frameworks", "test_variants"}
"""Each of their tests is long and asks another framework."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        module = item.path.stem
        if item.get_closest_marker("oracle") and module not in APART:
            group = "whole machine" if module in WHOLE_MACHINE else module
            item.add_marker(pytest.mark.xdist_group(group))
