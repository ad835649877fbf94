"""A plan and a file of what is run today, brought together: prices, changes, edits."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from meshwright.documents import read_text
from meshwright.errors import InfeasibleError
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.planner.analysis.waterfall import Baseline, read_baseline, with_baseline
from meshwright.planner.launch.file_change import (
    DocumentChange,
    ScriptChange,
    TomlChange,
    run_of_file,
)
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.launch.writer import unlaunched
from meshwright.planner.plan.document import Plan, ScriptDiff
from meshwright.planner.plan.texts import read_feasible_plan
from meshwright.planner.plan.training_cost import Budget
from meshwright.planner.runs.launches.bridge import is_recipe_name
from meshwright.planner.runs.launches.reader import launch_document
from meshwright.planner.runs.launches.torchtitan import is_toml
from meshwright.planner.runs.run_file import MAX_FILE_BYTES

# The smallest change of a launch file that people have to one that starts a plan.
#
# Flags and keys that the plan's own launch files set otherwise are candidates. Each is dropped again where
# the file says the same without it, as its reader understands it; flags of one subject stay together.


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
        return ScriptDiff(note=unlaunched(plan.inputs) or _OTHER_KIND)
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


def compare(
    plan: str | PathLike[str] | Plan,
    baseline: str | PathLike[str],
    *,
    tokens: float | None = None,
    days: float | None = None,
    gpu_hour_price: float | None = None,
) -> Plan:
    """What a plan brings over what is run today.

    Parameters
    ----------
    plan
        A plan, its file or its folder.
    baseline
        A launch script, a run file of one run, or another plan.
    tokens
        Tokens of the whole training, above 0 to 1e18: adds its days, GPU hours and kWh.
    days
        Above 0 to 1e6: with `tokens` the deadline; without, how long is trained.
    gpu_hour_price
        Dollars, 0 to 1e6: adds the price of the training; the cluster file's own when None.

    Returns
    -------
    Plan
        With `baseline`: the speed-up, what each change brings alone and in turn, and for a launch script the
        smallest edit of it that reaches the plan.

    Raises
    ------
    InputError
        If a file cannot be read or priced, or trains another model.
    InfeasibleError
        If the plan has no layout.
    """
    compared = plan if isinstance(plan, Plan) else read_feasible_plan(plan)
    today = read_baseline(Path(baseline), compared.inputs)
    budget = Budget(tokens=tokens, days=days, gpu_hour_price=gpu_hour_price)
    return against(compared, today, budget)


def against(plan: Plan, today: Baseline, budget: Budget | None = None) -> Plan:
    """A plan with its `baseline`, edits included; as it is without a layout. `budget` is of the training."""
    if plan.layout is None:
        return plan
    return with_script_diff(with_baseline(plan, today, budget))
