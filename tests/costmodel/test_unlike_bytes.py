"""Layers that hold unlike bytes: counted one by one, and bounds held against every partition."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.activations import activation_bytes_per_layer
from meshwright.costmodel.estimate import costs_of_times
from meshwright.costmodel.footprint import (
    GIB,
    fewest_of_each,
    least_held,
    least_in_parts,
    main_layer_rooms,
    offloaded_gib,
    peak_memory_gib,
    stage_memory_gib,
    stage_memory_parts_gib,
    unlike_rooms,
)
from meshwright.costmodel.layer_kinds import kind_times
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.rank_load import Stages
from meshwright.costmodel.states import rank_parameters
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.model_specs.blocks import BlockShares
from meshwright.model_specs.parameters import (
    dense_layer_parameters,
    embedding_parameters,
    moe_layer_parameters,
    parameter_count,
)
from meshwright.model_specs.reader import load_catalog_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.bounds.layer_split import ALL_LAYERS
from meshwright.planner.bounds.paces import MemoryFit
from tests.soaked import examples


def grouped(layers: int, every: int = 2) -> ModelSpec:
    moe = {"experts": 8, "top_k": 2, "moe_ffn_hidden": 2048, "every": every}
    fields: dict[str, Any] = {"layers": layers, "hidden": 2048, "ffn_hidden": 4096, "heads": 16}
    return ModelSpec.model_validate(fields | {"kv_heads": 4, "vocab": 32_000, "moe": moe})


def hybrid(pattern: str, name: str = "nemotron-h-8b") -> ModelSpec:
    own = load_catalog_model(name).model_dump(exclude_defaults=True, exclude_unset=True)
    return ModelSpec.model_validate(own | {"layers": len(pattern), "hybrid_pattern": pattern})


def linear(layers: int) -> ModelSpec:
    delta = {"key_heads": 16, "value_heads": 32, "key_head_dim": 128, "value_head_dim": 128}
    fields: dict[str, Any] = {"layers": layers, "hidden": 2048, "ffn_hidden": 512, "heads": 16}
    fields |= {"kv_heads": 2, "vocab": 32_000, "linear_attention": delta}
    moe = {"experts": 16, "top_k": 4, "moe_ffn_hidden": 512}
    return ModelSpec.model_validate(fields | {"full_attention_every": 4, "moe": moe})


def workload(model: ModelSpec, **changes: Any) -> Workload:
    fields: dict[str, Any] = {"model": model, "cluster": read_cluster("dgx-h100", gpus=16)}
    fields |= {"gpus": 16, "seq_len": 4096, "global_batch": 64, "framework": "megatron-lm"}
    return Workload(**fields | changes)


def partitions(layers: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, layers), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise([0, *cuts, layers]))


def splits(layers: int, pp: int, vpp: int) -> Iterator[Stages]:
    for sizes in partitions(layers, pp * vpp):
        yield tuple(tuple(sizes[rank::pp]) for rank in range(pp))


def random_case(chance: random.Random) -> tuple[Workload, Layout]:
    """A model of a kind, and a layout of two to four ranks of it."""
    model = chance.choice(
        [
            grouped(chance.choice([6, 8])),
            grouped(6, every=3),
            hybrid("".join(chance.choice("MM-*") for _ in range(5)) + "M-*"),
            hybrid(
                "".join(chance.choice("MME*") for _ in range(5)) + "ME*", "nemotron-3-nano-30b-a3b"
            ),
            linear(8),
        ]
    )
    pp, vpp = chance.choice([(2, 1), (3, 1), (4, 1), (2, 2)])
    tp = 2 if pp != 3 else 1
    full = chance.random() < 0.5
    offload = 0 if model.vision else chance.choice([0, 0, 100])
    layout = Layout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        dp=8 // pp if pp != 3 else 4,
        ep=2 if model.moe is not None and pp != 3 else 1,
        sequence_parallel=tp > 1,
        zero_stage=chance.choice([0, 1]),
        micro_batch=chance.choice([1, 2]),
        num_micro_batches=pp * chance.choice([1, 2, 3]),
        optimizer_offload=offload,
        recompute=int(Recompute.FULL) if full else 0,
        recompute_layers=chance.choice([1, 2, ALL_LAYERS]) if full else 0,
    )
    adapters = None
    if chance.random() < 0.4:
        # Ahead of the first of these, layers run forward alone.
        targets = chance.choice(
            [("qkv_proj", "o_proj"), ("gate_up_proj",), ("down_proj", "in_proj")]
        )
        adapters = AdapterSpec(rank=8, targets=targets)
    return workload(model, adapters=adapters), layout


def test_what_decides_bytes() -> None:
    assert grouped(4).unlike_bytes == ("F-", "FE", "F-", "FE")
    assert hybrid("M-M*").unlike_bytes == ("M", "-", "M", "*")
    assert linear(4).unlike_bytes == ("LE", "LE", "LE", "FE")
    for name in ("gpt-oss-120b", "gemma-3-27b", "deepseek-v3", "llama-3-8b"):
        assert load_catalog_model(name).unlike_bytes == (), name
    both = grouped(8).model_copy(update={"sliding_window": 128, "full_attention_every": 4})
    assert both.unlike_bytes == ("F-", "FE") * 4
    assert set(both.unlike_layers) == {"W-", "WE", "FE"}


def test_parameters_of_a_rank_are_those_of_its_layers() -> None:
    model = grouped(6)
    dense, routed = dense_layer_parameters(model), moe_layer_parameters(model)
    table = embedding_parameters(model)
    for first in range(1, 6):
        of_dense, of_experts = rank_parameters(model, Layout(pp=2), ((first,), (6 - first,)))
        held = np.asarray(of_dense) + np.asarray(of_experts)
        with_experts = first // 2
        own = table + (first - with_experts) * dense + with_experts * routed
        assert held[0] == own
        norm = model.hidden
        assert held.sum() == pytest.approx(parameter_count(model) - norm, rel=1e-12)


@pytest.mark.parametrize("model", [grouped(6), hybrid("M-M*-M"), linear(8)])
def test_ranks_hold_in_all_what_means_hold(model: ModelSpec) -> None:
    layout = Layout(tp=2, pp=2, dp=4, ep=2 if model.moe else 1, sequence_parallel=True)
    means = [float(np.asarray(x)) for x in rank_parameters(model, layout, None)]
    for first in range(1, model.layers):
        held = rank_parameters(model, layout, ((first,), (model.layers - first,)))
        assert [float(np.mean(x)) for x in held] == pytest.approx(means, rel=1e-12)


def test_activations_of_a_rank_are_those_of_its_layers() -> None:
    work = workload(hybrid("M-M*-M"))
    layout = Layout(tp=2, pp=2, dp=4, sequence_parallel=True, num_micro_batches=2)
    of_block = {}
    for block, shares in {"*": (1, 0, 0, 0), "M": (0, 1, 0, 0), "-": (0, 0, 1, 0)}.items():
        kept, _ = activation_bytes_per_layer(
            work, layout, experts=False, blocks=BlockShares(*map(float, shares))
        )
        of_block[block] = float(np.asarray(kept))
    held = stage_memory_parts_gib(work, layout, ((3,), (3,)))["activations"]
    assert held[0] == pytest.approx(2 * (2 * of_block["M"] + of_block["-"]) / GIB)
    more = held[1] * GIB - (of_block["*"] + of_block["-"] + of_block["M"])
    assert more == pytest.approx(2 * 4096 * work.model.hidden, rel=1e-9)  # the head's input


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_fewest_of_each_are_those_of_all_choices(parts: int) -> None:
    layers = tuple("MM*-ME-")
    fewest = fewest_of_each(layers, parts)
    kinds = list(dict.fromkeys(layers))
    for number in range(len(layers) + 1):
        least = [len(layers)] * len(kinds)
        for chosen in itertools.combinations(range(len(layers)), number):
            runs = sum(i == 0 or chosen[i - 1] != place - 1 for i, place in enumerate(chosen))
            if runs <= parts:
                counts = [sum(layers[i] == kind for i in chosen) for kind in kinds]
                least = [min(a, b) for a, b in zip(least, counts, strict=True)]
        assert np.all(fewest[:, number] <= least)
        if parts == 1:
            assert fewest[:, number].tolist() == least
    held = least_held(layers, parts, [np.array(x) for x in (3.0, 1.0, 2.0, 9.0)])
    assert np.all(np.diff(held) >= 0)
    assert held[-1] == 3 * 3 + 1 + 2 * 2 + 9


@pytest.mark.slow
@pytest.mark.hypothesis
def test_no_bound_on_memory_is_above_what_a_split_holds() -> None:
    chance = random.Random(11)
    for _ in range(examples(400, 25)):
        work, layout = random_case(chance)
        vpp = int(layout.vpp)
        fit = MemoryFit(work, layout)
        rows, again = fit.rank_rows(), int(layout.recompute_layers)
        least = float(np.asarray(peak_memory_gib(work, layout)))
        found = list(splits(work.model.layers, int(layout.pp), vpp))
        for stages in chance.sample(found, min(len(found), 40)):
            held = stage_memory_gib(work, layout, stages)
            assert least <= max(held) * (1 + 1e-9)
            rooms = main_layer_rooms(work, layout.flat(), float(max(held)))[0]
            offloaded = offloaded_gib(work, layout, stages)
            for rank, own in enumerate(stages):
                layers = sum(own)
                assert layers <= rooms[rank]
                assert fit.rank_gib(rank, layers, 0) <= held[rank] * (1 + 1e-9)
                recomputed = sum(min(again, size) for size in own)
                row = rows[rank]
                line = row.fixed_gib + row.layer_gib * layers - row.relief_gib * recomputed
                assert line <= held[rank] * (1 + 1e-9) + 1e-9
                if fit.host_limit_gib < np.inf:
                    on_host = row.host.fixed_gib + row.host.layer_gib * layers
                    assert on_host <= offloaded[rank] * (1 + 1e-9) + 1e-9


def test_equal_layers_save_what_is_left_where_each_part_recomputes_some() -> None:
    """Five layers of 4 bytes in two parts, of which each recomputes one or two, which then save 1."""
    of_kinds = (np.array([3.0]), np.array([4.0]), np.array([1.0]))
    for again, saved in ((0, 20), (1, 14), (2, 8), (9, 5)):
        fixed, moving = least_in_parts(("A",) * 5, 2, of_kinds, np.array(again))
        assert (fixed[5], moving[5]) == (15, saved)


def test_no_choice_of_layers_in_parts_saves_less_than_the_least() -> None:
    """Every choice of some layers, cut into parts at random, of which each recomputes its first layers."""
    chance = random.Random(3)
    for _ in range(30):
        layers = tuple(chance.choice("AB") for _ in range(6))
        names = list(dict.fromkeys(layers))
        states, saved = ([chance.uniform(1, 4) for _ in names] for _ in range(2))
        dropped = [chance.uniform(0.1, 1) * each for each in saved]
        parts, again = chance.choice([1, 2, 3]), chance.choice([0, 1, 2, 9])
        of_kinds = (np.array(states), np.array(saved), np.array(dropped))
        fixed, moving = least_in_parts(layers, parts, of_kinds, np.array(again))
        for number in range(1, 7):
            for chosen in itertools.combinations(range(6), number):
                begins = [i for i, place in enumerate(chosen) if place - 1 not in chosen]
                others = [i for i in range(number) if i not in begins]
                if len(begins) <= parts:
                    more = min(len(others), parts - len(begins))
                    edges = sorted([*begins, *chance.sample(others, more), number])
                    held = kept = 0.0
                    for begin, end in itertools.pairwise(edges):
                        own = [names.index(layers[place]) for place in chosen[begin:end]]
                        held += sum(states[kind] for kind in own)
                        kept += sum(dropped[kind] for kind in own[:again])
                        kept += sum(saved[kind] for kind in own[again:])
                    assert fixed[number] <= held * (1 + 1e-12)
                    assert moving[number] <= kept * (1 + 1e-12)


@pytest.mark.slow
@pytest.mark.hypothesis
def test_splits_that_fit_are_those_of_the_exact_memory() -> None:
    """Of ranks with one virtual stage, and of several."""
    chance, compared = random.Random(8), 0
    for _ in range(examples(200, 12)):
        work, layout = random_case(chance)
        fit = MemoryFit(work, layout)
        found = list(splits(work.model.layers, int(layout.pp), int(layout.vpp)))
        sample = chance.sample(found, min(len(found), 20))
        peaks = np.array([max(stage_memory_gib(work, layout, stages)) for stages in sample])
        limit_gib = fit.limit_gib = float(np.median(peaks))
        rooms = unlike_rooms(work, layout.flat(), limit_gib)
        assert rooms is not None
        sizes = np.array([np.transpose(stages) for stages in sample])
        holds = rooms.hold(sizes)[:, 0]
        fits = np.array([fit.fits_stages(stages) for stages in sample])
        clear = np.abs(peaks / limit_gib - 1) > 1e-7
        assert np.array_equal(holds[clear], peaks[clear] <= limit_gib)
        assert np.array_equal(fits[clear], peaks[clear] <= limit_gib)
        assert np.all(holds[peaks <= limit_gib])
        compared += int(clear.sum())
    assert compared > 50


@pytest.mark.hypothesis
def test_loads_in_their_order_are_the_parameters_of_ranks() -> None:
    chance = random.Random(9)
    for _ in range(examples(80, 10)):
        work, layout = random_case(chance)
        if int(layout.vpp) > 1:
            continue
        context = make_context(work, layout, nested_placement(work.cluster, layout))
        times = kind_times(context)
        unlike = [(float(kind.seconds), float(kind.recompute_s)) for kind in times.unlike]
        costs = MemoryFit(work, layout).split_costs(costs_of_times(context, times), unlike)
        for stages in splits(work.model.layers, int(layout.pp), 1):
            dense, experts = rank_parameters(work.model, layout, stages)
            ends = np.cumsum([0, *(size for (size,) in stages)])
            own = [costs.order_loads[a:b] for a, b in itertools.pairwise(ends)]
            loads = np.array([sum(load for load, _ in each) for each in own])
            loads[0] += costs.first_load
            loads[-1] += costs.last_load
            assert loads == pytest.approx(np.broadcast_to(dense, loads.shape), rel=1e-9)
            with_experts = [sum(has for _, has in each) for each in own]
            assert np.array_equal(
                np.array(with_experts) > 0, np.broadcast_to(experts, loads.shape) > 0
            )


@pytest.mark.hypothesis
def test_parts_that_fit_are_those_of_the_exact_memory() -> None:
    chance = random.Random(5)
    for _ in range(examples(200, 15)):
        work, layout = random_case(chance)
        if int(layout.vpp) > 1:
            continue
        fit = MemoryFit(work, layout)
        found = list(splits(work.model.layers, int(layout.pp), 1))
        sample = chance.sample(found, min(len(found), 30))
        peaks = [stage_memory_gib(work, layout, stages) for stages in sample]
        on_host = [offloaded_gib(work, layout, stages) for stages in sample]
        # The limit is what some split holds: it fits, and no other count of its bytes would say so.
        fit.limit_gib = sorted(float(max(held)) for held in peaks)[len(peaks) // 2]
        if int(layout.optimizer_offload):
            fit.limit_gib, fit.host_limit_gib = np.inf, float(np.sort(on_host, axis=None)[-3])
        fits = [fit.fits_part(rank) for rank in range(int(layout.pp))]
        for stages, held, beside in zip(sample, peaks, on_host, strict=True):
            ends = np.cumsum([0, *(size for (size,) in stages)])
            for rank, own in enumerate(fits):
                share = max(held[rank] / fit.limit_gib, beside[rank] / fit.host_limit_gib)
                fitting = bool(own[ends[rank], ends[rank + 1]])
                assert fitting if share <= 1 else share < 1 + 1e-7 or not fitting
