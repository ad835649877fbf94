"""A headless Chromium, driven over its DevTools pipe: no driver and no further package.

https://chromedevtools.github.io/devtools-protocol/: JSON messages, each ended by a zero byte, on the
descriptors 3 and 4 of a browser that is started with --remote-debugging-pipe.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PATIENCE_S = 120.0
ON_PIPES = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Starts a browser, which reads descriptor 3 and writes descriptor 4; shells may not know those above 9."""


class Tab:
    """One page of the browser."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies, self._rest = requests, replies, b""
        self._last_id = 0
        self._session: str | None = None
        self.troubles: list[str] = []
        """Errors and warnings of the page's console, and what it could not load."""
        self.places = ["file:", "data:", "about:"]
        """What the page may ask for, by the beginnings of addresses."""
        self._events: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """What a method of the protocol returns."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._last_id:
                assert "error" not in reply, reply["error"]
                result: dict[str, Any] = reply["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._replies], [], [], PATIENCE_S)
            assert ready, "the browser does not answer"
            read = os.read(self._replies, 1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        text, _, self._rest = self._rest.partition(b"\0")
        reply: dict[str, Any] = json.loads(text)
        self._note(reply.get("method", ""), reply.get("params", {}))
        return reply

    def _note(self, method: str, params: dict[str, Any]) -> None:
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            self.troubles.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] != "verbose":
            self.troubles.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.troubles.append(json.dumps(params["args"]))
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(tuple(self.places)):
                self.troubles.append(f"asked for {url}")

    def open(self, page: Path | str, *, width: int = 1280, height: int = 900) -> None:
        """Loads a page, by its path or its address, and waits until it is there."""
        self.resize(width, height)
        self._events.clear()
        self.ask("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while "Page.loadEventFired" not in self._events:
            self._next()

    def resize(self, width: int, height: int = 900) -> None:
        """Sets the size of the window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.ask("Emulation.setDeviceMetricsOverride", **size)

    def dark(self, *, on: bool) -> None:
        """Says that the user prefers dark colours, or light ones."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[feature])

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """Presses and releases a key, such as `Tab` or `ArrowDown`."""
        codes = {"Tab": 9, "ArrowDown": 40, "ArrowUp": 38, "Enter": 13}
        # A form is sent by the character of the key.
        letter = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown" if letter else "rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                     windowsVirtualKeyCode=codes[key], **letter)  # fmt: skip

    def wait(self, script: str) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + PATIENCE_S
        while not self.run(script):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.02)


WCAG = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
AXE_FOLDER = """
import importlib.util
spec = importlib.util.find_spec("axe_playwright_python")
print(spec.submodule_search_locations[0] if spec else "")
"""


def axe_core() -> str:
    """axe-core as a package for Playwright holds it, of which nothing else is used; skips without it."""
    python = os.environ.get("ORACLE_PYTHON", sys.executable)
    done = subprocess.run(
        [python, "-c", AXE_FOLDER], capture_output=True, text=True, check=True, timeout=60
    )
    script = Path(done.stdout.strip()) / "axe.min.js"
    if not script.is_file():
        pytest.skip("axe-core is not installed: make oracles")
    return script.read_text(encoding="utf-8")


def judged(browser: Tab, axe: str) -> tuple[list[str], int]:
    """What of the page keeps people out (WCAG 2.1, A and AA), as axe-core finds it; how many rules hold."""
    browser.run(f"{axe}; 0")
    browser.run(
        f"window.judged = undefined; axe.run(document, {{runOnly: {json.dumps(WCAG)}}})"
        ".then(found => { window.judged = found; }); 0"
    )
    browser.wait("window.judged !== undefined")
    violations = browser.run(
        "judged.violations.flatMap(each => each.nodes.map(node => `${each.id}: ${node.html.slice(0, 200)}`))"
    )
    return violations, browser.run("judged.passes.length")


@contextmanager
def tab(folder: Path) -> Iterator[Tab]:
    """A tab of a fresh browser, whose profile lies in a folder."""
    assert BROWSER is not None
    to_browser, requests = os.pipe()
    replies, from_browser = os.pipe()
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
               "--no-first-run", f"--user-data-dir={folder / 'profile'}"]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", ON_PIPES, str(to_browser), str(from_browser), *command],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Tab(requests, replies)
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)
        os.close(requests)
        os.close(replies)
