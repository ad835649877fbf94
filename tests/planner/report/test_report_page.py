"""The page of a plan: everything in it, nothing from elsewhere, no script but its own."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64decode, b64encode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.planner.drawing import count, rounded_seconds
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.plan.texts import plan_text, workload_of_plan
from meshwright.planner.report import view as html
from meshwright.planner.report.plan_page import plan_page
from meshwright.planner.report.prediction_view import memory_parts_view
from meshwright.planner.report.view import (
    BAR,
    Bullets,
    Column,
    Facts,
    Heading,
    Line,
    Table,
    block_html,
    line,
    sections,
)
from tests.planner.analysis.test_trace import piped
from tests.planner.plan.test_planner_service import request
from tests.priced_plans import priced_plan

ECHARTS_6_1_0 = "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"
"""SHA-256 of dist/echarts.min.js of the npm package."""
VOID = {"meta", "wbr", "rect", "circle", "polyline", "path"}


class Reader(HTMLParser):
    """Tags, attributes and text of a page; says where tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.words.append(data)


@pytest.fixture(scope="module")
def drawn() -> Plan:
    return piped("1f1b")


@pytest.fixture(scope="module")
def text(drawn: Plan) -> str:
    return plan_page(drawn)


def test_the_page_stands_alone(drawn: Plan, text: str) -> None:
    read = Reader(text)
    assert not {"link", "img", "iframe", "object"} & set(read.tags)
    names = {name for name, _ in read.attributes}
    assert not {name for name in names if name.startswith("on")} | {"src"} & names
    targets = [value for name, value in read.attributes if name == "href"]
    assert targets
    saved = [target for target in targets if not target.startswith("#")]
    assert len(saved) == 1
    kind, _, data = saved[0].partition(";base64,")
    assert kind == "data:text/plain;charset=utf-8"
    assert b64decode(data).decode() == plan_text(drawn)
    for title in ("Where the step goes", "The pipeline", "The ranks on the fabric", "Roofline"):
        assert title in read.words
    assert drawn.predicted is not None
    assert (
        rounded_seconds(drawn.predicted.step_time_s).replace(" ", "\N{NO-BREAK SPACE}")
        in read.words
    )
    assert len(text.encode()) < 3_000_000


def test_only_its_own_scripts_may_run(text: str) -> None:
    read = Reader(text)
    policy = next(value for name, value in read.attributes if name == "content" and "src" in value)
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_the_library_is_as_it_was_published() -> None:
    folder = Path(html.__file__).parent / "page"
    library = (folder / html.LIBRARY).read_bytes()
    assert hashlib.sha256(library).hexdigest() == ECHARTS_6_1_0
    assert "Apache License" in (folder / "echarts.LICENSE").read_text(encoding="utf-8")
    assert "Apache ECharts" in (folder / "echarts.NOTICE").read_text(encoding="utf-8")


def test_the_figures_are_those_of_the_plan(drawn: Plan, text: str) -> None:
    figures = figures_of(text)
    assert drawn.predicted is not None
    parts = sum(part["seconds"] for part in figures["breakdown"])
    assert parts == pytest.approx(drawn.predicted.step_time_s, rel=0.01)
    peaks = [sum(stage.values()) for stage in figures["memory"]["stages"]]
    assert peaks == pytest.approx(drawn.predicted.memory_gib)
    nodes = [
        node
        for pod in figures["fabric"]["pods"]
        for leaf in pod["leaves"]
        for node in leaf["nodes"]
    ]
    assert sorted(rank for _, on in nodes for rank in on) == list(range(drawn.inputs.gpus))
    assert "what_if" not in figures


def test_cards_say_where_figures_may_lie(drawn: Plan, text: str) -> None:
    """A step's band holds for rates the other way round; memory has that of measured peaks."""
    assert drawn.predicted is not None
    band, step_s = drawn.predicted.error_band, drawn.predicted.step_time_s
    notes = re.findall(r"<small>(.*?)</small>", text)
    low, high = (
        rounded_seconds(step_s * edge).replace(" ", "&nbsp;") for edge in (band.low, band.high)
    )
    assert notes[0] == f"likely {low} to {high}"
    rate = drawn.predicted.tokens_per_s_per_gpu
    assert notes[1] == f"likely {count(rate / band.high)} to {count(rate / band.low)}"
    assert len(notes) == 5


def test_memory_is_told_by_parts(drawn: Plan) -> None:
    """The parts of a row add up to its peak, to what tables round."""
    assert drawn.predicted is not None
    (block, *_) = memory_parts_view(drawn.predicted, workload_of_plan(drawn))
    assert isinstance(block, Table)
    for row in block.rows:
        *parts, peak_gib, share = (value for value in row[1:] if isinstance(value, float))
        assert sum(parts) == pytest.approx(peak_gib, abs=0.2)
        assert share == pytest.approx(peak_gib / usable_hbm_gib(workload_of_plan(drawn)))


def figures_of(text: str) -> dict[str, Any]:
    (data,) = re.findall(r'id="figures">(.*?)</script>', text)
    document: dict[str, Any] = json.loads(data)
    return document


def test_names_from_outside_stay_text() -> None:
    evil = "</title><script>alert(1)</script>"
    named = request().model.model_copy(update={"name": evil})
    text = plan_page(priced_plan(named, dp=8))
    assert "<script>alert" not in text
    assert any(evil in words for words in Reader(text).words)


@pytest.mark.slow
def test_a_plan_without_layout_has_a_page_too() -> None:
    asked = replace(request(gpus=8), pins={"tp": 8, "micro_batch": 64})
    found = fastest_plan(asked)
    assert found.status == "infeasible"
    read = Reader(plan_page(found))
    assert "These cannot all be kept" in read.words
    assert "script" not in read.tags


def test_views_become_tables_lists_and_lines() -> None:
    table = block_html(Table([Column("a"), Column("b", BAR)], [["x<y", 0.25]]))
    assert '<td class="left">x&lt;y</td>' in table
    assert 'style="width:25%"' in table
    assert 'class="bar over"' in block_html(Table([Column("a", BAR)], [[1.5]]))
    assert block_html(Bullets(["one", "two"])) == "<ul><li>one</li><li>two</li></ul>"
    assert block_html(Facts([("name", "value")])) == "<dl><dt>name</dt><dd>value</dd></dl>"
    assert block_html(Line()) == ""
    parts = sections([line("before"), Heading("Title"), line("inside"), Heading("Empty")])
    assert [title for title, _ in parts] == ["", "Title"]


def test_the_command(drawn: Plan, text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(plan_text(drawn), encoding="utf-8")
    target = tmp_path / "page" / "plan.html"
    line_ = ["report", str(tmp_path / "plan.yaml"), "-o", str(target)]
    assert CliRunner().invoke(main, line_).exit_code == 0
    assert target.read_text(encoding="utf-8") == text
    assert CliRunner().invoke(main, line_).exit_code == 2
    (tmp_path / "broken.yaml").write_text("schema: 1\n", encoding="utf-8")
    done = CliRunner().invoke(
        main, ["report", str(tmp_path / "broken.yaml"), "-o", str(tmp_path / "b.html")]
    )
    assert done.exit_code == 2
    assert not (tmp_path / "b.html").exists()
