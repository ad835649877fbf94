"""The page's server: it answers what the commands answer, to its own page alone, within its limits."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import socket
import string
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
import yaml
from uvicorn.server import ServerState

import meshwright
from meshwright.errors import InputError
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.texts import plan_document
from meshwright.planner.request.choices import PINS
from meshwright.serve import server
from meshwright.serve.answers import MOST_SIZES, Offer
from meshwright.serve.server import HOST, MOST_BODY_BYTES, listening
from tests.places import ROOT
from tests.serve import served
from tests.serve.served import Client

PAGE = ROOT / "serve" / "page"
QUESTION: Mapping[str, Any] = {**served.QUESTION, "without": "cuda-graph,tp-overlap"}
"""Leaves the plan one execution."""
QUICK: Mapping[str, Any] = {**served.QUESTION, "framework": "fsdp2"}
"""Has the fewest layouts."""
REFUSED = {**QUESTION, "pin": "tp=x"}
"""Is taken, and fails before anything is searched."""
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small.yaml"
    spec = meshwright.read_model("llama-3-8b").model_copy(update={"name": "ours", "layers": 16})
    path.write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_none=True)))
    return path


@pytest.fixture(scope="module")
def client(own_model: Path) -> Iterator[Client]:
    with served.served("--at-once", "1", "--model", str(own_model)) as opened:
        yield opened


@pytest.fixture(scope="module")
def planned(client: Client) -> Any:
    ticket = client.ask("plan", **QUESTION)
    assert ticket["state"] == "done", ticket["error"]
    return ticket


def without_times(document: Any) -> Any:
    document["solver"].pop("wall_s")
    return {name: part for name, part in document.items() if name != "digest"}


# It answers what the commands answer.


def test_a_plan_is_the_one_that_the_function_finds(client: Client, planned: Any) -> None:
    fetched = client.get(f"answers/{planned['id']}/plan.json")
    assert fetched.headers["content-disposition"] == 'attachment; filename="plan.json"'
    plan = meshwright.plan(**QUESTION, top=5, time_limit_s=30)
    expected = without_times(json.loads(json.dumps(plan_document(plan))))
    assert without_times({**fetched.document}) == {"schema": 1, **expected}
    assert plan.predicted is not None
    assert plan.layout is not None
    assert planned["answer"]["figures"]["step_time_s"] == plan.predicted.step_time_s
    assert planned["answer"]["choices"]["tp"] == str(plan.layout.tp)
    assert set(planned["answer"]["choices"]) == set(PINS)
    text = client.get(f"answers/{planned['id']}/plan.yaml").body.decode()
    assert yaml.safe_load(text)["layout"]["tp"] == plan.layout.tp


def test_progress_is_told_in_words(planned: Any) -> None:
    assert "a step" in planned["words"]
    assert planned["elapsed_s"] > 0


def test_a_what_if_is_a_plan_with_pins(client: Client) -> None:
    ticket = client.ask("plan", **QUESTION, pin={"tp": 4, "pp": "2", "recompute": "none"})
    assert ticket["state"] == "failed"
    assert "pin pp: '2' is not a whole number" in ticket["error"]["message"]
    ticket = client.ask("plan", **QUESTION, pin={"tp": 4, "pp": 2, "recompute": "full"})
    assert [ticket["answer"]["choices"][name] for name in ("tp", "pp", "recompute")] == [
        "4",
        "2",
        "full",
    ]
    assert ticket["answer"]["pins"] == {"tp": 4, "pp": 2, "recompute": "full"}


def test_adapters_are_planned_as_the_function_plans_them(client: Client) -> None:
    asked = {
        **QUICK,
        "gpus": 2,
        "train": "lora",
        "lora_rank": 8,
        "lora_targets": "q_proj,v_proj",
    }
    ticket = client.ask("plan", **asked)
    plan = meshwright.plan(**asked)
    assert plan.predicted is not None
    assert ticket["answer"]["figures"]["step_time_s"] == plan.predicted.step_time_s
    fewest = client.ask("fewest", **asked, step_time_s=1.01 * plan.predicted.step_time_s)["answer"]
    assert fewest["reached"]
    assert fewest["figures"]["step_time_s"] == plan.predicted.step_time_s


def test_choices_that_leave_no_plan_say_why(client: Client) -> None:
    ticket = client.ask("plan", **QUESTION, pin={"tp": 3})
    assert (ticket["state"], ticket["answer"]["status"]) == ("done", "infeasible")
    assert ticket["answer"]["layout"] is None
    assert ticket["answer"]["cards"] == []
    assert "attention heads do not divide by tp 3" in ticket["answer"]["sections"][0]["html"]


@pytest.mark.slow
def test_two_plans_are_compared(client: Client, planned: Any) -> None:
    pinned = client.ask("plan", **QUESTION, pin={"tp": 4})
    ticket = client.ask("compare", first=planned["id"], second=pinned["id"])
    html = ticket["answer"]["html"]
    assert "llama-3-8b on 16 GPUs of dgx-h100, tp=4" in html
    assert "pins differ" in html
    tp = planned["answer"]["choices"]["tp"]
    assert tp != "4"
    assert f'<td class="left">tp</td><td>{tp}</td><td>4</td>' in html


@pytest.mark.slow
def test_launch_files_and_report_are_those_of_the_plan(
    client: Client, planned: Any, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(client.get(f"answers/{planned['id']}/plan.yaml").body)
    plan = meshwright.read_plan(path)
    for target in ("", "slurm"):
        ticket = client.ask("launch", plan=planned["id"], target=target)
        fetched = client.get(f"answers/{ticket['id']}/launch.zip")
        with zipfile.ZipFile(io.BytesIO(fetched.body)) as archive:
            texts = {name: archive.read(name).decode() for name in archive.namelist()}
        assert texts == plan_files(plan, target or None)
    ticket = client.ask("report", plan=planned["id"])
    fetched = client.get(f"answers/{ticket['id']}/report.html")
    assert fetched.body.decode() == meshwright.report(plan)
    assert "sandbox" in fetched.headers["content-security-policy"]
    ticket = client.ask("launch", plan=planned["id"], target="slurmx")
    assert "unknown target, got 'slurmx'" in ticket["error"]["message"]


@pytest.mark.slow
def test_sizes_are_told_one_by_one_and_are_plans(client: Client) -> None:
    asked: dict[str, Any] = {**QUICK, "tokens": 1e12}
    asked |= {"gpu_hour_price": 2, "gpus": 8}
    ticket = client.ask("sizes", **asked)
    rows = ticket["answer"]["rows"]
    assert [row["gpus"] for row in rows] == [1, 2, 4, 8, 16, 32]
    assert ticket["rows"] == rows
    # 8.03e9 parameters at 16 bytes (in 32 bits weights, gradients, both moments): 128 GB.
    assert rows[0]["step_time_s"] is None
    assert rows[0]["message"]
    plan = meshwright.plan(**{**asked, "gpus": 32})
    assert plan.predicted is not None
    assert plan.cost is not None
    row = rows[5]
    assert row["step_time_s"] == plan.predicted.step_time_s
    assert [row[name] for name in ("days", "dollars", "kwh")] == [
        plan.cost.plan.days,
        plan.cost.plan.dollars,
        plan.cost.plan.kwh,
    ]
    table = client.get(f"answers/{ticket['id']}/sweep.csv").body.decode()
    assert len(table.splitlines()) == 1 + len(rows)


@pytest.mark.slow
def test_the_fewest_gpus_are_those_that_recommend_finds(client: Client) -> None:
    asked = {name: value for name, value in QUICK.items() if name != "robustness"}
    target = {"gpus": 32, "step_time_s": 2.5}
    ticket = client.ask("fewest", **{**asked, **target})
    expected = meshwright.recommend(**{**asked, **target}, workers=1, no_cache=True)
    assert ticket["answer"]["reached"]
    assert ticket["answer"]["gpus"] == expected.reached[0].gpus
    assert ticket["answer"]["figures"]["step_time_s"] == expected.reached[0].step_time_s
    assert "proven" in ticket["answer"]["verdict"]
    ticket = client.ask("fewest", **{**asked, **target, "step_time_s": 0.01})
    assert not ticket["answer"]["reached"]
    assert "misses" in ticket["answer"]["verdict"]


def test_every_choice_that_can_be_pinned_is_offered(client: Client) -> None:
    offer = client.get("offer").document
    assert [pin["name"] for pin in offer["pins"]] == list(PINS)
    assert {"llama-3-8b", "Qwen/Qwen3-8B"} <= set(offer["models"])
    (cluster,) = (each for each in offer["clusters"] if each["name"] == "dgx-h100")
    assert cluster["gpus_per_node"] == 8


def test_own_files_are_offered_by_their_names(client: Client, own_model: Path) -> None:
    offer = Offer.of_files([own_model])
    assert next(iter(offer.models.items())) == ("ours", str(own_model))
    ticket = client.ask("plan", **{**QUICK, "model": "ours"})
    assert ticket["answer"]["title"] == "ours on 16 GPUs of dgx-h100"
    with pytest.raises(InputError, match=r"no/such\.yaml"):
        Offer.of_files([Path("no/such.yaml")])


# Errors are the planner's own, and name the field.


@pytest.mark.parametrize(
    ("changes", "words", "where"),
    [
        ({"model": "llama-3-8"}, "did you mean 'llama-3-8b'", "model"),
        ({"model": "/etc/passwd"}, "neither in the catalog nor named at", "model"),
        ({"cluster": "./dgx.yaml"}, "not in the catalog", "cluster"),
        ({"gpus": 0}, "gpus: must be at least 1, got 0", None),
        ({"seq_len": "long"}, "seq_len", None),
        ({"time_limit": 61}, "time_limit: must be at most 60.0, got 61", None),
        ({"calibration": "/etc/passwd"}, "calibration", None),
        ({"nodes": "/etc/passwd"}, "nodes: must be a list", None),
        ({"gpu": 8}, "gpu: ", None),
        ({"kind": "nope"}, "kind: not a value of this field, got 'nope'; allowed: pretrain", None),
    ],
)
def test_a_question_that_cannot_be_read_is_refused_at_once(
    client: Client, changes: dict[str, Any], words: str, where: str | None
) -> None:
    reply = client.post("ask/plan", {**QUESTION, **changes})
    assert reply.status == 400
    assert words in reply.document["error"]["message"]
    assert reply.document["error"]["where"] == where


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": 1_000_000}, "cluster 'dgx-h100' has 131072; choose 1 to 131072"),
        ({"pin": "tp=x"}, "pin tp: 'x' is not a whole number; give 1 to 1048576"),
        (
            {"forbid": ["interleave"]},
            "forbid: 'interleave' is not known; did you mean 'interleaving'?",
        ),
    ],
)
def test_what_the_planner_refuses_is_said_in_its_words(
    client: Client, changes: dict[str, Any], words: str
) -> None:
    ticket = client.ask("plan", **{**QUESTION, **changes})
    assert ticket["state"] == "failed"
    assert words in ticket["error"]["message"]


def test_too_many_sizes_and_no_size_are_refused(client: Client) -> None:
    reply = client.post("ask/sizes", {**QUESTION, "sizes": list(range(1, MOST_SIZES + 2))})
    assert reply.status == 400
    reply = client.post("ask/sizes", {**QUESTION, "gpus": None})
    assert "around which numbers of GPUs?" in reply.document["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "give a target: step_time_s, tokens_per_s, or by_days with days"),
        ({"by_days": True, "tokens": 1e12}, "give days: in how many"),
    ],
)
def test_the_fewest_gpus_for_nothing_are_not_searched(
    client: Client, changes: dict[str, Any], words: str
) -> None:
    reply = client.post("ask/fewest", {**QUESTION, **changes})
    assert reply.status == 400
    assert words in reply.document["error"]["message"]


# To its own page alone.


def test_it_listens_on_this_machine_alone() -> None:
    with listening(0) as listener:
        address, port = listener.getsockname()
        assert address == HOST == "127.0.0.1"
        listener.listen()
        with pytest.raises(InputError, match=f"--port: cannot be listened on .* got {port}"):
            listening(port)


def test_a_request_without_the_token_is_refused(client: Client) -> None:
    wrong = client.token[:-1] + ("a" if client.token[-1] != "a" else "b")
    for path in ("/", "/offer", f"/{wrong}/", f"/{wrong}/offer", "//", f"/x/{client.token}/"):
        reply = client.send("GET", path)
        assert reply.status == 403, path
        assert client.token.encode() not in reply.body
    assert len(client.token) >= 32


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "", "[::1]:1"]
)
def test_a_name_that_leads_here_is_not_this_host(client: Client, host: str) -> None:
    headers = {"Host": host.format(port=client.port)}
    assert client.send("GET", f"/{client.token}/", headers=headers).status == 403


def test_this_machine_may_be_called_localhost(client: Client) -> None:
    headers = {"Host": f"localhost:{client.port}"}
    assert client.send("GET", f"/{client.token}/", headers=headers).status == 200


def test_a_page_of_another_origin_must_not_ask(client: Client) -> None:
    body, kind = json.dumps(REFUSED).encode(), {"Content-Type": "application/json"}
    path = f"/{client.token}/ask/plan"
    for origin in ("https://evil.example", "null", f"http://127.0.0.1:{client.port + 1}"):
        assert client.send("POST", path, body, {**kind, "Origin": origin}).status == 403
    assert client.send("POST", path, body, {"Content-Type": "text/plain"}).status == 415
    own = {**kind, "Origin": f"http://127.0.0.1:{client.port}"}
    reply = client.send("POST", path, body, own)
    assert reply.status == 202
    client.ended(reply.document["id"])


def test_the_page_loads_nothing_from_elsewhere(client: Client) -> None:
    page = client.get("")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["referrer-policy"] == "no-referrer"
    for name in ("page.css", "serve.css", "serve.js", "echarts.min.js"):
        assert client.get(f"page/{name}").status == 200
    assert client.get("page/../server.py").status in (403, 404)
    for path in PAGE.iterdir():
        assert "://" not in path.read_text(encoding="utf-8"), path


# Within its limits.


def test_large_bodies_are_refused_before_they_are_read(client: Client) -> None:
    path, kind = f"/{client.token}/ask/plan", {"Content-Type": "application/json"}
    full = json.dumps(REFUSED).encode()
    fits = full + b" " * (MOST_BODY_BYTES - len(full))
    reply = client.send("POST", path, fits, kind)
    assert reply.status == 202
    client.ended(reply.document["id"])
    assert client.send("POST", path, fits + b" ", kind).status == 413
    # Without a length, in pieces.
    with socket.create_connection((HOST, client.port), timeout=30) as stream:
        head = f"POST {path} HTTP/1.1\r\nHost: {HOST}:{client.port}\r\nTransfer-Encoding: chunked\r\n\r\n"
        stream.sendall(head.encode())
        piece = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
        stream.sendall(piece * 5)
        assert b" 413 " in stream.recv(4096).splitlines()[0]


def test_a_request_that_does_not_come_whole_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SENDING_S", 0.05)
    replies: list[Any] = []

    async def never_more() -> Any:
        await asyncio.sleep(600)

    async def reply(message: Any) -> None:
        replies.append(message)

    async def not_reached(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError(scope, receive, send)

    guard = server.Guard(not_reached, "token", 80)
    scope = {"type": "http", "path": "/token/ask/plan", "headers": [(b"host", b"localhost:80")]}
    asyncio.run(guard(scope, never_more, reply))
    assert replies[0]["status"] == 408


@pytest.mark.parametrize(
    ("pieces", "answers"),
    [([], 0), ([b"GET"] + [b"x"] * 99, 0), ([GET, b"GET"] + [b"x"] * 99, 1), ([GET] * 9, 9)],
    ids=["silent", "drips", "drips after a request", "prompt"],
)
def test_who_does_not_send_a_whole_head_is_hung_up_on(
    pieces: list[bytes], answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SENDING_S", 0.15)
    sent = bytearray()
    seconds: list[float] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def talk() -> None:
        config = uvicorn.Config(app, timeout_keep_alive=2, log_level="error")
        state, kind = ServerState(), cast("Any", server.prompt_protocol())
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(lambda: kind(config, state, {}), server.HOST, 0)
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())

        async def speak() -> None:
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.03)

        began_s, speaking = loop.time(), asyncio.create_task(speak())
        sent.extend(await asyncio.wait_for(reader.read(), 10))
        seconds.append(loop.time() - began_s)
        speaking.cancel()
        writer.close()
        listener.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        while state.connections:
            await asyncio.sleep(0.01)

    asyncio.run(talk())
    assert sent.count(b" 204 ") == answers
    # Who was prompt is left alone until the time between requests is over.
    assert (seconds[0] > 1.9) == (answers == 9), seconds


@pytest.mark.slow
def test_more_questions_than_may_wait_are_turned_away_and_all_can_be_stopped(
    client: Client,
) -> None:
    large = {"model": "deepseek-v3", "gpus": 2048, "global_batch": 15360, "time_limit": 60}
    replies = [client.post("ask/plan", {**QUESTION, **large}) for _ in range(16)]
    statuses = Counter(reply.status for reply in replies)
    # One is worked on at most, eight wait.
    assert statuses[202] in (8, 9)
    assert statuses[429] == 16 - statuses[202]
    refused = next(reply for reply in replies if reply.status == 429)
    assert "8 questions wait already" in refused.document["error"]["message"]
    assert refused.headers["retry-after"]
    began = time.monotonic()
    # Those that wait before the one that is worked on: else the next of them begins each time.
    for reply in reversed(replies):
        if reply.status == 202:
            assert client.delete(f"answers/{reply.document['id']}").document["state"] == "stopped"
    assert client.ask("plan", **QUICK)["state"] == "done"
    assert time.monotonic() - began < 30


WORDS = (
    "",
    "x",
    "tp=4",
    "tp=4,tp=8",
    "llama-3-8b",
    "dgx-h100",
    "../../x",
    "\x00",
    "é" * 300,
    "1e400",
    "-1",
)


def random_value(dice: random.Random, depth: int = 0) -> Any:
    values: list[Callable[[], Any]] = [
        lambda: dice.choice([0, -1, 1, 7, 8, 64, 10**6, 10**18, 10**400]),
        lambda: dice.choice([0.5, -2.5, 1e300, 1e-300, float("inf"), float("nan")]),
        lambda: dice.choice(WORDS) * dice.choice([1, 1, 50]),
        lambda: dice.choice([None, True, False]),
        lambda: "".join(dice.choices(string.printable, k=dice.randrange(200))),
        lambda: [random_value(dice, depth + 1) for _ in range(dice.randrange(4))],
        lambda: {
            dice.choice([*PINS, *QUESTION, *WORDS]): random_value(dice, depth + 1)
            for _ in range(dice.randrange(4))
        },
    ]
    return dice.choice(values if depth < 3 else values[:5])()


FIELDS = (
    *("model", "cluster", "gpus", "global_batch", "seq_len", "precision", "optimizer", "framework"),
    *("pin", "forbid", "without", "allow", "inside_domain", "tokens", "days", "gpu_hour_price"),
    *("time_limit", "top", "sizes", "step_time_s", "by_days", "plan", "target", "first", "second"),
    *(
        "train",
        "lora_rank",
        "lora_targets",
        "name",
        "seed",
        "method",
        "objective",
        "reserve_gib",
        "memory_risk",
        "nonsense",
    ),
)


def random_request(client: Client, seed: int) -> tuple[int, bytes]:
    """One request, bad in some way or in none; its status and its body."""
    dice = random.Random(seed)
    kind = dice.choice(
        ["plan", "plan", "plan", "sizes", "fewest", "compare", "launch", "report", "x"]
    )
    fields: dict[str, Any] = {**QUICK, "time_limit": 1, "gpus": 8}
    if kind in ("compare", "launch", "report"):
        fields = {"plan": "q1", "first": "q1", "second": "q2"}
    for name in dice.sample(FIELDS, dice.randrange(4)):
        fields[name] = random_value(dice)
    body = json.dumps(fields).encode()
    headers = {"Content-Type": "application/json"}
    path, method = f"/{client.token}/ask/{kind}", "POST"
    match dice.randrange(12):
        case 0:
            body = bytes(dice.randbytes(dice.randrange(400)))
        case 1:
            body = body[: dice.randrange(len(body))]
        case 2:
            body = dice.choice(
                [b"[" * 60_000, b'{"a":' * 12_000, b" " * 200_000, b"{}", b"[]", b"null"]
            )
        case 3:
            method = dice.choice(["PUT", "PATCH", "OPTIONS", "HEAD", "GET", "TRACE"])
        case 4:
            name = "".join(dice.choices(string.ascii_letters + "._-%2", k=dice.randrange(1, 60)))
            place = dice.choice(["", "answers/", "answers/q1/", "page/", "ask/"])
            path, method = f"/{client.token}/{place}{name}", dice.choice(["GET", "DELETE", "POST"])
        case 5:
            headers = {
                dice.choice(["Host", "Origin", "Content-Type"]): dice.choice(
                    ["x", "null", "", "a:1"]
                )
            }
        case 6:
            path = dice.choice(["/", "/x/ask/plan", "/" + client.token.lower() + "/", "//", "/%00"])
    for _ in range(dice.choice([0, 20])):
        reply = client.send(method, path, body, headers)
        if reply.status != 429:
            return reply.status, reply.body
        time.sleep(0.2)
    reply = client.send(method, path, body, headers)
    return reply.status, reply.body


REQUESTS = 1_000
ALLOWED = {200, 202, 400, 403, 404, 405, 413, 415, 429}


@pytest.mark.soak
def test_random_requests_neither_end_it_nor_leave_its_limits() -> None:
    with served.served("--at-once", "2") as client, ThreadPoolExecutor(8) as threads:
        outcomes = list(threads.map(partial(random_request, client), range(REQUESTS)))
        statuses = Counter(status for status, _ in outcomes)
        assert set(statuses) <= ALLOWED, statuses
        assert min(statuses[status] for status in (400, 403, 404, 405, 413)) > 10, statuses
        assert statuses[202] > 0, statuses
        assert statuses[202] + statuses[429] > 50, statuses
        assert not [
            body for _, body in outcomes if b"Traceback" in body or b"internal error" in body
        ]
        # Whatever was taken ends within its limits, and in an answer or in words.
        names = [
            json.loads(body)["id"] for status, body in outcomes if status == 202 and b'"id"' in body
        ]
        for name in names[-32:]:
            reply = client.get(f"answers/{name}")
            ticket = client.ended(name) if reply.status == 200 else None
            assert ticket is None or ticket["state"] in ("done", "failed"), ticket
            assert ticket is None or "internal error" not in str(ticket["error"]), ticket
        assert client.ask("plan", **QUICK)["state"] == "done"


# The command.


def test_without_the_extra_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    refused = pytest.raises(InputError, match=r"pip install 'meshwright\[serve\]'")
    with listening(0) as listener, refused as said:
        server.serve_page(Offer.of_files(), listener, "token")
    assert said.value.exit_code == 2


def test_a_cluster_with_parts_is_sent_to_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text("schema: 1\nname: mixed\nparts: []\n")
    with pytest.raises(InputError, match="is planned by `meshwright plan` alone"):
        Offer.of_files(clusters=[path])
