"""Files appear whole or not at all: on a full disk, in an odd folder, and under an interrupt."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshwright.documents import csv_text, left_over, uninterrupted, write_files
from meshwright.errors import InputError
from meshwright.planner.many.jobs import JOURNAL, AnswerCache, Journal


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """No file may grow beyond this: writing ends as it does where no room is left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_full_disk_leaves_the_old_files_and_no_new_ones(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.txt": "old"})
    with full_disk(1000), pytest.raises(InputError, match="cannot write"):
        write_files(tmp_path, {"a.txt": "new", "b.txt": "x" * 5000}, force=True)
    assert names(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    for folder in (tmp_path / "out", tmp_path / "out" / "below"):
        with pytest.raises(InputError, match="cannot be used as a folder"):
            write_files(folder, {"a.txt": "x"})
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_until_all_files_are_there(
    number: signal.Signals, tmp_path: Path
) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda n, _: heard.append(n))
    try:
        with uninterrupted():
            os.kill(os.getpid(), number)
            write_files(tmp_path, {"a.txt": "x", "b/c.txt": "y"})
            assert not heard
        assert heard == [number]
    finally:
        signal.signal(number, before)
    assert names(tmp_path) == ["a.txt", "c.txt"]


def test_a_cache_on_a_full_disk_keeps_nothing_and_says_nothing(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path)
    with full_disk(100):
        cache.put("ab" * 32, {"text": os.urandom(5000).hex()})
    assert cache.get("ab" * 32) is None
    assert names(tmp_path) == []


def test_every_flipped_bit_of_an_entry_is_noticed(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path)
    cache.put("cd" * 32, {"step_time_s": 1.0})
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert cache.get("cd" * 32) is None
    path.write_bytes(whole)
    assert cache.get("cd" * 32) == {"step_time_s": 1.0}


def test_a_journal_without_room_says_so_and_goes_on_later(tmp_path: Path) -> None:
    row = {"name": "a", "message": "x" * 50_000}
    with Journal(tmp_path, "id", resume=False) as journal:
        size = (tmp_path / JOURNAL).stat().st_size
        with full_disk(size), pytest.raises(InputError, match="make room, then --resume"):
            journal.add(0, row, cached=False, seconds=1.0)
    with Journal(tmp_path, "id", resume=True) as journal:
        assert journal.done() == set()
        journal.add(0, row, cached=False, seconds=1.0)
        assert journal.done() == {0}


def test_names_of_earlier_work_are_told_apart_from_new_ones(tmp_path: Path) -> None:
    write_files(tmp_path, {"plan.yaml": "new", "mapping/ranks.csv": "new"})
    (tmp_path / "hostfile").write_text("older", encoding="utf-8")
    names = ("plan.yaml", "hostfile", "rankfile", "mapping")
    words = left_over(tmp_path, names, ["plan.yaml", "mapping/ranks.csv"])
    assert words == (
        f"{tmp_path}: hostfile is still there from before, and no part of what was written now."
    )
    assert left_over(tmp_path, names, [*names, "mapping/ranks.csv"]) is None


def test_no_cell_of_a_table_is_a_formula() -> None:
    row = {"a": "=1+1", "b": ["=1+1", 2], "c": -1, "d": None, "e": ["x", "=y"]}
    assert csv_text([*"abcde"], [row]) == "a,b,c,d,e\n'=1+1,'=1+1 2,-1,,x =y\n"


@pytest.mark.parametrize(
    ("umask", "modes"), [(0o022, (0o644, 0o755)), (0o077, (0o600, 0o700)), (0o002, (0o664, 0o775))]
)
def test_files_are_for_whom_the_umask_lets(
    umask: int, modes: tuple[int, int], tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        paths = write_files(tmp_path / "run", {"plan.yaml": "a", "launch.sh": "b"})
        paths = write_files(tmp_path / "run", {"plan.yaml": "c", "launch.sh": "d"}, force=True)
    finally:
        os.umask(before)
    assert tuple(path.stat().st_mode & 0o777 for path in paths) == modes
    assert names(tmp_path / "run") == ["launch.sh", "plan.yaml"]
