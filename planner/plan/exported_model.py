"""The last CP-SAT model of a search as a file, so that anyone can solve it again."""

from __future__ import annotations

from pathlib import Path

from meshwright.cluster_specs.fabric import is_irregular
from meshwright.documents.output_files import write_files
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.certificate import Outcome


def export_model(request: PlanRequest, outcome: Outcome, path: Path) -> str | None:
    """Writes the last model of a search; what is already in the file is replaced.

    Parameters
    ----------
    request
        What was searched.
    outcome
        How the search ended.
    path
        Where to write `CpModelProto` as text (OR-Tools, sat/cp_model.proto). Its objective is the step in
        nanoseconds.

    Returns
    -------
    str or None
        Why nothing was written, in a sentence; None where the file is there.

    Raises
    ------
    InputError
        If the file cannot be written.
    """
    model = outcome.certificate.model
    if model is None:
        return f"no model was written to {path}: {_why_none(request)}"
    write_files(path.parent, {path.name: str(model.proto)}, force=True)
    return None


def _why_none(request: PlanRequest) -> str:
    if request.method == "exhaustive":
        return "an exhaustive search solves none"
    if is_irregular(request.cluster):
        return "irregular fabrics are searched by models of slots, which bound no printed figure"
    return "rules and memory left no layout that a model could choose"
