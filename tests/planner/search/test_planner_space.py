"""The space of layouts: complete, without repeats, and counted right."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.reader import load_cluster
from meshwright.costmodel.layout import LAYER_AXES, Layout
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.bounds.mappings import divisors
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.branches import plainest
from meshwright.planner.search.space import Space, recompute_name, space_of


def space(model: str = "llama-3-8b", **changes: Any) -> Space:
    given: dict[str, Any] = {
        "model": load_catalog_model(model),
        "cluster": load_cluster("dgx-h100"),
        "gpus": 12,
        "global_batch": 24,
        "seq_len": 4096,
    }
    return space_of(PlanRequest(**{**given, **changes}))


def rows(layouts: Layout) -> list[tuple[int, ...]]:
    columns = [np.asarray(getattr(layouts, f.name)).astype(int) for f in fields(layouts)]
    return [tuple(int(x) for x in row) for row in np.stack(columns, axis=1)]


@pytest.mark.parametrize("model", ["llama-3-8b", "olmoe-1b-7b"])
def test_degrees_are_all_the_legal_degrees(model: str) -> None:
    one = space(model)
    found = one.degrees(12)
    expected = set()
    for tp in (1, 2, 4, 8):
        for cp in (1, 2, 4, 8):
            for pp in range(1, 13):
                for dp in divisors(24):
                    if tp * cp * pp * dp > 12:
                        continue
                    for ep in one.ep:
                        for etp in one.etp:
                            if (tp * cp * dp) % (ep * etp) == 0:
                                expected |= {
                                    (tp, cp, pp, dp, ep, etp, b) for b in divisors(24 // dp)
                                }
    names = ("tp", "cp", "pp", "dp", "ep", "etp", "micro_batch")
    listed = list(zip(*(np.asarray(getattr(found, name)).tolist() for name in names), strict=True))
    assert len(listed) == len(set(listed))
    assert set(listed) == expected


def test_halves_make_the_whole() -> None:
    one = space()
    assert sorted(rows(one.degrees(12))) == sorted(rows(one.degrees(12, 6)) + rows(one.degrees(6)))


@pytest.mark.parametrize("gpus", [(12, 0), (12, 6), (7, 2)])
def test_degrees_of_shapes_are_counted_without_listing_them(gpus: tuple[int, int]) -> None:
    one = space("olmoe-1b-7b")
    degrees = one.degrees(*gpus)
    for of_layouts in (False, True):
        kinds = np.ones(degrees.broadcast_shape(), dtype=np.int64)
        if of_layouts:
            kinds = one.pipeline_counts[np.asarray(degrees.pp)] * one.shardings(degrees)
        counted = one.degrees_by_shape(*gpus, of_layouts=of_layouts)
        assert counted.sum() == kinds.sum()
        for at in np.ndindex(counted.shape):
            axes = zip(LAYER_AXES, at, strict=True)
            own = [np.asarray(getattr(degrees, name)) == getattr(one, name)[i] for name, i in axes]
            assert counted[at] == kinds[np.logical_and.reduce(own)].sum()


def test_degrees_too_slow_for_their_gpus_are_left_out() -> None:
    one = space("olmoe-1b-7b")
    degrees, shapes = one.degrees(12), one.shapes().flat()
    cost = np.random.default_rng(3).uniform(1.0, 9.0, shapes.broadcast_shape())
    names = (*LAYER_AXES, "micro_batch")
    keys = zip(*(np.asarray(getattr(shapes, name)).tolist() for name in names), strict=True)
    of_shape = dict(zip(keys, cost.tolist(), strict=True))
    own = zip(*(np.asarray(getattr(degrees, name)).tolist() for name in names), strict=True)
    seconds = np.array([of_shape[key] for key in own]) / np.asarray(degrees.gpus)
    for below_s in (0.1, 0.4, 0.9, 20.0):
        kept = one.degrees(12, 0, None, cost, below_s)
        assert rows(kept) == rows(degrees.take(seconds < below_s))


def test_members_are_counted_right() -> None:
    one = space("olmoe-1b-7b", gpus=6)
    degrees = one.degrees(6)
    layouts = one.layouts(degrees)
    assert one.layouts_per_degrees(degrees).sum() == len(rows(layouts)) == len(set(rows(layouts)))


def test_the_batch_is_always_whole() -> None:
    layouts = space().layouts(space().degrees(12))
    total = layouts.micro_batch * layouts.num_micro_batches * layouts.dp
    assert np.all(np.asarray(total) == 24)


def test_virtual_stages_deal_layers_evenly() -> None:
    # 32 layers on 4 ranks: 2, 4 and 8 divide; with embedding and a head of three layers 36 add 3.
    assert space().virtual_stages(4) == (1, 2, 3, 4, 8)
    assert space("llama-2-7b").virtual_stages(4) == (1, 2, 4, 8)
    # 61 layers and a head of three: 32 stages of two layers but for the ends.
    assert space("kimi-k2", gpus=64).virtual_stages(8) == (1, 2, 4)
    # Llama 3 405B, 126 layers on 16 ranks: as 128 with embedding and head (arXiv 2407.21783, 3.3.2).
    assert space("llama-3.1-405b", gpus=64).virtual_stages(16) == (1, 2, 4, 8)
    assert space().virtual_stages(1) == (1,)
    assert space(forbids=("interleaving",)).virtual_stages(4) == (1,)
    assert space(pins={"vpp": 3}).virtual_stages(4) == (3,)
    assert space(pins={"vpp": 9}).virtual_stages(4) == ()


def test_any_number_of_virtual_stages_is_planned_of_unlike_layers() -> None:
    # 52 layers on 4 ranks: 13 alone divides, which no pin of another number may beat.
    hybrid = "nemotron-3-nano-30b-a3b"
    for gpus in (16, 64):
        assert space(hybrid, gpus=gpus).virtual_stages(4) == tuple(range(1, 14))
    assert space(hybrid, gpus=64).virtual_stages(64) == (1,)
    assert plainest(space(hybrid, gpus=16)).virtual_stages(4) == (1, 2, 3, 13)


@pytest.mark.parametrize(
    ("framework", "name", "values"),
    [
        ("fsdp2", "pp", {1}),
        ("fsdp2", "zero_stage", {2, 3}),
        ("deepspeed", "cp", {1}),
        ("deepspeed", "sequence_parallel", {0}),
        ("torchtitan", "recompute", {0, 32}),
        ("megatron", "zero_stage", {0, 1}),
    ],
)
def test_frameworks_only_get_what_they_can_run(framework: str, name: str, values: set[int]) -> None:
    one = space(framework=framework)
    column = np.asarray(getattr(one.layouts(one.degrees(12)), name)).astype(int)
    assert set(column.tolist()) == values


@pytest.mark.parametrize("name", ["none", "selective", "full"])
def test_recompute_can_be_pinned(name: str) -> None:
    assert {recompute_name(mask) for mask in space(pins={"recompute": name}).recompute} == {name}


def test_idle_gpus_can_be_forbidden() -> None:
    one = space(forbids=("idle-gpus",))
    assert np.all(np.asarray(one.degrees(12).gpus) == 12)


def test_empty_space_is_empty() -> None:
    one = space(pins={"tp": 3})
    assert rows(one.degrees(12)) == []
    assert rows(one.layouts(one.degrees(12))) == []
