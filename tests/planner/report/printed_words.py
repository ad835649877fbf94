"""Every word that commands print: keys and values of documents, headings of tables, names of facts."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from meshwright.costmodel import execution_names as names
from meshwright.costmodel.execution_names import DISPATCHERS, OFFLOADED_MODULES, SCHEDULE_NAMES
from meshwright.costmodel.layout import AXES
from meshwright.frameworks.catalog import FRAMEWORK_NAMES
from meshwright.planner.many.batch import JobRow
from meshwright.planner.many.fleet import FleetJobRow
from meshwright.planner.many.recommend import SizeRow
from meshwright.planner.plan.document import Plan
from meshwright.planner.request import choices
from meshwright.planner.runs.run_terms import RECOMPUTED

REPORT = Path(__file__).resolve().parents[3] / "planner" / "report"
DOCUMENTS = (Plan, JobRow, SizeRow, FleetJobRow)
TITLED = {"Column", "Card"}
DESCRIBED_ELSEWHERE = {"model", "cluster", "calibration", "part"}
"""Of a plan's inputs: files of their own, which `meshwright schema` describes."""


def of_documents() -> set[str]:
    """Keys of the documents of plan, batch, sweep, recommend and fleet, and the words that they may hold."""
    seen: set[type] = set()
    return {word for document in DOCUMENTS for word in _of_type(document, seen)}


def _of_type(kind: Any, seen: set[type]) -> Iterator[str]:
    if get_origin(kind) is Literal:
        yield from (str(value) for value in get_args(kind) if isinstance(value, str))
    elif get_args(kind):
        for part in get_args(kind):
            yield from _of_type(part, seen)
    elif isinstance(kind, type) and kind not in seen:
        seen.add(kind)
        if issubclass(kind, BaseModel):
            for name, field in kind.model_fields.items():
                yield field.alias or name
                if name not in DESCRIBED_ELSEWHERE:
                    yield from _of_type(field.annotation, seen)
        elif is_dataclass(kind):
            yield from (field.name for field in fields(kind))


def of_choices() -> set[str]:
    """Values of pins, bans, software and permissions, as they are typed and printed."""
    pinned = {word for choice in choices.CHOICES for word in choice.words}
    return {
        *choices.PINS,
        *choices.FORBIDS,
        *pinned,
        *DISPATCHERS,
        *(part for modules in OFFLOADED_MODULES for part in modules.split("+")),
        *SCHEDULE_NAMES,
        *RECOMPUTED,
        *choices.WITHOUT,
        *choices.PERMISSIONS,
        *names.PRECISIONS,
        *names.OPTIMIZERS,
        *names.METHODS,
        *FRAMEWORK_NAMES,
        *AXES,
    }


def of_views() -> set[str]:
    """Titles of columns and cards and names of facts that the views have in their source."""
    words: set[str] = set()
    for path in sorted(REPORT.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            words |= set(_titles(node))
        words |= set(_plain_headings(tree))
    return {word for word in words if word.strip()}


def _titles(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TITLED:
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value
    if isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.ctx, ast.Load):
        name, text = node.elts
        is_word = isinstance(name, ast.Constant) and isinstance(name.value, str)
        if is_word and isinstance(text, ast.JoinedStr | ast.Call):
            yield ast.literal_eval(name)


def _plain_headings(tree: ast.Module) -> Iterator[str]:
    """Headings without a kind: texts among the columns that `table` or `section` is given."""
    shared = _assigned(tree.body)
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        columns_by_name = shared | _assigned(ast.walk(function))
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                place = {"table": 1, "section": 2}.get(node.func.id, len(node.args))
                for columns in node.args[place : place + 1]:
                    name = columns.id if isinstance(columns, ast.Name) else ""
                    declared = columns_by_name.get(name, columns)
                    values = declared.values if isinstance(declared, ast.Dict) else []
                    yield from (
                        str(text.value) for text in values if isinstance(text, ast.Constant)
                    )


def _assigned(nodes: Iterable[ast.AST]) -> dict[str, ast.AST]:
    """Values by the names that they are assigned to."""
    assigned: dict[str, ast.AST] = {}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name):
                assigned[target.id] = node.value
    return assigned
