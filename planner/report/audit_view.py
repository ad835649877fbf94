"""What was checked of a plan, and what is broken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.planner.drawing.quantities import counted
from meshwright.planner.report.view import Bullets, Facts, View, line


def audit_view(document: Mapping[str, Any]) -> View:
    """The view of what `verify --json` prints: a row for each check, then everything that is broken."""
    rows = [(check["check"], _outcome(check)) for check in document["checks"]]
    broken = [
        f"{check['check']}: {fault}" for check in document["checks"] for fault in check["broken"]
    ]
    if not broken:
        return [Facts(rows), line("The plan holds.")]
    return [Facts(rows), Bullets(broken)]


def _outcome(check: Mapping[str, Any]) -> str:
    if check["passed"] is None:
        return "nothing to check"
    if check["passed"]:
        return "holds"
    return f"broken: {counted(len(check['broken']), 'fault')}"
