"""The stack file that `meshwright calibrate` writes and `--calibration` reads."""

from __future__ import annotations

from os import PathLike
from typing import Any

import yaml
from pydantic import ValidationError

from meshwright.costmodel.constants.calibration import Calibration, constants_digest
from meshwright.documents.reader import path_of, path_text, read_mapping
from meshwright.documents.validation import validation_message
from meshwright.errors import InputError

MOST_BYTES = 256 * 2**10
_HEAD = """# What measured runs say of the constants of the cost model, as factors on the shipped ones.
# Written by `meshwright calibrate`, read by `--calibration`.
"""


def read_calibration(given: str | PathLike[str] | Calibration | None) -> Calibration | None:
    """A stack file as it was written.

    Parameters
    ----------
    given
        Path of the file, or what was read before.

    Returns
    -------
    Calibration or None
        None where nothing was given.

    Raises
    ------
    InputError
        If the file cannot be used, or goes with other constants than those of this version.
    """
    if given is None or isinstance(given, Calibration):
        return given
    path = path_of(given, "calibration")
    where = path_text(path)
    document = dict(read_mapping(path, MOST_BYTES))
    if document.pop("schema", None) != 1:
        raise InputError("must be 1: not a stack file of this version", where=f"{where}: schema")
    try:
        calibration = Calibration.model_validate(document)
    except ValidationError as error:
        raise InputError(validation_message(error, where, Calibration)) from None
    if calibration.constants != constants_digest():
        raise InputError(
            "was calibrated against other constants than this version ships; "
            "run `meshwright calibrate` again on the same runs",
            where=f"{where}: constants",
        )
    return calibration


def calibration_text(calibration: Calibration) -> str:
    """The text of a stack file.

    Parameters
    ----------
    calibration
        The stack.

    Returns
    -------
    str
        YAML.
    """
    document: dict[str, Any] = {"schema": 1, **calibration.model_dump(mode="json")}
    flat = yaml.safe_dump(document, sort_keys=False, width=120, default_flow_style=None)
    return f"{_HEAD}{flat}"
