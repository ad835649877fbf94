"""Writing the files of a launch: whole files, never over someone's work, never outside the folder."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from meshwright.errors import InputError


def refuse_taken(
    directory: str | os.PathLike[str], names: Iterable[str], force: bool = False
) -> None:
    """Says before long work what would stop its files from being written.

    Parameters
    ----------
    directory
        The folder that they will be written to. It need not exist.
    names
        Of files or folders in it.
    force
        Files that are there are replaced.

    Raises
    ------
    InputError
        The folder is a file, or a name is taken.
    """
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, not a folder. Choose another place with -o.")
    taken = [name for name in names if os.path.lexists(folder / name)]
    if taken and not force:
        them = "it" if len(taken) == 1 else "them"
        raise InputError(
            f"{folder}: {_listed(taken)} already there. Choose another place, remove {them}, or say --force."
        )


def write_files(
    directory: str | os.PathLike[str], files: Mapping[str, str], force: bool = False
) -> list[Path]:
    """Writes texts (UTF-8) under a folder, by relative name, and returns their paths; `.sh` is executable.

    The folder is made if need be. Every text is first written beside its place under a temporary name, then
    all are renamed, so a reader never sees half a file, and an interrupt leaves all files or none. Raises
    InputError if a name leads out of the folder (also through a symbolic link), or if a file exists and
    `force` is not set.
    """
    root = _folder(Path(directory))
    targets = {name: _target(root, name) for name in files}
    refuse_taken(root, files, force)
    for target in targets.values():
        if os.path.lexists(target) and (target.is_symlink() or not target.is_file()):
            raise InputError(f"{target} is not a plain file: it is not replaced. Remove it first.")
    with uninterrupted():
        _write_all(root, {targets[name]: text for name, text in files.items()})
    return list(targets.values())


def left_over(
    directory: str | os.PathLike[str], names: Iterable[str], written: Iterable[str]
) -> str | None:
    """Says which files of earlier work still lie beside those that were written; None where none do.

    Parameters
    ----------
    directory
        The folder that was written to.
    names
        Of files or folders that earlier work may have left there.
    written
        Names of the files that were written.
    """
    own = {PurePosixPath(name).parts[0] for name in written}
    folder = Path(directory)
    older = [name for name in names if name not in own and os.path.lexists(folder / name)]
    if not older:
        return None
    return (
        f"{folder}: {_listed(older)} still there from before, and no part of what was written now."
    )


@contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT and SIGTERM wait until what is inside is done. Only the main thread hears them at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda n, _: waiting.append(n)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        for heard in waiting:
            signal.raise_signal(heard)


def _write_all(root: Path, texts: Mapping[Path, str]) -> None:
    waiting: dict[Path, Path] = {}
    try:
        for target, text in texts.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            waiting[target] = _write_beside(target, text)
        for target, temporary in waiting.items():
            temporary.replace(target)
    except OSError as error:
        raise InputError(f"cannot write to {root}: {error.strerror or error}") from error
    except UnicodeError as error:
        raise InputError(f"cannot write to {root}: a text cannot be encoded as UTF-8") from error
    finally:
        for temporary in waiting.values():
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _folder(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return directory.resolve(strict=True)
    except OSError as error:
        raise InputError(
            f"{directory} cannot be used as a folder: {error.strerror or error}. Choose another."
        ) from error


def _target(root: Path, name: str) -> Path:
    parts = PurePosixPath(name).parts
    if (
        not parts
        or name != str(PurePosixPath(*parts))
        or name.startswith("/")
        or ".." in parts
        or "\0" in name
    ):
        raise InputError(f"{name!r} is no file name inside a folder.")
    target = root.joinpath(*parts)
    if not target.parent.resolve().is_relative_to(root):
        raise InputError(f"{name!r} leads out of {root} through a symbolic link.")
    return target


def _write_beside(target: Path, text: str) -> Path:
    handle, path = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    temporary = Path(path)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        temporary.chmod(0o755 if target.suffix == ".sh" else 0o644)
    except (OSError, UnicodeError):
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"
