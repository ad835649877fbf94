"""The smallest change of a launch file that people have to one that starts a plan.

Flags and keys that the plan's own launch files set otherwise are candidates. Each is dropped again where the
file says the same without it, as its reader understands it; flags of one subject stay together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from meshwright.documents.reader import read_text
from meshwright.errors import InfeasibleError
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.planner.launch.document_change import DocumentChange
from meshwright.planner.launch.file_change import run_of_file
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.launch.script_change import ScriptChange
from meshwright.planner.launch.toml_change import TomlChange
from meshwright.planner.plan.baseline_document import ScriptDiff
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.launches.bridge_recipes import is_recipe_name
from meshwright.planner.runs.launches.reader import launch_document
from meshwright.planner.runs.launches.torchtitan_toml import is_toml
from meshwright.planner.runs.run_file import MAX_FILE_BYTES

_ARGUMENTS = ("megatron_args.json", "torchtitan_args.json")
_DOCUMENTS = ("ds_config.json", "accelerate.yaml")
_OTHER_KIND = "the plan's files are of another kind: -o DIR writes them"


def with_script_diff(plan: Plan) -> Plan:
    """A plan whose baseline is a launch file, with the smallest change of that file that reaches the plan.

    Any other plan is returned as it is. Raises InputError where the file cannot be read.
    """
    if plan.baseline is None or plan.baseline.kind != "launch":
        return plan
    path = Path(plan.baseline.file)
    if is_recipe_name(path):
        note = "a recipe is no file: launch --target bridge writes its overrides"
        diff = ScriptDiff(note=note)
    else:
        diff = script_diff(path, plan)
    return plan.model_copy(update={"baseline": plan.baseline.model_copy(update={"diff": diff})})


def script_diff(path: Path, plan: Plan) -> ScriptDiff:
    """The smallest change of a launch file that starts a plan's layout.

    Parameters
    ----------
    path
        A launch file of the plan's framework.
    plan
        With a layout.

    Returns
    -------
    ScriptDiff
        Without edits, and with a note, where the file is of another framework.

    Raises
    ------
    InputError
        A file that cannot be read.
    """
    text = read_text(path, MAX_FILE_BYTES)
    ours = framework_of_stack(plan.inputs.framework).name
    theirs = framework_of_stack(run_of_file(text, path, plan).workload.framework).name
    if ours != theirs:
        note = f"the file is {theirs}'s, the plan {ours}'s: -o DIR writes that framework's files"
        return ScriptDiff(note=note)
    document = launch_document(path, text)
    try:
        files = plan_files(plan)
    except InfeasibleError as error:
        return ScriptDiff(note=str(error))
    if isinstance(document, dict):
        return _document_diff(path, text, plan, document, files)
    wanted = next((files[name] for name in _ARGUMENTS if name in files), None)
    if wanted is None:
        return ScriptDiff(note=_OTHER_KIND)
    diff = ScriptChange(path, text, plan, json.loads(wanted)).diff()
    exports = [
        f"{name}={value}"
        for name, value in json.loads(files["env.json"]).items()
        if name not in text
    ]
    if not exports:
        return diff
    environment = f"in the environment: {' '.join(exports)}"
    return diff.model_copy(update={"note": "; ".join(filter(None, (diff.note, environment)))})


def _document_diff(
    path: Path, text: str, plan: Plan, document: dict[str, Any], files: dict[str, str]
) -> ScriptDiff:
    """The change of a configuration file, of torchtitan's flags where it is a TOML file."""
    if is_toml(text):
        arguments = json.loads(files["torchtitan_args.json"])
        return TomlChange(path, text, plan, document, arguments).diff()
    wanted = next((files[name] for name in _DOCUMENTS if name in files), None)
    if wanted is None:
        return ScriptDiff(note=_OTHER_KIND)
    return DocumentChange(path, text, plan, document, yaml.safe_load(wanted)).diff()
