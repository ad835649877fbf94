"""docs/notebook.ipynb runs from its first cell to its last, without a network.

`python -m tests.test_notebook` runs it and writes the answers into it, as Jupyter would.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import os
import socket
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import meshwright
from tests.places import ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
LONGEST_S = 120.0
"""From the first cell to the last, on two cores."""


def cells() -> list[dict[str, Any]]:
    document = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    found: list[dict[str, Any]] = document["cells"]
    return found


def run(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a cell and gives its outputs: what it prints, its figures, and the value of its last line."""
    from matplotlib import pyplot

    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        exec(compile(tree, "notebook", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "notebook", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
    if value is not None and not source.rstrip().endswith(";"):
        data = {"text/plain": repr(value)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_()
        outputs.append(
            {"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data}
        )
    for number in pyplot.get_fignums():
        picture = io.BytesIO()
        pyplot.figure(number).savefig(picture, format="png", dpi=80, metadata={"Software": None})
        pyplot.close(number)
        data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
        outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
    return outputs


def run_all(folder: Path) -> list[list[dict[str, Any]]]:
    """The outputs of every code cell, run one after the other in a folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    before = Path.cwd()
    os.chdir(folder)
    try:
        with patch.dict(os.environ, {"MPLBACKEND": "agg"}):
            return [
                run("".join(cell["source"]), names)
                for cell in cells()
                if cell["cell_type"] == "code"
            ]
    finally:
        os.chdir(before)


@pytest.mark.soak
def test_the_notebook_runs_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pandas")

    def refused(*_: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refused)
    began = time.monotonic()
    outputs = [output for cell in run_all(tmp_path) for output in cell]
    assert time.monotonic() - began < LONGEST_S
    shown = [output["data"] for output in outputs if "data" in output]
    pages = [data["text/html"] for data in shown if "text/html" in data]
    assert sum("Where the step's time goes" in text for text in pages) == 1
    assert sum("From today's step to the plan's" in text for text in pages) == 1
    assert any("image/png" in data for data in shown)
    assert (tmp_path / "run" / "plan.yaml").is_file()


def test_every_cell_has_an_identity_and_what_it_showed() -> None:
    found = cells()
    assert len({cell["id"] for cell in found}) == len(found)
    code = [cell for cell in found if cell["cell_type"] == "code"]
    assert len(code) >= 6
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        assert not any(output["output_type"] == "error" for output in cell["outputs"])
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell["outputs"])


def test_it_calls_functions_that_there_are() -> None:
    called = {
        node.attr
        for cell in cells()
        if cell["cell_type"] == "code"
        for node in ast.walk(ast.parse("".join(cell["source"])))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "meshwright"
    }
    assert {"plan", "sweep", "compare", "save"} <= called <= set(meshwright.__all__)


def write() -> None:
    """Runs the notebook in a folder of its own and writes its outputs into it."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        shown = iter(run_all(Path(folder)))
    document = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, start=1):
        cell["execution_count"] = number
        cell["outputs"] = next(shown)
        for output in cell["outputs"]:
            if output["output_type"] == "execute_result":
                output["execution_count"] = number
    NOTEBOOK.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
