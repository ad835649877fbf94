"""Times of layers that are kept are those that are computed anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.costmodel.estimate import costs_of_layers
from meshwright.costmodel.layer_kinds import KindTime, kind_times
from meshwright.costmodel.layout import Layout
from meshwright.planner.bounds import mappings as alike
from meshwright.planner.bounds.combination_costs import shape_table
from meshwright.planner.bounds.mappings import KnownTimes, packed_context, shared_times
from meshwright.planner.request.reader import read_request
from meshwright.planner.search.space import space_of


def random_layouts(seed: int, count: int) -> Layout:
    random = np.random.default_rng(seed)
    tp, ep = random.choice([1, 2, 4, 8], count), random.choice([1, 2, 4], count)
    layouts = Layout(
        tp=tp,
        pp=random.choice([1, 2, 4], count),
        dp=np.full(count, 8),
        ep=ep,
        micro_batch=random.choice([1, 2], count),
        num_micro_batches=random.choice([4, 8], count),
        recompute=random.choice([0, 1, 32], count),
    )
    return layouts.flat()


@pytest.mark.parametrize("most_kept", [1, 20, 4096])
@pytest.mark.parametrize(
    ("model", "overlaps"),
    [("llama-3-8b", False), ("mixtral-8x7b", False), ("deepseek-v3", False), ("deepseek-v3", True)],
)
def test_kept_times_are_those_computed_anew(
    model: str, overlaps: bool, most_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alike, "MOST_KEPT", most_kept)
    request = read_request(
        model=model, cluster="dgx-h100", gpus=512, global_batch=512, seq_len=4096
    )
    known = KnownTimes()
    workload = replace(request.workload(), ep_overlap=overlaps)
    for seed, count in enumerate((1, 40, 7, 200, 40, 0)):
        context = packed_context(workload, random_layouts(seed, count))
        found = known.times(context)
        if not count:
            assert found is None
            assert shared_times(context) is None
            continue
        anew = kind_times(context).rows(np.arange(count), count)
        for kind, times in vars(shared_times(context)).items():
            if isinstance(times, KindTime):
                np.testing.assert_array_equal(times.seconds, getattr(anew, kind).seconds)
        assert found is not None
        for kind, times in vars(anew).items():
            own = getattr(found, kind)
            assert (times is None) == (own is None)
            if isinstance(times, KindTime):
                np.testing.assert_array_equal(own.seconds, times.seconds)
                np.testing.assert_array_equal(own.backward_s, times.backward_s)
                np.testing.assert_array_equal(own.recompute_s, times.recompute_s)


@pytest.mark.parametrize(
    "model", ["deepseek-v3", pytest.param("mixtral-8x7b", marks=pytest.mark.slow)]
)
def test_shapes_cost_under_many_executions_what_they_cost_under_each_alone(model: str) -> None:
    request = read_request(model=model, cluster="dgx-h100", gpus=64, global_batch=64, seq_len=4096)
    executions = list(request.execution_options.executions())
    workloads = [request.workload(each) for each in executions]
    shapes = space_of(request).shapes()
    plain = replace(shapes, pp=1, vpp=1, zero_stage=0, recompute=0, recompute_layers=0, schedule=0)
    plain = replace(plain, num_micro_batches=request.global_batch // np.asarray(plain.micro_batch))
    assert len(executions) > len({workload.moe_dispatch for workload in workloads}) > 1
    together = shape_table(workloads, shapes).costs
    for workload, costs in zip(workloads, together, strict=True):
        alone = costs_of_layers(packed_context(workload, plain))
        again = {name for name in vars(costs) if name.endswith("recompute_s")}
        assert all(getattr(costs, name) == 0.0 for name in again)
        for name in vars(costs).keys() - again:
            np.testing.assert_array_equal(getattr(costs, name), getattr(alone, name))


def test_shapes_cost_no_more_than_any_pipeline_of_them() -> None:
    request = read_request(
        model="deepseek-v3", cluster="dgx-h100", gpus=64, global_batch=64, seq_len=4096
    )
    workload = replace(request.workload(), ep_overlap=True)
    random = np.random.default_rng(7)
    layouts = random_layouts(7, 300)
    size = np.asarray(layouts.micro_batch)
    pp, dp = np.asarray(layouts.pp), random.choice([4, 8, 16], 300)
    layouts = replace(
        layouts,
        dp=dp,
        vpp=np.where(pp > 1, random.choice([2, 3], 300), 1),
        recompute=np.zeros(300, dtype=np.int64),
        num_micro_batches=64 // (dp * size),
    )
    found = shape_table([workload], layouts).costs[0]
    priced = costs_of_layers(packed_context(workload, layouts))
    assert np.all(np.asarray(found.moe_layer_s) <= np.asarray(priced.moe_layer_s))
    assert np.any(np.asarray(found.moe_layer_s) < 0.99 * np.asarray(priced.moe_layer_s))
