"""Sizes of hierarchical context parallelism in run files and launch scripts: priced as given, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.planner.runs.launches.reader import read_launch
from meshwright.planner.runs.run_file import Run, run_from_mapping

RUN = {"seq_len": 65_536, "global_batch": 4, "gpus": 32, "cp": 8}


def run(**changes: Any) -> Run:
    """llama-3-8b has 32 heads, 8 of keys and values."""
    row = {"model": "llama-3-8b", "cluster": "dgx-h100", "run": RUN | changes}
    return run_from_mapping(row, where="run.yaml")


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("a2a+p2p", "a2a+p2p"),
        (" A2A+P2P, sizes 4 2", "a2a+p2p"),
        ("a2a", "a2a"),
        ("ulysses", "a2a"),
        ("p2p", "p2p"),
        ("all_gather", "all_gather"),
        ("AllGather of keys and values", "all_gather"),
        (None, "p2p"),
    ],
)
def test_words_for_the_exchange(words: str | None, kind: str) -> None:
    assert run(cp_comm=words).workload.cp_comm == kind


@pytest.mark.parametrize("inner", [None, 1, 2, 8])
def test_a_number_of_neighbours_is_kept(inner: int | None) -> None:
    work = run(cp_comm="a2a+p2p", cp_inner=inner).workload
    assert (work.cp_comm, work.cp_inner) == ("a2a+p2p", inner)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cp_comm": "p2p", "cp_inner": 4}, "goes with cp_comm a2a[+]p2p only"),
        ({"cp_inner": 4}, "goes with"),
        ({"cp_comm": "a2a+p2p", "cp_inner": 3}, "3 does not divide cp 8"),
        ({"cp_comm": "a2a+p2p", "cp_inner": 16}, "16 does not divide cp 8"),
        ({"cp_comm": "a2a+p2p", "cp_inner": 8, "tp": 2}, "8 key-value heads do not divide by tp 2"),
        ({"cp_comm": "a2a+p2p", "tp": 8, "cp": 4}, "is needed: with tp 8 and cp 4"),
        ({"cp_comm": "a2a+p2p", "cp": 2, "global_batch": 16}, "is needed"),
        ({"cp_comm": "a2a+p2p", "cp_inner": 0}, "cp_inner"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        run(**changes)


SCRIPT = "torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py --seq-length 65536 --num-layers 4 "
SCRIPT += "--hidden-size 1024 --num-attention-heads 16 --context-parallel-size 8 "
SIZES = "--hierarchical-context-parallel-sizes"


def settings(tmp_path: Path, flags: str) -> dict[str, Any]:
    path = tmp_path / "launch.sh"
    path.write_text(SCRIPT + flags, encoding="utf-8")
    read = read_launch(path)
    assert not [flag for flag in read.unread if flag in ("--cp-comm-type", SIZES)]
    return {name: read.settings.get(name) for name in ("cp_comm", "cp_inner")}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", (None, None)),
        ("--cp-comm-type p2p", (None, None)),
        ("--cp-comm-type a2a", ("a2a", None)),
        ("--cp-comm-type all_gather", ("all_gather", None)),
        ("--cp-comm-type a2a a2a a2a a2a", ("a2a", None)),
        (f"--cp-comm-type a2a+p2p {SIZES} 4 2", ("a2a+p2p", 4)),
        (f"{SIZES} 2 4 --cp-comm-type a2a+p2p a2a+p2p", ("a2a+p2p", 2)),
        (f"--cp-comm-type p2p {SIZES} 2 4", (None, None)),
    ],
)
def test_flags_are_read(
    tmp_path: Path, flags: str, expected: tuple[str | None, int | None]
) -> None:
    assert tuple(settings(tmp_path, flags).values()) == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--cp-comm-type a2a+p2p", "has to be two whole numbers"),
        (f"--cp-comm-type a2a+p2p {SIZES} 2 2 2", "has to be two whole numbers"),
        (f"--cp-comm-type a2a+p2p {SIZES} two four", "has to be two whole numbers"),
        (f"--cp-comm-type a2a+p2p {SIZES} 2 2", "must multiply to the context-parallel size 8"),
        ("--cp-comm-type p2p a2a p2p a2a", "differs from layer to layer"),
    ],
)
def test_what_megatron_would_not_start_or_has_no_price_is_refused(
    tmp_path: Path, flags: str, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        settings(tmp_path, flags)
