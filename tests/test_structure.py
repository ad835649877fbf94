"""The shape of the code base: who imports whom, what importing costs, who prints, how long a file may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FILE = 400

MAY_IMPORT: dict[str, set[str]] = {
    "cli": {"commands", "planner", "constraints", "costmodel", "cluster_specs", "model_specs"},
    "commands": {"planner", "constraints", "costmodel", "cluster_specs", "model_specs"},
    "planner": {"constraints", "costmodel", "cluster_specs", "model_specs"},
    "constraints": {"costmodel", "cluster_specs", "model_specs"},
    "costmodel": {"cluster_specs", "model_specs"},
    "cluster_specs": set(),
    "model_specs": set(),
}
SOLVER_ROOMS = {"planner", "constraints"}
PRINTING_ROOMS = {"cli", "commands"}
PRINTING_MODULES = {"rich.console", "rich.progress", "rich.live", "rich.prompt"}
FILE_READERS = {"open", "read_text", "read_bytes", "safe_load", "safe_load_all", "loadtxt", "load"}
HEAVY = ("ortools", "networkx", "rich", "scipy", "matplotlib")


def room_of(path: Path, root: Path) -> str:
    return path.relative_to(root).with_suffix("").parts[0]


def modules(root: Path) -> list[Path]:
    """The Python files of the rooms, and cli.py."""
    found = [path for room in MAY_IMPORT for path in (root / room).rglob("*.py")]
    return sorted([*found, *root.glob("cli.py")])


def imports(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    """Every imported module with its line; relative imports are written out from `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: -(node.level - 1) or None] if node.level else []
            base = ".".join([*parents, node.module] if node.module else parents)
            yield base, node.lineno
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def run_at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that importing the module executes: no function bodies, nothing under TYPE_CHECKING."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
        elif isinstance(node, ast.Lambda):
            waiting += node.args.defaults
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def is_print(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    return name in ("print", "rich.print", "Console") or bool(
        re.fullmatch(r"click\.(echo|secho|echo_via_pager)|sys\.(__)?std(out|err)(__)?\.write(lines)?", name)
    )


def faults(path: Path, root: Path) -> list[str]:
    """What is wrong with one module, a line each."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    room = room_of(path, root)
    package = ".".join(path.relative_to(root).parent.parts)
    found: list[str] = []

    def fault(line: int, what: str) -> None:
        found.append(f"{path.relative_to(root)}:{line}: {what}")

    for name, line in imports(tree, package):
        top = name.split(".")[0]
        if top in MAY_IMPORT and top not in MAY_IMPORT[room] | {room}:
            fault(line, f"{room} must not import {top}")
        if top == "ortools" and room not in SOLVER_ROOMS:
            fault(line, f"{room} must not import ortools")
        if name in PRINTING_MODULES and room not in PRINTING_ROOMS:
            fault(line, f"only commands print, {name} is imported")
    for node in run_at_import(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [name for name, _ in imports(node, package)]
            if any(name.split(".")[0] == "ortools" for name in names):
                fault(node.lineno, "ortools is imported with the module")
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in FILE_READERS:
            fault(node.lineno, f"reads a file when imported: {ast.unparse(node)}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and is_print(node) and room not in PRINTING_ROOMS:
            fault(node.lineno, f"only commands print: {ast.unparse(node)}")
    lines = text.count("\n")
    if lines > LONGEST_FILE:
        fault(lines, f"longer than {LONGEST_FILE} lines")
    return found


def in_new_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_modules_keep_to_the_rules() -> None:
    paths = modules(ROOT)
    assert {room_of(path, ROOT) for path in paths} == set(MAY_IMPORT)
    found = [line for path in paths for line in faults(path, ROOT)]
    assert not found, "\n".join(found)


def test_importing_the_command_line_stays_light() -> None:
    loaded = in_new_process("import sys, cli; print('\\n'.join(sys.modules))").split()
    assert "cli" in loaded
    assert [name for name in HEAVY if name in loaded] == []


def test_importing_reads_no_data_and_no_solver() -> None:
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules(ROOT)]
    names = [name.removesuffix(".__init__") for name in names]
    code = f"""
import importlib, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
for name in {names!r}:
    importlib.import_module(name)
inside = [path for path in opened if path.startswith({str(ROOT)!r}) and ".venv" not in path]
print("\\n".join(path for path in inside if not path.endswith((".py", ".pyc")) and ".pyc." not in path))
print("\\n".join(name for name in sys.modules if name == "ortools"))
"""
    assert in_new_process(code).split() == []


def test_every_package_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts) for path in modules(ROOT) if path.name != "cli.py"
    }
    assert set(settings["packages"]) == packages
    assert settings["py-modules"] == ["cli"]
    for package in packages:
        assert (ROOT / package.replace(".", "/") / "__init__.py").is_file(), package
    for package in settings["package-data"]:
        assert package in packages


MACHINE_PATH = re.compile(r"(?<![\w.~$}/-])/(?:" + "|".join(["work", "root", "home/[a-z]"]) + r")[/\w]")
TEXTS = (".py", ".md", ".yaml", ".toml", ".cfg", ".sh", ".json", ".txt", "Makefile", "run")


def machine_paths(root: Path) -> list[str]:
    """Lines that name a place of one machine."""
    skipped = {
        ".git",
        ".venv",
        ".oracles",
        ".ray",
        ".mypy_cache",
        ".ruff_cache",
        ".pytest_cache",
        ".hypothesis",
        "__pycache__",
        "build",
    }
    found = []
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if not path.is_file() or skipped & set(parts) or not path.name.endswith(TEXTS):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if MACHINE_PATH.search(line) or f"{root}/" in line:
                found.append(f"{path.relative_to(root)}:{number}: {line.strip()[:100]}")
    return found


def test_no_file_names_a_place_of_one_machine() -> None:
    assert machine_paths(ROOT) == []


@pytest.mark.parametrize(
    ("place", "code", "part"),
    [
        ("costmodel/bad.py", "from planner import plan\n", "costmodel must not import planner"),
        (
            "costmodel/bad.py",
            "def f() -> None:\n    import constraints.rule\n",
            "must not import constraints",
        ),
        ("model_specs/bad.py", "import cluster_specs\n", "model_specs must not import cluster_specs"),
        ("planner/launch/bad.py", "import cli\n", "planner must not import cli"),
        ("planner/launch/bad.py", "import commands.terminal\n", "planner must not import commands"),
        ("commands/bad.py", "import cli\n", "commands must not import cli"),
        ("costmodel/bad.py", "def f() -> None:\n    import ortools\n", "costmodel must not import ortools"),
        ("planner/bad.py", "from ortools.sat.python import cp_model\n", "imported with the module"),
        (
            "planner/bad.py",
            "try:\n    import ortools\nexcept ImportError:\n    raise\n",
            "imported with the module",
        ),
        ("planner/bad.py", "class A:\n    import ortools\n", "imported with the module"),
        ("planner/bad.py", "print('x')\n", "only commands print"),
        (
            "planner/bad.py",
            "import sys\ndef f() -> None:\n    sys.stdout.write('x')\n",
            "only commands print",
        ),
        ("planner/bad.py", "import click\ndef f() -> None:\n    click.echo('x')\n", "only commands print"),
        ("planner/bad.py", "from rich.console import Console\n", "only commands print"),
        ("costmodel/bad.py", "DATA = open('x').read()\n", "reads a file when imported"),
        ("costmodel/bad.py", "def f(x: object = open('x')) -> None: ...\n", "reads a file when imported"),
        ("costmodel/bad.py", "\n" * 401, "longer than 400 lines"),
    ],
)
def test_the_checks_catch_a_bad_module(tmp_path: Path, place: str, code: str, part: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True)
    path.write_text(code, encoding="utf-8")
    assert modules(tmp_path) == [path]
    assert any(part in line for line in faults(path, tmp_path))


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("planner/good.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ortools\n"),
        ("planner/good.py", "def f() -> None:\n    from ortools.sat.python import cp_model\n    open('x')\n"),
        ("planner/launch/good.py", "from ..plan import Plan\nfrom . import other\nimport costmodel.layout\n"),
        ("planner/good.py", "from rich.table import Table\n"),
        ("cli.py", "import click\nimport planner.plan\nclick.echo('x')\nprint('y')\n"),
        ("commands/good.py", "import click\nimport planner.plan\nclick.echo('x')\n"),
        ("model_specs/good.py", "\n" * 400),
    ],
)
def test_the_checks_pass_a_good_module(tmp_path: Path, place: str, code: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code, encoding="utf-8")
    assert faults(path, tmp_path) == []


def test_machine_paths_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "see " + "/" + "root/notes and\nhttps://example.org/home/page\n", encoding="utf-8"
    )
    (tmp_path / "b.py").write_text(f"PATH = '{tmp_path}/x'\n", encoding="utf-8")
    assert [line.split(":")[:2] for line in machine_paths(tmp_path)] == [["a.md", "1"], ["b.py", "1"]]
