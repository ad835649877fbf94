"""The wheel: what it holds, and that it works where it is installed."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.places import ROOT
from tests.test_structure import module_name, modules

ONE_LINE = (
    "import meshwright; print(meshwright.plan('llama-3-8b', cluster='dgx-h100', gpus=8, global_batch=128, "
    "seq_len=8192, framework='fsdp2', robustness=False).predicted.step_time_s, meshwright.__file__)"
)


def done(*command: str, folder: Path) -> str:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    process = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def sources(folder: Path) -> Path:
    """The tree, copied: building leaves nothing in the repository, nor needs its history."""
    left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=left_out)
    return folder


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone_and_works_anywhere(tmp_path: Path) -> None:
    tree = sources(tmp_path / "tree")
    build = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q")
    done(*build, "-w", str(tmp_path), str(tree), folder=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    assert {name.split("/")[0].split("-")[0] for name in names} == {"meshwright"}
    package = {name for name in names if name.startswith("meshwright/")}
    assert all(".dist-info/" in name for name in names - package)
    code = {name for name in package if name.endswith(".py")}
    assert {Path(name).with_suffix("").as_posix().replace("/", ".") for name in code} == {
        f"{module_name(path, ROOT)}{'.__init__' if path.name == '__init__.py' else ''}"
        for path in modules(ROOT)
    }
    data = {
        path.relative_to(ROOT).as_posix()
        for pattern in ("*/data/*.yaml", "*/data/*.json", "planner/*/data/*.yaml")
        for path in ROOT.glob(pattern)
    }
    data = {f"meshwright/{name}" for name in data if not name.startswith("tests/")}
    assert len(data) > 4
    launches = (ROOT / "planner" / "runs" / "launches").glob("*.yaml")
    data |= {f"meshwright/{path.relative_to(ROOT).as_posix()}" for path in launches}
    assert "meshwright/planner/runs/launches/flag_effects.yaml" in data
    pages = [
        *(ROOT / "planner" / "report" / "page").iterdir(),
        *(ROOT / "serve" / "page").iterdir(),
    ]
    data |= {f"meshwright/{path.relative_to(ROOT).as_posix()}" for path in pages}
    assert package - code == {"meshwright/py.typed", "meshwright/docs/glossary.md", *data}

    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    (packages,) = home.glob("lib/python*/site-packages")
    install = (sys.executable, "-m", "pip", "--python", str(home), "install", "--no-deps", "-q")
    done(*install, "--no-index", str(wheel), folder=tmp_path)
    # What meshwright needs is taken from here.
    (packages / "needed.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
    away = tmp_path / "away"
    away.mkdir()
    python = str(home / "bin" / "python")
    step_s, where = done(python, "-c", ONE_LINE, folder=away).split(maxsplit=1)
    assert float(step_s) > 0
    assert Path(where.strip()).is_relative_to(home)
