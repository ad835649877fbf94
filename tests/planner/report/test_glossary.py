"""Every word that a plan's screen uses is in the glossary, which the package holds."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from meshwright import cli, plan
from meshwright.planner.report.first_screen import first_screen
from meshwright.planner.report.glossary import meaning_of, meanings
from meshwright.planner.report.plan_view import plan_view
from meshwright.planner.report.view import Facts, Table
from tests.planner.report.test_views import text
from tests.priced_plans import priced_plan

PLAIN = {"part", "time", "share", "sent", "figure", "mark", "peak", "of step", "of usable", "plan"}
"""Headings that mean no more than they say."""


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
def test_every_term_of_the_screen_is_explained(model: str) -> None:
    plan = priced_plan(model, tp=2, cp=2, dp=2, pp=2, num_micro_batches=8, sequence_parallel=True)
    assert plan.predicted is not None
    terms = [
        name for block in plan_view(plan) if isinstance(block, Facts) for name, _ in block.rows
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
    made = plan("gpt2-xl", cluster="dgx-h100", gpus=7, global_batch=16, seq_len=1024, pin=pins)
    assert made.predicted is not None
    per_s = 16 * 1024 / made.predicted.step_time_s
    assert f"{per_s:,.0f} tokens/s, {per_s / 4:,.0f} a GPU" in text(*first_screen(made), width=200)


def test_the_first_screen_is_twenty_lines_of_eighty() -> None:
    plan = priced_plan(tp=2, dp=4, num_micro_batches=16, sequence_parallel=True)
    lines = text(*first_screen(plan), width=80).splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 80
    assert not any("..." in line or "\N{HORIZONTAL ELLIPSIS}" in line for line in lines)


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
    near = CliRunner().invoke(cli.main, ["explain", "scalee"])
    assert near.exit_code == 2
    assert "did you mean 'scale'" in near.stderr
