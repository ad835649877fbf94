"""The single-formula calculators: answers by hand, and what they say to bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cli import main
from meshwright.commands.calculators import operation_word
from meshwright.costmodel.calibration import Factors
from meshwright.costmodel.textbook import ALGORITHMS, Link
from meshwright.errors import InputError
from meshwright.planner.analysis.roofline import roofline_document
from meshwright.planner.calculators.collective import (
    Network,
    collective_document,
    textbook_document,
)
from meshwright.planner.calculators.formulas import read_bytes, read_rate
from meshwright.planner.calculators.pipeline import pipeline_document
from meshwright.planner.calculators.volumes import compression_document
from meshwright.planner.runs.calibration.service import draft_stack

RUN = {
    "model": "llama-3-8b",
    "cluster": "dgx-h100",
    "run": {
        "gpus": 16, "seq_len": 4096, "global_batch": 16, "micro_batch": 1, "tp": 2, "pp": 2, "dp": 4,
        "zero_stage": 1, "recompute": "none", "precision": "bf16", "framework": "megatron",
    },
}  # fmt: skip


def meshwright(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GiB", 2**30),
        ("512 MB", 512e6),
        ("1e9", 1e9),
        ("1.5kib", 1536),
        ("7b", 7),
        ("2TB", 2e12),
        ("1G", 2**30),
    ],
)
def test_amounts_of_bytes(text: str, size: float) -> None:
    assert read_bytes(text, "--bytes") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1P", "1 PiB", "0", "nan", "1e99", "9" * 400])
def test_amounts_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="--bytes"):
        read_bytes(text, "--bytes")


def test_collective_of_one_node() -> None:
    """8 H200, 8 GiB: 473 GB/s measured with NVLS; n / t is 4/7 of the bus bandwidth of an all-reduce."""
    found = collective_document("all-reduce", [2.0**33], 8, "dgx-h200")
    assert found["algorithm"] == "nvls"
    assert found["bus_gb_per_s"] == pytest.approx(473, rel=0.03)
    assert found["algorithm_gb_per_s"] == pytest.approx(found["bus_gb_per_s"] * 4 / 7)
    assert found["seconds"] == pytest.approx(2.0**33 / found["algorithm_gb_per_s"] / 1e9)
    assert [level["ranks_inside"] for level in found["levels"]] == [8]


@pytest.mark.parametrize("key", ["seconds", "step_seconds"])
def test_what_a_stack_learned_moves_collectives_alone_and_in_a_step(key: str) -> None:
    """At half their rate the links between nodes pace the gather, not those inside: nearly twice as long."""
    shipped = draft_stack("ours", "megatron", "h100-sxm-80gb")
    slow = shipped.model_copy(update={"factors": Factors(network=0.5)})
    question = ("all-gather", [2.0**34], 64, "dgx-h100")
    as_shipped = collective_document(*question)
    assert collective_document(*question, calibration=shipped) == as_shipped
    learned = collective_document(*question, calibration=slow)
    assert learned[key] == pytest.approx(2 * as_shipped[key], rel=0.06)


def test_a_step_has_no_ring_of_an_all_to_all() -> None:
    assert collective_document("all-to-all", [2.0**30], 8, "dgx-h100")["step_seconds"] is None


def answer_of(words: str) -> dict[str, Any]:
    done = meshwright(*words.split(), "--json")
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.output))


def test_hierarchy_beats_the_flat_ring_where_a_node_has_one_nic() -> None:
    """32 GPUs, 4 nodes of 8: 23 GB/s flat, 29 by hierarchy."""
    rates = answer_of(
        "collective --op all_reduce --bytes 64MB --ranks 32 --alpha 5us --beta 50GB/s --per-node 8"
    )["gb_per_s_by_algorithm"]
    assert rates["ring"] == pytest.approx(23, abs=0.5)
    assert rates["hierarchical"] == pytest.approx(29, abs=0.5)


@pytest.mark.parametrize("word", ["alltoall", "all_to_all", "alltoall_perf", "ALL-TO-ALL"])
def test_the_words_of_nccl_tests_are_known(word: str) -> None:
    found = answer_of(f"collective --op {word} --bytes 1G --ranks 16 --cluster dgx-h100")
    assert (found["operation"], found["bytes"]) == ("all-to-all", 2**30)


@pytest.mark.parametrize(
    ("word", "operation"),
    [("allreduce", "all-reduce"), ("allgather", "all-gather"), ("sendrecv_perf", "send"),
     ("reduce_scatter_perf", "reduce-scatter"), ("reducescatter", "reduce-scatter"), ("reduce", "reduce")],
)  # fmt: skip
def test_other_words_of_nccl_tests(word: str, operation: str) -> None:
    assert operation_word(word) == operation


@given(
    st.floats(1.0, 1e12), st.sampled_from([2, 6, 8, 64, 1000]), st.sampled_from(sorted(ALGORITHMS))
)
def test_the_fastest_by_size_is_the_fastest(size: float, ranks: int, operation: str) -> None:
    network = Network(link=Link(alpha_s=2e-6, bytes_per_s=3e10, gamma_s_per_byte=1e-12))
    answer = textbook_document(operation, [size], ranks, network)
    changes = answer["fastest_from_bytes"]
    starts = [change["from_bytes"] for change in changes]
    assert starts == sorted(starts)
    name = [change["algorithm"] for change in changes if change["from_bytes"] <= size][-1]
    assert answer["seconds_by_algorithm"][name] == pytest.approx(answer["seconds"], rel=1e-9)


def test_a_sweep_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "sweep.svg"
    sweep = (
        "collective --op reduce --bytes 1K --end 1M --factor 4 --ranks 8 --link nvlink --picture"
    )
    found = answer_of(f"{sweep} {picture}")
    assert [row["bytes"] for row in found["sweep"]] == [1024.0 * 4**step for step in range(6)]
    assert "pipelined-tree" in picture.read_text(encoding="utf-8")


def test_compression_pays_on_slow_links_only() -> None:
    for rate, pays in (("12.5GB/s", True), ("450GB/s", False)):
        found = answer_of(f"compress --bytes 1GB --ranks 64 --alpha 0 --beta {rate} --why")
        quantised = found["methods"][0]
        assert quantised["pays"] is pays
        assert (quantised["pays_below_gb_per_s"] > float(rate[:-4])) is pays
        assert found["formulas"]


@pytest.mark.parametrize("operation", ["broadcast", "reduce", "scatter", "gather"])
def test_rooted_collectives_of_a_cluster(operation: str) -> None:
    """A pipelined broadcast passes every link once; a scatter's root sends all but its own share."""
    document = collective_document(operation, [2.0**30], 8, "dgx-h100")
    share = 1.0 if operation in ("broadcast", "reduce") else 7 / 8
    assert document["bus_gb_per_s"] == pytest.approx(share * document["algorithm_gb_per_s"])
    assert 250 < document["bus_gb_per_s"] < 450


@pytest.mark.parametrize(("k", "bound"), [(128, "memory"), (8192, "compute")])
def test_roofline_of_a_square_product(k: int, bound: str) -> None:
    """2 m n k FLOP over 2 (m k + k n + m n) bytes against 989 TFLOP/s and 3.35 TB/s."""
    found = roofline_document("h100-sxm-80gb", 4096, 4096, k, "bf16")
    moved = 2 * (2 * 4096 * k + 4096**2)
    assert found["bytes"] == moved
    assert found["bound"] == bound
    assert found["ridge_flop_per_byte"] == pytest.approx(989e12 / (found["hbm_gb_per_s"] * 1e9))
    least = max(2 * 4096**2 * k / 989e12, moved / (found["hbm_gb_per_s"] * 1e9))
    assert found["least_seconds"] == pytest.approx(least)


@pytest.mark.parametrize(
    ("schedule", "shape", "bubble_s", "held"),
    [
        ("1f1b", (4, 1, 8), 3 * 3, [4, 3, 2, 1]),
        ("gpipe", (4, 1, 8), 3 * 3, [8, 8, 8, 8]),
        ("interleaved-1f1b", (4, 2, 8), 3 * 3 / 2, [5.5, 4.5, 3.5, 2.5]),
        ("zb-h1", (4, 1, 8), 3 * 1, [4, 4, 4, 4]),
        ("1f1b", (1, 1, 5), 0, [1]),
    ],
)
def test_pipeline_bubbles(
    schedule: str, shape: tuple[int, int, int], bubble_s: float, held: list[float]
) -> None:
    """(p - 1)(f + b) over v; ZB-H1 (p - 1)(f + i - w), with f = i = w = 1."""
    found = pipeline_document(schedule, *shape)
    assert found["bubble_seconds"] == pytest.approx(bubble_s, abs=1e-9)
    assert found["seconds"] == pytest.approx(3 * shape[2] + bubble_s)
    assert found["in_flight"] == held


def test_memory_of_a_run_by_component(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN), encoding="utf-8")
    done = meshwright("memory", str(path), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert len(found["memory_gib"]) == len(found["memory_parts_gib"]) == 2
    for peak, parts in zip(found["memory_gib"], found["memory_parts_gib"], strict=True):
        assert sum(parts.values()) == pytest.approx(peak)
        assert {
            "weights",
            "gradients",
            "optimizer",
            "activations",
            "logits",
            "buffers",
            "fragmentation",
        } <= set(parts)
    priced = json.loads(meshwright("estimate", str(path), "--json").output)["predicted"]
    assert priced["memory_parts_gib"] == found["memory_parts_gib"]
    assert priced["memory_context_gib"] == found["context_gib"]
    shown = meshwright("memory", str(path))
    assert shown.exit_code == 0
    assert "optimizer" in shown.output


@pytest.mark.parametrize(
    "words",
    [
        "collective --op all-reduce --bytes 64MiB --ranks 16 --cluster dgx-h100",
        "collective --op all-to-all --bytes 64MiB --ranks 16 --cluster dgx-h100 --nccl",
        "roofline --device b200-sxm-180gb --m 128 --n 256 --k 512 --precision fp8",
        "pipeline --pp 4 --vpp 2 --micro-batches 16 --schedule zbv --forward-ms 3",
        "collective --op reduce --bytes 64MiB --ranks 16 --link roce --in-switch --why",
        "compress --bytes 1GB --ranks 8 --beta 50GB/s --why",
        "volumes --params 7e9 --hidden 4096 --heads 32 --why",
        "overlap --compute 1s --comm 2s --bytes 1GB --beta 50GB/s --seq-len 8192 --cp 4 --width 512 --why",
        "roofline --cluster dgx-h100 --device h100-sxm-80gb --m 64 --n 64 --k 64 --why",
        "pipeline --pp 4 --micro-batches 8 --boundary-bytes 64MB --why",
    ],
)
def test_commands_show_and_print_one_document(words: str) -> None:
    assert meshwright(*words.split()).exit_code == 0
    done = meshwright(*words.split(), "--json")
    assert done.exit_code == 0
    assert isinstance(json.loads(done.output), dict)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "collective --op all-reduc --bytes 1GiB --ranks 8 --cluster dgx-h100",
            "did you mean 'all-reduce'",
        ),
        ("collective --op reduce --bytes 1G --ranks 8", "give either --cluster"),
        ("collective --op reduce --bytes 1G --ranks 8 --alpha 1us --beta 5km", "no rate"),
        ("collective --op reduce --bytes 1G --ranks 8 --alpha 1h --beta 5GB/s", "no duration"),
        ("collective --op all-reduce --bytes 1G --ranks 9 --link tcp --per-node 8", "must divide"),
        ("collective --op all-reduce --bytes x --ranks 8 --cluster dgx-h100", "no amount of bytes"),
        ("collective --op all-reduce --bytes 1GiB --ranks 1 --cluster dgx-h100", "at least 2"),
        ("collective --op all-reduce --bytes 1GiB --ranks 8 --cluster dgx-h1000", "dgx-h100"),
        ("overlap --sync q", "--sync: no duration"),
        ("roofline --device h100 --m 1 --n 1 --k 1", "h100-sxm-80gb"),
        ("roofline --device h100-sxm-80gb --m 0 --n 1 --k 1", "--m: must be from 1 to"),
        ("roofline --device h100-sxm-80gb --m 1 --n 1 --k 1 --precision int8", "bf16"),
        ("pipeline --pp 4 --micro-batches 4 --schedule 2f2b", "interleaved-1f1b"),
        ("pipeline --pp 4 --micro-batches 4 --schedule zbv", "virtual stages"),
        ("pipeline --pp 0 --micro-batches 4", "--pp: must be at least 1, got 0"),
        ("pipeline --pp 4000 --micro-batches 4000", "at most"),
        ("pipeline --pp 4 --micro-batches 4 --forward-ms nan", "positive"),
    ],
)
def test_bad_input_is_told_apart(words: str, message: str) -> None:
    done = meshwright(*words.split())
    assert done.exit_code == 2
    assert message in done.output


def test_a_roofline_says_what_training_attains() -> None:
    """The same rates as a step: a large product at the device's fraction of its peak, below the roof."""
    document = roofline_document("h100-sxm-80gb", 8192, 8192, 8192, "bf16")
    attained = document["attained"]
    assert attained["seconds"] > document["least_seconds"]
    assert 0.5 * attained["peak_tflops"] < attained["tflops"] < attained["peak_tflops"]
    assert attained["hbm_gb_per_s"] < document["hbm_gb_per_s"]


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("450GB/s", 450e9), ("450 gb/s", 450e9), ("400Gb/s", 50e9), ("400Gbps", 50e9), ("100gbps", 12.5e9),
        ("800Mb/s", 1e8), ("1.6Tb/s", 2e11), ("8Kb/s", 1e3), ("8b/s", 8.0), ("2e-12", 5e11),
    ],
)  # fmt: skip
def test_a_small_b_behind_a_large_prefix_is_a_bit(text: str, bytes_per_s: float) -> None:
    assert read_rate(text, "--beta") == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(
    "words",
    [
        "overlap --bytes 1GB --beta 1GB/s --compute 0",
        "overlap --seq-len 128 --cp 2 --width 8 --element-bytes nan",
        "overlap --seq-len 128 --cp 2 --width 8 --element-bytes -2",
        "volumes --params 1e308",
        "volumes --params nan",
    ],
)
def test_numbers_that_say_nothing_are_refused(words: str) -> None:
    result = meshwright(*words.split())
    assert result.exit_code == 2
    assert re.search(r"--(compute|element-bytes|params): must be", result.output)


def test_advice_is_of_the_schedule_that_is_asked_about() -> None:
    """It was 1F1B's for all: four times the micro-batches, where twice as many do for zero bubbles."""
    document = pipeline_document("zb-h1", 16, 1, 16)
    assert document["efficiency"] < 0.8
    for change, (pp, micro_batches) in zip(
        document["advice"],
        ((16, document["advice"][0]["to"]), (document["advice"][1]["to"], 16)),
        strict=True,
    ):
        there = pipeline_document("zb-h1", pp, 1, micro_batches)
        assert change["efficiency"] == pytest.approx(there["efficiency"])
        assert there["efficiency"] >= 0.8 - 1e-9
    assert document["advice"][0]["to"] == 32


def test_a_codec_pays_below_a_rate_without_start_ups() -> None:
    """A ring of 1 GB of 64: 2 x 63/64 GB less the half of it, over two passes of the codec at 100 GB/s."""
    slow = compression_document(
        1e9, 64, Link(alpha_s=1e-3, bytes_per_s=12.5e9), codec_bytes_per_s=100e9
    )
    free = compression_document(
        1e9, 64, Link(alpha_s=0.0, bytes_per_s=12.5e9), codec_bytes_per_s=100e9
    )
    for with_start, without in zip(slow["methods"], free["methods"], strict=True):
        assert with_start["pays_below_gb_per_s"] == pytest.approx(without["pays_below_gb_per_s"])
