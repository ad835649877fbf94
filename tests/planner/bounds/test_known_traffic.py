"""Data-parallel traffic that is kept for other executions: the same as that of each of them."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.frameworks.catalog import FRAMEWORK_NAMES
from meshwright.planner.bounds.mappings import known_traffic, least_group_traffic, packed_context
from meshwright.planner.mapping.pricing import pricing_of
from meshwright.planner.request.reader import read_request
from meshwright.planner.search.loop import branches_of


@pytest.mark.parametrize("model", ["mixtral-8x7b", "llama-3-8b"])
@pytest.mark.parametrize("framework", FRAMEWORK_NAMES)
def test_traffic_that_is_kept_is_that_of_every_execution(framework: str, model: str) -> None:
    """The first execution that asks decides what the others read."""
    request = read_request(
        model=model,
        cluster="dgx-h100",
        gpus=64,
        global_batch=256,
        seq_len=4096,
        framework=framework,
        allow="all",
    )
    branches = branches_of(request, pricing_of)
    workloads = [each.pricing.workload for each in branches]
    if framework == "megatron":
        assert len({(each.tp_overlap, each.cuda_graph, each.cp_comm) for each in workloads}) > 4
        assert len({known_traffic(each, (1, 2)) for each in workloads}) < len(workloads)
    draw = np.random.default_rng(0)
    for branch in branches[:: max(1, len(branches) // 12)]:
        workload, numbers = branch.pricing.workload, branch.space.shard_groups
        variants = branch.space.variants(branch.space.degrees(request.gpus))
        count = variants.broadcast_shape()[0]
        context = packed_context(workload, variants.take(draw.integers(0, count, 200)))
        own, *others = least_group_traffic(context, numbers)
        by_size = np.array(others[0]) if others else np.array(own)[:, None]
        kept = known_traffic(workload, numbers).least(context)
        assert np.array_equal(np.array(kept[0]), np.array(own))
        assert np.array_equal(np.array(kept[-1]).reshape(by_size.shape), by_size)
