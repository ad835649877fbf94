"""The way back: what people run today, as a run file that `estimate` prices and `plan` can be asked to beat.

Reads a Megatron-LM or Megatron-DeepSpeed command line (a script, or a JSON list of arguments), torchtitan
flags, a DeepSpeed JSON or an accelerate YAML. A flag that is neither read nor known to have no bearing on the
time is listed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from meshwright.documents.output_files import write_files
from meshwright.documents.reader import read_text
from meshwright.errors import InputError
from meshwright.planner.runs.launch_flags import Words, words_of
from meshwright.planner.runs.launch_terms import (
    LaunchRun,
    from_accelerate,
    from_deepspeed,
    from_megatron,
    from_torchtitan,
)
from meshwright.planner.runs.prediction import PricedRun, price_run
from meshwright.planner.runs.run_file import MAX_FILE_BYTES, run_from_mapping
from meshwright.planner.runs.run_schema import SettingsDoc

_TOP = ("model", "cluster")
_INTEGERS = frozenset(
    name for name, field in SettingsDoc.model_fields.items() if "int" in str(field.annotation)
)


def price_launch(
    path: Path, given: Sequence[str], output: Path | None = None
) -> Iterator[PricedRun]:
    """Prices the run of a launch file; `given` are `name=value` for what the file leaves open.

    With `output` the run file is written there. Raises InputError for a file that cannot be
    read, and InfeasibleError if `output` exists.
    """
    found = read_launch(path)
    mapping = complete(found, given, str(path))
    run = run_from_mapping(mapping, where=str(path), base=path.parent, default_id=path.stem)
    remarks = [f"{path.name}: {name} is not read" for name in found.unread]
    if output is not None:
        text = yaml.safe_dump({"schema": 1, **mapping}, sort_keys=False)
        write_files(output.parent, {output.name: text})
    yield price_run(replace(run, remarks=(*run.remarks, *found.remarks, *remarks)), path)


def read_launch(path: Path) -> LaunchRun:
    """What a launch file says. Raises InputError if it is of no known kind."""
    text = read_text(path, MAX_FILE_BYTES)
    document = _document(path, text)
    if isinstance(document, dict):
        if "fsdp_config" in document or "parallelism_config" in document:
            return from_accelerate(document, str(path))
        if "train_batch_size" in document or "train_micro_batch_size_per_gpu" in document:
            return from_deepspeed(document, str(path))
        raise InputError(
            "neither a DeepSpeed configuration (train_batch_size) nor an accelerate one (fsdp_config)",
            where=str(path),
        )
    if isinstance(document, list):
        words = Words([str(word) for word in document], str(path))
    else:
        words = words_of(text, str(path))
    if words.has("--module") or any(word.startswith("--parallelism.") for word in words.words):
        return from_torchtitan(words)
    return from_megatron(words)


def complete(found: LaunchRun, given: Sequence[str], where: str) -> dict[str, Any]:
    """The run file's mapping: what the launch says, and what the caller adds. Raises InputError on gaps."""
    settings, top = dict(found.settings), {"model": found.model, "cluster": None}
    allowed = (*_TOP, *SettingsDoc.model_fields)
    for pair in (part for text in given for part in text.split(",")):
        name, sign, value = pair.partition("=")
        if not sign or name not in allowed:
            raise InputError(
                "must be NAME=VALUE of a run file", where="--with", value=pair, allowed=allowed
            )
        if name in _TOP:
            top[name] = value
        else:
            settings[name] = int(value) if name in _INTEGERS and value.isdigit() else value
    missing = [name for name in _TOP if top[name] is None]
    missing += [name for name in ("seq_len", "global_batch") if name not in settings]
    if missing:
        hint = " ".join(f"--with {name}=..." for name in missing)
        raise InputError(
            f"a launch file of this kind does not say {', '.join(missing)}: add {hint}", where=where
        )
    return {
        "id": Path(where).stem,
        "model": top["model"],
        "cluster": top["cluster"],
        "run": settings,
    }


def _document(path: Path, text: str) -> object:
    """The file as JSON or YAML where it is one; None for a script or a command line."""
    try:
        if path.suffix == ".json" or text.lstrip()[:1] in ("[", "{"):
            return json.loads(text)
        if path.suffix in (".yaml", ".yml"):
            return yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(f"cannot be read: {str(error)[:200]}", where=str(path)) from None
    return None
