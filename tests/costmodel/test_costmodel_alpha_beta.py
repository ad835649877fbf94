"""Textbook collectives and ratios against worked numbers (see docs/worked_examples.md)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel import textbook

UNIT = textbook.Link(alpha_s=1.0, bytes_per_s=1.0)
"""Start-ups and bytes count as seconds, so that a formula's two terms can be read off."""


@pytest.mark.parametrize(
    ("seconds", "startups", "moved"),
    [
        (textbook.textbook_s("all-reduce", "naive", 100.0, 8, UNIT), 14, 1400),
        (textbook.textbook_s("all-reduce", "tree", 100.0, 8, UNIT), 6, 600),
        (textbook.textbook_s("all-reduce", "ring", 100.0, 8, UNIT), 14, 175),
        (textbook.textbook_s("all-reduce", "halving-doubling", 100.0, 8, UNIT), 6, 175),
        (textbook.textbook_s("all-gather", "ring", 800.0, 8, UNIT), 7, 700),
        (textbook.textbook_s("reduce-scatter", "ring", 100.0, 8, UNIT), 7, 87.5),
        (textbook.textbook_s("all-to-all", "pairwise", 100.0, 8, UNIT), 7, 87.5),
        (textbook.textbook_s("broadcast", "tree", 100.0, 8, UNIT), 3, 300),
        (textbook.textbook_s("broadcast", "pipelined-tree", 100.0, 8, UNIT), 3, 100),
    ],
)
def test_startups_and_bytes_of_each_collective(
    seconds: float, startups: float, moved: float
) -> None:
    assert seconds == pytest.approx(startups + moved, rel=1e-12)


def test_a_group_of_one_costs_nothing() -> None:
    for operation, algorithms in textbook.ALGORITHMS.items():
        for algorithm in algorithms:
            assert textbook.textbook_s(operation, algorithm, 1e9, 1, UNIT) == 0.0, (
                operation,
                algorithm,
            )
    assert textbook.hierarchical_all_reduce_s(1e9, 1, 1, inside=UNIT, between=UNIT) == 0.0


@pytest.mark.parametrize("members", [0, 3, 6, np.array([2, 4, 12])])
def test_halving_doubling_needs_a_power_of_two(members: int) -> None:
    with pytest.raises(ValueError, match="not a power of two"):
        textbook.textbook_s("all-reduce", "halving-doubling", 1.0, members, UNIT)


def test_hierarchy_of_8_nodes_of_8_takes_14_fast_and_14_slow_steps() -> None:
    fast, slow = (
        textbook.Link(alpha_s=1.0, bytes_per_s=1e30),
        textbook.Link(alpha_s=1000.0, bytes_per_s=1e30),
    )
    assert textbook.hierarchical_all_reduce_s(
        64.0, 8, 8, inside=fast, between=slow
    ) == pytest.approx(14 + 14_000)
    assert textbook.textbook_s("all-reduce", "ring", 64.0, 64, fast) == pytest.approx(126)


def test_hierarchy_sends_an_eighth_over_the_slow_links() -> None:
    fast, slow = (
        textbook.Link(alpha_s=0.0, bytes_per_s=100.0),
        textbook.Link(alpha_s=0.0, bytes_per_s=10.0),
    )
    inside, between = 2 * 7 / 8 * 800 / 100, 2 * 7 / 8 * 100 / 10
    assert textbook.hierarchical_all_reduce_s(
        800.0, 8, 8, inside=fast, between=slow
    ) == pytest.approx(inside + between)


@pytest.mark.parametrize(
    ("alpha_us", "gb_per_s", "kilobytes"),
    [(1, 450, 450), (1.5, 200, 300), (5, 12.5, 62.5), (50, 12.5, 625)],
)
def test_crossover_between_latency_and_bandwidth(
    alpha_us: float, gb_per_s: float, kilobytes: float
) -> None:
    link = textbook.Link(alpha_s=alpha_us * 1e-6, bytes_per_s=gb_per_s * 1e9)
    assert textbook.crossover_bytes(link) == pytest.approx(kilobytes * 1e3)


def test_a_gigabyte_over_nvlink() -> None:
    assert textbook.chunked_s(
        1e9, 0, textbook.Link(alpha_s=0.0, bytes_per_s=450e9)
    ) == pytest.approx(2.22e-3, rel=2e-3)


def test_gradient_all_reduce_of_7b_over_512_gpus() -> None:
    node_share = textbook.Link(alpha_s=0.0, bytes_per_s=8 * 400e9 / 8)
    assert textbook.textbook_s("all-reduce", "ring", 7e9 * 4, 512, node_share) == pytest.approx(
        0.140, rel=0.01
    )


def test_an_activation_over_one_400_gigabit_port() -> None:
    port = textbook.Link(alpha_s=0.0, bytes_per_s=400e9 / 8)
    assert textbook.chunked_s(2048 * 4096 * 4096 * 2, 1, port) == pytest.approx(1.37, rel=5e-3)


def test_sixteen_gradient_chunks() -> None:
    """An all-reduce moves 500 MB of gradients twice: 0.208 ms and 5 us a chunk, 3.41 ms in all."""
    link = textbook.Link(alpha_s=5e-6, bytes_per_s=300e9)
    assert textbook.chunked_s(2 * 500e6 / 16, 1, link) == pytest.approx(0.208e-3 + 5e-6, rel=2e-3)
    assert textbook.chunked_s(2 * 500e6, 16, link) == pytest.approx(3.41e-3, rel=2e-3)


@given(st.floats(1e3, 1e11), st.floats(1e-7, 1e-2), st.floats(1e6, 1e12))
def test_no_chunk_count_exposes_less_than_the_best(
    n: float, alpha_s: float, bytes_per_s: float
) -> None:
    link = textbook.Link(alpha_s=alpha_s, bytes_per_s=bytes_per_s)

    def exposed_s(chunks: int) -> float:
        return chunks * alpha_s + n / bytes_per_s / chunks

    best = textbook.best_chunk_count(n, link)
    assert best >= 1
    for other in {max(best - 1, 1), best + 1, 2 * best, 1}:
        assert exposed_s(best) <= exposed_s(other) * (1 + 1e-12)


def test_free_chunks_have_no_best_count() -> None:
    with pytest.raises(ValueError, match="alpha_s"):
        textbook.best_chunk_count(1e6, textbook.Link(alpha_s=0.0, bytes_per_s=1e9))


@given(st.floats(1, 1e12), st.sampled_from([2, 4, 8, 64, 1024]))
def test_halving_doubling_is_never_slower_than_ring_and_tree(n: float, members: int) -> None:
    link = textbook.Link(alpha_s=1e-6, bytes_per_s=1e9)
    least = textbook.textbook_s("all-reduce", "halving-doubling", n, members, link)
    for other in ("ring", "tree", "naive"):
        seconds = np.asarray(textbook.textbook_s("all-reduce", other, n, members, link))
        assert least <= seconds * (1 + 1e-12)


def test_gamma_counts_each_reduced_byte_once() -> None:
    link = textbook.Link(alpha_s=0.0, bytes_per_s=1e30, gamma_s_per_byte=1.0)
    assert textbook.textbook_s("all-reduce", "ring", 80.0, 8, link) == pytest.approx(70)
    assert textbook.textbook_s("all-gather", "ring", 640.0, 8, link) == pytest.approx(0)
    assert textbook.textbook_s("all-reduce", "halving-doubling", 80.0, 8, link) == pytest.approx(70)


@pytest.mark.parametrize(
    ("batch", "flop_per_byte"),
    [(1, 3_072), (4, 12_288), (16, 49_152), (64, 196_608), (256, 786_432)],
)
def test_compute_to_communication_of_data_parallelism(batch: int, flop_per_byte: float) -> None:
    assert textbook.data_parallel_flop_per_byte(batch * 2048) == flop_per_byte


def test_ridge_of_an_h100_is_half_of_what_the_sparse_peak_suggests() -> None:
    assert textbook.ridge_flop_per_byte(1979e12, 900e9) == pytest.approx(2_200, rel=1e-3)
    assert textbook.ridge_flop_per_byte(989.5e12, 900e9) == pytest.approx(1_100, rel=1e-3)


@pytest.mark.parametrize(
    ("ratio", "name"),
    [
        (199, "severely communication-bound"),
        (200, "communication-bound"),
        (799, "communication-bound"),
        (800, "near the ridge"),
        (1200, "near the ridge"),
        (1201, "compute-bound"),
    ],
)
def test_regimes(ratio: float, name: str) -> None:
    assert textbook.regime(ratio, 1000) == name


def test_overlap() -> None:
    assert textbook.overlap_ratio(0.08, 0.1) == pytest.approx(0.8)
    assert textbook.overlapped_step_s(0.1, 0.08, 0.01) == pytest.approx(0.11)
    assert textbook.overlapped_step_s(0.1, 0.18) == pytest.approx(0.18)


def test_tensor_parallel_volume_of_a_gpt3_layer() -> None:
    layer = textbook.tensor_parallel_layer_bytes(2048, 12_288, 8)
    assert layer == pytest.approx(352e6, rel=2e-3)
    assert 96 * np.asarray(layer) == pytest.approx(33.8e9, rel=2e-3)
    assert textbook.tensor_parallel_layer_bytes(2048, 12_288, 1) == 0.0


def test_expert_parallel_volume_counts_every_chosen_expert() -> None:
    one = textbook.expert_parallel_layer_bytes(4096, 1, 7168, 8)
    assert one == pytest.approx(4 * 4096 * 7168 * 2 * 7 / 8)
    assert textbook.expert_parallel_layer_bytes(4096, 8, 7168, 8) == pytest.approx(
        8 * np.asarray(one)
    )


@pytest.mark.parametrize(
    ("pp", "m", "of_step", "of_ideal"),
    [(4, 8, 0.273, 3 / 8), (8, 32, 0.179, 7 / 32), (1, 8, 0.0, 0.0)],
)
def test_bubbles_name_their_base(pp: int, m: int, of_step: float, of_ideal: float) -> None:
    assert textbook.bubble_of_step(pp, m) == pytest.approx(of_step, abs=5e-4)
    assert textbook.bubble_of_ideal(pp, m) == of_ideal
    assert textbook.bubble_of_ideal(pp, m, 4) == of_ideal / 4


def test_pipeline_of_the_efficiency_modeler() -> None:
    """80 layers on 4 stages, 8 micro-batches, 64 MB a boundary, 81.92 ms: both directions are 1.024 GB."""
    sent = 8 * np.asarray(textbook.pipeline_boundary_bytes(64e6 / 2, 1))
    assert sent == pytest.approx(1.024e9)
    assert sent * 8 / 81.92e-3 == pytest.approx(100e9)


def test_activations_of_gpt3_without_recomputation() -> None:
    assert textbook.unfused_activation_bytes(2048, 2048, 12_288, 96, 96) == pytest.approx(
        275e9, rel=5e-3
    )


def test_ring_attention_buffers() -> None:
    assert textbook.ring_attention_buffer_bytes(2**17, 64, 8192, 1) == 32 * 2**20
    assert textbook.ring_attention_buffer_bytes(2**20, 8, 8192, 1) == pytest.approx(2.1e9, rel=0.03)


def test_volumes_of_data_parallelism() -> None:
    moved = np.asarray(textbook.data_parallel_elements(7e9, np.array([0, 1, 2, 3])))
    assert moved.tolist() == [14e9, 14e9, 14e9, 21e9]


def test_arrays_broadcast() -> None:
    members = np.array([1, 2, 8, 64])
    many = np.asarray(textbook.textbook_s("all-reduce", "ring", 1e6, members, UNIT))
    each = [textbook.textbook_s("all-reduce", "ring", 1e6, int(p), UNIT) for p in members]
    assert many.tolist() == each
    assert math.isclose(many[-1], 126 + 2 * 63 / 64 * 1e6)
