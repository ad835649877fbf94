"""Hierarchical context parallelism: which ranks swap heads, which pass keys on, and what that moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.reader import cluster_from_mapping
from meshwright.costmodel import layer_context as exposed
from meshwright.costmodel.activations import activation_bytes_per_layer
from meshwright.costmodel.estimate import estimate_layout
from meshwright.costmodel.execution_names import ContextExchange
from meshwright.costmodel.layer_kinds import kind_times
from meshwright.costmodel.layout import Floats, Layout
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.volumes import group_traffic
from meshwright.costmodel.workload import Workload, inside_and_between, largest_swap, swapping_ranks
from meshwright.model_specs.reader import load_catalog_model

HYBRID: ContextExchange = "a2a+p2p"
MODEL = load_catalog_model("llama-3-8b")
"""32 heads, 8 of keys and values, 128 wide."""


def workload(cluster: dict[str, Any] | None = None, **changes: Any) -> Workload:
    base = Workload(
        model=MODEL,
        cluster=cluster_from_mapping({"base": "dgx-h100", "gpus": 64} | (cluster or {})),
        gpus=16,
        global_batch=1,
        seq_len=131_072,
        cp_comm=HYBRID,
    )
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("tp", "cp", "heads", "kv_heads", "domain", "expected"),
    [
        (1, 1, 32, 8, 8, 1),
        (1, 2, 32, 8, 8, 1),  # no ring would be left
        (1, 4, 32, 8, 8, 2),
        (1, 16, 32, 8, 8, 8),
        (1, 16, 32, 8, 4, 4),  # a domain of four
        (1, 16, 32, 2, 8, 2),  # two key-value heads
        (4, 16, 32, 8, 8, 2),
        (8, 16, 32, 8, 8, 1),  # a whole node, and one key-value head left
        (1, 12, 32, 8, 8, 4),
        (1, 9, 32, 8, 8, 1),
        (1, 64, 24, 24, 72, 8),
        (2, 64, 64, 64, 72, 32),
    ],
)
def test_neighbours_that_swap_in_a_plan(
    *, tp: int, cp: int, heads: int, kv_heads: int, domain: int, expected: int
) -> None:
    model = MODEL.model_copy(update={"heads": heads, "kv_heads": kv_heads})
    size = {"nvlink_domain": domain}
    if domain > 8:
        size |= {"gpus_per_node": 4, "gpus": 288}
    work = workload(size, model=model)
    assert int(largest_swap(work, tp, cp)) == expected
    assert largest_swap(work, np.array([tp, 1]), np.array([cp, 1])).tolist() == [expected, 1]
    assert int(swapping_ranks(work, Layout(tp=tp, cp=cp))) == expected


def test_nodes_without_nvlink_between_all_are_the_domain() -> None:
    pcie = workload({"nvlink_domain": 1})
    assert int(largest_swap(pcie, 1, 16)) == 8


def test_a_given_number_of_neighbours_stands() -> None:
    work = workload(cp_inner=4)
    assert swapping_ranks(work, Layout(cp=np.array([16, 2]))).tolist() == [4, 2]


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("inside", [1, 2, 4, 8, 16])
def test_groups_inside_blocks_are_megatrons(size: int, inside: int) -> None:
    """Neighbours swap, every A-th rank is in a ring; blocks hold so many consecutive ranks."""
    ranks = np.arange(16)
    swaps, rings = ranks.reshape(-1, size), ranks.reshape(-1, size).T
    found = inside_and_between(np.array([inside, 16]), np.asarray(size))
    for groups, members in zip((swaps, rings), found, strict=True):
        for group in groups:
            beside = [int(np.sum(group // inside == rank // inside)) for rank in group]
            assert beside == [members[0]] * len(group)
        assert members[1] == groups.shape[1]


def test_seconds_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 ranks in two nodes: eight swap, rings have two. Every collective takes a second a byte sent.

    A rank holds 131,072 / 16 = 8,192 tokens. It swaps 2 (4,096 + 2,048 + 4,096) 8,192 = 167,772,160 bytes,
    of which 7/8 leave it, and passes on 2 x 2,048 x 8,192 = 33,554,432 in one of two steps.
    """

    def sent(volume: Floats, members: np.ndarray[Any, Any], links: object) -> Floats:
        out: Floats = np.asarray(volume) * (members[..., -1] - 1) / members[..., -1]
        return out

    monkeypatch.setattr(exposed, "all_to_all_s", sent)
    monkeypatch.setattr(exposed, "neighbour_ring_s", sent)
    layout = Layout(cp=16)
    work = workload()
    c = make_context(work, layout, nested_placement(work.cluster, layout))
    widths = (np.float64(4096), np.float64(2048), np.float64(4096))
    swapped, passed = 146_800_640, 33_554_432
    at_once = exposed.Passes(0.0, 0.0)
    assert exposed.context_parallel_s(c, widths, at_once) == (
        swapped + passed,
        swapped + 2 * passed,
    )
    long = exposed.Passes(1e9, 40_000_000.0)
    first_step = passed / 2
    assert exposed.context_parallel_s(c, widths, long) == (
        swapped + first_step,
        swapped + 2 * passed - 40_000_000,
    )
    assert exposed.ring_steps(c) == 2
    # One merge of 4,096 elements a token.
    assert exposed.merge_bytes(c, widths[0], widths[2]) == (335_544_320, 335_544_320)


@pytest.mark.parametrize(("framework", "nics"), [("megatron", 1), ("torchtitan", 8), ("fsdp2", 8)])
def test_a_ring_of_neighbours_leaves_a_node_over_one_nic(framework: str, nics: int) -> None:
    """16 ranks in two nodes pass 2 x 2,048 x 131,072 bytes: Megatron's over the NIC of the last of eight."""
    layout, work = Layout(cp=16), workload(cp_comm="p2p", framework=framework)
    c = make_context(work, layout, nested_placement(work.cluster, layout))
    buffer, links = 2.0 * 2048 * 131_072, c.links
    widths = (np.float64(4096), np.float64(2048), np.float64(4096))
    found, _ = exposed.context_parallel_s(c, widths, exposed.Passes(0.0, 0.0))
    rate = links.bytes_per_s[1] / (1 + np.sqrt(links.half_bytes[1] / buffer))
    inside = links.bytes_per_s[0] / (1 + np.sqrt(links.half_bytes[0] / buffer))
    assert links.fill_s is not None
    hops = 3 * links.latency_s[0] + links.latency_s[1] + links.fill_s[1]
    slowest = max(15 / 16 * buffer / (nics * rate), 15 / 16 * buffer / inside)
    assert found == pytest.approx(slowest + hops)


@pytest.mark.parametrize(
    ("stack", "elements", "waits"),
    [
        ("torchtitan-compile", 8192, True),
        ("torchtitan-eager", 8192, False),
        ("torchtitan", 2048, True),
        ("fsdp2", 2048, False),
    ],
)
def test_rings_of_pytorch_by_hand(
    monkeypatch: pytest.MonkeyPatch, stack: str, elements: int, waits: bool
) -> None:
    """16 ranks of 8,192 tokens, a second a byte sent: keys and values are gathered, 15 parts of 2 bytes an
    element, twice; gradients make 16 steps of 4 bytes. Compiled code hides none of it.
    """

    def sent(volume: Floats, members: np.ndarray[Any, Any], links: object) -> Floats:
        out: Floats = np.asarray(volume) * (members[..., -1] - 1) / members[..., -1]
        return out

    monkeypatch.setattr(exposed, "ring_pass_s", sent)
    monkeypatch.setattr(exposed, "neighbour_ring_s", sent)
    layout, work = Layout(cp=16), workload(cp_comm="p2p", framework=stack)
    c = make_context(work, layout, nested_placement(work.cluster, layout))
    widths = (np.float64(4096), np.float64(2048), np.float64(4096))
    gathered = 15 * 2 * 8192 * elements
    gradients = 16 * 4 * 8192 * elements
    bare = exposed.context_parallel_s(c, widths, exposed.Passes(0.0, 0.0))
    assert bare == pytest.approx((gathered, gathered + gradients))
    beside = exposed.context_parallel_s(c, widths, exposed.Passes(1e15, 1e15))
    assert beside == pytest.approx(bare if waits else (gathered / 16, gathered / 16))
    width = (work.model.heads if elements == 8192 else work.model.kv_heads) * 2 * 128
    moved = group_traffic(c, ((32,),)).context
    assert moved == pytest.approx(32 * width / elements * (2 * gathered + gradients))


def test_a_gather_is_hidden_by_nothing_and_merges_nothing() -> None:
    """Keys and values once forward, and backward again with their gradients, over all NICs of a node."""
    layout, hidden_s = Layout(cp=16), np.float64(3600.0)
    work = workload(cp_comm="all_gather")
    c = make_context(work, layout, nested_placement(work.cluster, layout))
    widths = (np.float64(4096), np.float64(2048), np.float64(4096))
    forward_s, backward_s = exposed.context_parallel_s(
        c, widths, exposed.Passes(hidden_s, hidden_s)
    )
    pytorch = replace(work, cp_comm="p2p", framework="torchtitan")
    beside = make_context(pytorch, layout, nested_placement(work.cluster, layout))
    bare_s, _ = exposed.context_parallel_s(beside, widths, exposed.Passes(0.0, 0.0))
    assert forward_s == pytest.approx(bare_s)
    assert backward_s == 2 * forward_s
    assert exposed.merge_bytes(c, widths[0], widths[2]) == (0, 0)
    place = nested_placement(work.cluster, layout)
    ring = make_context(replace(work, cp_comm="p2p"), layout, place)
    assert group_traffic(c, ((32,),)).context == group_traffic(ring, ((32,),)).context > 0


def test_groups_that_swap_pay_where_a_ring_would_leave_its_node() -> None:
    """8 ranks swap inside, and eight rings of two have a NIC each: an eighth of the bytes for each NIC."""
    layout = Layout(cp=16)
    ring, grouped = (
        float(
            np.asarray(
                estimate_layout(
                    work, layout, nested_placement(work.cluster, layout), ((32,),)
                ).breakdown_s["cp_comm"]
            )
        )
        for work in (workload(cp_comm="p2p", seq_len=32_768), workload(seq_len=32_768))
    )
    assert grouped < ring


def test_bytes_over_levels_by_hand() -> None:
    """Swaps stay in the node, once forward and once backward; rings leave it, thrice with gradients."""
    layout, work = Layout(cp=16), workload()
    found = estimate_layout(work, layout, nested_placement(work.cluster, layout), ((32,),))
    sent = [level.by_axis.get("cp", 0.0) for level in found.level_traffic]
    assert sent[0] == pytest.approx(2 * 32 * 146_800_640)
    assert sum(sent[1:]) == pytest.approx(3 * 32 * 33_554_432)
    c = make_context(work, layout, nested_placement(work.cluster, layout))
    moved = group_traffic(c, ((32,),))
    assert moved.context == 0
    assert moved.context_swaps == pytest.approx(2 * 32 * 167_772_160)
    assert moved.context_rings == pytest.approx(3 * 32 * 33_554_432)


@pytest.mark.parametrize(("inner", "plain"), [(1, "p2p"), (8, "a2a")])
@pytest.mark.parametrize("cluster", [{}, {"base": "h100-leaf-3to1", "gpus": 256, "pxn": False}])
@pytest.mark.parametrize("tp", [1, 2])
def test_groups_of_one_and_of_all_are_the_plain_exchanges(
    inner: int, plain: ContextExchange, cluster: dict[str, Any], tp: int
) -> None:
    """To the digit: Transformer Engine falls back to them (attn_forward_func_with_cp)."""
    layout = Layout(tp=tp, cp=8, dp=2, sequence_parallel=tp > 1)
    model = MODEL.model_copy(update={"kv_heads": 16})
    work = workload(cluster, gpus=16 * tp, model=model, global_batch=2)
    place = nested_placement(work.cluster, layout, ("dp", "tp", "cp", "pp"))
    grouped = estimate_layout(replace(work, cp_inner=inner), layout, place, ((32,),))
    whole = estimate_layout(replace(work, cp_comm=plain), layout, place, ((32,),))
    for name, part in whole.breakdown_s.items():
        assert float(np.asarray(grouped.breakdown_s[name])) == float(np.asarray(part)), name
    assert grouped.step_time_s == whole.step_time_s
    assert grouped.level_traffic == whole.level_traffic
    saved = [
        np.asarray(activation_bytes_per_layer(one, layout, experts=False)[0])
        for one in (replace(work, cp_inner=inner), replace(work, cp_comm=plain))
    ]
    assert saved[0] == saved[1]


def test_the_output_is_kept_twice_where_heads_are_swapped() -> None:
    """2 bytes of each of 4,096 elements of a token more than a ring."""
    kept = {
        name: float(
            np.asarray(
                activation_bytes_per_layer(workload(cp_comm=name), Layout(cp=16), experts=False)[0]
            )
        )
        for name in ("p2p", HYBRID)
    }
    assert kept[HYBRID] - kept["p2p"] == pytest.approx(8192 * 2 * 4096)


def test_fewer_steps_are_launched_and_merged() -> None:
    """Two steps in place of sixteen: 14 merges less each way, of 10 bytes an element and token."""
    layout = Layout(cp=16)
    parts = {}
    for name in ("p2p", HYBRID):
        work = workload(cp_comm=name)
        c = make_context(work, layout, nested_placement(work.cluster, layout))
        dense = kind_times(c).dense
        assert dense is not None
        parts[name] = dense.parts
    saved_s = parts["p2p"]["memory_bound"] - parts[HYBRID]["memory_bound"]
    assert saved_s == pytest.approx(2 * 14 * 10 * 8192 * 4096 / c.rates.hbm_bytes_per_s)
    assert parts[HYBRID]["host"] < parts["p2p"]["host"]
    assert parts[HYBRID]["attention"] == parts["p2p"]["attention"]
