"""Every public function of the cost model says what it takes, what it returns and what it raises."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshwright.costmodel

ROOM = Path(meshwright.costmodel.__file__).parent
FILES = sorted(ROOM.rglob("*.py"))
SECTION = re.compile(r"^(Parameters|Returns|Raises)\n-+\n", flags=re.MULTILINE)
NUMBER = re.compile(r"^(float|int|Floats|Ints)( \| \w+)*$")
RANGE = re.compile(
    r"\d|at least|at most|above|below|more than|less than|share|shape|None", flags=re.IGNORECASE
)
"""Words in which a description says what values a number may have."""
EXAMPLES = ("meshwright.costmodel.estimate",)


def public_functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions of a module and methods of its public classes, properties aside."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, node
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for method in node.body:
                if not isinstance(method, ast.FunctionDef) or method.name.startswith("_"):
                    continue
                if any("property" in ast.unparse(d) for d in method.decorator_list):
                    continue
                yield f"{node.name}.{method.name}", method


def sections(docstring: str) -> dict[str, str]:
    """The text of each numpydoc section."""
    parts = SECTION.split(docstring)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def arguments(function: ast.FunctionDef) -> list[str]:
    taken = function.args
    named = [a.arg for a in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
    starred = ["*" + taken.vararg.arg] if taken.vararg else []
    return [name for name in (*named, *starred) if name not in ("self", "cls")]


def faults(name: str, function: ast.FunctionDef) -> list[str]:
    """What the docstring of a function leaves out."""
    stated = sections(ast.get_docstring(function) or "")
    headings = re.findall(r"^(\S.*?)(?: : .*)?$", stated.get("Parameters", ""), flags=re.MULTILINE)
    described = {word.strip() for line in headings for word in line.split(",")}
    missing = [f"{name}: {a} is not described" for a in arguments(function) if a not in described]
    missing += [
        f"{name}: no argument is called {word}" for word in described - set(arguments(function))
    ]
    if ast.unparse(function.returns or ast.Constant(None)) != "None" and "Returns" not in stated:
        missing.append(f"{name}: does not say what it returns")
    if any(isinstance(n, ast.Raise) for n in ast.walk(function)) and "Raises" not in stated:
        missing.append(f"{name}: does not say what it raises")
    return missing


def descriptions(function: ast.FunctionDef) -> dict[str, str]:
    """What the docstring says of every parameter, its type left out."""
    text = sections(ast.get_docstring(function) or "").get("Parameters", "")
    entries = re.findall(r"^(\S[^\n]*)\n((?:[ \t]+[^\n]*\n?)+)", text, flags=re.MULTILINE)
    described: dict[str, str] = {}
    for heading, words in entries:
        names, _, kind = heading.partition(" : ")
        shape = kind.partition("shape")[1]
        described |= {name.strip(): f"{shape} {words}" for name in names.split(",")}
    return described


def boundless(name: str, function: ast.FunctionDef) -> list[str]:
    """Numbers of which the docstring does not say which values they may have."""
    described = descriptions(function)
    taken = (*function.args.args, *function.args.kwonlyargs)
    numbers = [a.arg for a in taken if a.annotation and NUMBER.match(ast.unparse(a.annotation))]
    return [f"{name}: {n} has no range" for n in numbers if not RANGE.search(described.get(n, ""))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOM)))
def test_numbers_have_their_range(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lines = [line for name, node in public_functions(tree) for line in boundless(name, node)]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOM)))
def test_public_functions_are_documented(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lines = [line for name, node in public_functions(tree) for line in faults(name, node)]
    assert not lines, "\n".join(lines)


def test_a_docstring_without_sections_is_caught() -> None:
    code = '''
def f(a: int, *b: int) -> int:
    """No.

    Parameters
    ----------
    c : int
    """
    raise ValueError
'''
    (function,) = (node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef))
    assert faults("f", function) == [
        "f: a is not described",
        "f: *b is not described",
        "f: no argument is called c",
        "f: does not say what it returns",
        "f: does not say what it raises",
    ]
    assert boundless("f", function) == ["f: a has no range"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted
    assert not result.failed
