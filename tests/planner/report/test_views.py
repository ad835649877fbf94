"""The view model, and what the terminal makes of it."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest
from rich.console import Console

from meshwright.model_specs.adapters import AdapterSpec
from meshwright.planner.drawing import (
    LogScale,
    amount,
    batch_words,
    counted,
    gigabytes,
    hours,
    ranges,
    seconds,
)
from meshwright.planner.report.explain_view import compare_view, comparison
from meshwright.planner.report.run_view import run_view
from meshwright.planner.report.view import (
    BAR,
    COUNT,
    PERCENT,
    SECONDS,
    Bar,
    Block,
    Bullets,
    Column,
    Facts,
    Heading,
    Table,
    Words,
    decimals,
    line,
    printed,
    view_text,
)
from meshwright.planner.runs.prediction import prediction_of, price_run
from meshwright.planner.runs.run_file import run_from_mapping
from tests.plans import make_plan


@pytest.mark.parametrize("module", ["planner.report.view", "planner.drawing"])
def test_the_examples_run(module: str) -> None:
    result = doctest.testmod(import_module(f"meshwright.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def text(*blocks: Block, width: int = 60) -> str:
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        for block in blocks:
            console.print(printed(block))
    return captured.get()


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({"out_of_memory": True}, "the run ended out of memory; predicted to fit, wrongly: "),
        ({"step_time_s": 9.0}, "Slower than 19 of 20 measured steps beside their prices: "),
        ({"step_time_s": 6.9}, None),
    ],
)
def test_a_run_says_how_far_it_was_off(measured: dict[str, object], words: str | None) -> None:
    """Of a run out of memory nothing was said, of one far off the percentage alone."""
    settings = {"gpus": 16, "tp": 2, "seq_len": 8192, "global_batch": 128, "zero_stage": 1}
    row = {"model": "llama-3-8b", "cluster": "dgx-h100", "measured": measured}
    run = run_from_mapping(row | {"run": settings | {"sequence_parallel": True}}, where="run")
    shown = " ".join(text(*run_view(price_run(run, Path("run")))).split())
    assert "Against the measurement" in shown
    if words is None:
        assert "Slower than" not in shown
    else:
        assert words in shown


def test_memory_is_compared_as_it_was_measured() -> None:
    """Of a log of rank 0 the fullest rank was compared here, and rank 0 by `validate`."""
    settings = {"gpus": 16, "tp": 2, "pp": 4, "dp": 2, "seq_len": 8192, "global_batch": 128}
    measured = {"memory_gib": 20.0, "memory_note": "peak allocated, rank 0"}
    row = {"model": "llama-3-8b", "cluster": "dgx-h100", "measured": measured}
    run = run_from_mapping(row | {"run": settings | {"recompute": "full"}}, where="run")
    priced, told = price_run(run, Path("run")), prediction_of(run).memory_gib
    assert told is not None
    assert told < max(priced.predicted.memory_gib) - 1.0
    assert f"memory of rank 0 {told:.1f} GiB" in " ".join(text(*run_view(priced)).split())


def test_a_column_writes_its_values() -> None:
    columns = [
        Column("job"),
        Column("step", SECONDS, absent=""),
        Column("share", PERCENT),
        Column("free", decimals(1, sign=True), unit="GiB"),
        Column("GPUs", COUNT),
    ]
    table = Table(columns, [["a", 0.25, 0.5, -1.25, 4096], ["b", None, None, "none", 8]])
    assert table.head == ["job", "step", "share", "free GiB", "GPUs"]
    assert [[str(cell) for cell in row] for row in table.cells] == [
        ["a", "250 ms", "50.0 %", "-1.2", "4,096"],
        ["b", "", "-", "none", "8"],
    ]


def test_the_terminal_shows_every_kind_of_block() -> None:
    shown = text(
        Heading("Title"),
        line(Words("bold", "bold"), " and plain"),
        Facts([("name", "value")]),
        Bullets(["first", "second"]),
        Table([Column("part"), Column("share", BAR)], [["x", 0.5], ["y", 2.0]]),
    )
    lines = [each.rstrip() for each in shown.splitlines()]
    assert lines[:5] == ["", "Title", "bold and plain", "name  value", "- first"]
    assert lines[-2:] == ["x     " + "█" * 10 + "·" * 10, "y     " + "█" * 20]


def test_cells_are_folded_and_never_cut() -> None:
    name = "a-name-that-is-longer-than-the-terminal-is-wide"
    shown = text(Table([Column("name"), Column("n", COUNT)], [[name, 1]]), width=20)
    assert name in "".join(row.split()[0] for row in shown.splitlines()[2:])


def test_words_and_headings_are_folded_before_numbers() -> None:
    columns = [
        Column("cluster"),
        Column("tokens/s a GPU", COUNT),
        Column("free", COUNT, unit="GiB"),
    ]
    table = Table(columns, [["dgx-a100-40gb", 1_234_567, 1_000]])
    assert "dgx-a100-40gb" in text(table, width=60)
    rows = text(table, width=26).splitlines()
    assert any("1,234,567" in row and "1,000" in row for row in rows)
    # Too narrow for the numbers: folded like the rest, and still not cut.
    digits = "".join(text(table, width=12).split())
    assert all(digits.count(digit) >= 1 for digit in "1234567")


def test_columns_move_closer_before_numbers_are_folded() -> None:
    columns = [Column("cluster"), *(Column(name, COUNT) for name in ("dollars", "tokens", "kWh"))]
    table = Table(columns, [["h200.yaml", 746_287, 228_688, 163_250]])
    rows = text(table, width=29).splitlines()
    assert any("746,287 228,688 163,250" in row for row in rows)
    assert max(map(len, rows)) <= 29


def test_a_file_cannot_steer_the_terminal() -> None:
    evil = "\x1b[2Jgone"
    table = Table([Column("x")], [[evil]])
    shown = text(line(evil), Facts([(evil, evil)]), Bullets([evil]), table)
    assert "\x1b" not in shown


def test_a_bar_is_never_more_than_full() -> None:
    assert [Bar(share).filled for share in (-1.0, 0.25, 3.0)] == [0.0, 0.25, 1.0]


def test_quantities() -> None:
    assert [seconds(value) for value in (4096.0, 123.456, 12.3456, 0.345, 0.0123, 6.7e-6)] == [
        "4,096 s", "123.46 s", "12.346 s", "345 ms", "12.3 ms", "6.7 us",
    ]  # fmt: skip
    assert [hours(value) for value in (30.0, 7200.0, 400_000.0)] == ["30 s", "2.0 h", "4.6 d"]
    assert [amount(value) for value in (950.0, 7.06e10, 9.996e11)] == ["950", "70.6 B", "1,000 B"]
    assert [gigabytes(value) for value in (5e6, 3.2e9)] == ["5.00 MB", "3.20 GB"]
    assert batch_words(1, 1) == "1 sequence x 1 token"
    assert batch_words(2048, 8192) == "2,048 sequences x 8,192 tokens"
    assert [counted(1, "leaf", "leaves"), counted(2, "leaf", "leaves")] == ["1 leaf", "2 leaves"]
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges([]) == ""


def test_logarithmic_scales() -> None:
    twos = LogScale.of_twos([3, 9])
    assert (twos.low, twos.high, twos.ticks) == (2, 16, (2, 4, 8, 16))
    assert [twos.place(value) for value in (2, 4, 16)] == pytest.approx([0, 1 / 3, 1])
    alone = LogScale.of_twos([8])
    assert (alone.low, alone.high) == (8, 16)
    tens = LogScale.of_tens([0.5, 30], 2.0)
    assert (tens.low, tens.high) == (0.25, 60)
    assert tens.ticks == (0.5, 1, 2, 5, 10, 20, 50)


def test_plans_of_unlike_trainings_are_told_apart_either_way() -> None:
    """Documents leave out what is plain: a plan of adapters beside one without them ended in a KeyError."""
    plain = make_plan(dp=8)
    lora = plain.model_copy(
        update={"inputs": plain.inputs.model_copy(update={"adapters": AdapterSpec(method="lora")})}
    )
    for plans in ((plain, lora), (lora, plain)):
        assert comparison(plans)["differing_inputs"] == ["adapters"]
        words = view_text(compare_view(("a", "b"), plans))
        assert "the plans answer different questions: adapters differs" in words
