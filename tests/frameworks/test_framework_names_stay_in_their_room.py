"""No module outside frameworks/ compares a framework's name, or looks one up by it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.frameworks.catalog import FRAMEWORK_NAMES, STACK_NAMES
from tests.test_structure import ROOT, modules

NAMES = {*FRAMEWORK_NAMES, *STACK_NAMES}


def names_within(node: ast.AST) -> set[str]:
    """Names of frameworks among the literals of an expression."""
    return {
        child.value
        for child in ast.walk(node)
        if isinstance(child, ast.Constant) and isinstance(child.value, str) and child.value in NAMES
    }


def may_decide(text: str) -> bool:
    """Whether a module holds a framework's name as a literal at all."""
    return any(f'"{name}"' in text or f"'{name}'" in text for name in NAMES)


def decisions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every framework's name that the code decides by."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        decided: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            decided = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            decided = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.MatchValue | ast.Subscript):
            decided = [node]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("startswith", "endswith", "get"):
                decided = list(node.args[:1])
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
            node.value, ast.Tuple | ast.List | ast.Set
        ):
            decided = [node.value]
        for part in decided:
            yield from ((line, name) for name in sorted(names_within(part)))


def code_outside_the_room() -> list[Path]:
    product = [path for path in modules(ROOT) if "frameworks" not in path.relative_to(ROOT).parts]
    return [*product, *(ROOT / "benchmarks").glob("*.py")]


def test_no_other_module_decides_by_a_framework_name() -> None:
    wrong = []
    for path in code_outside_the_room():
        text = path.read_text(encoding="utf-8")
        if may_decide(text):
            lines = decisions(ast.parse(text))
            wrong += [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in lines]
    assert wrong == []


@pytest.mark.parametrize(
    "code",
    [
        'if work.framework == "megatron": pass',
        'if work.framework != "megatron-bridge": pass',
        'if work.framework in ("megatron", "torchtitan"): pass',
        'ZERO = {"fsdp2": (2, 3)}',
        'match framework:\n    case "deepspeed":\n        pass',
        'SELECTIVE = ("megatron",)',
        'if name.startswith("torchtitan"): pass',
        'stages = ZERO["megatron"]',
    ],
)
def test_the_check_catches_a_decision(code: str) -> None:
    assert list(decisions(ast.parse(code)))
