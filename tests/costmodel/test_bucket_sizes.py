"""Sizes of gradient buckets inside prices and bounds, held against prices of each size by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.costmodel.layer_kinds import kind_times
from meshwright.costmodel.layout import Layout, Placement
from meshwright.costmodel.stacks import stack_constants
from meshwright.costmodel.step_time import loaded_step, make_context, optimistic_step
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.parameters import embedding_parameters
from meshwright.planner.bounds.mappings import useful_groups
from meshwright.planner.bounds.pricing import CostModelPricing
from tests.costmodel.test_costmodel_properties import SLOWER, Case, cases, pace_of
from tests.soaked import examples

GAIN = 5e-4
STAGES = {"megatron": (0, 1), "deepspeed": (1, 2)}


@st.composite
def open_cases(draw: st.DrawFn) -> Case:
    """A step whose gradients are reduced beside the backward pass, of a stack whose buckets have a size."""
    case = draw(cases(tensor_inside=True))
    layout, stages, framework = case.layout, case.stages, case.workload.framework
    if int(layout.schedule) == 0 and draw(st.booleans()):
        layout, stages = replace(layout, vpp=1), tuple((sum(rank),) for rank in stages)
    if int(layout.vpp) == 1:
        framework = draw(st.sampled_from(sorted(STAGES)))
    assume(framework in STAGES)  # splits of several virtual stages are those of the framework
    workload = replace(case.workload, framework=framework, dp_overlap=True, chooses_buckets=True)
    layout = replace(layout, zero_stage=draw(st.sampled_from(STAGES[framework])))
    constants = make_context(workload, layout, case.placement).constants
    return replace(case, workload=workload, layout=layout, stages=stages, constants=constants)


def sized(case: Case, parameters: float | None) -> Case:
    """With buckets of one size, None for the framework's own."""
    stack = stack_constants(case.workload)
    size_mb = None if parameters is None else stack.gradients_mb(parameters)
    return replace(case, workload=replace(case.workload, bucket_mb=size_mb, chooses_buckets=False))


def sizes_of(case: Case) -> list[float]:
    """The sizes that docs/cost_model.md names, from its words."""
    layout, model = case.layout, case.workload.model
    deepspeed = case.workload.framework == "deepspeed"
    if layout.vpp > 1 or (deepspeed and layout.pp > 1):
        return []
    own = 500e6 if deepspeed else max(40e6, 1e6 * float(layout.dp) * float(layout.cp))
    least = min(own, float(embedding_parameters(model)) / float(layout.tp))
    most = own if deepspeed else mean_parameters(case)
    return [
        times * own for times in (0.5, 2.0, 5.0, 10.0, 20.0, 30.0) if least <= times * own <= most
    ]


def mean_parameters(case: Case) -> float:
    """Of a rank, dense or of experts, whichever are more."""
    from meshwright.costmodel.states import rank_parameters

    both = rank_parameters(case.workload.model, case.layout, None)
    return max(float(np.asarray(part)) for part in both)


def in_rows(layout: Layout) -> Layout:
    return Layout(**{name: np.array([value]) for name, value in vars(layout).items()})


@pytest.mark.slow
@given(open_cases())
@settings(max_examples=examples(400, 16))
def test_a_price_is_the_least_of_all_sizes_where_that_saves_enough(case: Case) -> None:
    own_s = sized(case, None).seconds()
    others_s = [sized(case, size).seconds() for size in sizes_of(case)]
    least_s = min(others_s, default=own_s)
    pays = least_s <= (1 - GAIN) * own_s
    expected_s = least_s if pays else own_s
    if abs(least_s / own_s - (1 - GAIN)) > 1e-9:
        assert case.seconds() == pytest.approx(expected_s, rel=1e-12)


FEW_AND_MORE = [
    pytest.param(40, id="few"),
    pytest.param(8, id="more", marks=(pytest.mark.soak, pytest.mark.hypothesis)),
]
"""One in how many examples is drawn."""


@pytest.mark.parametrize("one_in", FEW_AND_MORE)
def test_bounds_hold_for_every_size(one_in: int) -> None:
    settings(max_examples=examples(600, one_in))(given(open_cases())(bounds_hold))()


def bounds_hold(case: Case) -> None:
    """Below the step with the framework's own size, and with every other."""
    context = make_context(case.workload, case.layout, case.placement)
    times = kind_times(context)
    pricing, one = CostModelPricing(case.workload), in_rows(case.layout)
    step = optimistic_step(context, times, pace_of(context, times))
    bounds = [float(np.asarray(step.seconds)), float(pricing.lower_bound_s(one)[0])]
    own_s = sized(case, None).seconds()
    for bound_s in bounds:
        assert bound_s <= own_s * SLOWER
        for size in sizes_of(case):
            assert bound_s <= sized(case, size).seconds() * SLOWER
    assert bounds[1] <= bounds[0] * SLOWER


@pytest.mark.parametrize("one_in", FEW_AND_MORE)
def test_any_number_of_shard_groups_with_any_size_is_bounded(one_in: int) -> None:
    settings(max_examples=examples(400, one_in))(
        given(open_cases(), st.integers(1, 3))(every_number_is_bounded)
    )()


def every_number_is_bounded(case: Case, zero: int) -> None:
    """And a number that is not useful is, with every size, no faster than one of its divisors."""
    stages = STAGES[case.workload.framework]
    layout = replace(case.layout, zero_stage=zero if zero in stages else 1, shard_groups=1)
    case, one = replace(case, layout=layout), in_rows(layout)
    dp, cp = int(layout.dp), int(layout.cp)
    numbers = [n for n in range(1, dp + 1) if dp % n == 0 and (n == 1 or dp * cp > n)]
    prices = {
        n: [
            sized(replace(case, layout=replace(layout, shard_groups=n)), size).seconds()
            for size in (None, *sizes_of(case))
        ]
        for n in numbers
    }
    bound_s = float(CostModelPricing(case.workload).lower_bound_s(one, numbers)[0])
    assert bound_s <= min(own_s for own_s, *_ in prices.values()) * SLOWER
    assert bound_s <= min(map(min, prices.values())) * SLOWER
    rows = {name: np.asarray(value)[None] for name, value in vars(case.placement).items()}
    for number in numbers:
        own = replace(one, shard_groups=np.array([number]))
        if not useful_groups(make_context(case.workload, own, Placement(**rows)), numbers)[0]:
            fewer = [prices[n] for n in numbers if n < number and number % n == 0]
            for column, seconds in enumerate(prices[number]):
                assert min(each[column] for each in fewer) <= seconds * SLOWER


@given(open_cases(), st.floats(0.1, 10), st.floats(0.0, 3.0))
@settings(max_examples=examples(200, 12))
def test_a_step_of_given_loads_is_below_every_size(
    case: Case, busiest_s: float, more: float
) -> None:
    """What the solver's model knows of a combination."""
    work_s = busiest_s * (1 + more)

    def seconds(workload: Workload) -> float:
        context = make_context(workload, case.layout, case.placement)
        step = loaded_step(context, kind_times(context), busiest_s, work_s)
        return float(np.asarray(step.seconds))

    least_s = min(seconds(sized(case, size).workload) for size in (None, *sizes_of(case)))
    assert seconds(case.workload) == pytest.approx(least_s, rel=1e-12)


@pytest.mark.soak
def test_the_cases_have_choices_that_pay() -> None:
    """Else the properties above would hold of nothing."""
    pays, chosen = [0], [0]

    @given(open_cases())
    @settings(max_examples=120, derandomize=True)
    def count(case: Case) -> None:
        sizes = sizes_of(case)
        chosen[0] += bool(sizes)
        pays[0] += case.seconds() < sized(case, None).seconds()

    count()
    assert chosen[0] > 30
    assert pays[0] > 5
