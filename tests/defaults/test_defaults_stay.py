"""What commands answer by default stays as it was recorded, to the digit.

`python -m tests.defaults.test_defaults_stay` records the answers again, where other answers are the point
of a change. Floats are compared to 1e-12: sums differ in their last digit from one processor to another.
"""

from __future__ import annotations

import json
import lzma
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner

from meshwright.cli import main
from tests.places import DATA, ROOT
from tests.soaked import some

FOLDER = DATA / "defaults"
ROUNDING = 1e-12
LIMIT_S = "900"
"""Of a search: a slow machine must not end one that the recording finished."""
TIMES = {"wall_s", "digest", "seconds_spent", "started", "version"}
"""Of the run of the command, not of its answer."""


def lines_of(name: str) -> list[str]:
    """The requests of a file, without its comments."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


PLANS = lines_of("plans.txt")
COMMANDS = lines_of("commands.txt")
SOME = PLANS[::12]
IN_SOAK = {*range(3, 10), 1}
"""Numbers of those that take longest, with every second of the others."""
COSTLIEST = "olmoe-1b-7b --cluster starved.yaml --global-batch 128 --seq-len 4096"
"""Takes as long as ten others: not in the share that `make slow` takes."""
MORE = sorted((line for line in PLANS if line not in SOME), key=lambda line: line == COSTLIEST)


def lasting(value: Any) -> Any:
    """A document without what differs from run to run."""
    if isinstance(value, dict):
        return {key: lasting(entry) for key, entry in value.items() if key not in TIMES}
    return [lasting(entry) for entry in value] if isinstance(value, list) else value


def answer(words: list[str]) -> Any:
    """The exit code and the document of a command."""
    said = CliRunner().invoke(main, [*words, "--json"])
    assert said.stdout, said.stderr
    return {"exit": said.exit_code, "document": lasting(json.loads(said.stdout))}


def answer_plan(request: str) -> Any:
    """What `plan` answers in the folder of the requests."""
    os.chdir(FOLDER)
    words = shlex.split(request)
    if not {"--time-limit", "--sweep", "exhaustive"} & set(words):
        words += ["--time-limit", LIMIT_S]
    return answer(["plan", *words])


def answer_commands() -> dict[str, Any]:
    """What every command answers, in a copy of the folder so that files may be written."""
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(FOLDER, Path(place) / "tests" / "data" / "defaults")
        for name in ("plans", "hf_configs", "topologies"):
            shutil.copytree(DATA / name, Path(place) / "tests" / "data" / name)
        shutil.copytree(ROOT / "docs" / "examples", Path(place) / "tests" / "docs" / "examples")
        before = Path.cwd()
        os.chdir(Path(place) / "tests" / "data" / "defaults")
        try:
            with patch.dict(os.environ, {"XDG_CACHE_HOME": place}):
                return {line: answer(shlex.split(line)) for line in COMMANDS}
        finally:
            os.chdir(before)


def recorded(name: str) -> dict[str, Any]:
    """The answers by request."""
    path = FOLDER / f"{name}.json.xz"
    answers: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes()))
    return answers


def differences(now: Any, before: Any, where: str = "") -> Iterator[str]:
    """Places at which two documents differ."""
    if isinstance(now, dict) and isinstance(before, dict):
        for key in sorted(now.keys() | before.keys()):
            yield from differences(now.get(key), before.get(key), f"{where}.{key}")
    elif isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        pairs = zip(now, before, strict=True)
        yield from chain.from_iterable(
            differences(a, b, f"{where}[{index}]") for index, (a, b) in enumerate(pairs)
        )
    elif isinstance(now, float) and isinstance(before, float | int):
        if now != pytest.approx(before, rel=ROUNDING, abs=1e-15, nan_ok=True):
            yield f"{where}: {before} before, {now} now"
    elif now != before:
        yield f"{where}: {before} before, {now} now"


def check(now: Any, before: Any) -> None:
    found = list(differences(now, before))
    assert not found, "\n".join(found[:20])


def test_every_request_is_recorded() -> None:
    assert len(set(PLANS)) == len(PLANS) >= 120
    assert list(recorded("plans")) == PLANS
    assert list(recorded("commands")) == COMMANDS


@pytest.mark.parametrize(
    "request_line",
    [
        pytest.param(line, marks=pytest.mark.soak if number in IN_SOAK else pytest.mark.slow)
        for number, line in enumerate(SOME)
    ],
)
def test_plans_stay(request_line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    check(answer_plan(request_line), recorded("plans")[request_line])


@pytest.mark.soak
@pytest.mark.parametrize("request_line", some(MORE))
def test_all_plans_stay(request_line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    check(answer_plan(request_line), recorded("plans")[request_line])


@pytest.mark.soak
def test_documents_of_commands_stay() -> None:
    before = recorded("commands")
    for line, now in answer_commands().items():
        found = list(differences(now, before[line]))
        assert not found, "\n".join([line, *found[:20]])


def record(name: str, answers: dict[str, Any]) -> None:
    text = json.dumps(answers, separators=(",", ":"))
    (FOLDER / f"{name}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))


if __name__ == "__main__":
    with ProcessPoolExecutor(2) as pool:
        record("plans", dict(zip(PLANS, pool.map(answer_plan, PLANS), strict=True)))
    record("commands", answer_commands())
