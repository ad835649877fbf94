"""Figures of public guides: volumes, stages, wished efficiency, a fitted link, bytes from rank to rank."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from meshwright.cli import main
from meshwright.cluster_specs.importers.facts import SourceText
from meshwright.errors import InputError
from meshwright.planner.analysis.roofline import network_roofline
from meshwright.planner.analysis.traffic import plan_traffic, rank_matrix_csv, traffic_matrix
from meshwright.planner.calculators.collective import fitted_document
from meshwright.planner.calculators.pipeline import pipeline_document
from meshwright.planner.calculators.volumes import TransformerShape, volumes_document
from meshwright.planner.report.plan_words import meaning_of
from tests.planner.analysis.test_trace import piped


def meshwright(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def test_gradients_are_sent_as_wide_as_they_are_added_up() -> None:
    """Without ZeRO both passes carry gradients; under ZeRO one does and weights come back in 16 bits."""
    sent = volumes_document(TransformerShape(params=1e9, gradient_bytes=4.0))["data_parallel_bytes"]
    assert sent == {"zero_0": 8e9, "zero_1": 6e9, "zero_2": 6e9, "zero_3": 8e9}
    hybrid = volumes_document(TransformerShape(params=1e9, gradient_bytes=4.0, shard_group=8))
    assert hybrid["hybrid_sharded"] == {"inside_bytes": 8e9, "between_bytes": 1e9}


def test_tensor_parallel_ranks_hold_and_send_their_part() -> None:
    whole = volumes_document(TransformerShape(params=8e9, dp=4))
    part = volumes_document(TransformerShape(params=8e9, dp=4, tp=8))
    for name in ("states_bytes", "data_parallel_bytes"):
        for stage, size in whole[name].items():
            assert part[name][stage] == pytest.approx(size / 8)
    assert part["gpus"] == whole["gpus"] == 2


def test_sequence_parallelism_shards_what_else_is_replicated() -> None:
    """Korthikanti et al. 2022, equations 1, 2 and 4: 34 = 24 sharded by tensor parallelism + 10."""
    shape = {"hidden": 64, "heads": 4, "seq_len": 128, "layers": 3}
    whole = volumes_document(TransformerShape(**shape))
    part = volumes_document(TransformerShape(**shape, tp=4))
    assert whole["activation_bytes_without_sequence_parallel"] == whole["activation_bytes"]
    assert part["activation_bytes"] == pytest.approx(whole["activation_bytes"] / 4)
    per_layer = 128 * (10 * 64 + (24 * 64 + 5 * 4 * 128) / 4)
    assert part["activation_bytes_without_sequence_parallel"] == pytest.approx(3 * per_layer)


@pytest.mark.parametrize("memory", ["0", "nan", "1KB"])
def test_a_gpu_without_memory_is_told(memory: str) -> None:
    done = meshwright("volumes", "--params", "1e9", "--gpu-memory", memory)
    assert done.exit_code == 2
    assert "--gpu-memory" in done.output


def test_stages_are_dealt_round_robin_or_in_a_v() -> None:
    def ranks(schedule: str) -> list[int]:
        return [s["rank"] for s in pipeline_document(schedule, 4, 2, 8, layers=32)["stages"]]

    assert ranks("interleaved-1f1b") == [0, 1, 2, 3, 0, 1, 2, 3]
    assert ranks("zbv") == [0, 1, 2, 3, 3, 2, 1, 0]


def test_layers_that_do_not_divide_go_to_the_first_stages() -> None:
    document = pipeline_document("1f1b", 4, 1, 8, layers=30)
    assert [stage["layers"] for stage in document["stages"]] == [8, 8, 7, 7]
    total_s = sum(stage["compute_s"] for stage in document["stages"])
    assert total_s == pytest.approx(4 * document["work_seconds"])
    with pytest.raises(InputError, match="--layers"):
        pipeline_document("1f1b", 4, 1, 8, layers=3)


def test_the_turn_of_a_v_crosses_no_boundary() -> None:
    transfer = pipeline_document("zbv", 4, 2, 8, boundary_bytes=1e6)["transfer"]
    assert transfer["boundaries"] == 6
    assert transfer["bytes_all_boundaries"] == pytest.approx(6 * 2 * 8 * 1e6)


@pytest.mark.parametrize("efficiency", [0.5, 0.9, 0.99])
def test_the_batch_of_an_efficiency_has_it(efficiency: float) -> None:
    def level(*batches: float) -> dict[str, Any]:
        document = network_roofline(
            1e15, {"net": 5e10}, seq_len=2048, batches=batches, efficiency=efficiency
        )
        return dict(document["levels"][0])

    wished = level(1.0)[f"batch_{100 * efficiency:.4g}"]
    rows = level(wished["overlapped"], wished["serial"])["batches"]
    assert rows[0]["efficiency_overlapped"] == pytest.approx(efficiency)
    assert rows[1]["efficiency_serial"] == pytest.approx(efficiency)


def log_of(operation: str, gpus: int, alpha_s: float, beta_s: float) -> SourceText:
    """A log of exact alpha-beta times."""
    passes = 2 if operation == "all_reduce" else 1
    lines = [f"#  Rank {r:2} Group  0 Pid 1 on host device {r:2} [0x0] GPU" for r in range(gpus)]
    lines.append(f"# {operation}_perf")
    for size in (1024, 65536, 2**20, 2**26, 2**30):
        time_us = 1e6 * passes * (gpus - 1) * (alpha_s + size / gpus * beta_s)
        rate = size / time_us / 1e3
        bus = rate * passes * (gpus - 1) / gpus
        half = f"{time_us:.4f} {rate:.4f} {bus:.4f} 0"
        lines.append(f" {size} {size // 4} float sum -1 {half} {half}")
    return SourceText(name=f"{operation}.log", text="\n".join(lines))


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter"])
def test_alpha_and_beta_come_back_from_times_that_have_them(operation: str) -> None:
    fitted = fitted_document(log_of(operation, 8, 3e-6, 1 / 4e10))
    assert fitted["alpha_s"] == pytest.approx(3e-6, rel=1e-3)
    assert fitted["gb_per_s"] == pytest.approx(40, rel=1e-3)
    assert fitted["mean_error_pct"] < 0.1


def test_a_log_of_one_size_is_refused(tmp_path: Path) -> None:
    lines = log_of("all_gather", 4, 1e-6, 1e-10).text.splitlines()
    path = tmp_path / "all_gather_perf.log"
    path.write_text("\n".join(lines[:6]), encoding="utf-8")
    done = meshwright("collective", "--from", str(path))
    assert done.exit_code == 2
    assert "two sizes" in done.output


def test_a_log_says_its_own_ranks() -> None:
    done = meshwright("collective", "--from", "x.log", "--ranks", "4")
    assert done.exit_code == 2
    assert "from the log" in done.output
    assert "--from" in meshwright("collective", "--op", "all-reduce").output


def test_a_member_of_a_ring_sends_to_one() -> None:
    """Rings counted twice, and were refused at half of the pairs that are written."""
    ring = next(flow for flow in plan_traffic(piped("1f1b")).use.axes if flow.kind == "ring")
    pairs = ring.groups.size
    rows = rank_matrix_csv([ring], int(ring.groups.max()) + 1, most_pairs=pairs).splitlines()
    assert len(rows) == 1 + pairs
    with pytest.raises(InputError, match=f"{pairs:,} pairs of ranks"):
        rank_matrix_csv([ring], int(ring.groups.max()) + 1, most_pairs=pairs - 1)


def test_rank_to_rank_bytes_add_up_to_those_of_blocks() -> None:
    use = plan_traffic(piped("1f1b")).use
    node = use.positions.node
    rows = list(csv.DictReader(rank_matrix_csv(use.axes, len(node)).splitlines()))
    blocks = np.unique(node, return_inverse=True)[1]
    sent = np.zeros((4, 4))
    for row in rows:
        assert row["source"] != row["target"]
        sent[blocks[int(row["source"])], blocks[int(row["target"])]] += float(row["bytes"])
    expected = np.array(traffic_matrix(use)["bytes"])
    assert sent == pytest.approx(expected, rel=1e-6, abs=len(rows))
    with pytest.raises(InputError, match="--matrix"):
        rank_matrix_csv(use.axes, len(node), most_pairs=3)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("balance", "auxiliary"),
        ("auxiliary loss", "routers"),
        ("NCCL_P2P_LEVEL", "PXB"),
        ("congestion", "ethtool"),
        ("message fusion", "start-ups"),
        ("static_graph", "DDP"),
        ("find_unused_parameters", "DDP"),
        ("gradient_as_bucket_view", "DDP"),
        ("pin_memory", "page-locked"),
        ("set_epoch", "DistributedSampler"),
        ("convergence cost", "compress"),
        ("scaling law", "0.076"),
        ("memory hierarchy", "SRAM"),
        ("weight shard", "[4096 x 1024]"),
        ("strategies", "bubble"),
        ("DDP", "16 bytes a parameter"),
        ("FSDP", "ZeRO 3"),
        ("tensor parallelism", "NVLink"),
        ("pipeline parallel", "(p - 1) / (v m)"),
        ("context parallel", "keys and values"),
        ("expert parallelism", "router"),
        ("point to point against collective", "2 (P-1)"),
    ],
)
def test_words_of_guides_are_explained(word: str, says: str) -> None:
    meaning = meaning_of(word)
    assert meaning is not None
    assert says in meaning[1]
    assert says in meshwright("explain", word, "--json").output


def test_words_of_a_term_need_no_quotes() -> None:
    done = meshwright("explain", "memory", "risk")
    assert done.exit_code == 0, done.output
    assert done.output == meshwright("explain", "memory risk").output
    unknown = meshwright("explain", "memory", "rusk")
    assert unknown.exit_code == 2
    assert "did you mean 'memory-risk'" in unknown.output


def test_times_of_a_log_are_drawn_beside_those_of_the_fit(tmp_path: Path) -> None:
    log = log_of("all_gather", 8, 3e-6, 1 / 4e10)
    path, picture = tmp_path / "nccl.log", tmp_path / "fit.svg"
    path.write_text(log.text, encoding="utf-8")
    done = meshwright("collective", "--from", str(path), "--picture", str(picture))
    assert done.exit_code == 0, done.output
    drawn = picture.read_text(encoding="utf-8")
    assert "measured" in drawn
    assert "fitted" in drawn
    assert "all-gather over 8 ranks" in drawn


@pytest.mark.parametrize(
    ("size", "share", "helps"), [("10KB", "99.3 %", "message fusion"), ("1GB", "0.2 %", "compress")]
)
def test_advice_on_a_message_follows_its_size(size: str, share: str, helps: str) -> None:
    """12 start-ups of 5 us; halving and doubling sends 63/32 n over 50 GB/s."""
    link = ("--alpha", "5us", "--beta", "50GB/s")
    shown = meshwright("collective", "--op", "all-reduce", "--bytes", size, "--ranks", "64", *link)
    assert f"start-ups are {share}" in " ".join(shown.output.split())
    assert helps in " ".join(shown.output.split())
