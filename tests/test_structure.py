"""The shape of the code base: who imports whom, what importing costs, who prints."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

import meshwright
from benchmarks.house import survey
from meshwright import cli
from meshwright.commands.options import ChoiceIn

ROOT = Path(__file__).resolve().parent.parent

SPECS = {"model_specs", "cluster_specs"}
COSTS = SPECS | {"errors", "documents", "frameworks", "costmodel"}
RULES = COSTS | {"constraints"}
DRAWN = {"planner.drawing"}
BOUNDS = RULES | {"planner.solvers", "planner.bounds"}
REQUEST = BOUNDS | {"planner.experts", "planner.request"}
RUNS = REQUEST | {"planner.runs"}
SEARCH = RUNS | {"planner.mapping", "planner.search"}
PLAN = SEARCH | {"planner.plan"}
MIXED = PLAN | {"planner.mixed"}
LAUNCH = MIXED | DRAWN | {"planner.analysis", "planner.launch"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "documents": {"errors"},
    "model_specs": {"errors", "documents"},
    "cluster_specs": {"errors", "documents"},
    "frameworks": {"errors", "documents"} | SPECS,
    "costmodel": COSTS - {"costmodel"},
    "constraints": COSTS,
    "planner.solvers": {"errors"},
    "planner.drawing": set(),
    "planner.bounds": BOUNDS - {"planner.bounds"},
    "planner.mapping": BOUNDS,
    "planner.experts": BOUNDS,
    "planner.request": BOUNDS | {"planner.experts"},
    "planner.runs": REQUEST | {"planner.mapping"},
    "planner.search": RUNS | {"planner.mapping"},
    "planner.plan": SEARCH,
    "planner.analysis": MIXED | {"planner.calculators"},
    "planner.mixed": PLAN,
    "planner.launch": MIXED | DRAWN | {"planner.analysis"},
    "planner.audit": LAUNCH,
    "planner.many": LAUNCH,
    "planner.calculators": COSTS,
    "planner.report": LAUNCH | {"planner.analysis", "planner.many", "planner.calculators"},
}
"""What each room may import, itself aside. `api`, `commands` and `cli` stand above all of them."""
BELOW = set(MAY_IMPORT)
MAY_IMPORT["planner"] = set()
MAY_IMPORT[""] = BELOW | {"api"}
MAY_IMPORT["api"] = BELOW
MAY_IMPORT["serve"] = BELOW | {"api"}
MAY_IMPORT["commands"] = BELOW | {"api", "serve"}
MAY_IMPORT["cli"] = BELOW | {"api", "commands"}
MAY_IMPORT["__main__"] = {"cli"}
SOLVER_ROOMS = {room for room in MAY_IMPORT if room.startswith("planner.")} | {"constraints"}
PRINTING_ROOMS = {"cli", "commands"}
PACKAGE = "meshwright"
TOPS = {room.split(".")[0] for room in MAY_IMPORT if room}
PRINTING_MODULES = {"rich.console", "rich.progress", "rich.live", "rich.prompt"}
PRINTERS = {"print", "Console", "echo", "secho", "echo_via_pager", "write", "writelines"}
"""What the names of calls that print end in."""
FILE_READERS = {"open", "read_text", "read_bytes", "safe_load", "safe_load_all", "loadtxt", "load"}
LOADS_CP_SAT = "planner/solvers/or_tools.py"
"""Where CP-SAT is imported, for everybody else to import from."""
NAMES_CP_SAT = (LOADS_CP_SAT, "constraints/rule.py")
"""The base of all rules names its types."""
HEAVY = (
    "ortools",
    "networkx",
    "rich",
    "scipy",
    "matplotlib",
    "tomlkit",
    "starlette",
    "uvicorn",
    "mcp",
    "tensorboard",
)


def room_of(path: Path, root: Path) -> str:
    """The room of a file: `planner.search` for planner/search/model.py, `` for the package's own __init__."""
    return room_named(path.relative_to(root).with_suffix("").parts)


def room_named(parts: tuple[str, ...]) -> str:
    if parts == ("__init__",):
        return ""
    return ".".join(parts[:2]) if ".".join(parts[:2]) in MAY_IMPORT else parts[0]


def modules(root: Path) -> list[Path]:
    """The Python files of the package."""
    tops = {room.split(".")[0] for room in MAY_IMPORT if room}
    inside = [path for top in sorted(tops) for path in (root / top).rglob("*.py")]
    flat = [path for path in root.glob("*.py") if path.stem in tops or path.stem == "__init__"]
    return sorted([*inside, *flat])


def room_of_import(name: str) -> str | None:
    """The room that an imported name lies in; None where it is not of this package or names all of it."""
    parts = tuple(name.split("."))
    if parts[0] != PACKAGE or len(parts) == 1:
        return None
    room = ".".join(parts[1:3])
    return room if room in MAY_IMPORT else parts[1]


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join((PACKAGE, *parts)).removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    """A module, read once for all tests of a process."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a module, in the order of `ast.walk`, found once for all tests of a process."""
    nodes: list[ast.AST] = [tree_of(path)]
    for node in nodes:
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                nodes.append(value)
            elif isinstance(value, list):
                nodes += (each for each in value if isinstance(each, ast.AST))
    return tuple(nodes)


def imports(nodes: Iterable[ast.AST], package: str) -> Iterator[tuple[str, int]]:
    """Every imported module with its line; relative imports are written out from `package`."""
    for node in nodes:
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
            waiting += [
                *node.decorator_list,
                *node.args.defaults,
                *filter(None, node.args.kw_defaults),
            ]
        elif isinstance(node, ast.Lambda):
            waiting += node.args.defaults
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def is_print(call: ast.Call) -> bool:
    last = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if last not in PRINTERS:
        return False
    name = ast.unparse(call.func)
    return name in ("print", "rich.print", "Console") or bool(
        re.fullmatch(
            r"click\.(echo|secho|echo_via_pager)|sys\.(__)?std(out|err)(__)?\.write(lines)?", name
        )
    )


def is_solver(name: str) -> bool:
    """Whether a module loads OR-tools."""
    return name.split(".", maxsplit=1)[0] == "ortools" or name.endswith("solvers.or_tools")


def faults(path: Path, root: Path) -> list[str]:
    """What is wrong with one module, a line each."""
    tree = tree_of(path)
    room = room_of(path, root)
    package = ".".join((PACKAGE, *path.relative_to(root).parent.parts))
    found: list[str] = []

    def fault(line: int, what: str) -> None:
        found.append(f"{path.relative_to(root)}:{line}: {what}")

    for name, line in imports(nodes_of(path), package):
        other = room_of_import(name)
        if other not in MAY_IMPORT[room] | {room, None, "planner"}:
            fault(line, f"{room} must not import {other}")
        if name.split(".")[0] in TOPS:
            fault(line, f"{name} is imported without {PACKAGE}")
        if is_solver(name) and room not in SOLVER_ROOMS:
            fault(line, f"{room} must not import ortools")
        if name.startswith("ortools.sat") and path.relative_to(root).as_posix() not in NAMES_CP_SAT:
            fault(line, f"CP-SAT is imported from {LOADS_CP_SAT}")
        if name in PRINTING_MODULES and room not in PRINTING_ROOMS:
            fault(line, f"only commands print, {name} is imported")
    for node in run_at_import(tree) if path.relative_to(root).as_posix() != LOADS_CP_SAT else ():
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [name for name, _ in imports([node], package)]
            if any(is_solver(name) for name in names):
                fault(node.lineno, "ortools is imported with the module")
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in FILE_READERS:
            fault(node.lineno, f"reads a file when imported: {ast.unparse(node)}")
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and is_print(node) and room not in PRINTING_ROOMS:
            fault(node.lineno, f"only commands print: {ast.unparse(node)}")
    return found


def in_new_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_modules_keep_to_the_rules() -> None:
    paths = modules(ROOT)
    assert {room_of(path, ROOT) for path in paths} <= set(MAY_IMPORT)
    found = [line for path in paths for line in faults(path, ROOT)]
    assert not found, "\n".join(found)


def test_no_room_imports_in_a_circle() -> None:
    graph: nx.DiGraph[str] = nx.DiGraph()
    names = {module_name(path, ROOT): path for path in modules(ROOT)}
    for name, path in names.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found = imports(nodes_of(path), package)
        graph.add_edges_from((name, other) for other, _ in found if other in names)
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    circles = [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    assert circles == []


@pytest.mark.slow
def test_the_code_reads_as_it_should() -> None:
    house = survey(ROOT)
    assert house.doubled == {}
    assert house.vague_share < 0.02
    assert round(house.nodes_per_line, 1) <= 9.8


def test_few_modules_lie_flat_in_the_planner() -> None:
    assert (
        len([path for path in (ROOT / "planner").glob("*.py") if path.name != "__init__.py"]) <= 3
    )


def test_the_choices_of_options_exist() -> None:
    parameters = [p for command in cli.main.commands.values() for p in command.params]
    choices = [p.type for p in parameters if isinstance(p.type, ChoiceIn)]
    assert len(choices) > 10
    for choice in choices:
        assert all(isinstance(name, str) for name in choice.choices)


def test_every_name_of_the_package_exists() -> None:
    for name in meshwright.__all__:
        assert getattr(meshwright, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        meshwright.plam  # noqa: B018


def test_importing_the_package_imports_nothing_else() -> None:
    loaded = in_new_process("import sys, meshwright; print('\\n'.join(sys.modules))").split()
    assert [name for name in loaded if name.startswith("meshwright.")] == []
    assert "numpy" not in loaded


def test_importing_the_command_line_stays_light() -> None:
    loaded = in_new_process("import sys, meshwright.cli; print('\\n'.join(sys.modules))").split()
    assert "meshwright.cli" in loaded
    assert [name for name in HEAVY if name in loaded] == []


@pytest.mark.slow
def test_importing_reads_no_data_and_no_solver() -> None:
    lazy = ROOT / LOADS_CP_SAT
    names = [module_name(path, ROOT) for path in modules(ROOT) if path != lazy]
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
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "setuptools"
    ]
    packages = {module_name(path, ROOT) for path in modules(ROOT) if path.name == "__init__.py"}
    assert set(settings["packages"]) == packages
    assert settings["package-dir"] == {PACKAGE: "."}
    for path in modules(ROOT):
        assert path.parent == ROOT or (path.parent / "__init__.py").is_file(), path
    for package in settings["package-data"]:
        assert package in packages


MACHINE_PATH = re.compile(
    r"(?<![\w.~$}/-])/(?:" + "|".join(["work", "root", "home/[a-z]"]) + r")[/\w]"
)
TEXTS = (".py", ".md", ".yaml", ".toml", ".cfg", ".sh", ".json", ".txt", "Makefile", "run")


def machine_paths(root: Path) -> list[str]:
    """Lines that name a place of one machine."""
    skipped = {
        ".git",
        ".venv",
        ".oracles",
        ".ray",
        ".docs",
        ".measure",
        ".supply",
        ".mypy_cache",
        ".ruff_cache",
        ".pytest_cache",
        ".hypothesis",
        "__pycache__",
        "build",
    }
    paths: list[Path] = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in skipped]
        paths += (Path(folder, name) for name in files if name.endswith(TEXTS))
    found = []
    for path in sorted(paths):
        text = path.read_text(encoding="utf-8")
        if not MACHINE_PATH.search(text) and f"{root}/" not in text:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if MACHINE_PATH.search(line) or f"{root}/" in line:
                found.append(f"{path.relative_to(root)}:{number}: {line.strip()[:100]}")
    return found


def test_no_file_names_a_place_of_one_machine() -> None:
    assert machine_paths(ROOT) == []


@pytest.mark.parametrize(
    ("place", "code", "part"),
    [
        (
            "costmodel/bad.py",
            "from meshwright.planner.plan import x\n",
            "must not import planner.plan",
        ),
        (
            "costmodel/bad.py",
            "def f() -> None:\n    import meshwright.constraints.rule\n",
            "constraints",
        ),
        (
            "model_specs/bad.py",
            "import meshwright.cluster_specs\n",
            "must not import cluster_specs",
        ),
        ("planner/launch/bad.py", "import meshwright.cli\n", "planner.launch must not import cli"),
        ("planner/bounds/bad.py", "from meshwright.planner.search import x\n", "planner.search"),
        ("planner/solvers/bad.py", "from meshwright.planner import plan\n", "planner.plan"),
        (
            "planner/bounds/bad.py",
            "from ..search import x\n",
            "planner.bounds must not import planner.search",
        ),
        ("commands/bad.py", "import meshwright.cli\n", "commands must not import cli"),
        ("costmodel/bad.py", "import planner\n", "without meshwright"),
        (
            "costmodel/bad.py",
            "def f() -> None:\n    import ortools\n",
            "costmodel must not import ortools",
        ),
        (
            "planner/plan/bad.py",
            "from meshwright.planner.solvers.or_tools import cp_model\n",
            "imported with the module",
        ),
        (
            "planner/plan/bad.py",
            "try:\n    import ortools\nexcept ImportError:\n    raise\n",
            "imported with the module",
        ),
        (
            "planner/plan/bad.py",
            "def f() -> None:\n    from ortools.sat.python import cp_model\n",
            "CP-SAT is imported from planner/solvers/or_tools.py",
        ),
        ("planner/plan/bad.py", "class A:\n    import ortools\n", "imported with the module"),
        ("planner/plan/bad.py", "print('x')\n", "only commands print"),
        (
            "planner/plan/bad.py",
            "import sys\ndef f() -> None:\n    sys.stdout.write('x')\n",
            "only commands print",
        ),
        (
            "planner/plan/bad.py",
            "import click\ndef f() -> None:\n    click.echo('x')\n",
            "only commands print",
        ),
        ("planner/plan/bad.py", "from rich.console import Console\n", "only commands print"),
        ("costmodel/bad.py", "DATA = open('x').read()\n", "reads a file when imported"),
        (
            "costmodel/bad.py",
            "def f(x: object = open('x')) -> None: ...\n",
            "reads a file when imported",
        ),
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
        (
            "planner/plan/good.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ortools\n",
        ),
        (
            "planner/plan/good.py",
            "def f() -> None:\n    from meshwright.planner.solvers.or_tools import cp_model\n    open('x')\n",
        ),
        ("planner/launch/good.py", "from ..plan import Plan\nimport meshwright.costmodel.layout\n"),
        ("planner/report/good.py", "from rich.table import Table\n"),
        ("cli.py", "import click\nimport meshwright.planner.plan\nclick.echo('x')\nprint('y')\n"),
        ("commands/good.py", "import click\nimport meshwright.planner.plan\nclick.echo('x')\n"),
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
    assert [line.split(":")[:2] for line in machine_paths(tmp_path)] == [
        ["a.md", "1"],
        ["b.py", "1"],
    ]
