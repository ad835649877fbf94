"""The files of `costmodel/data`, each read once."""

from __future__ import annotations

from functools import cache
from typing import Any

from meshwright.documents.reader import packaged_document


@cache
def data_table(name: str) -> dict[str, Any]:
    """One file as plain data, shared by all who ask: nobody may change it.

    Parameters
    ----------
    name : str
        Of a file of `costmodel/data`, with its ending.

    Returns
    -------
    dict
        As the YAML says.
    """
    table: dict[str, Any] = packaged_document("meshwright.costmodel.data", name)
    return table
