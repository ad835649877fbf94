"""`meshwright mcp` under the client of the protocol's own package: in memory, and as a program starts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.serve.tools import TOOLS
from tests.oracles.test_schedulers import asked_of_oracles
from tests.places import ROOT

pytestmark = pytest.mark.oracle

QUESTION: dict[str, Any] = {
    "model": "llama-3-8b",
    "cluster": "dgx-h100",
    "gpus": 8,
    "global_batch": 8,
    "seq_len": 4096,
}
ASK = """
import json, os, sys
import anyio
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from meshwright.serve import answers
from meshwright.serve.answers import Offer
from meshwright.serve.queue import PageLimits, QuestionQueue
from meshwright.serve.tools import PlannerTools, tool_server

async def asked(server, calls):
    async with Client(server) as client:
        tools = (await client.list_tools()).tools
        replies = [await client.call_tool(name, arguments) for name, arguments in calls]
    return {
        "tools": {tool.name: [tool.description, tool.input_schema] for tool in tools},
        "replies": [
            [reply.is_error, reply.structured_content, reply.content[0].text] for reply in replies
        ],
    }

how, calls = json.load(sys.stdin)
if how == "memory":
    queue = QuestionQueue(answers.load, PageLimits(at_once=1))
    try:
        done = anyio.run(asked, tool_server(PlannerTools(Offer.of_files(), queue)), calls)
    finally:
        queue.close()
else:
    words = ["-m", "meshwright.cli", "mcp", "--at-once", "1"]
    command = StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ))
    done = anyio.run(asked, stdio_client(command), calls)
print(json.dumps(done))
"""


def asked(how: str, calls: list[tuple[str, dict[str, Any]]], folder: Path) -> dict[str, Any]:
    """What the client is told of the tools, and the reply to each call: (is an error, document, text)."""
    (folder / "meshwright").symlink_to(ROOT)
    said: dict[str, Any] = json.loads(asked_of_oracles(ASK, [how, calls], PYTHONPATH=str(folder)))
    return said


@pytest.mark.parametrize("how", ["memory", "stdio"])
def test_a_client_lists_and_calls_the_tools(how: str, tmp_path: Path) -> None:
    said = asked(
        how,
        [
            ("plan", QUESTION),
            ("plan", QUESTION | {"model": "llama-3-8c"}),
            ("plan", QUESTION | {"time_limit_s": 1e6}),
            ("explain", {"plan": "memory risk"}),
            ("verify", {"plan": "q1"}),
            ("verify", {"plan": "/etc/passwd"}),
            ("recommend", QUESTION | {"step_time_s": 9, "optimiser": "muon"}),
        ],
        tmp_path,
    )
    assert list(said["tools"]) == list(TOOLS)
    schema = said["tools"]["plan"][1]
    assert set(schema["required"]) == {"model", "cluster", "global_batch", "seq_len"}
    assert schema["properties"]["time_limit_s"]["maximum"] == 60
    assert schema["additionalProperties"] is False
    plan, wrong, long, term, verified, outside, misspelt = said["replies"]
    assert not plan[0], plan[2]
    assert plan[1]["plan"] == "q1"
    assert plan[1]["figures"]["step_time_s"] > 0
    assert json.loads(plan[2])["layout"] == plan[1]["layout"], "for clients that read text alone"
    assert wrong[0]
    assert "did you mean 'llama-3-8b'" in wrong[2]
    assert long[0]
    assert "less than or equal to 60" in long[2]
    assert "meaning" in term[1]
    assert verified[1]["passed"]
    assert outside[0]
    assert "--folder" in outside[2]
    assert misspelt[0], "it would have been left aside"
    assert "optimiser" in misspelt[2]
