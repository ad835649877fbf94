"""Shard groups in pipelines through unlike parts: against a brute force, and which are left out."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from meshwright.cluster_specs.reader import MixedClusterSpec, PartSpec, load_cluster
from meshwright.costmodel.mixed import mixed_step
from meshwright.planner.mixed.document import MixedRequest, read_mixed_request
from meshwright.planner.mixed.kernel import MixedKernel
from meshwright.planner.mixed.promising import KernelMaker, promising_rows
from meshwright.planner.mixed.service import MixedSearch
from meshwright.planner.request.choices import WITHOUT
from tests.planner.mixed.test_mixed_optimum import CASES, asked, compare
from tests.soaked import examples, some

SEVERAL = (1, 9, 14, 19)
"""Requests whose best plan has several shard groups."""
EACH = [
    9,
    *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 14, 19)),
]
"""Each of them, the longer ones later."""


def asked_grouped(seed: int) -> MixedRequest:
    """Nodes of two or four GPUs behind slow networks, so that shards had better stay within few of them."""
    draw = random.Random(f"groups {seed}")
    request = asked(seed)
    per_node = draw.choice([2, 2, 4])
    parts, specs = [], []
    dp = draw.choice([4, 4, 8])
    pins: dict[str, int | str] = {"zero_stage": 1, "micro_batch": 1, "tp": 1, "dp": dp}
    pins |= {"cp": draw.choice([1, 1, 2]) if dp == 4 else 1, "optimizer_offload": 0}
    pins |= {"recompute": draw.choice(["none", "full"])}
    layers, hbm = draw.choice([3, 4, 5]), draw.choice([0.8, 1.5, 3.0])
    for part in request.parts:
        device = part.cluster.device
        cluster = part.cluster.model_copy(
            update={
                "device": device.model_copy(update={"hbm_gib": device.hbm_gib * hbm}),
                "gpus_per_node": per_node,
                "nvlink_domain": per_node,
                "nic_gbps_per_gpu": draw.choice([10.0, 25.0, 100.0]),
            }
        )
        model = part.model.model_copy(update={"layers": layers, "tied_embeddings": seed % 2 == 0})
        parts.append(replace(part, cluster=cluster, gpus=8, pins=pins, model=model, forbids=()))
        specs.append(PartSpec(cluster=cluster, gpus=8))
    spec = request.cluster.model_copy(update={"parts": tuple(specs)})
    return replace(request, cluster=spec, parts=tuple(parts))


@pytest.mark.parametrize("seed", EACH)
def test_shard_groups_are_chosen_with_the_stages(seed: int) -> None:
    compare(seed, asked_grouped)


@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3)),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in some(range(4, 20))),
    ],
)
def test_bounds_with_shard_groups_are_never_above_prices(seed: int) -> None:
    request = asked_grouped(seed)
    maker = KernelMaker(request)
    for row in promising_rows(request, inf, lambda: None):
        price = maker.kernel(row).best_split(inf)
        assert price is None or row.bound_s <= price.step_time_s


@pytest.mark.parametrize("seed", EACH)
def test_shard_groups_bring_something(seed: int) -> None:
    """The plan has several, and is slower without."""
    request = asked_grouped(seed)
    best = MixedSearch(request, inf).run().best
    assert best is not None
    assert int(best.layout.shard_groups) > 1
    parts = tuple(replace(part, forbids=(*part.forbids, "shard-groups")) for part in request.parts)
    without = MixedSearch(replace(request, parts=parts), inf).run().best
    assert without is None or without.price_s > best.price_s


@pytest.mark.parametrize(
    "seed",
    [
        *(0, 1),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4)),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in some(range(5, 12))),
    ],
)
def test_groups_that_are_left_out_are_never_faster(seed: int) -> None:
    """Under random splits, against each divisor's price."""
    draw = random.Random(seed)
    request = asked_grouped(seed)
    maker = KernelMaker(request)
    rows = [
        row
        for row in promising_rows(request, inf, lambda: None)
        if int(row.layout.shard_groups) > 1 and not maker.gains_by_grouping(row)
    ]
    for row in draw.sample(rows, min(len(rows), 40)):
        is_no_faster(draw, maker.kernel(row))


def is_no_faster(draw: random.Random, kernel: MixedKernel) -> None:
    """A kernel's number of groups against each divisor of it, under some splits."""
    groups, ranks, layers = int(kernel.layout.shard_groups), int(kernel.layout.pp), kernel.layers
    amount = int(kernel.full)
    for _ in range(4):
        cuts = sorted(draw.sample(range(1, layers), ranks - 1))
        ends = zip([0, *cuts], [*cuts, layers], strict=True)
        stages = tuple((end - start,) for start, end in ends)
        seconds = {}
        for number in range(1, groups + 1):
            if groups % number == 0:
                layout = replace(kernel.layout, shard_groups=number, recompute_layers=amount)
                step = mixed_step(kernel.segments_of(layout), stages)
                seconds[number] = float(np.asarray(step.seconds))
        own_s = seconds.pop(groups)
        assert min(seconds.values()) <= own_s * (1 + 1e-12)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("llama-3-8b", marks=pytest.mark.soak),
        pytest.param("mixtral-8x7b", marks=pytest.mark.slow),
    ],
)
def test_groups_of_large_requests_that_are_left_out_are_never_faster(model: str) -> None:
    """Where layers fill their buckets, and shards reach over many nodes."""
    parts = tuple(
        PartSpec(cluster=load_cluster(name), gpus=32) for name in ("dgx-h100", "dgx-a100")
    )
    request = read_mixed_request(
        model=model,
        cluster=MixedClusterSpec(parts=parts),
        global_batch=256,
        seq_len=4096,
        pin="micro_batch=1,zero_stage=1,recompute=none,optimizer_offload=0,cp=1,pp=2",
        without=WITHOUT,
    )
    draw, maker = random.Random(model), KernelMaker(request)
    rows = [
        row
        for row in promising_rows(request, inf, lambda: None)
        if int(row.layout.shard_groups) > 1
    ]
    left_out = [row for row in rows if not maker.gains_by_grouping(row)]
    assert left_out
    for row in draw.sample(left_out, min(len(left_out), examples(60))):
        is_no_faster(draw, maker.kernel(row))


@pytest.mark.soak
@pytest.mark.parametrize("seed", some(seed for seed in range(CASES) if seed not in SEVERAL))
def test_shard_groups_are_always_chosen_with_the_stages(seed: int) -> None:
    compare(seed, asked_grouped)
