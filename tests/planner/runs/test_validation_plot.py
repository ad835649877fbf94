"""Predicted against measured, drawn: `validate --plot`, and the pictures of docs/accuracy.md."""

from __future__ import annotations

import json
import re
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result

from meshwright import cli
from meshwright.planner.report.validation_plot import group_bars, scatter, write_picture
from tests.places import DATA

RUNS = DATA / "published_runs.yaml"
MODEL = "llama-2-7b"


def row(name: str, step_time_s: float, **changed: object) -> dict[str, Any]:
    run = {
        "seq_len": 1024,
        "global_batch": 64,
        "micro_batch": 2,
        "tp": 2,
        "pp": 2,
        "dp": 4,
        "zero_stage": 1,
    }
    measured = {"measured": {"step_time_s": step_time_s}}
    return {
        "id": name,
        "model": MODEL,
        "cluster": "dgx-a100",
        "run": {**run, **changed},
        **measured,
    }


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "runs.yaml"
    path.write_text(
        yaml.safe_dump({"runs": [row("a", 2.0), row("b", 3.0, tp=1, dp=8)]}), encoding="utf-8"
    )
    return path


def validate(*args: object) -> Result:
    return CliRunner().invoke(cli.main, ["validate", *map(str, args)], prog_name="meshwright")


def test_a_drawn_validation_shows_every_row_and_is_the_same_twice(
    runs: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    for path in (first, second):
        result = validate(runs, "--plot", path)
        assert result.exit_code == 0, result.output
    text = first.read_text(encoding="utf-8")
    assert text == second.read_text(encoding="utf-8")
    assert "Step time of 2 measured runs" in text
    assert "a100-sxm-80gb" in text
    assert not re.search(r"20\d\d-\d\d-\d\d", text), "no date"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "first.svg",
        "runs.yaml",
        "second.svg",
    ]


def test_png_and_json_go_together(runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "plot.PNG"
    result = validate(runs, "--json", "--plot", path)
    assert result.exit_code == 0
    assert result.stdout.startswith('{"schema": 1')
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plot.pdf", ".png or .svg"),
        ("plot", ".png or .svg"),
        ("none/plot.svg", "no folder"),
        ("dir.svg", "not a"),
    ],
)
def test_a_path_that_cannot_be_drawn_to_is_refused_before_any_work(
    runs: Path, tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / "dir.svg").mkdir()
    result = validate(runs, "--plot", tmp_path / name)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_without_matplotlib_the_message_says_what_to_install(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = util.find_spec
    missing = "meshwright.planner.report.validation_plot.find_spec"
    monkeypatch.setattr(missing, lambda name: None if name == "matplotlib" else find(name))
    result = validate(runs, "--plot", tmp_path / "plot.svg")
    assert result.exit_code == 2
    assert "pip install 'meshwright[plot]'" in result.stderr
    assert not (tmp_path / "plot.svg").exists()
    assert validate(runs).exit_code == 0, "without --plot it is not needed"


def test_rows_without_a_measurement_leave_nothing_to_draw(tmp_path: Path) -> None:
    path = tmp_path / "runs.yaml"
    unmeasured = {name: value for name, value in row("a", 1.0).items() if name != "measured"}
    path.write_text(yaml.safe_dump({"runs": [unmeasured]}), encoding="utf-8")
    result = validate(path, "--plot", tmp_path / "plot.svg")
    assert result.exit_code == 2
    assert "nothing to draw" in result.stderr


def test_the_error_of_a_row_is_told_in_seconds(runs: Path) -> None:
    data = json.loads(validate(runs, "--json").stdout)
    for found in data["rows"]:
        expected = found["predicted"]["step_time_s"] - found["measured"]["step_time_s"]
        assert found["error_s"] == pytest.approx(expected)
        assert found["error_pct"] == pytest.approx(
            100 * expected / found["measured"]["step_time_s"]
        )
    shown = f"{data['rows'][0]['error_s']:+.3f}"
    assert shown in validate(runs).stdout


def test_dots_lie_where_the_rows_are_and_bars_are_as_long_as_errors(tmp_path: Path) -> None:
    dots = scatter([("x", 1.0, 2.0), ("y", 3.0, 4.0), ("x", 5.0, 6.0)], "title").axes[0]
    lines = {line.get_label(): np.array(line.get_data()).T.tolist() for line in dots.get_lines()}
    assert lines["x"] == [[1.0, 2.0], [5.0, 6.0]]
    assert lines["y"] == [[3.0, 4.0]]
    figure = group_bars({"a (2)": (1.0, 2.0), "b (3)": (3.0, 4.0)}, ("fitted", "left out"), "title")
    lengths = [bar.get_extents().width for bar in figure.axes[0].patches]
    assert [length / lengths[0] for length in lengths] == pytest.approx([1.0, 3.0, 2.0, 4.0])
    write_picture(figure, tmp_path / "bars.svg")
    assert "left out" in (tmp_path / "bars.svg").read_text(encoding="utf-8")
