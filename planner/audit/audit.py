"""What `meshwright verify` does: a plan and the files that start it, checked without the solver.

Nothing is searched. Prices, memory and rules are worked out again from the document, ranks are counted from
`ranks.csv`, launch files are read by the readers of `estimate --from-launch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.documents.reader import LARGE_FILE_BYTES, path_text, read_mapping
from meshwright.documents.versions import program_version
from meshwright.errors import InputError, MeshwrightError
from meshwright.planner.audit.launch_files import launch_file_faults
from meshwright.planner.audit.rank_list import RANKS_FILE, rank_list_faults
from meshwright.planner.audit.stated_figures import stated_figure_faults
from meshwright.planner.plan.digest import digest_of
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.texts import plan_path, read_plan
from meshwright.planner.search.model import solver_version

MOST_LISTED = 20
"""Faults of one check that are listed; the others are counted."""
_UNREADABLE = (MeshwrightError, ValueError, ArithmeticError, LookupError, AssertionError)
"""What arithmetic on a damaged plan may end with."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    broken: tuple[str, ...] | None
    """What is wrong, in words; None where there was nothing to look at."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Everything that was looked at."""

    plan: Path
    directory: Path | None
    """The folder of the launch files; None where there are none beside the plan."""
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not any(check.broken for check in self.checks)


def audit_plan(path: Path, directory: Path | None = None) -> Audit:
    """Checks a plan and its files.

    Parameters
    ----------
    path
        A `plan.yaml`, its folder, or saved `plan --json` output.
    directory
        The folder of the launch files; that of the plan when None, if it holds any.

    Returns
    -------
    Audit
        One check each of the document, versions, edits by hand, prices and rules, ranks, and launch files.

    Raises
    ------
    InputError
        If there is no such plan or folder, or the file is no plan at all.
    """
    if directory is not None and not directory.is_dir():
        raise InputError("no such folder", where=path_text(directory))
    file = plan_path(path)
    folder = directory or _folder_of(file)
    try:
        plan = read_plan(file)
    except InputError as error:
        _refuse_what_is_no_plan(file)
        unread = Check(name="document", broken=(str(error),))
        return Audit(plan=file, directory=folder, checks=(unread,))
    return Audit(plan=file, directory=folder, checks=tuple(_checks(plan, file, folder)))


def audit_document(audit: Audit) -> dict[str, Any]:
    """What `verify --json` prints."""
    return {
        "plan": str(audit.plan),
        "directory": None if audit.directory is None else str(audit.directory),
        "passed": audit.passed,
        "checks": [
            {
                "check": check.name,
                "passed": None if check.broken is None else not check.broken,
                "broken": list(check.broken or ()),
            }
            for check in audit.checks
        ],
    }


def _checks(plan: Plan, file: Path, folder: Path | None) -> Iterator[Check]:
    yield Check(name="document", broken=())
    yield Check(name="versions", broken=tuple(_version_faults(plan)))
    yield Check(name="edits by hand", broken=tuple(_edit_faults(plan)))
    yield _checked("prices and rules", lambda: stated_figure_faults(plan))
    if folder is None or plan.layout is None:
        yield Check(name="ranks", broken=None)
        yield Check(name="launch files", broken=None)
        return
    yield _checked("ranks", lambda: rank_list_faults(plan, folder / RANKS_FILE))
    yield _checked("launch files", lambda: launch_file_faults(plan, file, folder))


def _checked(name: str, faults: Callable[[], Iterator[str]]) -> Check:
    """The check of these faults; what cannot even be worked out is one of them."""
    broken: list[str] = []
    try:
        broken.extend(dict.fromkeys(faults()))
    except _UNREADABLE as error:
        reason = str(error) or type(error).__name__
        broken.append(f"cannot be worked out: {reason}")
    beyond = len(broken) - MOST_LISTED
    if beyond > 0:
        broken[MOST_LISTED:] = [f"and {beyond} more"]
    return Check(name=name, broken=tuple(broken))


def _version_faults(plan: Plan) -> Iterator[str]:
    """A plan of another version may have other prices and other launch files by right."""
    made_by, this = plan.solver.program, program_version()
    if made_by != this:
        stated = "an earlier version" if made_by is None else made_by
        yield f"made by {stated}, checked by {this}: plan again with this version"
    if plan.solver.version != solver_version():
        yield f"made with {plan.solver.version}, here is {solver_version()}: plan again"


def _edit_faults(plan: Plan) -> Iterator[str]:
    if plan.digest is None:
        yield "the plan has no digest: it was made by an earlier version, or the line was taken out"
    elif plan.digest != digest_of(plan):
        yield "the document is not the one that was written: its digest differs"


def _folder_of(file: Path) -> Path | None:
    """The plan's own folder where it holds launch files."""
    holds_files = any((file.parent / name).exists() for name in ("launch.sh", RANKS_FILE))
    return file.parent if holds_files else None


def _refuse_what_is_no_plan(file: Path) -> None:
    """Raises InputError again for a file that is no plan; a plan with a wrong field is a fault."""
    data = read_mapping(file, LARGE_FILE_BYTES)
    if "solver" not in data and "layout" not in data:
        raise InputError("this is not a plan", where=path_text(file), value=data)
