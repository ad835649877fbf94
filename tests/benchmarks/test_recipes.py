"""The comparison with published recipes: groups, and the plan of a small one."""

from __future__ import annotations

import pytest

from benchmarks.recipes import compared, page, recipes
from tests.soaked import some


@pytest.mark.slow
def test_every_recipe_of_the_family_is_in_a_group() -> None:
    groups = recipes()
    assert len(groups) == 130
    assert all(run.measured is not None for runs in groups.values() for run in runs)
    assert {group[0] for group in groups} >= {"Llama-3.1-405B", "GPT-3-175B", "DeepSeek-V3-671B"}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("model", "precision"),
    [("Llama-3-8B", "bf16"), ("Llama-3.1-8B", "fp8"), ("Llama-3.1-8B", "nvfp4")],
)
def test_a_plan_costs_at_most_its_recipe(model: str, precision: str) -> None:
    named = [group for group in recipes() if (group[0], group[-1]) == (model, precision)]
    small = [group for group in named if group[2] <= 8]
    assert small
    for group in some(small[:3]):
        comparison = compared(group, recipes()[group], None, free=False)
        assert comparison.plan_s is not None
        assert comparison.plan_s <= comparison.priced_s * (1 + 1e-6), comparison
        assert f"| {group[0]} | {group[1]} | {group[2]} |" in page([comparison], None)
