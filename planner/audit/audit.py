"""What `meshwright verify` does: a plan and the files that start it, checked without the solver.

Nothing is searched. Prices, memory and rules are worked out again from the document, ranks are counted from
`ranks.csv`, launch files are read by the readers of `estimate --from-launch`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.documents.reader import LARGE_FILE_BYTES, path_text, read_mapping
from meshwright.errors import InputError
from meshwright.planner.audit.checks import Check, checked, edit_faults, version_faults
from meshwright.planner.audit.launch_files import launch_file_faults
from meshwright.planner.audit.mixed import mixed_checks
from meshwright.planner.audit.rank_list import RANKS_FILE, rank_list_faults
from meshwright.planner.audit.stated_figures import stated_figure_faults
from meshwright.planner.mixed.texts import mixed_plan_path, read_mixed_plan
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.texts import plan_path, read_plan


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
        A `plan.yaml` or `mixed_plan.yaml`, its folder, or saved `plan --json` output.
    directory
        The folder of the launch files; that of the plan when None, if it holds any.

    Returns
    -------
    Audit
        One check each of the document, versions, edits by hand, prices and rules, ranks, and launch files;
        `planner.audit.mixed` has those of a plan on a mixed cluster.

    Raises
    ------
    InputError
        If there is no such plan or folder, or the file is no plan at all.
    """
    if directory is not None and not directory.is_dir():
        raise InputError("no such folder", where=path_text(directory))
    mixed = mixed_plan_path(path)
    file = mixed or plan_path(path)
    folder = directory or _folder_of(file)
    try:
        if mixed is not None:
            checks = tuple(mixed_checks(read_mixed_plan(mixed), folder))
            return Audit(plan=file, directory=folder, checks=checks)
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
    yield Check(name="versions", broken=tuple(version_faults(plan.solver)))
    yield Check(name="edits by hand", broken=tuple(edit_faults(plan)))
    yield checked("prices and rules", lambda: stated_figure_faults(plan))
    if folder is None or plan.layout is None:
        yield Check(name="ranks", broken=None)
        yield Check(name="launch files", broken=None)
        return
    yield checked("ranks", lambda: rank_list_faults(plan, folder / RANKS_FILE))
    yield checked("launch files", lambda: launch_file_faults(plan, file, folder))


def _folder_of(file: Path) -> Path | None:
    """The plan's own folder where it holds launch files."""
    holds_files = any((file.parent / name).exists() for name in ("launch.sh", RANKS_FILE))
    return file.parent if holds_files else None


def _refuse_what_is_no_plan(file: Path) -> None:
    """Raises InputError again for a file that is no plan; a plan with a wrong field is a fault."""
    data = read_mapping(file, LARGE_FILE_BYTES)
    if "solver" not in data and "layout" not in data:
        raise InputError("this is not a plan", where=path_text(file), value=data)
