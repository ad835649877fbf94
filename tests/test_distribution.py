"""What runs meshwright elsewhere: the image, the GitHub Action and the pre-commit hook."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.cli import main
from meshwright.errors import InfeasibleError
from meshwright.frameworks.record import FrameworkName
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.planner.launch.plan_files import TARGETS, plan_files
from tests.places import ROOT
from tests.plans import make_plan

ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
DOCUMENTED = {"name", "description", "author", "branding", "inputs", "outputs", "runs"}
"""Keys of an action (docs.github.com, "Metadata syntax reference")."""


def instructions() -> list[tuple[str, str]]:
    """(instruction, its words) of the Dockerfile, comments left out and lines joined."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (ROOT / "Dockerfile").read_text("utf-8"))
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    pairs = [line.partition(" ") for line in lines if line.strip()]
    return [(word.upper(), rest.strip()) for word, _, rest in pairs]


def test_the_action_has_the_keys_of_a_composite_action() -> None:
    assert set(ACTION) <= DOCUMENTED
    assert ACTION["runs"]["using"] == "composite"
    for each in (*ACTION["inputs"].values(), *ACTION["outputs"].values()):
        assert each["description"]
    for step in ACTION["runs"]["steps"]:
        assert ("uses" in step) != ("run" in step)
        if "run" in step:
            assert step["shell"] == "bash"
            assert "${{" not in step["run"], "an input is never part of the script"


@pytest.mark.parametrize(
    ("plans", "expected"),
    [
        (".", ["."]),
        ("plans/a\n\nplans/two words\n", ["plans/a", "plans/two words"]),
        ("$(touch owned)\n`touch owned`; touch owned\n--help", None),
    ],
)
@pytest.mark.parametrize("status", [0, 1, 2])
def test_the_action_verifies_what_is_named(
    plans: str, expected: list[str] | None, status: int, tmp_path: Path
) -> None:
    expected = expected or plans.splitlines()
    (step,) = (each for each in ACTION["runs"]["steps"] if each.get("id") == "verify")
    tool = tmp_path / "bin" / "meshwright"
    tool.parent.mkdir()
    tool.write_text(
        f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" > {tmp_path}/words\necho told\nexit {status}\n',
        encoding="utf-8",
    )
    tool.chmod(0o755)
    files = {name: str(tmp_path / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    done = subprocess.run(
        # As GitHub runs a step whose shell is bash.
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=tmp_path,
        env={"PATH": f"{tool.parent}:{os.environ['PATH']}", "PLANS": plans, **files},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == status, done.stderr
    words = (tmp_path / "words").read_text("utf-8").splitlines()
    assert words == ["verify", "--all", "--", *expected]
    assert not list(tmp_path.rglob("owned"))
    told = Path(files["GITHUB_OUTPUT"]).read_text("utf-8")
    assert told == f"passed={'false' if status else 'true'}\n"
    assert Path(files["GITHUB_STEP_SUMMARY"]).read_text("utf-8") == "told\n"


@pytest.mark.parametrize(
    ("path", "is_checked"),
    [
        ("plan.yaml", True),
        ("plans/big/mixed_plan.yaml", True),
        ("run/launch.sh", True),
        ("run/megatron_args.json", True),
        ("run/mapping/ranks.csv", True),
        ("README.md", False),
        ("run/swift.yaml", True),
        ("run/trl.sh", True),
        ("my_plan.yaml", False),
        ("my_accelerate.yaml", False),
        ("launch.sh.orig", False),
    ],
)
def test_the_hook_runs_where_a_file_of_a_plan_changes(path: str, is_checked: bool) -> None:
    assert bool(re.search(HOOK["files"], path)) is is_checked


@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "deepspeed", "fsdp2"])
def test_the_hook_runs_for_every_file_of_every_target(framework: FrameworkName) -> None:
    """It knew those of the frameworks alone: `verify` checks what schedulers and stacks read too."""
    adapters = None if framework == "torchtitan" else AdapterSpec(method="lora")
    zero_stage = 1 if framework == "megatron" else 2
    base = make_plan("qwen3-8b", dp=16, num_micro_batches=2, zero_stage=zero_stage)
    written: dict[str, set[str]] = {}
    for trained in {None, adapters}:
        inputs = base.inputs.model_copy(update={"framework": framework, "adapters": trained})
        plan = base.model_copy(update={"inputs": inputs})
        for target in TARGETS:
            with contextlib.suppress(InfeasibleError):
                written.setdefault(target, set()).update(plan_files(plan, target))
    assert {"kubernetes", "volcano", "trainjob", "skypilot", "ray", "slurm", "openmpi"} <= {
        *written
    }
    for target, names in written.items():
        missed = [name for name in names if not re.search(HOOK["files"], f"run/{name}")]
        assert not missed, target


def test_the_hook_says_a_command_that_there_is(tmp_path: Path) -> None:
    arguments: list[str] = HOOK["args"]
    program, *words = [*shlex.split(HOOK["entry"]), *arguments]
    assert program in PROJECT["scripts"]
    command = main.commands[words[0]]
    context = command.make_context("verify", words[1:])
    assert context.params["is_all"]
    assert context.params["plans"] == (Path("."),)


def test_the_image_runs_the_command_for_a_user_who_may_little() -> None:
    steps = instructions()
    images = [words.split()[0] for word, words in steps if word == "FROM"]
    (default,) = (words for word, words in steps if word == "ARG" and "IMAGE" in words)
    name, _, image = default.partition("=")
    assert images == [f"${{{name}}}"] * 2
    assert image == "python:3.11-slim", "a version, not the latest"
    assert PROJECT["requires-python"] == ">=3.11"
    users = [words for word, words in steps if word == "USER"]
    assert users
    assert users[-1] not in ("0", "root")
    assert not [words for word, words in steps if word == "ADD"], (
        "nothing is fetched by an instruction"
    )
    assert dict(steps)["ENTRYPOINT"] == '["meshwright"]'
    assert "meshwright" in PROJECT["scripts"]
    (extras,) = (words for word, words in steps if word == "ARG" and "EXTRAS" in words)
    assert set(extras.partition("=")[2].split(",")) <= set(PROJECT["optional-dependencies"])


def context_of_image(folder: Path) -> Path:
    """What `COPY . .` finds: files that .dockerignore does not leave out."""
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert lines[0] == "*"
    for line in lines[1:]:
        if not line.startswith("!"):
            continue
        for path in ROOT.glob(line[1:]):
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(path, target)
    return folder


@pytest.mark.soak
def test_the_image_is_built_of_all_that_the_package_needs(tmp_path: Path) -> None:
    """The build's own command, but for the network, on the context alone."""
    context = context_of_image(tmp_path / "context")
    copied = {words.split()[0] for word, words in instructions() if word == "COPY"}
    assert all((context / name).exists() for name in copied if not name.startswith("--"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "-w", str(tmp_path), str(context)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for package in ("api.py", "serve/tools.py", "model_specs/data/llama.yaml", "docs/glossary.md"):
        path = ROOT / package
        assert not path.exists() or f"meshwright/{package}" in names, package
    modules = {
        f"meshwright/{path.relative_to(ROOT).as_posix()}"
        for folder in ("planner", "commands", "costmodel", "cluster_specs", "model_specs", "serve")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".css", ".js")
    }
    assert modules <= names
