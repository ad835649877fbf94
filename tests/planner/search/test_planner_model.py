"""The CP-SAT model on made-up cost tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshwright.cluster_specs.reader import load_cluster
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.layout import Layout
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.model import Candidates, bound_ns, build_model, price_ns, solve
from tests.planner.search.rows_of_rules import with_rules


class AtMost(Rule):
    """tp below a limit."""

    unit = "GPUs"

    def __init__(self, limit: int) -> None:
        self.name, self.limit = f"at-most-{limit}", limit

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        return np.asarray(table.layouts.tp, dtype=np.float64) - self.limit

    def check(self, plan: FinishedPlan) -> Finding | None:
        raise AssertionError("the model asks for excess only")


def table(degrees: list[int]) -> Candidates:
    asked = PlanRequest(
        model=load_catalog_model("llama-3-8b"),
        cluster=load_cluster("dgx-h100"),
        gpus=8,
        global_batch=8,
        seq_len=1024,
    )
    return Candidates(
        workload=asked.workload(),
        layouts=Layout(tp=np.array(degrees)),
        memory_gib=np.zeros(len(degrees)),
    )


@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.lists(st.integers(0, 10**15), min_size=1, max_size=4)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 8),
)
def test_choice_is_the_cheapest_legal_pair(
    options: list[tuple[int, list[int]]], limit: int
) -> None:
    times = [np.array(ways, dtype=np.int64) for _, ways in options]
    built = with_rules(build_model(times), [AtMost(limit)], table([tp for tp, _ in options]))
    choice = solve(built, seed=0, time_limit_s=None)
    legal = [min(ways) for tp, ways in options if tp <= limit]
    if not legal:
        assert choice.status == "infeasible"
        return
    assert choice.status == "optimal"
    assert times[choice.layout][choice.mapping] == min(legal) == choice.bound_ns
    assert options[choice.layout][0] <= limit


def test_same_model_same_choice() -> None:
    times = [np.array([5, 5, 5], dtype=np.int64)] * 6
    found = {(c.layout, c.mapping) for c in (solve(build_model(times), 7, None) for _ in range(5))}
    assert len(found) == 1


def test_no_mapping_no_choice() -> None:
    times = [np.zeros(0, dtype=np.int64), np.array([9], dtype=np.int64)]
    assert solve(build_model(times), 0, None).layout == 1
    assert solve(build_model(times[:1]), 0, None).status == "infeasible"


def test_times_beyond_64_bits_are_refused() -> None:
    times = [np.array([2**61, 2**61, 2**61], dtype=np.int64)]
    with pytest.raises(OverflowError, match="64-bit"):
        build_model(times)


def test_bounds_round_down_and_prices_up() -> None:
    assert bound_ns(np.array([1.0000000019])).tolist() == [1_000_000_001]
    assert price_ns(1.0000000011) == 1_000_000_002
