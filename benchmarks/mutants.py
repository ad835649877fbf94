"""How many small faults in the rules the tests notice: python -m benchmarks.mutants [--sample 400] [--seed 1] [FILE ...]

The faults are the operators of cosmic-ray: another comparison, another arithmetic, a number one more or less, a
negation, a decorator less. Its own runner starts a new process for every mutant; here each is a fork of a process
that has imported all but the rules, and no file is changed. Mutants that differ in annotations only are left out:
no annotation is evaluated.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import random
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from itertools import islice
from pathlib import Path
from types import CodeType

import cosmic_ray.plugins
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "constraints"
TESTS = ("tests/constraints",)
IMPORTED_BEFORE = (
    "meshwright.costmodel.footprint",
    "meshwright.costmodel.schedules",
    "meshwright.frameworks.catalog",
    "ortools.sat.python.cp_model",
)
CPU_LIMIT_S = 20
"""Of one mutant's tests; a mutant that loops is noticed by this."""
NO_FAULTS = ("core/VariableReplacer", "core/VariableInserter")
"""Operators that need to be told names."""


@dataclass(frozen=True)
class Mutant:
    """One changed source file."""

    path: Path
    operator: str
    occurrence: int

    def source(self) -> str:
        operator = cosmic_ray.plugins.get_operator(self.operator)()
        changed = mutate_code(self.path.read_text("utf-8"), operator, self.occurrence)
        return str(changed)

    def difference(self) -> str:
        """The changed lines."""
        before, after = self.path.read_text("utf-8").splitlines(), self.source().splitlines()
        lines = list(unified_diff(before, after, lineterm="", n=0))[2:]
        return f"{self.path.relative_to(ROOT)} {self.operator}\n" + "\n".join(lines)


class _Finder(MetaPathFinder, InspectLoader):
    """Imports one module from a text in place of its file."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.source = source

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        del path, target
        return spec_from_loader(fullname, self) if fullname == self.name else None

    def get_source(self, fullname: str) -> str:
        del fullname
        return self.source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, f"<mutant of {fullname}>", "exec", dont_inherit=True)


class _FirstFailureIsEnough:
    """Pytest plugin: hypothesis makes no failing example smaller."""

    def pytest_sessionstart(self) -> None:
        settings.register_profile(
            "mutants", settings.default, phases=(Phase.explicit, Phase.generate)
        )
        settings.load_profile("mutants")


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of one file."""
    nodes = list(ast_nodes(get_ast(path.read_text("utf-8"))))
    for name in cosmic_ray.plugins.operator_names():
        if name in NO_FAULTS:
            continue
        operator = cosmic_ray.plugins.get_operator(name)()
        places = sum(len(list(operator.mutation_positions(node))) for node in nodes)
        yield from (Mutant(path, name, occurrence) for occurrence in range(places))


def changes_the_program(mutant: Mutant) -> bool:
    """Whether more than annotations differ."""
    original = mutant.path.read_text("utf-8")
    return _without_annotations(mutant.source()) != _without_annotations(original)


def _without_annotations(source: str) -> str:
    """The program of a file, to be compared; a text that is none stands for itself."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def killed(mutant: Mutant | None) -> bool:
    """Whether the tests fail on a mutant, or on the rules as they are where it is None."""
    child = os.fork()
    if child == 0:
        os._exit(_status_of_tests(mutant))
    return os.waitpid(child, 0)[1] != 0


def _status_of_tests(mutant: Mutant | None) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    if mutant is not None:
        module = ".".join(mutant.path.relative_to(ROOT).with_suffix("").parts)
        sys.meta_path.insert(0, _Finder(f"meshwright.{module}", mutant.source()))
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # Hypothesis is imported before pytest could rewrite its asserts, which needs none.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    choice = ["-m", "not slow and not soak and not oracle and not ray"]
    return int(pytest.main([*options, *choice, *TESTS], plugins=[_FirstFailureIsEnough()]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--sample", type=int, default=400, help="mutants tried, drawn at random")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fail-under", type=float, default=0.0, help="percent killed")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args(arguments)
    os.chdir(ROOT)
    for name in IMPORTED_BEFORE:
        importlib.import_module(name)
    if killed(None):
        raise SystemExit("The tests fail without any mutant.")
    paths = [path.resolve() for path in options.files] or sorted(RULES.glob("*.py"))
    mutants = [mutant for path in paths for mutant in mutants_of(path)]
    random.Random(options.seed).shuffle(mutants)
    programs = filter(changes_the_program, mutants)
    count = survivors = 0
    for mutant in islice(programs, options.sample):
        count += 1
        if not killed(mutant):
            survivors += 1
            print(mutant.difference(), flush=True)
    share_pct = 100 * (1 - survivors / count)
    print(
        f"{count - survivors} of {count} mutants killed ({share_pct:.1f} %), of {len(mutants)} places"
    )
    if share_pct < options.fail_under:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
