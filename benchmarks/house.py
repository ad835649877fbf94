"""How the code reads, in figures: its size, how dense its lines are, its names, its docstrings.

    python -m benchmarks.house [ROOT]

Figures to look at, and thresholds that tests hold (`tests/test_structure.py`): what they cannot see is whether a
sentence is true or a name is right.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
APART = {"tests", "benchmarks", "docs", "build", "dist"}
"""Folders beside the product."""
VAGUE_NAMES = frozenset(
    [
        "again",
        "anew",
        "asked",
        "at",
        "enough",
        "found",
        "given",
        "gone",
        "held",
        "kept",
        "known",
        "least",
        "left",
        "many",
        "mine",
        "more",
        "most",
        "much",
        "one",
        "other",
        "others",
        "out",
        "own",
        "some",
        "such",
        "that",
        "theirs",
        "them",
        "these",
        "thing",
        "this",
        "told",
        "two",
        "whole",
        "it",
        "they",
    ]
)
"""Names of variables that say nothing of what they hold."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(kw_only=True)
class House:
    """Counts over all modules of the product."""

    modules: int = 0
    lines: int = 0
    """Of files, blank ones and docstrings included."""
    code_lines: int = 0
    """Neither blank, nor comment, nor docstring."""
    nodes: int = 0
    """Of the syntax trees."""
    bindings: Counter[str] = field(default_factory=Counter)
    """Names of variables and parameters, and how often each is bound."""
    function_lengths: list[int] = field(default_factory=list)
    documented: int = 0
    public_functions: int = 0
    homes: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Public functions and classes, and the modules that define one of that name."""

    @property
    def nodes_per_line(self) -> float:
        return self.nodes / self.code_lines

    @property
    def vague_share(self) -> float:
        """Bindings with a name out of `VAGUE_NAMES`, of all."""
        vague = sum(count for name, count in self.bindings.items() if name in VAGUE_NAMES)
        return vague / self.bindings.total()

    @property
    def doubled(self) -> dict[str, list[str]]:
        """Public names that two modules define."""
        return {name: sorted(homes) for name, homes in self.homes.items() if len(homes) > 1}


def product_files(root: Path = ROOT) -> Iterator[Path]:
    """The Python files of the product under `root`, in order of their path."""
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if not any(name in APART or name.startswith(".") for name in folders):
            yield path


def survey(root: Path = ROOT) -> House:
    """Counts the product under `root`."""
    house = House()
    for path in product_files(root):
        text = path.read_text(encoding="utf-8")
        count_module(house, str(path.relative_to(root)), text)
    return house


def count_module(house: House, name: str, text: str) -> None:
    """Adds one module's figures."""
    tree = ast.parse(text)
    documentation: set[int] = set()
    house.modules += 1
    for node in ast.walk(tree):
        house.nodes += 1
        documentation |= docstring_lines(node)
        if isinstance(node, Function):
            count_function(house, node)
        if isinstance(node, ast.arg):
            house.bindings[node.arg] += 1
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            house.bindings[node.id] += 1
    for statement in tree.body:
        if isinstance(statement, Function | ast.ClassDef) and not statement.name.startswith("_"):
            house.homes[statement.name].add(name)
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.strip()
        house.lines += 1
        if words and not words.startswith("#") and number not in documentation:
            house.code_lines += 1


def count_function(house: House, function: Function) -> None:
    """Adds one function's length and whether it is documented."""
    house.function_lengths.append((function.end_lineno or function.lineno) - function.lineno + 1)
    if not function.name.startswith("_"):
        house.public_functions += 1
        house.documented += bool(ast.get_docstring(function))


def docstring_lines(node: ast.AST) -> set[int]:
    """The lines of a module's, class's or function's docstring."""
    if not isinstance(node, ast.Module | ast.ClassDef | Function) or not ast.get_docstring(node):
        return set()
    first = node.body[0]
    return set(range(first.lineno, (first.end_lineno or first.lineno) + 1))


def report(house: House) -> str:
    """The figures as lines of text."""
    lengths = sorted(house.function_lengths)
    vague = ((name, house.bindings[name]) for name in VAGUE_NAMES)
    frequent = sorted(vague, key=lambda pair: -pair[1])[:8]
    rows = [
        f"modules              {house.modules}",
        f"lines                {house.lines}, {house.code_lines} of code",
        f"syntax nodes a line  {house.nodes_per_line:.2f}",
        f"functions            {len(lengths)}: median {lengths[len(lengths) // 2]} lines, "
        f"90th {lengths[len(lengths) * 9 // 10]}, longest {lengths[-1]}",
        f"public with a docstring  {house.documented} of {house.public_functions}",
        f"vague names          {house.vague_share:.1%} of {house.bindings.total()} bindings: "
        + ", ".join(f"{name} {count}" for name, count in frequent),
        f"names defined twice  {len(house.doubled)}",
    ]
    rows += [f"  {name}: {', '.join(homes)}" for name, homes in sorted(house.doubled.items())]
    return "\n".join(rows)


if __name__ == "__main__":
    print(report(survey(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)))
