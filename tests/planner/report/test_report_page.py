"""The page of a plan: everything in it, nothing from elsewhere, nothing that runs."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.plan.texts import plan_text
from meshwright.planner.report.html import block_html
from meshwright.planner.report.plan_page import plan_page
from meshwright.planner.report.view import (
    BAR,
    Bullets,
    Column,
    Facts,
    Heading,
    Line,
    Table,
    line,
    sections,
)
from tests.planner.analysis.test_trace import piped
from tests.planner.plan.test_planner_service import request

VOID = {"meta", "rect", "circle", "polyline", "path"}


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


def test_the_page_stands_alone(drawn: Plan) -> None:
    read = Reader(plan_page(drawn))
    assert not {"script", "link", "img", "iframe", "object"} & set(read.tags)
    names = {name for name, _ in read.attributes}
    assert not {name for name in names if name.startswith("on")} | {"src", "href"} & names
    policy = next(value for name, value in read.attributes if name == "content" and "src" in value)
    assert policy.startswith("default-src 'none'")
    for title in (
        "Layout",
        "The pipeline",
        "The ranks on the fabric",
        "Predicted",
        "Cuts, by phase",
    ):
        assert title in read.words
    assert read.tags.count("svg") == 2
    assert drawn.predicted is not None
    assert f"{drawn.predicted.step_time_s:.3f} s" in read.words
    assert plan_text(drawn) in read.words


def test_the_same_plan_makes_the_same_page(drawn: Plan) -> None:
    assert plan_page(drawn) == plan_page(drawn)


def test_names_from_outside_stay_text() -> None:
    evil = "</title><script>alert(1)</script>"
    asked = request(gpus=8, model=request().model.model_copy(update={"name": evil}))
    read = Reader(plan_page(fastest_plan(asked)))
    assert "script" not in read.tags
    assert any(evil in words for words in read.words)


def test_a_plan_without_layout_has_a_page_too() -> None:
    asked = replace(request(gpus=8), pins={"tp": 8, "micro_batch": 64})
    found = fastest_plan(asked)
    assert found.status == "infeasible"
    read = Reader(plan_page(found))
    assert "These cannot all be kept" in read.words
    assert "svg" not in read.tags


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


def test_the_command(drawn: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(plan_text(drawn), encoding="utf-8")
    target = tmp_path / "page" / "plan.html"
    line_ = ["report", str(tmp_path / "plan.yaml"), "-o", str(target)]
    assert CliRunner().invoke(main, line_).exit_code == 0
    assert target.read_text(encoding="utf-8") == plan_page(drawn)
    assert CliRunner().invoke(main, line_).exit_code == 2
    (tmp_path / "broken.yaml").write_text("schema: 1\n", encoding="utf-8")
    done = CliRunner().invoke(
        main, ["report", str(tmp_path / "broken.yaml"), "-o", str(tmp_path / "b.html")]
    )
    assert done.exit_code == 2
    assert not (tmp_path / "b.html").exists()
