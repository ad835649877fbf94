"""Predicted against measured, drawn: `validate --plot`, and the pictures of docs/accuracy.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result

from benchmarks.accuracy_plots import group_bars_svg
from meshwright import cli
from meshwright.planner.report.run_view import scatter_svg
from tests.places import DATA

RUNS = DATA / "published_runs.yaml"
MODEL = "llama-2-7b"
SVG = "{http://www.w3.org/2000/svg}"


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


def test_picture_and_json_go_together(runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "plot.SVG"
    result = validate(runs, "--json", "--plot", path)
    assert result.exit_code == 0
    assert result.stdout.startswith('{"schema": 1')
    assert path.read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plot.pdf", ".svg"),
        ("plot.png", ".svg"),
        ("plot", ".svg"),
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


def test_dots_lie_where_the_rows_are() -> None:
    """Both axes are the same logarithmic scale, so a dot's height over the diagonal is its error."""
    picture = ElementTree.fromstring(
        scatter_svg([("x", 1.0, 2.0), ("y", 3.0, 3.0), ("x", 4.0, 2.0)], "title")
    )
    dots = {}
    for shape in picture.iter(f"{SVG}circle"):
        tip = shape.find(f"{SVG}title")
        if tip is not None and tip.text:
            dots[tip.text.split(":")[0], float(shape.attrib["cx"])] = float(shape.attrib["cy"])
    (left, left_y), (right, right_y) = sorted(
        (x, y) for (name, x), y in dots.items() if name == "x"
    )
    ((middle, middle_y),) = [(x, y) for (name, x), y in dots.items() if name == "y"]
    assert left < middle < right
    assert left_y == pytest.approx(right_y, abs=0.02), "both are predicted to take 2 s"
    assert middle_y < left_y
    across_per_e = (right - left) / np.log(4)
    assert middle == pytest.approx(left + across_per_e * np.log(3), abs=0.02)
    down_per_e = (left_y - middle_y) / np.log(1.5)
    assert down_per_e / across_per_e == pytest.approx(380 / 640, abs=1e-3)


def test_bars_are_as_long_as_errors() -> None:
    errors = {"a (2)": (1.0, 2.0), "b (3)": (3.0, 4.0)}
    picture = ElementTree.fromstring(group_bars_svg(errors, ("fitted", "left out"), "title"))
    bars = [shape for shape in picture.iter(f"{SVG}rect") if shape.find(f"{SVG}title") is not None]
    lengths = [float(bar.attrib["width"]) for bar in bars]
    assert [length / lengths[0] for length in lengths] == pytest.approx([1.0, 2.0, 3.0, 4.0])
