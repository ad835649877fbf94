"""A file in the way of the result is told before the work, not after it."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from meshwright import api
from meshwright.cli import main

MODEL = ("llama-3-8b", "--gpus", "8", "--global-batch", "8", "--seq-len", "2048")
CASES = {
    "plan": (("plan", *MODEL, "--cluster", "dgx-h100"), "plan.yaml"),
    "sweep": (("plan", *MODEL, "--cluster", "dgx-h100", "--sweep", "gpus=8:16:x2"), "sweep.csv"),
    "recommend": (
        (
            "recommend",
            "llama-3-8b",
            "--cluster",
            "dgx-h100",
            "--global-batch",
            "8",
            "--seq-len",
            "2048",
        ),
        "recommend.json",
    ),
    "fleet": (("fleet", "no_such_jobs.yaml", "--cluster", "dgx-h100"), "fleet.json"),
}


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("the work began")


@pytest.mark.parametrize("case", CASES)
def test_a_taken_name_is_refused_before_the_work(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("plan", "recommend"):
        monkeypatch.setattr(api, name, _refuse)
    monkeypatch.setattr("meshwright.sweep", _refuse, raising=False)
    words, name = CASES[case]
    (tmp_path / name).write_text("mine", encoding="utf-8")
    answer = CliRunner().invoke(main, [*words, "-o", str(tmp_path)])
    assert answer.exit_code == 2
    assert f"{name} is already there" in answer.stderr
    assert (tmp_path / name).read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("command", [("report", "--sweep"), ("trace",), ("compare", "run.sh")])
def test_a_taken_page_is_refused_before_the_plan_is_read(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine", encoding="utf-8")
    plan = tmp_path / "no_such_plan.yaml"
    name, *options = command
    answer = CliRunner().invoke(main, [name, str(plan), *options, "-o", str(page)])
    assert answer.exit_code == 2
    assert "page.html is already there. Choose another place, remove it," in answer.stderr
    assert page.read_text(encoding="utf-8") == "mine"


def test_a_folder_where_a_file_is_asked_for_is_said_to_be_one() -> None:
    """It was said that a file without a name is already there."""
    answer = CliRunner().invoke(main, ["report", "no_such_plan.yaml", "-o", "."])
    assert answer.exit_code == 2
    assert ". is a folder, not a file. Name a file in it with -o." in answer.stderr


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("file/inner/deep", "file is a file, not a folder"),
        ("closed/inner", "closed may not be written to. Choose another place with -o."),
    ],
)
def test_a_place_that_takes_no_files_is_refused_before_the_work(
    place: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said behind the search. Root may write to every folder, so the answer is put in its place."""
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(api, "plan", _refuse)
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "closed")
    words_of_plan = ["plan", "gpt2-xl", "--cluster", "dgx-a100", "--global-batch", "8"]
    asked = [*words_of_plan, "--seq-len", "1024", "-o", str(tmp_path / place)]
    answer = CliRunner().invoke(main, asked)
    assert answer.exit_code == 2
    assert words in answer.stderr


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_a_folder_is_no_file_whatever_is_forced(force: tuple[str, ...], tmp_path: Path) -> None:
    """`--force` was offered, and refused then."""
    words = ["report", "no_such_plan.yaml", "-o", str(tmp_path), *force]
    answer = CliRunner().invoke(main, words)
    assert answer.exit_code == 2
    assert f"{tmp_path} is a folder, not a file" in answer.stderr
    assert "--force" not in answer.stderr


@pytest.mark.slow
def test_what_an_earlier_plan_left_is_named(tmp_path: Path) -> None:
    """`launch.sh` takes a hostfile and a rankfile that lie beside it."""
    (tmp_path / "mixed_plan.yaml").write_text("of another plan", encoding="utf-8")
    (tmp_path / "rankfile").write_text("of another plan", encoding="utf-8")
    pins = ("--pin", "tp=1,pp=1,micro_batch=1,zero_stage=3", "--forbid", "shard-groups")
    asked = [*MODEL, "--cluster", "dgx-h100", "--framework", "fsdp2"]
    words = ["plan", *asked, *pins, "-o", str(tmp_path), "--force"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0
    assert "mixed_plan.yaml, rankfile are still there from before" in result.stderr
    assert (tmp_path / "rankfile").read_text(encoding="utf-8") == "of another plan"
    again = CliRunner().invoke(main, [*words[:-2], str(tmp_path / "empty")])
    assert "still there" not in again.stderr
