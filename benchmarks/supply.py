"""Wheel and sdist built twice and compared, and what the wheel brings with it: python -m benchmarks.supply FOLDER

Both builds begin from a copy of the tree with other times of change. An sdist's archive is written again with
one time and no owner, as setuptools does not; a wheel is repeatable by itself under SOURCE_DATE_EPOCH
(reproducible-builds.org/specs/source-date-epoch).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EPOCH_S = 1_735_689_600
"""2025-01-01, where SOURCE_DATE_EPOCH says nothing else; a zip archive knows no time before 1980."""
NOT_SOURCES = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")


def main() -> None:
    output = Path(sys.argv[1])
    epoch_s = int(os.environ.get("SOURCE_DATE_EPOCH", EPOCH_S))
    with tempfile.TemporaryDirectory() as folder:
        builds = [_built(Path(folder) / str(turn), epoch_s, turn) for turn in (1, 2)]
        hashes = [
            {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in build}
            for build in builds
        ]
        for name, digest in sorted(hashes[0].items()):
            alike = "same" if hashes[1].get(name) == digest else "DIFFERS"
            print(f"{alike} in two builds  {digest}  {name}")
        if hashes[0] != hashes[1]:
            raise SystemExit(1)
        output.mkdir(parents=True, exist_ok=True)
        for path in builds[0]:
            shutil.copy(path, output / path.name)
    (wheel,) = output.glob("*.whl")
    _write_bill_of_materials(wheel, output / "sbom.cdx.json")


def _built(folder: Path, epoch_s: int, turn: int) -> list[Path]:
    """Wheel and sdist of a copy of the tree."""
    tree, output = folder / "tree", folder / "dist"
    shutil.copytree(ROOT, tree, ignore=NOT_SOURCES)
    for path in tree.rglob("*"):
        os.utime(path, (epoch_s + 1000 * turn, epoch_s + 1000 * turn))
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch_s)}
    command = [sys.executable, "-m", "build", "--outdir", str(output), str(tree)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    for path in output.glob("*.tar.gz"):
        path.write_bytes(repeatable_archive(path.read_bytes(), epoch_s))
    return sorted(output.iterdir())


def repeatable_archive(data: bytes, epoch_s: int) -> bytes:
    """The same .tar.gz with its members in order, of one time and no owner."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(data)) as given,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for member in sorted(given.getmembers(), key=lambda member: member.name):
            member.mtime, member.pax_headers = epoch_s, {}
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            archive.addfile(member, given.extractfile(member) if member.isfile() else None)
    return gzip.compress(packed.getvalue(), mtime=epoch_s)


def _write_bill_of_materials(wheel: Path, output: Path) -> None:
    """CycloneDX of an environment that holds the wheel and what it needs, and nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [str(python), "-m", "pip"]
        subprocess.run([*pip, "install", "--quiet", str(wheel)], check=True)
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", "setuptools", "pip"], check=True)
        cyclonedx = [sys.executable, "-m", "cyclonedx_py", "environment"]
        options = ["--output-reproducible", "-o", str(output), str(python)]
        subprocess.run([*cyclonedx, *options], check=True)
    print(f"bill of materials in {output}")


if __name__ == "__main__":
    main()
