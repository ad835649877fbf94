"""A measured run in the words of other tools, and the arithmetic of the comparison; without those tools."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.few_shot import DATA
from benchmarks.peers import dense_a100, llm_analysis_cases, simumax_cases
from benchmarks.peers.__main__ import PEERS_PAGE, SWEEPS
from benchmarks.peers.calculon_cases import (
    NO_LIMIT_GIB,
    application_of,
    execution_of,
    system_of,
    why_not,
)
from benchmarks.peers.comparison import draws_of, figures_of, mean_error_pct, stack_factor
from meshwright.costmodel.layout import Recompute
from meshwright.planner.runs.run_file import Run, read_runs

FIELDS = {
    "num_procs", "tensor_par", "pipeline_par", "data_par", "tensor_par_net", "pipeline_par_net",
    "data_par_net", "batch_size", "microbatch_size", "datatype", "fused_activation", "attention_type",
    "activation_recompute", "pipeline_interleaving", "optimizer_sharding", "tensor_par_comm_type",
    "tensor_par_overlap", "seq_par_ag_redo", "data_par_overlap", "weight_offload",
    "activations_offload", "optimizer_offload", "training",
}  # fmt: skip
"""Calculon refuses an execution with any other set (`Llm.Execution.fields`)."""


@pytest.fixture(scope="module")
def gpt3() -> Run:
    """GPT-3 175B on 768 H100: tp 4, pp 8, 12 virtual stages, dp 24."""
    return read_runs(DATA / "mlperf_gpt3_175b.yaml")[0]


@pytest.fixture(scope="module")
def internevo() -> tuple[Run, ...]:
    return read_runs(DATA / "internevo_7b_a100.yaml")


def test_an_execution_has_calculons_fields(gpt3: Run) -> None:
    execution = execution_of(gpt3)
    layout = gpt3.layout
    assert set(execution) == FIELDS
    assert execution["num_procs"] == gpt3.workload.gpus
    assert execution["data_par"] == layout.dp
    assert (execution["tensor_par"], execution["pipeline_par"]) == (layout.tp, layout.pp)
    assert execution["datatype"] == "float8"
    assert execution["tensor_par_comm_type"] == "rs_ag"
    assert execution["seq_par_ag_redo"]
    nets = [execution[f"{axis}_par_net"] for axis in ("tensor", "data", "pipeline")]
    assert nets == [0, 1, 1]


def test_one_gpu_a_group_asks_for_nothing_that_calculon_forbids(gpt3: Run) -> None:
    layout = replace(gpt3.layout, tp=1, dp=1)
    execution = execution_of(replace(gpt3, layout=layout))
    assert not execution["optimizer_sharding"]
    assert not execution["data_par_overlap"]
    assert not execution["seq_par_ag_redo"]
    assert execution["tensor_par_overlap"] == "none"
    assert execution["tensor_par_comm_type"] == "ar"


def test_a_group_inside_a_node_uses_its_links(internevo: tuple[Run, ...]) -> None:
    assert execution_of(internevo[0])["data_par_net"] == 0
    assert execution_of(internevo[1])["data_par_net"] == 1


def test_a_gated_feed_forward_keeps_its_parameters(internevo: tuple[Run, ...]) -> None:
    application = application_of(internevo[0])
    assert 2 * application["feedforward"] == 3 * internevo[0].workload.model.ffn_hidden
    assert application["attn_size"] * application["attn_heads"] == application["hidden"]


def test_links_are_the_runs_and_the_shipped_system_stays(internevo: tuple[Run, ...]) -> None:
    memory_gib = {"GiB": 80.0}
    networks = [{"bandwidth": 1, "size": 2}, {"bandwidth": 3}]
    shipped = {"networks": networks, "mem1": memory_gib}
    system = system_of(internevo[0], shipped)
    assert system["networks"] == [{"bandwidth": 300, "size": 8}, {"bandwidth": 6.25}]
    assert system["mem1"]["GiB"] == NO_LIMIT_GIB
    assert memory_gib["GiB"] == 80.0
    assert networks[1] == {"bandwidth": 3}


def test_what_calculon_has_no_words_for_is_named(gpt3: Run, internevo: tuple[Run, ...]) -> None:
    assert why_not(gpt3) is None
    assert why_not(replace(gpt3, layout=replace(gpt3.layout, cp=2))) == "context parallelism"
    partial = replace(gpt3.layout, recompute=int(Recompute.FULL), recompute_layers=1)
    assert why_not(replace(gpt3, layout=partial)) == "recomputation of some layers"
    grouped = [run for run in internevo if int(run.layout.shard_groups) > 1]
    assert grouped
    assert {why_not(run) for run in grouped} == {"optimizer states sharded inside a group"}


def test_one_factor_takes_away_what_all_rows_share() -> None:
    measured_s = np.array([1.0, 2.0, 3.0])
    assert stack_factor(2.0 * measured_s, measured_s) == pytest.approx(0.5)
    assert mean_error_pct(np.array([1.1, 1.8, 3.0]), measured_s) == pytest.approx(20 / 3)


def test_perfect_predictions_have_no_error_whatever_their_factor(gpt3: Run) -> None:
    runs = read_runs(DATA / "mlperf_gpt3_175b.yaml")
    steps_s = [run.measured.step_time_s for run in runs if run.measured]
    figures = figures_of("half", runs, 0.5 * np.array(steps_s), draws=3, seconds=0.0)
    assert figures.uncorrected == pytest.approx(50.0)
    assert figures.with_factor == pytest.approx(0.0, abs=1e-9)
    assert figures.with_factor_of_few == pytest.approx(0.0, abs=1e-9)


def test_draws_are_the_same_each_time_and_part_the_rows() -> None:
    assert draws_of(9, 4) == draws_of(9, 4)
    for own, rest in draws_of(9, 4):
        assert sorted(own + rest) == list(range(9))
        assert len(own) == 5


def test_the_page_has_both_tools_on_every_sweep() -> None:
    text = PEERS_PAGE.read_text(encoding="utf-8")
    for sweep in SWEEPS:
        assert text.count(f"| {sweep.name} |") == 2


@pytest.fixture(scope="module")
def megascale() -> Run:
    """GPT-3 175B on 512 A100: tp 8, pp 8, 6 virtual stages, dp 8, 96 micro-batches."""
    return read_runs(DATA / "megascale.yaml")[0]


def test_simumax_reads_degrees_recomputation_and_virtual_stages(megascale: Run) -> None:
    strategy = simumax_cases.strategy_of(megascale)
    assert (strategy["tp_size"], strategy["pp_size"], strategy["world_size"]) == (8, 8, 512)
    assert (strategy["micro_batch_num"], strategy["interleaving_size"]) == (96, 6)
    assert not strategy["pp_comm_async"]
    assert strategy["recompute_granularity"] == "sdp_only"
    assert simumax_cases.model_of(megascale)["use_swiglu"] is False


def test_simumax_keeps_kernels_and_gets_the_runs_links(megascale: Run) -> None:
    places = ("low_intra_node", "high_intra_node", "inter_node")
    switched = {"networks": {place: {"bandwidth": {"gbps": 1.0}} for place in places}}
    shipped = {"accelerator": {"op": "kernels"}, "networks": {"intra_node_pcie_8x": {}}}
    system = simumax_cases.system_of(megascale, shipped, switched)
    assert system["accelerator"] == {"op": "kernels"}
    assert "intra_node_pcie_8x" not in system["networks"]
    assert system["networks"]["high_intra_node"]["bandwidth"]["gbps"] == 300
    assert system["networks"]["inter_node"]["bandwidth"]["gbps"] == 200


def test_llm_analysis_reads_the_micro_batch_and_the_step(megascale: Run) -> None:
    case = llm_analysis_cases.case_of(megascale, {"name": "a100"})
    assert case["training"]["gradient_accumulation_steps"] == 96
    assert case["training"]["recomputation"] == 1
    assert case["parallelism"] == {"tp_size": 8, "pp_size": 8, "dp_size": 8, "sp_size": 8}


def test_sources_in_which_another_is_nearer_are_named(megascale: Run) -> None:
    runs = list(read_runs(DATA / "megascale.yaml"))
    measured_s = np.array([run.measured.step_time_s for run in runs if run.measured])
    steps_s = {"meshwright": 1.1 * measured_s, "near": 1.05 * measured_s, "far": 2.0 * measured_s}
    assert dense_a100.nearer_than_ours(runs, steps_s) == "near on MegaScale (NSDI 2024), Table 2"
    lines = dense_a100.table_of(runs, steps_s)
    assert lines[-1] == "| all | 4 | 10.0, 0.0 | 5.0, 0.0 | 100.0, 0.0 |"


def test_the_dense_page_has_every_source_and_all_tools() -> None:
    text = dense_a100.PAGE.read_text(encoding="utf-8")
    for word in ("| source | rows | meshwright | Calculon | SimuMax | llm-analysis |", "| all |"):
        assert word in text
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| all |")]
    ours, *others = (float(cell.split(",")[0]) for cell in rows[0][3:7])
    assert ours < min(others)
