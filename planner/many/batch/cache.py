"""Answers kept on disk under a name that says all they depend on."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

LARGEST_ENTRY_BYTES = 256 * 2**20


def default_cache_folder() -> Path:
    """`meshwright` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache)."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():
        folder = Path.home() / ".cache"
    return folder / "meshwright"


def chosen_folder(folder: Path | None, off: bool) -> Path | None:
    """Where answers are kept: a folder, by default the user's; None where nothing is to be kept."""
    if off:
        return None
    return folder or default_cache_folder()


class AnswerCache:
    """Entries of plain data by key, one file each.

    A file is written under another name and renamed, so processes may share a folder: two that answer the
    same question write the same entry. An entry that cannot be read, or whose digest is wrong, counts as
    absent. A folder that cannot be written to only means that nothing is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: str) -> dict[str, Any] | None:
        """The entry, or None."""
        path = self._path(key)
        try:
            if path.stat().st_size > LARGEST_ENTRY_BYTES:
                return None
            data = path.read_bytes()
            digest, packed = data[:32], data[32:]
            if hashlib.sha256(packed).digest() != digest:
                return None
            entry = json.loads(gzip.decompress(packed))
        except (OSError, EOFError, ValueError, zlib.error):
            return None
        return entry if isinstance(entry, dict) else None

    def put(self, key: str, entry: dict[str, Any]) -> None:
        """Keeps an entry."""
        text = json.dumps(entry, separators=(",", ":")).encode()
        packed = gzip.compress(text, compresslevel=4, mtime=0)
        path = self._path(key)
        temporary = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
            with os.fdopen(handle, "wb") as stream:
                stream.write(hashlib.sha256(packed).digest() + packed)
            Path(temporary).replace(path)
        except OSError:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / "answers" / key[:2] / f"{key[2:]}.json.gz"
