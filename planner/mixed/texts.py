"""Plans on mixed clusters as YAML texts, and back."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from pydantic import ValidationError

from meshwright.documents.reader import (
    LARGE_FILE_BYTES,
    is_file,
    path_text,
    read_mapping,
    read_text,
)
from meshwright.documents.validation import validation_message
from meshwright.errors import InfeasibleError, InputError
from meshwright.planner.mixed.document import MixedPlan, mixed_document
from meshwright.planner.plan.texts import MIXED_KIND, document_text, plan_path

MIXED_FILE = "mixed_plan.yaml"


def mixed_text(plan: MixedPlan) -> str:
    """The text of `mixed_plan.yaml`; `read_mixed_plan` gives the plan back."""
    return document_text(mixed_document(plan))


def mixed_plan_path(path: Path) -> Path | None:
    """The file of a plan on a mixed cluster that a user names; None where it is another plan or none.

    Parameters
    ----------
    path
        A file, or a folder: of a folder that has a `plan.yaml`, that is meant.
    """
    file = plan_path(path)
    if file != path and not is_file(str(file)):
        file = path / MIXED_FILE
    # The word first: the plan of a large cluster takes long to parse, and is parsed again as a plan.
    if not is_file(str(file)) or MIXED_KIND not in read_text(file, LARGE_FILE_BYTES):
        return None
    return file if read_mapping(file, LARGE_FILE_BYTES).get("kind") == MIXED_KIND else None


def read_mixed_plan(path: str | PathLike[str]) -> MixedPlan:
    """The plan on a mixed cluster that a file holds.

    Parameters
    ----------
    path
        A `mixed_plan.yaml`, or saved `plan --json` output.

    Raises
    ------
    InputError
        If there is no such file, or what it holds is no such plan.
    """
    where = path_text(Path(path))
    data = read_mapping(Path(path), LARGE_FILE_BYTES)
    if data.get("kind") != MIXED_KIND:
        raise InputError(
            "this is no plan on a mixed cluster; give the mixed_plan.yaml that `meshwright plan -o DIR` "
            "writes for a cluster file with parts",
            where=where,
            value=data.get("kind"),
        )
    try:
        return MixedPlan.model_validate(data)
    except ValidationError as error:
        raise InputError(validation_message(error, where, MixedPlan)) from None


def read_mixed_answer(path: str | PathLike[str]) -> MixedPlan:
    """The plan of a file, as `read_mixed_plan` reads it, that says what is fastest.

    Raises
    ------
    InputError
        If the file cannot be used.
    InfeasibleError
        If it says that nothing fits, or that nothing was found.
    """
    plan = read_mixed_plan(path)
    if not plan.runs_on:
        raise InfeasibleError(
            f"{path_text(Path(path))}: this plan has no layout, its status is {plan.status}"
        )
    return plan
