"""The files that start a plan, against the plan: what their flags say, and every line of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from meshwright.documents.reader import LARGE_FILE_BYTES, read_text
from meshwright.errors import InfeasibleError, InputError, shown
from meshwright.planner.launch.plan_files import TARGETS, plan_files
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.launches.reader import read_launch

READABLE = (
    "launch.sh",
    "megatron_args.json",
    "torchtitan_args.json",
    "ds_config.json",
    "accelerate.yaml",
)
"""What `estimate --from-launch` reads."""
_OF_LAYOUT = (
    "tp", "cp", "pp", "dp", "ep", "etp", "vpp", "micro_batch", "zero_stage", "sequence_parallel", "recompute",
)  # fmt: skip
_OF_INPUTS = ("seq_len", "global_batch", "precision", "optimizer")
_OF_MODEL = ("layers", "hidden", "heads", "ffn_hidden")


def launch_file_faults(plan: Plan, file: Path, folder: Path) -> Iterator[str]:
    """Where the files of a folder do not start the plan, in words.

    Flags are read as `estimate --from-launch` reads them and compared with the layout; then every line is
    compared with what is written for the plan.

    Raises
    ------
    InputError
        If a file cannot be read.
    """
    try:
        target = target_of(plan, folder)
        expected = plan_files(plan, target)
    except InfeasibleError as error:
        yield f"these files cannot start the plan: {error}"
        return
    if (folder / "plan.yaml").resolve() == file.resolve():
        del expected["plan.yaml"]
    yield from file_faults(plan, expected, folder)


def file_faults(plan: Plan, expected: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Where files of a folder differ from those that are written for a plan, in words.

    Parameters
    ----------
    plan
        With a layout.
    expected
        Texts by file name.
    folder
        Where the files are.

    Raises
    ------
    InputError
        If a file cannot be read.
    """
    for name in READABLE:
        if name in expected and (folder / name).is_file():
            yield from _flag_faults(plan, folder / name)
    for name, text in expected.items():
        path = folder / name
        if path.is_file():
            yield from _line_faults(name, read_text(path, LARGE_FILE_BYTES), text)
        else:
            yield f"{name} is missing"


def target_of(plan: Plan, folder: Path) -> str:
    """The target whose files are in a folder: of those that can start the plan, the one with the fewest files
    missing, and most of its own; the plan's framework where none can.
    """
    own: str = plan.inputs.framework
    fewest_missing: tuple[float, int] = (float("inf"), 0)
    best = own
    for target in (own, *(name for name in TARGETS if name != own)):
        try:
            names = plan_files(plan, target).keys() - {"plan.yaml"}
        except InfeasibleError:
            continue
        present = sum((folder / name).is_file() for name in names)
        missing = (len(names) - present, -present)
        if missing < fewest_missing:
            fewest_missing, best = missing, target
    return best


def _flag_faults(plan: Plan, path: Path) -> Iterator[str]:
    try:
        launch = read_launch(path)
    except InputError:
        # Some scripts leave the model to a file beside them; their lines are compared all the same.
        return
    for name, planned in _planned_settings(plan).items():
        stated = launch.settings.get(name, planned)
        if stated != planned:
            yield f"{path.name}: {name} is {shown(stated)}, the plan says {shown(planned)}"
    if not isinstance(launch.model, Mapping):
        return
    for name in _OF_MODEL:
        planned = getattr(plan.inputs.model, name, None)
        stated = launch.model.get(name, planned)
        if stated != planned:
            yield f"{path.name}: the model's {name} is {shown(stated)}, the plan says {shown(planned)}"


def _planned_settings(plan: Plan) -> dict[str, Any]:
    """What a reader could find of a plan, by the names of a run file."""
    assert plan.layout is not None
    settings: dict[str, Any] = {name: getattr(plan.layout, name) for name in _OF_LAYOUT}
    settings |= {name: getattr(plan.inputs, name) for name in _OF_INPUTS}
    layout = plan.layout
    return settings | {"gpus": layout.tp * layout.cp * layout.pp * layout.dp}


def _line_faults(name: str, text: str, expected: str) -> Iterator[str]:
    """The first line that differs, and how many do."""
    pairs = list(zip_longest(text.splitlines(), expected.splitlines()))
    differing = [number for number, (line, planned) in enumerate(pairs, start=1) if line != planned]
    if differing:
        line, planned = pairs[differing[0] - 1]
        more = f", and {len(differing) - 1} more lines differ" if len(differing) > 1 else ""
        stated = "nothing" if line is None else shown(line)
        wanted = "nothing" if planned is None else shown(planned)
        yield f"{name}: line {differing[0]} is {stated}, for the plan it is {wanted}{more}"
    elif text != expected:
        yield f"{name}: ends of lines differ from what is written for the plan"
