"""What a shell completes: names of the catalogs, words of lists, files."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.shell_completion import ShellComplete

from meshwright import cli
from meshwright.cluster_specs.reader import cluster_names
from meshwright.constraints.fabric import INSIDE_DOMAIN
from meshwright.model_specs.reader import catalog_names
from meshwright.planner.request.choices import FORBIDS, PINS
from tests.places import ROOT


def completed(line: str) -> list[tuple[str, str]]:
    """Kind and text of what completes the last word of a line."""
    *words, typed = line.split(" ")
    shell = ShellComplete(cli.main, {}, "meshwright", "_MESHWRIGHT_COMPLETE")
    return [(item.type, item.value) for item in shell.get_completions(words, typed)]


@pytest.mark.parametrize("command", ["plan", "recommend", "model"])
def test_models_are_completed(command: str) -> None:
    names = {text for _, text in completed(f"{command} ")}
    assert names >= set(catalog_names())
    assert completed(f"{command} meta-llama/Llama-3.1-8B-") == [
        ("plain", "meta-llama/Llama-3.1-8B-Instruct")
    ]
    assert completed(f"{command} ./config") == [("file", "./config")]


@pytest.mark.parametrize("command", ["plan llama-3-8b", "map plan.yaml", "collective", "calibrate"])
def test_clusters_are_completed(command: str) -> None:
    assert {text for _, text in completed(f"{command} --cluster ")} == set(cluster_names())
    assert completed(f"{command} --cluster my") == [("file", "my")]


def test_words_of_a_list_are_completed_one_by_one() -> None:
    assert {text for _, text in completed("plan x --forbid ")} == set(FORBIDS)
    assert completed("plan x --inside-domain tp,") == [
        ("plain", f"tp,{axis}") for axis in INSIDE_DOMAIN if axis != "tp"
    ]
    assert ("plain", "tp=8,recompute=full") in completed("plan x --pin tp=8,recompute=f")
    assert {text.partition("=")[0] for _, text in completed("plan x --pin ")} == set(PINS)


def test_a_shell_is_told_how() -> None:
    """As `docs/commands.md` says it."""
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert "_MESHWRIGHT_COMPLETE=bash_source meshwright" in page
    for shell in ("zsh", "fish"):
        said = subprocess.run(
            [sys.executable, "-c", "from meshwright.cli import main; main(prog_name='meshwright')"],
            env={**os.environ, "_MESHWRIGHT_COMPLETE": f"{shell}_source"},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert f"_MESHWRIGHT_COMPLETE={shell}_complete" in said.stdout
