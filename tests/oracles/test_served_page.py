"""The page of `meshwright serve` in a real browser: what it shows is what the planner says, to everybody.

axe-core looks for what keeps people out (WCAG 2.1, A and AA: names of controls, contrast, structure).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import meshwright
from meshwright.planner.drawing import count, rounded_seconds
from tests.oracles.browser import BROWSER, Tab, axe_core, judged, tab
from tests.serve.served import Client, served

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine"),
]
ASKED: dict[str, Any] = {
    "model": "llama-3-8b",
    "cluster": "dgx-h100",
    "gpus": 16,
    "global_batch": 64,
    "seq_len": 4096,
}
SMALLEST_TEXT_PX = 12
SIZES = """[...document.querySelectorAll('body *')]
  .filter(each => each.checkVisibility() && each.textContent.trim())
  .map(each => parseFloat(getComputedStyle(each).fontSize))"""


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with served("--at-once", "1") as opened:
        yield opened


@pytest.fixture(scope="module")
def browser(client: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab(tmp_path_factory.mktemp("browser")) as opened:
        opened.places.append(client.address)
        yield opened


@pytest.fixture(scope="module")
def axe() -> str:
    return axe_core()


def at(name: str) -> str:
    return f"document.getElementById({json.dumps(name)})"


def text(browser: Tab, name: str) -> str:
    return str(browser.run(f"{at(name)}.textContent"))


def opened_page(browser: Tab, client: Client, width: int = 1280, *, dark: bool = False) -> None:
    browser.troubles.clear()
    browser.dark(on=dark)
    browser.open(client.address, width=width)
    browser.wait("document.documentElement.dataset.ready !== undefined")
    for name, value in ASKED.items():
        browser.run(
            f"{at('question')}.elements[{json.dumps(name)}].value = {json.dumps(str(value))}"
        )


def click(browser: Tab, name: str) -> None:
    browser.run(f"{at(name)}.click()")


def pin(browser: Tab, name: str, value: str) -> None:
    browser.run(
        f"(() => {{ const control = document.querySelector('[data-pin={name}]');"
        f"control.value = {json.dumps(value)}; control.dispatchEvent(new Event('change')); }})()"
    )


def all_shown(browser: Tab, client: Client, width: int, *, dark: bool) -> None:
    """Every section of the page, filled."""
    opened_page(browser, client, width, dark=dark)
    browser.run(f"{at('question')}.elements.tokens.value = '1e12'")
    click(browser, "plan-button")
    browser.wait(f"!{at('plan')}.hidden")
    pin(browser, "tp", "4")
    browser.wait(f"{at('what-if-cards')}.children.length > 0")
    click(browser, "compare-button")
    browser.wait("document.querySelector('#comparison table') !== null")
    click(browser, "sizes-button")
    browser.wait("document.querySelector('#sizes-table table') !== null")
    browser.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")


@pytest.mark.parametrize("width", [390, 768, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_everybody_can_read_and_use_it(
    browser: Tab, client: Client, axe: str, width: int, dark: bool
) -> None:
    all_shown(browser, client, width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert min(browser.run(SIZES)) >= SMALLEST_TEXT_PX
    violations, rules_kept = judged(browser, axe)
    assert violations == []
    assert rules_kept > 15
    assert browser.troubles == []


def test_a_plan_and_a_what_if_are_those_of_the_planner(browser: Tab, client: Client) -> None:
    opened_page(browser, client)
    click(browser, "plan-button")
    browser.wait(f"!{at('plan')}.hidden")
    plan = meshwright.plan(**ASKED)
    pinned = meshwright.plan(**ASKED, pin={"tp": 4, "recompute": "full"}, robustness=False)
    assert plan.predicted is not None
    assert pinned.predicted is not None
    cards = text(browser, "plan-cards")
    assert rounded_seconds(plan.predicted.step_time_s) in cards
    tokens = ASKED["global_batch"] * ASKED["seq_len"] / plan.predicted.step_time_s
    assert count(tokens) in cards
    pin(browser, "tp", "4")
    pin(browser, "recompute", "full")
    step = rounded_seconds(pinned.predicted.step_time_s)
    browser.wait(f"{at('what-if-cards')}.textContent.includes({json.dumps(step)})")
    share = pinned.predicted.step_time_s / plan.predicted.step_time_s - 1
    assert f"+{100 * share:.1f} %" in text(browser, "what-if-cards")
    pin(browser, "tp", "3")
    browser.wait(f"{at('what-if-answer')}.textContent.includes('do not divide by tp 3')")
    assert browser.run(f"{at('take')}.disabled")
    pin(browser, "tp", "4")
    browser.run(
        "(() => { const control = document.querySelector('[data-ask=gpus]');"
        "control.value = '32'; control.dispatchEvent(new Event('change')); })()"
    )
    larger = meshwright.plan(
        **{**ASKED, "gpus": 32}, pin={"tp": 4, "recompute": "full"}, robustness=False
    )
    assert larger.predicted is not None
    step = rounded_seconds(larger.predicted.step_time_s)
    browser.wait(f"{at('what-if-cards')}.textContent.includes({json.dumps(step)})")
    click(browser, "unpin")
    assert browser.run("document.querySelector('[data-pin=tp]').value") == ""
    assert browser.troubles == []


def test_gpus_against_time_is_drawn_to_the_number(browser: Tab, client: Client) -> None:
    opened_page(browser, client)
    browser.run(f"{at('question')}.elements.tokens.value = '1e12'")
    click(browser, "sizes-button")
    browser.wait("document.querySelector('#sizes-table table') !== null")
    series = "echarts.getInstanceByDom(document.getElementById('chart-sizes')).getOption().series[0].data"
    drawn = dict(browser.run(f"{series}.map(point => point.value)"))
    assert set(drawn) == {2, 4, 8, 16, 32, 64}
    plan = meshwright.plan(**{**ASKED, "gpus": 32}, tokens=1e12, robustness=False)
    assert plan.predicted is not None
    assert plan.cost is not None
    assert drawn[32] == plan.predicted.step_time_s
    browser.run(
        f"(() => {{ const select = {at('measure')}; select.value = 'days';"
        "select.dispatchEvent(new Event('change')); })()"
    )
    assert dict(browser.run(f"{series}.map(point => point.value)"))[32] == plan.cost.plan.days
    assert (
        browser.run(f"[...{at('measure')}.options].some(each => each.value === 'dollars')") is False
    )
    assert "dollars of the training" in text(browser, "sizes-words")
    assert browser.troubles == []


def test_a_plan_is_asked_for_and_varied_by_keys_alone(browser: Tab, client: Client) -> None:
    opened_page(browser, client)

    def to(selector: str) -> None:
        for _ in range(80):
            browser.press("Tab")
            if browser.run(f"document.activeElement.matches({json.dumps(selector)})"):
                return
        raise AssertionError(f"{selector} is not reached")

    to("[name=model]")
    browser.run("document.activeElement.select()")
    browser.ask("Input.insertText", text="llama-2-7b")
    to("[name=gpus]")
    browser.run("document.activeElement.select()")
    browser.ask("Input.insertText", text="8")
    browser.press("Enter")
    browser.wait(f"{at('plan-title')}.textContent === 'llama-2-7b on 8 GPUs of dgx-h100'")
    browser.wait(f"document.activeElement === {at('plan-title')}")
    to("[data-pin=tp]")
    browser.ask("Input.insertText", text="2")
    browser.press("Tab")
    browser.wait(f"{at('what-if-words')}.textContent.startsWith('tp 2,')")
    to("#take")
    browser.press("Enter")
    browser.wait(f"{at('plan-layout')}.textContent.startsWith('tp 2,')")


def test_what_is_wrong_is_said_at_its_field(browser: Tab, client: Client) -> None:
    opened_page(browser, client)
    for name, value, words in (
        ("model", "llama-3-8", "did you mean 'llama-3-8b'"),
        ("gpus", "1000000", "choose 1 to 131072"),
        ("memory_risk", "2", "memory_risk"),
    ):
        field = f"{at('question')}.elements[{json.dumps(name)}]"
        before = browser.run(f"{field}.value")
        browser.run(f"{field}.value = {json.dumps(value)}")
        click(browser, "plan-button")
        browser.wait(f"!{at('error')}.hidden && {at('progress')}.hidden")
        assert words in text(browser, "error")
        assert browser.run(f"document.activeElement === {field}"), name
        assert browser.run(f"{field}.getAttribute('aria-invalid')") == "true"
        browser.run(f"{field}.value = {json.dumps(before)}")


def test_a_search_is_stopped(browser: Tab, client: Client) -> None:
    opened_page(browser, client)
    for name, value in {"model": "deepseek-v3", "gpus": "2048", "global_batch": "15360"}.items():
        browser.run(f"{at('question')}.elements.{name}.value = '{value}'")
    click(browser, "plan-button")
    browser.wait(f"!{at('progress')}.hidden && {at('progress-words')}.textContent !== ''")
    click(browser, "stop")
    browser.wait(f"{at('progress')}.hidden")
    assert browser.run(f"{at('plan')}.hidden")
    assert client.ask("plan", **ASKED, robustness=False)["state"] == "done"


def test_the_report_opens_beside_the_page(browser: Tab, client: Client) -> None:
    opened_page(browser, client)
    click(browser, "plan-button")
    browser.wait(f"!{at('plan')}.hidden")
    click(browser, "get-report")
    browser.wait("document.querySelector('#file-words a') !== null")
    address = str(browser.run("document.querySelector('#file-words a').href"))
    browser.open(address)
    browser.wait("document.documentElement.dataset.drawn !== undefined")
    assert browser.run("document.querySelectorAll('.chart svg').length") > 3
    assert browser.troubles == []
