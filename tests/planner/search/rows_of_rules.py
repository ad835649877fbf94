"""Rules as rows of the model of layouts, beside what the search posts itself."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.constraints.rule import Rule
from meshwright.planner.search.model import Candidates, PlanModel


def with_rules(built: PlanModel, rules: Sequence[Rule], candidates: Candidates) -> PlanModel:
    """The model with a row for each rule on its layouts."""
    for rule in rules:
        rule.post(built.model, built.layouts, rule.excess(candidates))
    return built
