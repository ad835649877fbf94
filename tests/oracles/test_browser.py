"""A plan's page in a real browser: shown whole, legible, with controls that say what `plan` says."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import meshwright
from meshwright.cli import main
from meshwright.planner.drawing import count, rounded_seconds
from meshwright.planner.many.sweep import WhatIfParams, what_if
from meshwright.planner.mixed.document import read_mixed_answer
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.report.mixed_view import mixed_page
from meshwright.planner.report.plan_page import plan_page
from meshwright.planner.request.plan_request import PlanRequest
from tests.oracles.browser import BROWSER, Tab, axe_core, judged, tab

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine"),
]
SWEEP = {"gpus": (16, 32), "global_batch": (256, 512)}
CHARTS = {
    "waterfall",
    "variants", "breakdown", "pipeline", "memory", "levels", "matrix", "roofline", "near",
}  # fmt: skip
SHORTEST_TEXT_PX = 10
DATA = Path(__file__).resolve().parent.parent / "data"
LISTED = {"n0-00", "n0-01", "n0-02", "n1-00", "n1-01", "n2-00", "n2-01", "n2-02"}
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


@pytest.fixture(scope="module")
def axe() -> str:
    return axe_core()


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
        assert labels, chart
        for index, (words, left, top, right, bottom, size) in enumerate(labels):
            assert size >= SHORTEST_TEXT_PX, (chart, words)
            assert "…" not in words
            assert "..." not in words
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


# What a page of any plan must hold.


MOST_WORDS = 3_000
MOST_BYTES = 3_000_000
MOST_MS = 1_000
WORDS = "document.body.innerText.split(/\\s+/).filter(Boolean).length"
UNFOLD = "document.querySelectorAll('details').forEach(each => { each.open = true; }); 0"
# Words of the page that lie on more than one line; a hyphen, a slash and an underscore may end a line.
BROKEN_WORDS = """(() => {
  const broken = [], walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (node.parentElement.closest('svg, option') || !node.parentElement.checkVisibility()) { continue; }
    for (const word of node.data.matchAll(/[^\\s\\-\\/]+/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
      if (lines.size > 1) { broken.push(word[0]); }
    }
  }
  return broken;
})()"""
# Sentences of the page, unfolded; not the answers of its controls.
SENTENCES = """[...document.querySelectorAll('main p:not([data-figure]), main li, main dd, .headline')]
  .map(each => each.textContent.trim()).filter(words => words.split(' ').length >= 5)"""


@pytest.fixture(scope="module")
def pages(page: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of plans: dense layers, experts, nodes listed here and there, unlike parts, a sweep."""
    folder = tmp_path_factory.mktemp("pages")
    made = {
        "dense": meshwright.plan(
            "llama-3-70b",
            cluster="superpod-h100",
            gpus=512,
            global_batch=512,
            seq_len=8192,
            time_limit_s=60,
        ),
        "experts": meshwright.plan(
            "qwen3-30b-a3b",
            cluster="dgx-h100",
            gpus=64,
            global_batch=256,
            seq_len=4096,
            time_limit_s=60,
        ),
        "listed": meshwright.plan(
            "llama-3-8b",
            cluster=DATA / "plans/three_leaves.yaml",
            global_batch=96,
            seq_len=8192,
            time_limit_s=60,
        ),
    }
    texts = {name: plan_page(each) for name, each in made.items()}
    asked = [
        "llama-2-7b",
        "--cluster",
        str(DATA / "defaults/h100_and_a100.yaml"),
        "-o",
        str(folder),
    ]
    sizes = ["--global-batch", "128", "--seq-len", "4096", "--time-limit", "60"]
    assert CliRunner().invoke(main, ["plan", *asked, *sizes]).exit_code == 0
    texts["mixed"] = mixed_page(read_mixed_answer(folder / "mixed_plan.yaml"))
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {**{name: folder / f"{name}.html" for name in texts}, "swept": page}


@pytest.mark.parametrize("kind", ["dense", "experts", "listed", "mixed", "swept"])
def test_every_page_keeps_its_limits(
    browser: Tab, pages: dict[str, Path], axe: str, kind: str
) -> None:
    """Bytes, time, words, nothing said twice, no word broken, nothing beyond the window, AA."""
    browser.dark(on=False)
    path = pages[kind]
    drawn_ms: list[int] = []
    # The shortest of some, as the machine may be busy with others' work.
    while not drawn_ms or (min(drawn_ms) > MOST_MS and len(drawn_ms) < 10):
        shown(browser, path)
        drawn_ms.append(int(browser.run("document.documentElement.dataset.drawn")))
    folded = browser.run(WORDS)
    browser.run(UNFOLD)
    unfolded, size = browser.run(WORDS), path.stat().st_size
    print(f"{kind}: {size:,} bytes, {min(drawn_ms)} ms, {folded} words, {unfolded} unfolded")
    assert size <= MOST_BYTES
    assert min(drawn_ms) <= MOST_MS
    assert folded < unfolded <= MOST_WORDS
    sentences = browser.run(SENTENCES)
    assert sentences
    assert [words for words in set(sentences) if sentences.count(words) > 1] == []
    for dark in (False, True):
        browser.dark(on=dark)
        for width in (390, 768, 1280):
            shown(browser, path, width)
            assert browser.run("document.documentElement.scrollWidth") <= width
            browser.run(UNFOLD)
            assert browser.run("document.documentElement.scrollWidth") <= width
            assert browser.run(BROKEN_WORDS) == []
            violations, rules_kept = judged(browser, axe)
            assert violations == []
            assert rules_kept > 8
    assert browser.troubles == []


def test_the_fabric_shows_every_rank_on_its_host(browser: Tab, pages: dict[str, Path]) -> None:
    """Leaves have frames with the names of the file, and every GPU shows its rank once."""
    shown(browser, pages["listed"])
    ranks = browser.run(
        "[...document.querySelectorAll('#fabric .gpu')].map(cell => Number(cell.textContent))"
    )
    assert sorted(ranks) == list(range(64))
    leaves = browser.run(
        "[...document.querySelectorAll('#fabric .leaf')].map(leaf => [leaf.firstChild.textContent,"
        " getComputedStyle(leaf).borderTopStyle,"
        " [...leaf.querySelectorAll('.node-name')].map(name => name.textContent)])"
    )
    assert [(name, border, len(nodes)) for name, border, nodes in leaves] == [
        ("leaf-0, 3", "solid", 3),
        ("leaf-1, 2", "solid", 2),
        ("leaf-2, 3", "solid", 3),
    ]
    assert {node for *_, nodes in leaves for node in nodes} == LISTED
    before = browser.run("document.querySelector('#fabric .gpu').style.background")
    browser.run(
        "(() => { const control = document.getElementById('rank-axis'); control.selectedIndex = 1;"
        "control.dispatchEvent(new Event('change')); })()"
    )
    cells = "[...document.querySelectorAll('#fabric .gpu')].map(cell => cell.style.background)"
    assert before
    assert len(set(browser.run(cells))) == int(
        browser.run("document.querySelectorAll('.swatch').length")
    )


def test_what_was_not_planned_together_is_grey(browser: Tab, plan: Plan, tmp_path: Path) -> None:
    """Of one change at a time two cannot be chosen, until the first is taken back."""
    path = tmp_path / "plan.html"
    document = what_if(plan, SWEEP, WhatIfParams(workers=1))
    now = {axis["name"]: axis["values"][axis["now"]] for axis in document["axes"]}
    document["rows"] = [
        row
        for row in document["rows"]
        if sum(row["values"][name] != now[name] for name in now) <= 1
    ]
    path.write_text(plan_page(plan, document), encoding="utf-8")
    browser.dark(on=False)
    shown(browser, path)
    grey = (
        "[...document.querySelectorAll('#controls option')]"
        ".filter(each => each.disabled).map(each => each.text)"
    )
    assert browser.run(grey) == []
    browser.run(
        "(() => { const control = document.querySelector('#controls select'); control.value = '1';"
        "control.dispatchEvent(new Event('change')); })()"
    )
    assert browser.run(grey) == ["256 sequences"]
    browser.run("document.getElementById('what-if-reset').click()")
    assert browser.run(grey) == []


def test_it_prints(browser: Tab, page: Path) -> None:
    shown(browser, page)
    printed = base64.b64decode(browser.ask("Page.printToPDF", printBackground=True)["data"])
    assert printed.startswith(b"%PDF")
    assert len(printed) > 50_000
    assert browser.troubles == []
