"""A pipeline through parts on other nodes of them: placed, priced, verified, launched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import meshwright
from meshwright.cli import main
from meshwright.documents import write_files
from meshwright.errors import InfeasibleError, InputError
from meshwright.planner.analysis.traffic import map_parts, mapped_parts_document
from meshwright.planner.launch.plan_files import mixed_files
from meshwright.planner.mixed.document import MixedPlan
from meshwright.planner.mixed.verify import mixed_faults
from tests.planner.mixed.conftest import PIN


def named(folder: Path, leaves: int = 1) -> Path:
    """Four nodes of each of two kinds, on as many leaves each."""

    def part(name: str, base: str) -> dict[str, Any]:
        each = 4 // leaves
        nodes = [
            {
                "name": f"{name}[{leaf * each}-{leaf * each + each - 1}]",
                "leaf": f"{name}-leaf{leaf}",
            }
            for leaf in range(leaves)
        ]
        return {"name": name, "cluster": {"base": base, "nodes": nodes}}

    path = folder / "named.yaml"
    data = {"name": "named", "parts": [part("new", "dgx-h100"), part("old", "dgx-a100")]}
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With `named.yaml`, and a plan on two nodes of each part in `plan`."""
    where = tmp_path_factory.mktemp("map")
    result = meshwright.plan_mixed(
        "llama-3-8b",
        cluster=named(where),
        global_batch=64,
        seq_len=4096,
        pin=PIN,
        nodes="new[0-1],old[0-1]",
        choices=False,
    )
    write_files(where / "plan", mixed_files(result), force=False)
    return where


def run(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    return result.exit_code, result.output


def test_a_pipeline_is_placed_on_other_nodes_and_launched_there(
    folder: Path, tmp_path: Path
) -> None:
    there = ("--cluster", folder / "named.yaml", "--nodes", "new[2-3],old[1-2]")
    code, text = run("map", folder / "plan", *there, "-o", tmp_path / "mapped")
    assert code == 0, text
    assert "2 nodes of new, then 2 nodes of old" in text
    hosts = (tmp_path / "mapped" / "hostfile").read_text().split()
    assert sorted(hosts) == ["new2", "new3", "old1", "old2"]
    assert run("verify", tmp_path / "mapped")[0] == 0
    assert run("launch", folder / "plan", *there, "-o", tmp_path / "launched")[0] == 0
    assert (tmp_path / "launched" / "hostfile").read_text().split() == hosts
    before = MixedPlan.model_validate(
        yaml.safe_load((folder / "plan" / "mixed_plan.yaml").read_text())
    )
    after = MixedPlan.model_validate(
        yaml.safe_load((tmp_path / "mapped" / "mixed_plan.yaml").read_text())
    )
    assert list(mixed_faults(after)) == []
    assert (after.status, after.objective.lower_bound_s) == ("feasible", None)
    assert after.layout == before.layout
    assert after.predicted == before.predicted


def test_what_has_no_room_is_said(folder: Path) -> None:
    plan = MixedPlan.model_validate(
        yaml.safe_load((folder / "plan" / "mixed_plan.yaml").read_text())
    )
    file = str(folder / "named.yaml")
    with pytest.raises(InfeasibleError, match="needs 2 nodes of new, named has 1 free"):
        map_parts(plan, file, "new[2],old[1-2]")
    with pytest.raises(InputError, match="no part of named has a node 'new8'"):
        map_parts(plan, file, "new[8-9],old[1-2]")
    code, text = run("map", folder / "plan", "--objective", "spread")
    assert code == 2
    assert "run through the nodes of each in turn" in " ".join(text.split())


def test_up_links_are_counted_on_every_part_with_a_bound(folder: Path, tmp_path: Path) -> None:
    """On leaves of one node each all replicas talk across; nothing can send less than the bound."""
    plan = MixedPlan.model_validate(
        yaml.safe_load((folder / "plan" / "mixed_plan.yaml").read_text())
    )
    document = mapped_parts_document(
        map_parts(plan, str(named(tmp_path, leaves=4)), "new[0-1],old[0-1]")
    )
    assert list(document["parts"]) == plan.runs_on
    for part in document["parts"].values():
        assert 0 < part["lower_bound_s"] <= part["uplinks_busy_s"] * (1 + 1e-9)
        assert part["busiest_uplink_s"] <= part["uplinks_busy_s"]
        assert part["status"] == "optimal"
