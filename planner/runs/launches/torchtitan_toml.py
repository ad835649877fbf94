"""A torchtitan job of a TOML file, as torchtitan took them up to 0.2, as a run.

Sections and keys are those of its flags (torchtitan/config/job_config.py of v0.2.0; before v0.1.0
`batch_size` of `training`), so the file is read as the flags that say the same. A script names such a file
in `CONFIG_FILE` or `--job.config_file`, and its own flags win over the file's.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.planner.runs.launches.flags import CommandLine
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.torchtitan import from_torchtitan
from meshwright.planner.runs.launches.torchtitan_registry import stages_of_parts

_SECTION = re.compile(r"\s*(?:#[^\n]*\n\s*)*\[[A-Za-z_][\w.]*\]\s*(?:#[^\n]*)?(?:\n|$)")
OLD_NAMES = {"training.batch_size": "training.local_batch_size"}
"""Keys before v0.1.0, and what they are called since."""
MODEL_PARTS = "module_fqns_per_model_part"
"""Key of `parallelism` with the modules of each chunk of the pipeline."""
_CONFIG_FLAGS = ("--job.config_file", "--job.config-file")
_CONFIG_VARIABLE, _GPUS_VARIABLE = "CONFIG_FILE", "NGPU"
"""What torchtitan's run_train.sh takes (v0.2.2)."""
_FOLDERS_ABOVE = 8
"""Above the script in which a file is looked for: scripts name it from the top of their repository."""
_DEEPEST = 6


def is_toml(text: str) -> bool:
    """Whether a text begins with a section of a TOML file, after comments."""
    return _SECTION.match(text) is not None


def toml_document(text: str, where: str) -> dict[str, Any]:
    """The sections of a TOML file. Raises InputError where it cannot be read."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot be read: {str(error)[:200]}", where=where) from None


def config_file_of(line: CommandLine, folder: Path) -> Path | None:
    """The TOML file that a script names; None where it names none.

    Parameters
    ----------
    line
        The script's words.
    folder
        Where the script lies. The file lies as it is named, below that folder or one above it, or beside the
        script.

    Raises
    ------
    InputError
        It is named and lies nowhere.
    """
    flagged = (line.text(flag) for flag in _CONFIG_FLAGS)
    named = [name for name in (*flagged, line.variable(_CONFIG_VARIABLE)) if name]
    named = [name for name in named if name.lower().endswith(".toml")]
    if not named:
        return None
    name = Path(named[0])
    above = islice((folder.resolve(), *folder.resolve().parents), _FOLDERS_ABOVE)
    for place in (*(each / name for each in above), folder / name.name):
        if place.is_file():
            return place
    raise InputError(
        "names its configuration, which does not lie there: put the TOML file beside the script, or give the "
        "TOML file itself",
        where=line.where,
        value=named[0],
    )


def from_toml(
    document: Mapping[str, object], path: Path, script: CommandLine | None = None
) -> LaunchRun:
    """The run of a TOML file's sections, under the flags of a script that names it.

    Raises InputError where they are of another program.
    """
    where = str(path)
    model, degrees = document.get("model"), document.get("parallelism")
    if not isinstance(model, Mapping) or not isinstance(degrees, Mapping):
        what = "torchtitan's TOML files have sections model and parallelism, this one has not"
        raise InputError(what, where=where)
    words = list(_words(document, where))
    line = CommandLine(words, where)
    if script is not None:
        line = script.after(words)
    run = from_torchtitan(line, path.parent)
    settings = run.settings | stages_of_parts(degrees.get(MODEL_PARTS), run.settings)
    settings.setdefault("precision", "bf16")
    gpus = line.variable(_GPUS_VARIABLE) or ""
    if "gpus" not in settings and re.fullmatch(r"\d{1,6}", gpus):
        settings["gpus"] = int(gpus)
    return replace(run, settings=settings)


def _words(document: Mapping[str, object], where: str) -> Iterator[str]:
    """The flags that say what the sections say."""
    # The default of every release with TOML files, of each second layer.
    yield from ("--activation-checkpoint.mode", "selective")
    for section, settings in document.items():
        if not isinstance(settings, Mapping):
            raise InputError("must be a section", where=f"{where}: {section}", value=settings)
        yield from _section(section, settings)


def _section(name: str, settings: Mapping[str, object], depth: int = 0) -> Iterator[str]:
    for key, value in settings.items():
        place = f"{name}.{key}"
        if isinstance(value, Mapping) and depth < _DEEPEST:
            yield from _section(place, value, depth + 1)
        elif key != MODEL_PARTS:
            yield from _flag(OLD_NAMES.get(place, place), value)


def _flag(name: str, value: object) -> Iterator[str]:
    """A switch for a truth, a flag with its value for all else."""
    section, _, key = name.rpartition(".")
    if isinstance(value, bool):
        yield f"--{name}" if value else f"--{section}.no-{key}"
    elif isinstance(value, list):
        yield from (f"--{name}", ",".join(map(str, value)))
    else:
        yield from (f"--{name}", str(value))
