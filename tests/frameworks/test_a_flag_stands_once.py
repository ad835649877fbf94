"""A flag of a framework stands once, in its record; what writes it and what reads it take it from there.

`python -m tests.frameworks.test_a_flag_stands_once` prints the flags that stand in several modules.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from meshwright.frameworks.catalog import RECORDS
from tests.frameworks.test_records import settings_of
from tests.test_structure import ROOT, modules, nodes_of

ROOMS = ("frameworks", "planner/launch", "planner/runs", "constraints")
"""Where a string that looks like a flag is one of a framework."""
OWN_OPTIONS = "commands"
"""Where it is an option of ours, some of which are called like a framework's flag."""
MANY = 3
"""Modules in which a flag is not to stand."""
MOST = 5
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")
_KEY = re.compile(r"[a-z]+(?:_[a-z0-9]+)+")


def literals(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """The strings of a module that are no documentation."""
    documentation = {
        id(statement.value)
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Expr)
    }
    for node in nodes:
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and id(node) not in documentation:
            yield value


def recorded_keys() -> set[str]:
    """Keys of configuration files that the records name, without their sections."""
    flags = {setting.flag for record in RECORDS for _, setting in settings_of(record)}
    keys = {flag.rpartition(".")[2] for flag in flags if not flag.startswith("--")}
    return {key for key in keys if _KEY.fullmatch(key)}


def may_name_one(path: Path, keys: set[str]) -> bool:
    """Whether a flag or one of some keys stands anywhere in a module."""
    text = path.read_text(encoding="utf-8")
    return bool(_FLAG.search(text)) or not keys.isdisjoint(re.findall(r"\w+", text))


def modules_by_flag() -> dict[str, set[str]]:
    """The modules of the product in which each flag or key of a framework stands."""
    keys = recorded_keys()
    texts = {
        path.relative_to(ROOT).as_posix(): list(literals(nodes_of(path)))
        for path in modules(ROOT)
        if may_name_one(path, keys)
    }
    recorded = keys | flags_in(texts, "frameworks")
    names = recorded | (flags_in(texts, ROOMS) - flags_in(texts, OWN_OPTIONS))
    standing: dict[str, set[str]] = defaultdict(set)
    for module, strings in texts.items():
        if module.startswith(OWN_OPTIONS):
            continue
        for text in strings:
            words = {*_FLAG.findall(text), *(keys & set(re.findall(r"\w+", text)))}
            for name in words & names:
                standing[name].add(module)
    return standing


def flags_in(texts: Mapping[str, list[str]], rooms: str | tuple[str, ...]) -> set[str]:
    """Strings of some rooms that are flags as a whole."""
    strings = (
        text for module, strings in texts.items() for text in strings if module.startswith(rooms)
    )
    return {text for text in strings if _FLAG.fullmatch(text)}


def test_strings_are_told_from_documentation() -> None:
    text = '"""Takes --of-a-text."""\n\n\ndef f() -> str:\n    """--of-f."""\n    return "--kept" + "words"\n'
    strings = list(literals(list(ast.walk(ast.parse(text)))))
    assert sorted(strings) == ["--kept", "words"]
    assert flags_in({"frameworks/a.py": strings, "commands/b.py": ["--other"]}, "frameworks") == {
        "--kept"
    }


@pytest.mark.slow
def test_few_flags_stand_in_three_modules() -> None:
    standing = modules_by_flag()
    wide = {flag: sorted(where) for flag, where in standing.items() if len(where) >= MANY}
    assert len(standing) > 150
    assert len(wide) <= MOST, wide


if __name__ == "__main__":
    for flag, where in sorted(modules_by_flag().items(), key=lambda pair: -len(pair[1])):
        if len(where) > 1:
            print(len(where), flag, *sorted(where))
