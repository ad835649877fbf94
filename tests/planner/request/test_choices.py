"""Choices are declared once: the table against the records and documents, and literals that tell it again."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import fields

import numpy as np
import pytest

from meshwright.costmodel.layout import Layout
from meshwright.costmodel.workload import Execution
from meshwright.frameworks.catalog import RECORDS, framework_named
from meshwright.frameworks.record import Framework
from meshwright.planner.plan.document import SpaceReport
from meshwright.planner.request.choices import (
    ALLOW,
    BY_NAME,
    CHOICES,
    FORBIDS,
    OF_LAYOUT,
    Choice,
    is_forbidden,
)
from meshwright.planner.runs.run_schema import SettingsDoc
from meshwright.planner.runs.run_terms import LayoutDoc
from tests.test_structure import ROOT, modules, nodes_of

NAMES = frozenset(BY_NAME) | {
    "num_micro_batches", "sequence_parallel", "recompute_layers", "dp_overlap", "pp_overlap", "bucket_mb",
}  # fmt: skip
MOST_LITERALS = 30
"""Literals of the product that name three choices or more: places that a new choice may have to touch."""


def literals(nodes: Iterable[ast.AST]) -> Iterator[set[str]]:
    """The strings of every tuple, list and set, and the keys of every dictionary."""
    for node in nodes:
        parts: list[ast.expr] = []
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            parts = node.elts
        elif isinstance(node, ast.Dict):
            parts = [key for key in node.keys if key is not None]
        values = (part.value for part in parts if isinstance(part, ast.Constant))
        yield {value for value in values if isinstance(value, str)}


def test_literals_are_counted() -> None:
    text = "a = ('tp', 'cp', x); b = {'tp': 1, 'cp': 2, 'pp': 3}; c: Literal['tp', 'ep', 'dp']"
    assert sum(len(words & NAMES) >= 3 for words in literals(ast.walk(ast.parse(text)))) == 2


@pytest.mark.slow
def test_few_literals_tell_the_choices_again() -> None:
    telling = [
        str(path.relative_to(ROOT))
        for path in modules(ROOT)
        for words in literals(nodes_of(path))
        if len(words & NAMES) >= 3
    ]
    assert len(telling) <= MOST_LITERALS, telling


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_a_choice_is_a_field_where_it_says(choice: Choice) -> None:
    holder = Layout if choice.of == "layout" else Execution
    assert choice.name in {field.name for field in fields(holder)}
    assert (choice.run_file or _run_file_name(choice)) in SettingsDoc.model_fields
    if choice.of == "layout":
        assert choice.name in LayoutDoc.model_fields
    if choice.searched:
        assert choice.searched in SpaceReport.model_fields
    if choice.record:
        assert choice.record in {field.name for field in fields(Framework)}
    assert not choice.words or choice.word(choice.plain) in choice.words
    assert choice.words or choice.of == "numerics" or choice.low <= int(choice.plain) <= choice.high


def _run_file_name(choice: Choice) -> str:
    """Overlaps are switched under one field, and whether layers are compiled is the stack's name."""
    if choice.name.endswith("_overlap"):
        return "overlap"
    return "framework" if choice.name == "compiled" else choice.name


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_what_records_allow_is_in_the_table(record: Framework) -> None:
    assert set(record.numerics) <= set(ALLOW)


def test_the_record_says_which_flag_asks_for_a_choice() -> None:
    megatron = framework_named("megatron")
    zero = BY_NAME["zero_stage"].setting(megatron, 1)
    assert zero is megatron.zero_stages[1]
    assert BY_NAME["ep_overlap"].setting(megatron, True) is megatron.overlaps["ep"]
    assert BY_NAME["shard_groups"].setting(megatron, 4) is megatron.shard_groups
    assert BY_NAME["recompute"].setting(megatron, "full") is None


def test_what_is_forbidden_is_the_same_of_one_layout_and_of_many() -> None:
    layouts = {choice.name: [choice.plain, choice.plain] for choice in OF_LAYOUT}
    layouts |= {
        "zero_stage": [0, 2],
        "recompute": ["selective", "full"],
        "vpp": [1, 3],
        "ep": [4, 1],
    }
    wanted = {
        "zero-0": [True, False],
        "zero-2": [False, True],
        "interleaving": [False, True],
        "ep": [True, False],
        "recompute": [True, True],
        "selective-recompute": [True, False],
        "full-recompute": [False, True],
    }
    for word in FORBIDS[:-1]:
        many = is_forbidden(word, lambda name: np.array(layouts[name]))
        singly = [
            is_forbidden(word, {name: both[row] for name, both in layouts.items()}.__getitem__)
            for row in (0, 1)
        ]
        assert many.tolist() == singly == wanted.get(word, [False, False])
