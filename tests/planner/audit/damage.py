"""Random damage to a plan and the files that start it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from meshwright.documents import LARGE_FILE_BYTES, read_mapping
from meshwright.errors import InputError
from meshwright.planner.audit import READABLE
from meshwright.planner.plan.document import digest_of
from meshwright.planner.plan.texts import read_plan

DECIDING = (
    "status", "objective", "layout", "execution", "predicted", "mapping", "binding", "warnings",
    "installs", "grades", "evidence",
)  # fmt: skip
"""Sections in which any change is damage that can be worked out, whoever made it."""
DECIDING_INPUTS = (
    "gpus", "global_batch", "seq_len", "precision", "optimizer", "framework",
)  # fmt: skip
DECIDING_MODEL = ("layers", "hidden", "heads", "ffn_hidden", "vocab")
OTHERS = {
    "precision": ("bf16", "fp16", "fp8"),
    "optimizer": ("adam", "sgd", "muon"),
    "framework": ("megatron", "torchtitan", "deepspeed", "fsdp2"),
    "recompute": ("none", "selective", "full"),
    "schedule": ("1f1b", "interleaved-1f1b", "gpipe"),
    "status": ("optimal", "feasible", "infeasible"),
}
Keys = tuple[str | int, ...]


def damaged(rng: random.Random, folder: Path) -> str:
    """Damages one thing in a folder of launch files, and says what."""
    kinds: tuple[Callable[[random.Random, Path], str], ...] = (
        _plan_edited,
        _plan_forged,
        _rank_edited,
        _flag_edited,
        _host_edited,
        _file_lost,
    )
    return rng.choice(kinds)(rng, folder)


def _plan_edited(rng: random.Random, folder: Path) -> str:
    """Any value of the document, as an editor would change it."""
    document = read_mapping(folder / "plan.yaml", LARGE_FILE_BYTES)
    places = [keys for keys in leaves(document) if keys[:2] != ("solver", "wall_s")]
    return _edited(rng, document, rng.choice(places), folder)


def _plan_forged(rng: random.Random, folder: Path) -> str:
    """A value that decides something, and the digest made to fit."""
    document = read_mapping(folder / "plan.yaml", LARGE_FILE_BYTES)
    places = [keys for keys in leaves(document) if _decides(keys)]
    words = _edited(rng, document, rng.choice(places), folder)
    try:
        digest = digest_of(read_plan(folder))
    except InputError:
        return f"{words}; the digest could not be made to fit"
    document["digest"] = digest
    _write(document, folder)
    return f"{words}; the digest made to fit"


def _decides(keys: Keys) -> bool:
    if keys[0] == "inputs":
        in_model = keys[1] == "model" and keys[2] in DECIDING_MODEL
        return in_model or keys[1] in DECIDING_INPUTS
    return keys[0] in DECIDING


def _edited(rng: random.Random, document: Any, keys: Keys, folder: Path) -> str:
    parent: Any = document
    for key in keys[:-1]:
        parent = parent[key]
    before = parent[keys[-1]]
    parent[keys[-1]] = other(rng, keys, before)
    _write(document, folder)
    return f"plan.yaml: {'.'.join(map(str, keys))} from {before} to {parent[keys[-1]]}"


def _write(document: object, folder: Path) -> None:
    (folder / "plan.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")


def leaves(value: object, keys: Keys = ()) -> Iterator[Keys]:
    """The places of all values that hold no others."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, (*keys, key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from leaves(part, (*keys, index))
    elif keys != ("schema",):
        yield keys


def other(rng: random.Random, keys: Keys, value: object) -> object:
    """Another value of the same kind."""
    for name in reversed(keys):
        if name in OTHERS:
            return rng.choice([word for word in OTHERS[str(name)] if word != value])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, value * 2 + 1, abs(value - 1) + 2 * (value == 1)])
    if isinstance(value, float):
        return value * rng.choice([0.5, 0.99, 1.01, 2.0]) + (0.25 if value == 0 else 0.0)
    if isinstance(value, str):
        return f"{value}x"
    return 7


def _rank_edited(rng: random.Random, folder: Path) -> str:
    """A cell of ranks.csv, two places swapped, a line lost or doubled."""
    path = folder / "mapping" / "ranks.csv"
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    first, second = rng.sample(range(len(lines)), 2)
    kind = rng.choice(("cell", "swap", "lost", "doubled"))
    if kind == "cell":
        cells = lines[first].split(",")
        column = rng.randrange(len(cells))
        cells[column] = f"{cells[column]}1"
        lines[first] = ",".join(cells)
    elif kind == "swap":
        cells, others = lines[first].split(","), lines[second].split(",")
        cells[1:3], others[1:3] = others[1:3], cells[1:3]
        lines[first], lines[second] = ",".join(cells), ",".join(others)
    elif kind == "lost":
        del lines[first]
    else:
        lines.insert(first, lines[second])
    path.write_text("\n".join([head, *lines, ""]), encoding="utf-8")
    return f"ranks.csv: {kind} at line {first + 2}"


def _flag_edited(rng: random.Random, folder: Path) -> str:
    """A digit of a file that a framework reads, or a line of it."""
    names = [*READABLE, "env.json"]
    path = folder / rng.choice([name for name in names if (folder / name).is_file()])
    lines = path.read_text(encoding="utf-8").splitlines()
    with_digits = [index for index, line in enumerate(lines) if any(map(str.isdigit, line))]
    index = rng.choice(with_digits or range(len(lines)))
    if rng.random() < 0.3 or not with_digits:
        words = f"{path.name}: line {index + 1} lost"
        del lines[index]
    else:
        at = rng.choice([k for k, letter in enumerate(lines[index]) if letter.isdigit()])
        digit = str((int(lines[index][at]) + rng.randint(1, 8)) % 10)
        lines[index] = lines[index][:at] + digit + lines[index][at + 1 :]
        words = f"{path.name}: line {index + 1} is now {lines[index]}"
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return words


def _host_edited(rng: random.Random, folder: Path) -> str:
    """A host renamed, lost or named twice, in one of the lists of hosts."""
    names = (
        "hostfile.template",
        "mapping/slurm_hostfile.template",
        "mapping/nodes.csv",
        "mapping/rankfile.openmpi",
    )
    path = folder / rng.choice(names)
    lines = path.read_text(encoding="utf-8").splitlines()
    index = rng.randrange(len(lines))
    kind = rng.choice(("renamed", "lost", "twice"))
    if kind == "renamed":
        lines[index] = f"{lines[index]}9"
    elif kind == "lost":
        del lines[index]
    else:
        lines.insert(index, lines[index])
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return f"{path.name}: line {index + 1} {kind}"


def _file_lost(rng: random.Random, folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    kept = [path for path in files if path.name not in ("plan.yaml",)]
    path = rng.choice(kept)
    path.unlink()
    return f"{path.name} removed"
