"""Lists of published pairs: what is priced, and what is only counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.calibrate import RUNS, free_records
from benchmarks.calibration import Problem
from benchmarks.cross_validation import leave_out, source_of
from benchmarks.gain_posterior import REASONS, knob_gains, priced_pairs
from benchmarks.unseen import Unseen
from meshwright.errors import InputError
from meshwright.planner.runs.prediction import prediction_of, validation_report
from meshwright.planner.runs.run_file import read_runs
from meshwright.planner.runs.stated_pairs import (
    UNSTATED_SHARDING,
    StatedPair,
    StatedPairDoc,
    UnpricedPair,
    is_pair_list,
    read_pairs,
    source_words,
)
from meshwright.planner.runs.validation import (
    MeasuredStep,
    measured_steps,
    pair_sums,
    pairs_of,
    score,
    score_pairs,
)
from tests.places import DATA

MOST_STATED_ERROR = 0.065
LEAST_STATED_DIRECTION = 0.85
NEVER_SEEN = [("aleph_alpha_layouts", 4000, 0.115, 0.90), ("flagperf", 16, 0.07, 0.80)]
"""Files whose stacks no constant was fitted to: at least so many pairs, and the worst that is held."""
PUBLISHED = DATA / "published_pairs.yaml"
MORE = DATA / "more_pairs.yaml"
STATED: dict[str, Any] = {
    "id": "a", "source": "a paper", "knob": "recompute", "from": "no AC", "to": "full AC", "ratio": 1.3,
    "model": "Llama 3 8B", "device": "B200", "gpus": 8, "seq_len": 8192, "global_batch": 32,
    "precision": "bf16", "framework": "torchtitan (2026-05)",
    "layout": {"tp": 1, "pp": 1, "dp": 8, "micro_batch": 1, "zero_stage": "fsdp2"},
}  # fmt: skip


def read(folder: Path, **changed: Any) -> StatedPair | UnpricedPair:
    path = folder / "pairs.yaml"
    path.write_text(yaml.safe_dump([STATED | changed]))
    (pair,) = read_pairs(path)
    return pair


def test_both_sides_are_the_stated_run_with_one_change(tmp_path: Path) -> None:
    pair = read(tmp_path)
    assert isinstance(pair, StatedPair)
    assert (pair.ratio, pair.first.layout.zero_stage, pair.first.layout.dp) == (1.3, 3, 8)
    assert int(pair.first.layout.recompute) == 0
    assert int(pair.second.layout.recompute) != 0
    assert pair.first.workload.model.layers == 32


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"seq_len": None}, "seq_len not stated"),
        ({"layout": {"ep": 8, "micro_batch": 1}}, "layout: tp not stated"),
        ({"layout": {"tp": 1, "pp": 2, "cp": 1, "micro_batch": 1}}, "layout: vpp not stated"),
        ({"layout": {"tp": 1, "pp": 1, "micro_batch": 1}}, "layout: cp not stated"),
        (
            {"model": "Mixtral 8x7B", "layout": {"tp": 1, "pp": 1, "cp": 1, "micro_batch": 1}},
            "layout: ep not stated",
        ),
        ({"device": "H100"}, "device named by no node"),
        ({"model": "Llama 3 8B (LoRA)"}, "model in no catalog"),
        ({"also_changes": ["sequence_parallel"]}, "another setting changes"),
        ({"knob": "fusion"}, "no setting of a run file"),
        ({"knob": "compile"}, "no setting with a price"),
        ({"to": "memory-budget AC 0.9"}, "no setting with a price"),
        ({"to": "no AC"}, "one setting to the cost model"),
        ({"global_batch": "eight"}, "no run: "),
    ],
)
def test_what_cannot_be_said_is_counted_with_the_reason(
    tmp_path: Path, changed: dict[str, Any], reason: str
) -> None:
    pair = read(tmp_path, **changed)
    assert isinstance(pair, UnpricedPair)
    assert reason in pair.reason


def test_degrees_that_make_all_gpus_leave_one_to_the_others(tmp_path: Path) -> None:
    layout = {"tp": 4, "dp": 2, "micro_batch": 1}
    pair = read(tmp_path, layout=layout)
    assert isinstance(pair, StatedPair)
    assert (pair.first.layout.pp, pair.first.layout.cp) == (1, 1)
    half = read(tmp_path, layout=layout, gpus=16)
    assert isinstance(half, UnpricedPair)
    assert half.reason.endswith("not stated")


def test_overlap_of_one_axis_leaves_that_of_others(tmp_path: Path) -> None:
    layout = {
        "tp": 2,
        "dp": 4,
        "micro_batch": 1,
        "overlap": {"dp": True},
        "sequence_parallel": True,
    }
    pair = read(tmp_path, layout=layout, knob="tp_overlap", to="async TP", **{"from": "vanilla TP"})
    assert isinstance(pair, StatedPair)
    both = [(run.workload.dp_overlap, run.workload.tp_overlap) for run in (pair.first, pair.second)]
    assert both == [(True, False), (True, True)]


def test_compilation_is_the_stack_that_compiles(tmp_path: Path) -> None:
    words = {"from": "eager FSDP2", "to": "FSDP2 + torch.compile"}
    pair = read(tmp_path, knob="compile", **words)
    assert isinstance(pair, StatedPair)
    assert (pair.first.workload.compiled, pair.second.workload.compiled) == (False, True)


ZERO_BUBBLE = {
    "source": "Zero Bubble Pipeline Parallelism (arXiv 2401.10241) Table 4",
    "knob": "vpp",
    "from": "1F1B",
    "to": "interleaved 1F1B",
    "model": "GPT 1.5B",
    "device": "A100-80GB SXM",
    "seq_len": None,
    "global_batch": None,
    "precision": None,
    "framework": "Megatron-LM",
}
"""As table 4 states a pair: sizes, lengths and degrees stand in table 3."""


def test_what_a_source_says_elsewhere_completes_its_pairs(tmp_path: Path) -> None:
    pair = read(tmp_path, **ZERO_BUBBLE, layout={"microbatches": 24})
    assert isinstance(pair, StatedPair)
    first, second = pair.first, pair.second
    assert (first.workload.model.layers, first.workload.model.hidden) == (22, 2304)
    assert (first.workload.seq_len, first.workload.global_batch) == (1024, 24 * 6)
    assert (first.layout.pp, first.layout.vpp, second.layout.vpp) == (8, 1, 3)
    assert any("table 3" in remark for remark in first.remarks)


def test_an_entry_is_believed_before_what_its_source_says_elsewhere(tmp_path: Path) -> None:
    pair = read(tmp_path, **ZERO_BUBBLE | {"seq_len": 2048}, layout={"microbatches": 24})
    assert isinstance(pair, StatedPair)
    assert pair.first.workload.seq_len == 2048
    other = read(tmp_path, **ZERO_BUBBLE | {"source": "a paper"}, layout={"microbatches": 24})
    assert isinstance(other, UnpricedPair)


def test_a_model_may_be_its_sizes(tmp_path: Path) -> None:
    sizes = {"layers": 2, "hidden": 256, "ffn_hidden": 512, "heads": 4, "kv_heads": 4, "vocab": 512}
    pair = read(tmp_path, model=sizes)
    assert isinstance(pair, StatedPair)
    assert (pair.first.workload.model.layers, pair.second.workload.model.hidden) == (2, 256)
    wrong = read(tmp_path, model=sizes | {"hiden": 1})
    assert isinstance(wrong, UnpricedPair)
    assert "did you mean 'hidden'?" in wrong.reason


def test_a_side_that_its_source_calls_faulty_is_counted_only(tmp_path: Path) -> None:
    pair = read(
        tmp_path,
        source="pytorch/torchtitan benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md",
        knob="tp_overlap",
        precision="float8 rowwise",
        to="async TP",
        **{"from": "vanilla TP"},
    )
    assert isinstance(pair, UnpricedPair)
    assert "fault" in pair.reason


def test_a_note_says_what_both_sides_recompute(tmp_path: Path) -> None:
    source = "pytorch/torchtitan branch autoresearch-parallelize/may15, results.tsv"
    words = {"knob": "precision", "from": "bf16", "to": "float8 rowwise linears"}
    noted = read(tmp_path, source=source, note="full AC; one reading", **words)
    plain = read(tmp_path, source=source, **words)
    assert isinstance(noted, StatedPair)
    assert isinstance(plain, StatedPair)
    assert int(noted.first.layout.recompute)
    assert int(noted.second.layout.recompute)
    assert not int(plain.first.layout.recompute)


def test_every_fact_is_of_a_published_pair() -> None:
    rows = yaml.safe_load(PUBLISHED.read_text())
    entries = [StatedPairDoc.model_validate(row) for row in rows]
    unused = [fact for fact in source_words().facts if not any(map(fact.is_of, entries))]
    assert not unused


def test_sides_and_cluster_may_be_those_of_a_run_file(tmp_path: Path) -> None:
    sides = {"from": {"overlap": {"tp": False}}, "to": {"overlap": {"tp": True}}}
    layout = {
        "tp": 2,
        "dp": 4,
        "micro_batch": 1,
        "sequence_parallel": True,
        "overlap": {"dp": True},
    }
    node = {"device": "b200-sxm-180gb", "gpus": 8, "gpus_per_node": 8}
    pair = read(tmp_path, knob="tp_overlap", layout=layout, device=node, **sides)
    assert isinstance(pair, StatedPair)
    assert pair.first.workload.cluster.device.name == "b200-sxm-180gb"
    both = [(run.workload.dp_overlap, run.workload.tp_overlap) for run in (pair.first, pair.second)]
    assert both == [(True, False), (True, True)]
    named = read(tmp_path, knob="tp_overlap", layout=layout, device="dgx-b200", **sides)
    assert isinstance(named, StatedPair)
    misspelt = read(tmp_path, knob="tp_overlap", layout=layout, **sides | {"to": {"overlab": {}}})
    assert isinstance(misspelt, UnpricedPair)
    assert "overlap" in misspelt.reason


def test_rates_of_two_batches_are_compared_for_as_many_tokens(tmp_path: Path) -> None:
    """Twice the batch in twice the micro-batches: a step takes about twice as long, a token as long."""
    sides = {"from": {"global_batch": 32}, "to": {"global_batch": 64}}
    pair = read(tmp_path, knob="global_batch", ratio=1.0, **sides)
    (priced,) = score_pairs([pair], prediction_of).stated_pairs
    steps = [prediction_of(run).step_time_s for run in (priced.first.run, priced.second.run)]
    assert priced.predicted == pytest.approx(0.5 * steps[1] / steps[0])
    assert 0.9 < priced.predicted < 1.0


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("# a note\n- id: a\n", True),
        ("schema: 1\npairs:\n- id: a\n", True),
        ("schema: 1\nruns:\n- id: a\n", False),
        ("", False),
    ],
)
def test_a_list_of_pairs_is_told_from_a_run_file(text: str, pairs: bool) -> None:
    assert is_pair_list(text) == pairs


def test_sharding_that_is_not_stated_is_said(tmp_path: Path) -> None:
    layout = {"tp": 1, "pp": 1, "cp": 1, "micro_batch": 1}
    pair = read(tmp_path, layout=layout)
    assert isinstance(pair, StatedPair)
    assert pair.first.layout.zero_stage == pair.second.layout.zero_stage == 0
    assert UNSTATED_SHARDING in pair.first.remarks
    stated = read(tmp_path, layout=layout | {"zero_stage": 1})
    assert isinstance(stated, StatedPair)
    assert UNSTATED_SHARDING not in stated.first.remarks


def test_a_list_without_ratios_is_refused_where_it_stands(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"pairs\[0\].*ratio"):
        read(tmp_path, ratio=None)


def test_every_published_pair_is_priced_or_counted() -> None:
    report = validation_report(PUBLISHED)
    assert len(report.stated_pairs) + len(report.unpriced_pairs) == 156
    assert len(report.stated_pairs) >= 49
    sums = report.summary()
    near = sum(0.98 < pair.measured < 1.02 for pair in report.stated_pairs)
    assert sums["pairs"]["n"] == len(report.stated_pairs) - near
    assert sum(row["pairs"] for row in sums["gains"]) == sums["pairs"]["n"]
    assert sums["pairs"]["error"] < 0.06
    assert sums["pairs"]["direction"] > LEAST_STATED_DIRECTION


def test_pairs_in_the_words_of_run_files_all_have_a_price() -> None:
    report = validation_report(MORE)
    assert not report.unpriced_pairs
    assert len(report.stated_pairs) >= 72
    pairs = [*report.stated_pairs, *validation_report(PUBLISHED).stated_pairs]
    sums = pair_sums([pair for pair in pairs if not 0.98 < pair.measured < 1.02])
    assert sums["error"] < MOST_STATED_ERROR
    assert sums["direction"] > LEAST_STATED_DIRECTION


def test_ratios_of_the_pairs_are_those_of_what_was_measured() -> None:
    entries = yaml.safe_load(MORE.read_text())
    assert len({entry["id"] for entry in entries}) == len(entries)
    for entry in entries:
        change = entry["measured_to"] / entry["measured_from"]
        expected = change if entry["unit"] in ("s/step", "ms/step") else 1.0 / change
        assert entry["ratio"] == pytest.approx(expected, abs=6e-5), entry["id"]
        assert entry["date"]
        assert entry["source"]


def test_a_mean_gain_that_is_far_off_has_its_reason() -> None:
    far = {gain.knob for gain in knob_gains(priced_pairs()) if gain.far}
    assert far == set(REASONS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least", "error", "direction"), NEVER_SEEN)
def test_ratios_of_stacks_that_no_constant_was_fitted_to(
    name: str, least: int, error: float, direction: float
) -> None:
    file = Unseen(name, score(read_runs(DATA / "more_runs" / f"{name}.yaml"), prediction_of).rows)
    sums = pair_sums(pairs_of(measured_steps(file.trusted)))
    assert sums["n"] >= least
    assert sums["error"] < error
    assert sums["direction"] > direction


@pytest.mark.soak
def test_ratios_of_rows_whose_source_is_left_out_of_the_fit() -> None:
    problem = Problem(read_runs(RUNS), free_records())
    known = problem.linearise(problem.start)
    left_out = leave_out(problem, source_of, problem.start, known, exact=False)
    times = zip(problem.runs, left_out.seconds.tolist(), problem.measured_s.tolist(), strict=True)
    sums = pair_sums(
        pairs_of(
            MeasuredStep(run=run, predicted_s=predicted_s, measured_s=measured_s)
            for run, predicted_s, measured_s in times
            if run.suspect is None
        )
    )
    assert sums["n"] > 650
    assert sums["error"] < 0.055
    assert sums["direction"] > 0.95
