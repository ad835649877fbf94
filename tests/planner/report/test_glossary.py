"""Every word that a plan's screen uses is in the glossary, which the package holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshwright import cli
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.plan.texts import plan_text
from meshwright.planner.report.plan_view import first_screen, plan_view
from meshwright.planner.report.plan_words import meaning_of, meanings, rule_meaning
from meshwright.planner.report.view import Facts, Table
from meshwright.planner.request.reader import read_request
from tests.planner.report import printed_words
from tests.planner.report.test_views import text
from tests.priced_plans import priced_plan

PLAIN = {"part", "time", "share", "sent", "figure", "mark", "peak", "of step", "of usable", "plan"}
"""Headings that mean no more than they say."""

SAY_WHAT_THEY_MEAN = {
    "a node",
    "a step",
    "all",
    "allowed",
    "assumed",
    "batch of a rank",
    "by hierarchy, three calls",
    "bytes",
    "calibration",
    "component",
    "compute of a step",
    "constant",
    "failed",
    "figure",
    "first",
    "formula",
    "from",
    "in a step",
    "in a training step",
    "in a training step, by a ring",
    "in all",
    "job",
    "layer",
    "layers each",
    "layout, or why there is none",
    "least time",
    "looked at",
    "medium",
    "n / t",
    "of",
    "one after the other",
    "operation",
    "operations",
    "part",
    "pattern",
    "peak",
    "peak memory, GiB",
    "predictions",
    "ranks inside",
    "row",
    "second",
    "source",
    "stack",
    "the best plan with it",
    "the most",
    "this plan",
    "time",
    "time of links",
    "to",
    "took",
    "transfer of a step",
    "what is off",
    "what it means",
    "when",
    "worst layer",
}
"""Of all commands: the like, and headings of sentences."""


def unexplained(words: set[str]) -> list[str]:
    known = {word for word in words if meaning_of(word) or rule_meaning(word)}
    return sorted(words - known - SAY_WHAT_THEY_MEAN)


def test_every_key_and_value_of_documents_is_explained() -> None:
    words = printed_words.of_documents()
    assert {"moe_dispatch", "bucket_mb", "step_time_s_without", "level_traffic"} <= words
    assert unexplained(words) == []


def test_every_value_of_a_choice_is_explained() -> None:
    words = printed_words.of_choices()
    assert {"deepep", "hybridep", "full-graph", "a2a+p2p", "bf16-moments", "zbv"} <= words
    assert unexplained(words) == []


def test_every_heading_of_every_view_is_explained() -> None:
    words = printed_words.of_views()
    assert {"links busy", "GiB on the fullest GPU", "needs installed", "nodes/token"} <= words
    assert unexplained(words) == []


def test_every_part_of_a_finished_plan_is_explained() -> None:
    """What no schema lists: parts of the step, of memory, and names of levels and rules."""
    plan = priced_plan("mixtral-8x7b", tp=2, cp=2, dp=2, pp=2, num_micro_batches=8)
    assert plan.predicted is not None
    words = set(plan.predicted.breakdown_s) | set(plan.predicted.memory_parts_gib[0])
    words |= {binding.rule for binding in plan.binding} | set(plan.solver.model_dump())
    assert unexplained(words) == []


@pytest.mark.parametrize(
    "word",
    ["bucket_mb", "moe_dispatch", "cuda_graph", "ep_overlap", "tp_overlap", "HSDP", "memory risk"],
)
def test_words_that_were_not_known(word: str) -> None:
    done = CliRunner().invoke(cli.main, ["explain", word, "--json"])
    assert done.exit_code == 0, done.stderr
    assert len(json.loads(done.stdout)["meaning"]) > 40


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
def test_every_term_of_the_screen_is_explained(model: str) -> None:
    plan = priced_plan(model, tp=2, cp=2, dp=2, pp=2, num_micro_batches=8, sequence_parallel=True)
    assert plan.predicted is not None
    terms = [
        name
        for block in plan_view(plan)
        if isinstance(block, Facts)
        for name, words in block.rows
        if words
    ]
    tables = [block for block in plan_view(plan) if isinstance(block, Table)]
    terms += [column.title for table in tables for column in table.columns]
    terms += list(plan.predicted.breakdown_s)
    terms += list(plan.predicted.memory_parts_gib[0])
    terms += [grade.what for grade in plan.grades]
    missing = [term for term in {*terms} - PLAIN - {""} if meaning_of(term) is None]
    assert missing == []


@pytest.mark.slow
def test_idle_gpus_produce_no_tokens() -> None:
    """7 GPUs asked for, 4 in use: tokens of a step over its seconds, and a quarter of that a GPU."""
    pins = {"tp": 1, "cp": 1, "pp": 1, "dp": 4}
    asked = read_request(
        model="gpt2-xl", cluster="dgx-h100", gpus=7, global_batch=16, seq_len=1024, pin=pins
    )
    made = fastest_plan(asked)
    assert made.predicted is not None
    per_s = 16 * 1024 / made.predicted.step_time_s
    assert f"{per_s:,.0f} tokens/s, {per_s / 4:,.0f} a GPU" in text(*first_screen(made), width=200)


def test_the_first_screen_is_twenty_lines_of_eighty() -> None:
    plan = priced_plan(tp=2, dp=4, num_micro_batches=16, sequence_parallel=True)
    lines = text(*first_screen(plan), width=80).splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 80
    assert not any("..." in line or "\N{HORIZONTAL ELLIPSIS}" in line for line in lines)


@pytest.mark.parametrize("word", ["batch_90", "batch_99.5", "90 % serial", "92.5 % overlapped"])
def test_words_with_a_figure_are_explained(word: str) -> None:
    assert meaning_of(word) is not None
    assert meaning_of(f"{word} or so") is None


def test_explain_prints_a_term() -> None:
    for word, term in (
        ("scale", "scale"),
        ("Pipeline-Bubble", "pipeline bubble"),
        ("stages", "stage"),
    ):
        done = CliRunner().invoke(cli.main, ["explain", word])
        assert done.exit_code == 0
        assert done.stdout == f"{term}: {meanings()[term]}\n"
    for rule, sentence in (("batch-split", "= global_batch"), ("megatron-hybrid", "No Mamba-1")):
        done = CliRunner().invoke(cli.main, ["explain", rule])
        assert done.exit_code == 0
        assert done.stdout.startswith(f"{rule}: ")
        assert sentence in done.stdout
    both = CliRunner().invoke(cli.main, ["explain", "hbm"])
    assert both.stdout.startswith(
        f"HBM: {meanings()['HBM']} The rule of this name: peak memory <= "
    )
    assert "update of the actor" in CliRunner().invoke(cli.main, ["explain", "grpo"]).stdout
    near = CliRunner().invoke(cli.main, ["explain", "scalee"])
    assert near.exit_code == 2
    assert "did you mean 'scale'" in near.stderr


def keys_of(data: object) -> set[str]:
    if isinstance(data, dict):
        return set(data) | {key for value in data.values() for key in keys_of(value)}
    return {key for value in data for key in keys_of(value)} if isinstance(data, list) else set()


RUN = """\
model: llama-3-8b
cluster: dgx-h100
run: {seq_len: 4096, global_batch: 64, tp: 4, dp: 2, sequence_parallel: true, zero_stage: 1}
measured: {step_time_s: 6.0}
"""


@pytest.mark.slow
def test_every_key_that_other_commands_print_is_explained(tmp_path: Path) -> None:
    plan = priced_plan("mixtral-8x7b", tp=2, cp=2, dp=2, pp=2, num_micro_batches=8)
    folder, file = str(tmp_path), str(tmp_path / "run.yaml")
    (tmp_path / "plan.yaml").write_text(plan_text(plan), encoding="utf-8")
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    commands = (
        *(("explain", folder, "--no-best"), ("traffic", folder), ("overlap", folder)),
        *(("roofline", folder), ("verify", folder), ("estimate", file), ("validate", file)),
        *(("model", "mixtral-8x7b"), ("catalog", "clusters"), ("catalog", "devices")),
        ("pipeline", "--pp", "4", "--micro-batches", "16"),
        (
            "collective",
            "--op",
            "all-reduce",
            "--bytes",
            "1GB",
            "--ranks",
            "16",
            "--cluster",
            "dgx-h100",
        ),
    )
    words: set[str] = set()
    for command in commands:
        done = CliRunner().invoke(cli.main, [*command, "--json"])
        assert done.exit_code in (0, 1), done.stderr
        words |= keys_of(json.loads(done.stdout))
    names = {"h100-sxm-80gb", "dgx-h100"}
    assert len(words) > 200
    assert unexplained(words - names) == []
