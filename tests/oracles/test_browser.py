"""A plan's page in a real browser: shown whole, legible, with controls that say what `plan` says."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.planner.drawing import count, rounded_seconds
from meshwright.planner.many.sweep import WhatIfParams, what_if
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.report.plan_page import plan_page
from meshwright.planner.request.plan_request import PlanRequest
from tests.oracles.browser import BROWSER, Tab, tab

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine"),
]
SWEEP = {"gpus": (16, 32), "global_batch": (256, 512)}
CHARTS = {
    "waterfall",
    "variants", "breakdown", "pipeline", "memory", "ranks", "levels", "matrix", "roofline", "near",
}  # fmt: skip
SHORTEST_TEXT_PX = 10
# Every text of the charts with its box in the window and its size; and texts of the page itself.
TEXTS = """[...document.querySelectorAll('.chart')].map(chart => [chart.id,
  [...chart.querySelectorAll('svg text')].filter(text => text.textContent.trim()).map(text => {
    const box = text.getBoundingClientRect();
    return [text.textContent, box.left, box.top, box.right, box.bottom,
            parseFloat(getComputedStyle(text).fontSize)];
  })])"""
SIZES = """[...new Set([...document.querySelectorAll('body *')].map(
  element => parseFloat(getComputedStyle(element).fontSize)))]"""


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A long pipeline, beside a recipe that is run today."""
    return meshwright.plan(
        "llama-3-8b",
        cluster="dgx-h100",
        gpus=16,
        global_batch=512,
        seq_len=8192,
        pin="pp=4,tp=2,micro_batch=1,recompute=none",
        baseline="llama3_8b_pretrain_8gpu_h100_bf16_config",
        robustness=False,
    )


@pytest.fixture(scope="module")
def page(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    other_plans = what_if(plan, SWEEP, WhatIfParams(workers=1))
    path.write_text(plan_page(plan, other_plans), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def shown(browser: Tab, page: Path, width: int = 1280) -> None:
    browser.troubles.clear()
    browser.open(page, width=width)
    browser.wait("document.documentElement.dataset.drawn")
    assert browser.troubles == []


def figure(browser: Tab, name: str) -> str:
    return str(browser.run(f"document.querySelector('[data-figure={name}]').textContent"))


@pytest.mark.parametrize("width", [390, 768, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_all_charts_are_legible(browser: Tab, page: Path, width: int, dark: bool) -> None:
    browser.dark(on=dark)
    shown(browser, page, width)
    assert browser.run("document.documentElement.scrollWidth") <= width
    texts = dict(browser.run(TEXTS))
    assert set(texts) == {f"chart-{name}" for name in CHARTS}
    for chart, labels in texts.items():
        if chart == "chart-ranks":  # its thousands of cells lie on a canvas
            assert browser.run("document.querySelector('#chart-ranks canvas').width") > 0
            continue
        assert labels, chart
        for index, (words, left, top, right, bottom, size) in enumerate(labels):
            assert size >= SHORTEST_TEXT_PX, (chart, words)
            for other, *box, _ in labels[index + 1 :]:
                beside = right <= box[0] + 1 or box[2] <= left + 1
                above = bottom <= box[1] + 1 or box[3] <= top + 1
                assert beside or above, (chart, words, other)
    assert min(browser.run(SIZES)) >= SHORTEST_TEXT_PX


def test_dark_colours_are_dark(browser: Tab, page: Path) -> None:
    brightness = {}
    for dark in (False, True):
        browser.dark(on=dark)
        shown(browser, page)
        colour = browser.run("getComputedStyle(document.body).backgroundColor")
        ink = browser.run("document.querySelector('#chart-memory text').getAttribute('fill')")
        brightness[dark] = sum(map(int, re.findall(r"\d+", colour))), ink
    assert brightness[False][0] > 600
    assert brightness[True][0] < 200
    assert brightness[False][1] != brightness[True][1]


def test_the_controls_show_what_plan_finds(browser: Tab, page: Path, plan: Plan) -> None:
    browser.dark(on=False)
    shown(browser, page)
    controls = "document.querySelectorAll('#controls select')"
    assert browser.run(f"{controls}.length") == len(SWEEP)
    for at_gpus, gpus in enumerate(SWEEP["gpus"]):
        for at_batch, batch in enumerate(SWEEP["global_batch"]):
            browser.run(
                f"[{at_gpus}, {at_batch}].forEach((at, index) => {{ const control = {controls}[index];"
                "control.value = String(at); control.dispatchEvent(new Event('change')); })"
            )
            asked = PlanRequest.of_inputs(plan.inputs, gpus=gpus, global_batch=batch)
            planned = fastest_plan(asked)
            assert planned.predicted is not None
            tokens = planned.predicted.tokens_per_s_per_gpu * gpus
            assert figure(browser, "step") == rounded_seconds(planned.predicted.step_time_s)
            assert figure(browser, "throughput") == count(tokens)
            assert figure(browser, "memory") == f"{max(planned.predicted.memory_gib):.1f}"
    browser.run("document.getElementById('what-if-reset').click()")
    assert plan.predicted is not None
    assert figure(browser, "step") == rounded_seconds(plan.predicted.step_time_s)


def test_the_controls_are_reached_and_moved_by_keys(browser: Tab, page: Path) -> None:
    shown(browser, page)
    before = figure(browser, "step")
    for _ in range(40):
        browser.press("Tab")
        if browser.run("document.activeElement.closest('#controls') !== null"):
            break
    assert browser.run("document.activeElement.tagName") == "SELECT"
    browser.press("ArrowDown")
    browser.wait(
        f"document.querySelector('[data-figure=step]').textContent !== {json.dumps(before)}"
    )


def test_charts_are_true_to_the_number(browser: Tab, page: Path, plan: Plan) -> None:
    shown(browser, page)
    assert plan.predicted is not None
    series: list[dict[str, Any]] = browser.run(
        "echarts.getInstanceByDom(document.getElementById('chart-memory')).getOption().series"
        ".map(series => ({data: series.data}))"
    )
    stages = [sum(stage) for stage in zip(*(each["data"] for each in series), strict=True)]
    assert stages == pytest.approx(plan.predicted.memory_gib)
    drawn = browser.run("document.querySelectorAll('#chart-pipeline svg path').length")
    phases = figures(page)["pipeline"]["phases"]
    assert [phase["name"] for phase in phases] == ["warm-up", "one period", "cool-down"]
    assert drawn >= sum(len(phase["passes"]) for phase in phases)
    near = figures(page)["near"]["layouts"]
    assert [layout["is_plan"] for layout in near].count(True) == 1


def figures(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    (data,) = re.findall(r'id="figures">(.*?)</script>', text)
    document: dict[str, Any] = json.loads(data)
    return document


def test_it_is_small_soon_there_and_prints(browser: Tab, page: Path) -> None:
    assert page.stat().st_size < 3_000_000
    shown(browser, page)
    ready_ms = float(browser.run("document.documentElement.dataset.ready"))
    print(f"interactive after {ready_ms:.0f} ms, {page.stat().st_size:,} bytes")
    printed = base64.b64decode(browser.ask("Page.printToPDF", printBackground=True)["data"])
    assert printed.startswith(b"%PDF")
    assert len(printed) > 50_000
    assert browser.troubles == []
