"""Errors, their exit codes, and what their messages carry."""

from __future__ import annotations

from itertools import count

import pytest

from meshwright import errors
from meshwright.errors import (
    ExitCode,
    InfeasibleError,
    InputError,
    InternalError,
    MeshwrightError,
    OutOfTimeError,
    listed,
    message_of,
    near_miss,
    shown,
)


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (InputError("wrong"), "wrong", 2),
        (InfeasibleError("nothing fits"), "nothing fits", 1),
        (OutOfTimeError("too late"), "too late", 3),
        (InternalError("broken"), "internal error, InternalError: broken. This is a fault in", 70),
        (KeyError("x"), "internal error, KeyError: 'x'. This is a fault in", 70),
        (ImportError("no x"), "the installation is incomplete: no x", 70),
        (FileNotFoundError(2, "No such file", "a.yaml"), "a.yaml: No such file", 2),
    ],
    ids=count(),
)
def test_every_error_has_a_sentence_and_an_exit_code(
    error: Exception, text: str, code: int
) -> None:
    message, exit_code = message_of(error)
    assert message.startswith(text)
    assert exit_code == code


def test_all_errors_have_one_base_and_a_code() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    ours = [kind for kind in classes if issubclass(kind, Exception)]
    assert len(ours) == 5
    for kind in ours:
        assert issubclass(kind, MeshwrightError)
        assert isinstance(kind.exit_code, ExitCode)


def test_long_lists_are_cut_short() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed([str(number) for number in range(62)]).endswith("58, 59, and 2 more")
    names = [f"name-{number}" for number in range(30)]
    guessed = InputError("is not known", value="name-", allowed=names, did_you_mean="name-7")
    assert str(guessed).endswith("(did you mean 'name-7'?); allowed: " + listed(names, 12))
    assert guessed.allowed == tuple(names)


def test_a_part_of_a_name_is_a_near_miss() -> None:
    assert near_miss("h100", ["dgx-a100", "dgx-h100"]) == "dgx-h100"
    assert near_miss("h", ["dgx-h100"]) is None


def test_near_misses() -> None:
    assert near_miss("Full Attention", ["full_attention", "other"]) == "full_attention"
    assert near_miss("zzz", ["full_attention"]) is None
    assert near_miss(3, ["3"]) is None
    assert near_miss("id", ["kind", "method"]) is None
    assert near_miss("vp", ["tp", "vpp"]) == "vpp"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1.0, "1.0"),
        (0.0, "0.0"),
        (12, "12"),
        (-(10**6000), "an integer of 19932 bits"),
        ("a\nb", r"'a\nb'"),
        ("y" * 100, "'" + "y" * 80 + "'..."),
        ([[[]]], "a list of 1 items"),
        (b"", "a bytes"),
    ],
    ids=count(),
)
def test_values_are_shown_short(value: object, text: str) -> None:
    assert shown(value) == text
