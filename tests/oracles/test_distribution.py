"""The image, the Action and the hook, asked of those who read them: hadolint, GitHub's schema, pre-commit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import meshwright
from tests.places import ROOT

pytestmark = pytest.mark.oracle

HOOKS = ROOT / ".pre-commit-hooks.yaml"


def told(name: str, *words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """What a program of the oracles' environment says."""
    python = os.environ.get("ORACLE_PYTHON")
    assert python, "run `make oracles`: ORACLE_PYTHON names no interpreter"
    program = [python, "-m", name] if name == "pre_commit" else [str(Path(python).parent / name)]
    return subprocess.run(
        [*program, *words], capture_output=True, text=True, check=False, timeout=300, **settings
    )


def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    done = told("hadolint", str(ROOT / "Dockerfile"))
    assert (done.returncode, done.stdout) == (0, "")
    worse = tmp_path / "Dockerfile"
    text = (ROOT / "Dockerfile").read_text("utf-8")
    worse.write_text(text.replace("USER 10001", "USER root"), encoding="utf-8")
    assert "DL3002" in told("hadolint", str(worse)).stdout, "the last user is root"


def test_githubs_schema_takes_the_action(tmp_path: Path) -> None:
    check = ("--builtin-schema", "vendor.github-actions")
    done = told("check-jsonschema", *check, str(ROOT / "action.yml"))
    assert done.returncode == 0, done.stdout
    worse = tmp_path / "action.yml"
    text = (ROOT / "action.yml").read_text("utf-8")
    worse.write_text(text.replace("      shell: bash\n", "", 1), encoding="utf-8")
    assert told("check-jsonschema", *check, str(worse)).returncode == 1


def test_pre_commit_takes_the_hook(tmp_path: Path) -> None:
    assert told("pre_commit", "validate-manifest", str(HOOKS)).returncode == 0
    worse = tmp_path / "hooks.yaml"
    worse.write_text(HOOKS.read_text("utf-8").replace("  language: python\n", ""), encoding="utf-8")
    assert told("pre_commit", "validate-manifest", str(worse)).returncode == 1


def test_pre_commit_runs_the_hook_where_a_plan_is_committed(tmp_path: Path) -> None:
    """With this interpreter's meshwright in place of an environment of its own, for want of a network."""
    (hook,) = yaml.safe_load(HOOKS.read_text("utf-8"))
    entry = hook["entry"].replace("meshwright", f"{sys.executable} -m meshwright.cli", 1)
    own = {**hook, "language": "system", "entry": entry}
    repository = tmp_path / "repository"
    plan = meshwright.plan(
        "llama-3-8b", cluster="dgx-h100", gpus=8, global_batch=8, seq_len=4096, robustness=False
    )
    meshwright.save(plan, repository / "plans")
    (repository / "README.md").write_text("x\n", encoding="utf-8")
    config = {"repos": [{"repo": "local", "hooks": [own]}]}
    (repository / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    environment = dict(os.environ) | {"PRE_COMMIT_HOME": str(tmp_path / "home")}
    settings = {"cwd": repository, "env": environment}
    for words in (["init", "-q"], ["add", "README.md", ".pre-commit-config.yaml"]):
        subprocess.run(["git", *words], cwd=repository, check=True)
    assert "no files to check" in told("pre_commit", "run", **settings).stdout
    subprocess.run(["git", "add", "plans"], cwd=repository, check=True)
    done = told("pre_commit", "run", "--verbose", **settings)
    assert done.returncode == 0, done.stdout
    assert "1 of 1 plan holds." in done.stdout
    script = repository / "plans" / "launch.sh"
    script.write_text(script.read_text("utf-8").replace("nnodes=1", "nnodes=2"), encoding="utf-8")
    subprocess.run(["git", "add", "plans"], cwd=repository, check=True)
    done = told("pre_commit", "run", **settings)
    assert done.returncode == 1
    assert "launch.sh" in done.stdout
