"""Launch scripts that grow as their variables are put in: fuzzing found them to take minutes."""

from __future__ import annotations

import pytest

from meshwright.errors import InputError
from meshwright.planner.runs.launches import command_line as flags
from meshwright.planner.runs.launches.command_line import MOST_LETTERS, MOST_LINE_LETTERS, words_of

SCRIPTS = {
    "a variable that doubles": "A=x\n" + 'A="$A $A"\n' * 40,
    "one variable many times": "A=" + "x" * 10_000 + "\n" + "B=" + "$A" * 10_000 + "\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_grows_is_refused_in_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "MOST_LETTERS", 50_000)
    with pytest.raises(InputError, match="letters once its variables have their values"):
        words_of(SCRIPTS[name], "launch.sh")


def test_a_script_of_megabytes_is_refused_before_it_is_split() -> None:
    with pytest.raises(InputError, match="are no launch script"):
        words_of("\n" * (MOST_LETTERS + 1), "launch.sh")


def test_an_array_over_many_lines_is_one_list() -> None:
    script = "args=(\n" + "--flag 1\n" * 20_000 + ")\nrun ${args[@]}\n"
    words = words_of(script, "launch.sh").words
    assert words[:3] == ["run", "--flag", "1"]
    assert len(" ".join(words)) <= MOST_LINE_LETTERS
