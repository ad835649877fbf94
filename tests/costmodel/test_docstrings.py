"""Public functions of the cost model and of `meshwright` say what they take, return and raise, and whence."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

import meshwright
import meshwright.costmodel
from tests.places import ROOT

ROOM = Path(meshwright.costmodel.__file__).parent
FILES = sorted(ROOM.rglob("*.py"))
SECTION = re.compile(r"^(Parameters|Returns|Raises)\n-+\n", flags=re.MULTILINE)
NUMBER = re.compile(r"^(float|int|Floats|Ints)( \| \w+)*$")
RANGE = re.compile(
    r"\d|at least|at most|above|below|more than|less than|share|shape|None", flags=re.IGNORECASE
)
"""Words in which a description says what values a number may have."""
ELSEWHERE = re.compile(r"^\s*As (for )?`?\w+`? ?(takes (it|them))?")
"""How a description says that another function has the range."""
SOURCE = re.compile(
    r"arXiv|et al\.|\b(19|20)\d\d\b|\w+\.(py|cc|cu|cuh|hpp|yaml|md)\b|\w+/\w+/\w+"
    r"|NVIDIA|Transformer Engine|Derived here"
)
"""A paper, a file of a framework, a document, a table of constants; or that the derivation follows."""
AMOUNT = re.compile(r"[Ff]loat|Parts|LayerTime|Passes|KindTime|Links|Rates|Traffic|Volumes")
"""Types of what a formula gives."""
REFERENCE = re.compile(r"`(?:\w+\.)*(\w+)`")
LEAST_WITH_PARAMETERS = 0.8
LEAST_WITH_SOURCE = 0.9
"""Of formulas; the others only add, scale or convert."""
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
    starred += ["**" + taken.kwarg.arg] if taken.kwarg else []
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
    stated = {n: described.get(n, "") for n in numbers}
    return [
        f"{name}: {n} has no range"
        for n, words in stated.items()
        if not RANGE.search(words) and not ELSEWHERE.search(words)
    ]


def is_formula(function: ast.FunctionDef) -> bool:
    """Whether it computes an amount: seconds, bytes, FLOP, shares."""
    arithmetic = any(
        isinstance(node, ast.BinOp) and not isinstance(node.op, ast.BitAnd | ast.BitOr | ast.Mod)
        for statement in function.body
        for node in ast.walk(statement)
    )
    return arithmetic and bool(AMOUNT.search(ast.unparse(function.returns or ast.Constant(None))))


@cache
def texts() -> dict[str, str]:
    """The docstring of every function and class of the cost model and of the constants below their values."""
    found: dict[str, str] = {}
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name] = ast.get_docstring(node) or ""
            body = node.body if isinstance(node, ast.Module | ast.ClassDef) else []
            for value, text in pairwise(body):
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    target = value.targets[0] if isinstance(value, ast.Assign) else None
                    target = value.target if isinstance(value, ast.AnnAssign) else target
                    found |= (
                        {target.id: str(text.value.value)} if isinstance(target, ast.Name) else {}
                    )
    return found


def has_source(text: str, depth: int = 3) -> bool:
    """Whether a text names a source, or another part of the cost model that does."""
    if SOURCE.search(text):
        return True
    referred = (texts().get(name, "") for name in REFERENCE.findall(text))
    return depth > 0 and any(has_source(other, depth - 1) for other in referred)


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


@pytest.mark.slow
def test_most_public_functions_have_parameters_and_most_formulas_a_source() -> None:
    """Counted over every function and method without an underscore, properties and nested ones too."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES]
    functions = [
        node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    stated = [node for node in functions if "Parameters\n-" in (ast.get_docstring(node) or "")]
    assert len(stated) >= LEAST_WITH_PARAMETERS * len(functions)
    formulas = [node for tree in trees for _, node in public_functions(tree) if is_formula(node)]
    bare = [node.name for node in formulas if not has_source(ast.get_docstring(node) or "")]
    assert len(bare) <= (1 - LEAST_WITH_SOURCE) * len(formulas), bare


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOM)))
def test_what_texts_refer_to_exists(path: Path) -> None:
    """Headings of documents, and `module.name` of the cost model."""
    text = re.sub(r"\s+", " ", path.read_text(encoding="utf-8"))
    for document, heading in re.findall(r'(docs/\w+\.md), "([^"]+)"', text):
        headings = re.findall(r"^#+ (.*)$", (ROOT / document).read_text(encoding="utf-8"), re.M)
        assert any(line.startswith(heading) for line in headings), (document, heading)
    modules = {file.stem for file in FILES}
    for module, name in re.findall(r"`([a-z_]+)\.([a-zA-Z_]\w*)`", text):
        if name not in ("py", "yaml", "md") and module not in ("architectures", "links"):
            assert module in modules, f"{module}.{name}"
            assert hasattr(importlib.import_module(f"meshwright.costmodel.{module}"), name), name


def _tree(member: Callable[..., object]) -> ast.FunctionDef | ast.ClassDef:
    """The source of a member; options that it takes together stand one by one, as in its signature."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(member))).body
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    together = node.args.kwarg if isinstance(node, ast.FunctionDef) else None
    if together is not None and "Unpack" in ast.unparse(together.annotation or together):
        assert isinstance(node, ast.FunctionDef)
        node.args.kwarg = None
        named = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        node.args.kwonlyargs += [
            ast.arg(option.name, ast.parse(str(option.annotation), mode="eval").body)
            for option in inspect.signature(member).parameters.values()
            if option.name not in named
        ]
    return node


@pytest.mark.parametrize("name", [name for name in meshwright.__all__ if name[0] != "_"])
def test_the_public_api_is_documented(name: str) -> None:
    """Functions in full; classes with the ranges of fields that are plain numbers."""
    node = _tree(getattr(meshwright, name))
    assert ast.get_docstring(node)
    if isinstance(node, ast.FunctionDef):
        assert faults(name, node) + boundless(name, node) == []
        return
    for field, text in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
        if isinstance(field, ast.AnnAssign) and NUMBER.match(ast.unparse(field.annotation)):
            assert isinstance(text, ast.Expr), ast.unparse(field)
            assert RANGE.search(ast.unparse(text)), ast.unparse(field)


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


def test_a_formula_without_source_is_caught() -> None:
    code = "def f_s(n: float) -> float:\n    return 2.0 * n"
    (function,) = (node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef))
    assert is_formula(function)
    assert not has_source("Twice the bytes.")
    assert has_source("Twice, as `ring_pass_s`: that function has a source.")


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted
    assert not result.failed
