"""Flags in the text of a script, changed where they stand: the lines around them stay as they are."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

_VALUE = r"""(?:"[^"\n]*"|'[^'\n]*'|(?!--)[^\s\\)"']+)"""
_VARIABLE = re.compile(r"^\"?\$\{?([A-Za-z_]\w*)\}?\"?$")


@dataclass(frozen=True, kw_only=True)
class FlagEdit:
    """A flag to set, change or take out."""

    flag: str
    before: tuple[str, ...] | None
    """Its values now; None where it is not there."""
    after: tuple[str, ...] | None
    """Its values then; None where it is taken out."""


def edited_text(
    text: str, edits: Sequence[FlagEdit], anchors: Sequence[str], *, through_variables: bool
) -> str:
    """A script with some flags changed.

    Parameters
    ----------
    text
        The script.
    edits
        What to change.
    anchors
        Flags after which new ones may stand, the first that is there is taken.
    through_variables
        Whether a flag whose value is `$NAME` is changed where NAME is set, and not where it is used.

    Returns
    -------
    str
        What could not be found is left as it is.
    """
    for edit in edits:
        if edit.after is None:
            text = _without(text, edit)
        elif edit.before is not None:
            text = _changed(text, edit, through_variables=through_variables)
    for edit in reversed(edits):
        if edit.before is None and edit.after is not None:
            text = _with(text, edit, anchors)
    return text


def _pattern(flag: str, values: int) -> re.Pattern[str]:
    """A flag with its values, whichever way its words are joined, in a line that is no comment."""
    words = flag.removeprefix("--").replace("-", "[-_]")
    spaced = rf"(?:[ \t]+{_VALUE})" * values
    joined = rf"=(?P<joined>{_VALUE})|" if values == 1 else ""
    return re.compile(rf"(?<![\w$-])(?P<flag>--{words})(?:{joined}(?P<spaced>{spaced}))(?![\w.-])")


def _matches(text: str, flag: str, values: int) -> list[re.Match[str]]:
    matches = _pattern(flag, values).finditer(text)
    return [match for match in matches if not _in_comment(text, match.start())]


def _in_comment(text: str, position: int) -> bool:
    line = text[text.rfind("\n", 0, position) + 1 : position]
    return re.search(r"(^|\s)#", line) is not None


def _changed(text: str, edit: FlagEdit, *, through_variables: bool) -> str:
    assert edit.before is not None
    assert edit.after is not None
    words = " ".join(map(shlex.quote, edit.after))
    for match in reversed(_matches(text, edit.flag, len(edit.before))):
        value = match["spaced"] or match.groupdict().get("joined") or ""
        variable = _VARIABLE.match(value.strip())
        if variable is not None and through_variables:
            return _assigned(text, variable[1], words)
        spaced = match["spaced"] is not None
        start, end = match.span("spaced" if spaced else "joined")
        text = text[:start] + (" " if spaced and words else "") + words + text[end:]
    return text


def _assigned(text: str, name: str, words: str) -> str:
    """The text with the one plain assignment of a variable changed; as it is where there are more."""
    pattern = re.compile(rf"^(?P<head>\s*(?:export\s+)?{name}=)(?P<value>{_VALUE})", re.MULTILINE)
    places = list(pattern.finditer(text))
    if len(places) != 1:
        return text
    start, end = places[0].span("value")
    return text[:start] + words + text[end:]


def _without(text: str, edit: FlagEdit) -> str:
    """The text without a flag and its values; a line that held nothing else goes with it."""
    values = len(edit.before or ())
    for match in reversed(_matches(text, edit.flag, values)):
        line_start = text.rfind("\n", 0, match.start()) + 1
        line_end = text.find("\n", match.end())
        line_end = len(text) if line_end < 0 else line_end
        rest = text[line_start : match.start()] + text[match.end() : line_end]
        if rest.strip() in ("", "\\"):
            text = text[:line_start] + text[line_end + 1 :]
        else:
            end = match.end()
            while text[end : end + 1] == " " and text[match.start() - 1] == " ":
                end += 1
            text = text[: match.start()] + text[end:]
    return text


def _with(text: str, edit: FlagEdit, anchors: Sequence[str]) -> str:
    """The text with a new flag behind the first anchor: on a line of its own where the anchor has one."""
    assert edit.after is not None
    words = " ".join([edit.flag, *map(shlex.quote, edit.after)])
    for anchor in anchors:
        matches = _matches(text, anchor, 1)
        if not matches:
            continue
        match = matches[-1]
        line_start = text.rfind("\n", 0, match.start()) + 1
        line_end = text.find("\n", match.end())
        line_end = len(text) if line_end < 0 else line_end
        before, after = text[line_start : match.start()], text[match.end() : line_end]
        if before.strip() == "" and after.strip() in ("", "\\"):
            if after.strip() == "" and _is_continued(text, line_start) and line_start:
                return f"{text[: match.end()]} \\\n{before}{words}{text[match.end() :]}"
            return f"{text[:line_end]}\n{before}{words}{after}{text[line_end:]}"
        return f"{text[: match.end()]} {words}{text[match.end() :]}"
    return text


def _is_continued(text: str, line_start: int) -> bool:
    """Whether the line before ends with a backslash."""
    return text[:line_start].rstrip("\n").endswith("\\")
