"""The wheel: what it holds, and that it works where it is installed."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.places import ROOT
from tests.test_structure import module_name, modules

TESTED = ("3.11", "3.12", "3.13")
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


def built(folder: Path) -> Path:
    """The wheel of the tree."""
    tree = sources(folder / "tree")
    build = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q")
    done(*build, "-w", str(folder), str(tree), folder=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone_and_works_anywhere(tmp_path: Path) -> None:
    wheel = built(tmp_path)
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
    assert "Usage: meshwright" in done(python, "-m", "meshwright", "--help", folder=away)
    assert Path(where.strip()).is_relative_to(home)


def interpreter(version: str) -> str | None:
    """A Python of that version on the path, or among those of pyenv."""
    candidates = [shutil.which(f"python{version}")]
    if pyenv := shutil.which("pyenv"):
        installed = Path(pyenv).resolve().parents[1].glob(f"versions/{version}.*/bin/python")
        candidates += [str(path) for path in installed]
    for python in candidates:
        # A shim of pyenv is there for versions that are not switched on too.
        if (
            python
            and not subprocess.run([python, "-V"], capture_output=True, check=False).returncode
        ):
            return python
    return None


@pytest.mark.soak
@pytest.mark.parametrize("version", TESTED[1:])
def test_the_wheel_plans_the_same_on_newer_pythons(version: str, tmp_path: Path) -> None:
    """With what it needs from the package index, at the locked versions, and warnings as errors."""
    newer = interpreter(version)
    if newer is None:
        pytest.skip(f"no Python {version} on the path or among pyenv's")
    home = tmp_path / "venv"
    done(newer, "-m", "venv", str(home), folder=tmp_path)
    python, command = (str(home / "bin" / name) for name in ("python", "meshwright"))
    lock = str(ROOT / "requirements-dev.lock")
    install = (sys.executable, str(ROOT / ".ci" / "install.py"), python, "-c", lock)
    done(*install, str(built(tmp_path)), folder=tmp_path)
    done(python, "-m", "pip", "check", folder=tmp_path)
    here, there = (
        float(done(each, "-W", "error", "-c", ONE_LINE, folder=place).split()[0])
        for each, place in ((sys.executable, ROOT), (python, tmp_path))
    )
    assert there == here
    words = "plan llama-3-8b --cluster dgx-h100 --gpus 8 --global-batch 128 --seq-len 8192 -o run"
    done(command, *words.split(), folder=tmp_path)
    assert "1 of 1 plan holds" in done(command, "verify", "--all", "run", folder=tmp_path)


def test_the_tested_pythons_are_those_of_the_classifiers() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    named = [name.rpartition(" :: ")[2] for name in project["classifiers"] if "Python ::" in name]
    assert named == [*TESTED]
    assert project["requires-python"] == f">={TESTED[0]}"
    assert f"tested: {', '.join(TESTED)}" in (ROOT / "README.md").read_text(encoding="utf-8")
