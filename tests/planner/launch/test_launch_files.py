"""Writing launch files: whole, not over others, inside the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.documents import write_files
from meshwright.errors import InputError
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.launch.plan_files import next_step, plan_files
from meshwright.planner.plan.document import Mapping
from tests.plans import make_plan


def test_files_are_written_and_scripts_are_executable(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    paths = write_files(
        folder, {"hostfile": "a\n", "launch.sh": "#!/bin/sh\n", "plans/x.txt": "é\n"}
    )
    assert [path.relative_to(folder).as_posix() for path in paths] == [
        "hostfile",
        "launch.sh",
        "plans/x.txt",
    ]
    assert (folder / "plans" / "x.txt").read_text(encoding="utf-8") == "é\n"
    assert (folder / "launch.sh").stat().st_mode & 0o111
    assert not (folder / "hostfile").stat().st_mode & 0o111


@pytest.mark.parametrize(
    ("target", "stage"), [("megatron", 1), ("torchtitan", 3), ("deepspeed", 1), ("fsdp2", 3)]
)
def test_a_name_in_a_model_file_ends_no_comment(target: str, stage: int) -> None:
    """Fields that no reader asked for are named in launch.sh, which ran what stood behind a line break."""
    hostile = ("num_things\ntouch pwned\n# 7", "more\r\u2028touch pwned 1")
    model = load_catalog_model("llama-3-8b").model_copy(update={"left_out": hostile})
    script = plan_files(make_plan(model, dp=8, zero_stage=stage), target)["launch.sh"]
    assert "num_things touch pwned # 7" in script
    starts = [line.lstrip("# ").split()[:1] for line in script.splitlines() if "touch" in line]
    assert starts
    assert ["touch"] not in starts


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("mine")
    with pytest.raises(InputError, match=r"b is already there.*--force"):
        write_files(tmp_path, {"a": "1", "b": "2"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]
    assert (tmp_path / "b").read_text() == "mine"
    write_files(tmp_path, {"a": "1", "b": "2"}, force=True)
    assert (tmp_path / "b").read_text() == "2"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", ".", "a//b", "a/./b", "x\0y"])
def test_names_stay_inside_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="no file name inside a folder"):
        write_files(tmp_path / "in", {name: "x"}, force=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "in"
    outside.mkdir()
    folder.mkdir()
    (outside / "secret").write_text("old")
    (folder / "link").symlink_to(outside)
    (folder / "file").symlink_to(outside / "secret")
    with pytest.raises(InputError, match="through a symbolic link"):
        write_files(folder, {"link/x": "new"}, force=True)
    with pytest.raises(InputError, match="not a plain file"):
        write_files(folder, {"file": "new"}, force=True)
    assert (outside / "secret").read_text() == "old"
    assert [path.name for path in outside.iterdir()] == ["secret"]


def test_a_failure_leaves_neither_files_nor_leftovers(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        write_files(tmp_path, {"a": "fine", "b" * 300: "name too long"})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="cannot be encoded"):
        write_files(tmp_path, {"a": "fine", "b": "\ud800"})
    assert list(tmp_path.iterdir()) == []


def test_a_file_cannot_be_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot be used as a folder"):
        write_files(tmp_path / "file", {"a": "1"})


@pytest.mark.parametrize(("nodes", "mode"), [((0, 0), "node"), ((0, 1), "slurm"), ((), "slurm")])
def test_a_plan_on_one_node_needs_no_scheduler(nodes: tuple[int, ...], mode: str) -> None:
    """A workstation has no Slurm, and was told to start with it."""
    ranks = [(node, gpu) for gpu, node in enumerate(nodes)] or None
    mapping = Mapping(order=[], levels=[], matrix={}, ranks=ranks)
    plan = make_plan(dp=max(1, len(nodes)), mapping=mapping)
    assert f"launch.sh {mode}" in next_step(plan, Path("run"))
