"""Damaged arrays that fuzzing found: each ended in a traceback before."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.planner.experts import inputs
from meshwright.planner.experts.inputs import read_routing


def saved() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ones((2, 16), dtype=np.int64))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(saved().replace(b"16), }", b"16), })"), id="header is no literal"),
        pytest.param(saved().replace(b"}", b"("), id="header does not end"),
        pytest.param(b"", id="empty"),
    ],
)
def test_a_damaged_header_is_named(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "loads.npy"
    path.write_bytes(data)
    with pytest.raises(InputError, match="not a numpy array"):
        read_routing(path)


def test_a_header_with_long_integers_is_read_without_a_warning(tmp_path: Path) -> None:
    """As Python 2 wrote it: numpy reads it, and warned on standard error."""
    path = tmp_path / "loads.npy"
    path.write_bytes(saved().replace(b"16), } ", b"16L), }"))
    assert read_routing(path).loads.shape == (1, 2, 16)


def test_what_unpacks_to_too_much_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """900 KB of zeros took 2.7 GiB and 17 s of the processor before the refusal."""
    monkeypatch.setattr(inputs, "LARGEST_UNPACKED_BYTES", 100_000)
    path = tmp_path / "loads.npz"
    np.savez_compressed(path, loads=np.zeros((2, 8192), dtype=np.int64))
    assert path.stat().st_size < 1000
    with pytest.raises(InputError, match="unpacks to more than 100000 bytes"):
        read_routing(path)


def test_damaged_compressed_data_is_named(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("load.npy", saved())
    data = bytearray(buffer.getvalue())
    data[45:60] = b"\xff" * 15
    path = tmp_path / "loads.npz"
    path.write_bytes(bytes(data))
    with pytest.raises(InputError, match="not an npz file"):
        read_routing(path)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("layer,expert,load\n1e300,0,1", "layer: must be a whole number"),
        ("layer,expert,load\n0,nan,1", "expert: must be a whole number"),
        ("layer,expert,load\n0,1.5,1", "expert: must be a whole number"),
        ("layer,expert,load\n0,1", "2 numbers a line, but 3 columns"),
    ],
)
def test_a_column_that_counts_holds_whole_numbers(lines: str, words: str, tmp_path: Path) -> None:
    """1e300 ended in a warning of numpy, a missing column in an IndexError, NaN in a wrong layer."""
    path = tmp_path / "loads.csv"
    path.write_text(lines)
    with pytest.raises(InputError, match=words):
        read_routing(path)
