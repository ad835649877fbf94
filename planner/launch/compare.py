"""A plan beside a file of what is run today: prices, changes, and the smallest edit of the file.

An edit is judged by what the file's own reader makes of it, for every kind of launch file.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import tomlkit
import yaml

from meshwright.costmodel.stacks import stack_constants
from meshwright.costmodel.workload import Execution
from meshwright.documents import path_of, read_text
from meshwright.errors import InfeasibleError, InputError, known_keywords
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.frameworks.megatron import MEGATRON_ARGUMENTS
from meshwright.frameworks.torchtitan import MODEL_PARTS, TORCHTITAN_ARGUMENTS
from meshwright.planner.analysis.waterfall import (
    Baseline,
    parts_with_baseline,
    read_baseline,
    read_baseline_on_parts,
    with_baseline,
)
from meshwright.planner.launch.plan_files import plan_files, writer_of
from meshwright.planner.launch.writer import legal_launch, unlaunched
from meshwright.planner.mixed.document import (
    AnyPlan,
    MixedPlan,
    PartBaselineDoc,
    inputs_by_part,
    read_any_plan,
)
from meshwright.planner.mixed.service import MixedResult
from meshwright.planner.plan.document import Plan, ScriptDiff, ScriptEdit, with_digest
from meshwright.planner.plan.training_cost import Budget
from meshwright.planner.runs.launches.command_line import CommandLine, words_of
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.megatron import are_overrides, is_recipe_name
from meshwright.planner.runs.launches.reader import launch_document, launch_of_text, run_of_inputs
from meshwright.planner.runs.launches.torchtitan import OLD_NAMES, is_toml
from meshwright.planner.runs.launches.trainers import swift_command
from meshwright.planner.runs.prediction import arrangement, predict_run
from meshwright.planner.runs.run_file import MAX_FILE_BYTES, Run
from meshwright.planner.runs.run_terms import layout_document

# Flags in the text of a script, changed where they stand: the lines around them stay as they are.


_VALUE = r"""(?:"[^"\n]*"|'[^'\n]*'|(?!--)[^\s\\)"']+)"""
_SUBCOMMAND = "activation-checkpoint:"
"""Of torchtitan, ahead of its value and behind all flags: those that follow would be its own."""
_VARIABLE = re.compile(r"^\"?\$\{?([A-Za-z_]\w*)\}?\"?$")


@dataclass(frozen=True, kw_only=True)
class FlagEdit:
    """A flag to set, change or take out."""

    flag: str
    before: tuple[str, ...] | None
    """Its values now; None where it is not there."""
    after: tuple[str, ...] | None
    """Its values then; None where it is taken out."""


def edited_text(
    text: str, edits: Sequence[FlagEdit], anchors: Sequence[str], *, through_variables: bool
) -> str:
    """A script with some flags changed.

    Parameters
    ----------
    text
        The script.
    edits
        What to change.
    anchors
        Flags after which new ones may stand, the first that is there is taken.
    through_variables
        Whether a flag whose value is `$NAME` is changed where NAME is set, and not where it is used.

    Returns
    -------
    str
        What could not be found is left as it is.
    """
    for edit in edits:
        if edit.after is None:
            text = _without(text, edit)
        elif edit.before is not None:
            text = _changed(text, edit, through_variables=through_variables)
    for edit in reversed(edits):
        if edit.before is None and edit.after is not None:
            text = _with(text, edit, anchors)
    return text


def _pattern(flag: str, values: int) -> re.Pattern[str]:
    """A flag with its values, whichever way its words are joined, in a line that is no comment."""
    if flag == _SUBCOMMAND:
        return re.compile(rf"(?<![\w$-])(?P<flag>{flag})(?P<joined>{_VALUE})(?P<spaced>(?!))?")
    words = flag.removeprefix("--").replace("-", "[-_]")
    spaced = rf"(?:[ \t]+{_VALUE})" * values
    joined = rf"=(?P<joined>{_VALUE})|" if values == 1 else ""
    return re.compile(rf"(?<![\w$-])(?P<flag>--{words})(?:{joined}(?P<spaced>{spaced}))(?![\w.-])")


def _matches(text: str, flag: str, values: int) -> list[re.Match[str]]:
    matches = _pattern(flag, values).finditer(text)
    return [match for match in matches if not _in_comment(text, match.start())]


def _in_comment(text: str, position: int) -> bool:
    line = text[text.rfind("\n", 0, position) + 1 : position]
    return re.search(r"(^|\s)#", line) is not None


def _changed(text: str, edit: FlagEdit, *, through_variables: bool) -> str:
    assert edit.before is not None
    assert edit.after is not None
    words = " ".join(map(shlex.quote, edit.after))
    for match in reversed(_matches(text, edit.flag, len(edit.before))):
        value = match["spaced"] or match.groupdict().get("joined") or ""
        variable = _VARIABLE.match(value.strip())
        if variable is not None and through_variables:
            return _assigned(text, variable[1], words)
        spaced = match["spaced"] is not None
        start, end = match.span("spaced" if spaced else "joined")
        text = text[:start] + (" " if spaced and words else "") + words + text[end:]
    return text


def _assigned(text: str, name: str, words: str) -> str:
    """The text with the one plain assignment of a variable changed; as it is where there are more."""
    pattern = re.compile(rf"^(?P<head>\s*(?:export\s+)?{name}=)(?P<value>{_VALUE})", re.MULTILINE)
    places = list(pattern.finditer(text))
    if len(places) != 1:
        return text
    start, end = places[0].span("value")
    return text[:start] + words + text[end:]


def _lines_around(text: str, match: re.Match[str]) -> tuple[int, int]:
    """Where the first line of a match begins and the last one ends."""
    end = text.find("\n", match.end())
    return text.rfind("\n", 0, match.start()) + 1, len(text) if end < 0 else end


def _without(text: str, edit: FlagEdit) -> str:
    """The text without a flag and its values; a line that held nothing else goes with it."""
    values = len(edit.before or ())
    for match in reversed(_matches(text, edit.flag, values)):
        line_start, line_end = _lines_around(text, match)
        rest = text[line_start : match.start()] + text[match.end() : line_end]
        if rest.strip() in ("", "\\"):
            text = text[:line_start] + text[line_end + 1 :]
        else:
            end = match.end()
            while text[end : end + 1] == " " and text[match.start() - 1] == " ":
                end += 1
            text = text[: match.start()] + text[end:]
    return text


def _with(text: str, edit: FlagEdit, anchors: Sequence[str]) -> str:
    """The text with a new flag behind the first anchor: on a line of its own where the anchor has one."""
    assert edit.after is not None
    if edit.flag == _SUBCOMMAND:
        return text
    words = " ".join([edit.flag, *map(shlex.quote, edit.after)])
    for anchor in anchors:
        matches = _matches(text, anchor, 1)
        if not matches:
            continue
        match = matches[-1]
        line_start, line_end = _lines_around(text, match)
        before, after = text[line_start : match.start()], text[match.end() : line_end]
        if before.strip() == "" and after.strip() in ("", "\\"):
            is_continued = text[:line_start].rstrip("\n").endswith("\\")
            if after.strip() == "" and is_continued and line_start:
                return f"{text[: match.end()]} \\\n{before}{words}{text[match.end() :]}"
            return f"{text[:line_end]}\n{before}{words}{after}{text[line_end:]}"
        return f"{text[: match.end()]} {words}{text[match.end() :]}"
    return text


SAME_PRICE = 1e-3
"""Relative difference of a step that counts as the plan's own price."""

Meaning = Callable[[Sequence[FlagEdit]], object]
"""What a file says with some edits."""


class FileChange:
    """What both kinds of files have in common: candidates, dropped one by one."""

    def __init__(self, path: Path, text: str, plan: Plan) -> None:
        self._path, self._text, self._plan = path, text, plan

    def _meaning(self, text: str) -> object:
        """What a file says; None where it cannot be read or its settings do not fit together."""
        try:
            launch = launch_of_text(text, self._path, self._plan.inputs.model)
        except InputError:
            launch = None
        return self._meaning_of_launch(launch)

    def _meaning_of_launch(self, launch: LaunchRun | None) -> object:
        try:
            return launch and launch_meaning(launch, self._plan, self._path)
        except InputError:
            return None

    def _smallest(
        self, edits: list[FlagEdit], groups: Iterable[list[FlagEdit]], meaning: Meaning
    ) -> list[FlagEdit]:
        """The edits without the groups of them that the file means the same without."""
        target = meaning(edits)
        for group in groups:
            remaining = [edit for edit in edits if edit not in group]
            if len(remaining) < len(edits) and meaning(remaining) == target:
                edits = remaining
        return edits

    def _result(self, edits: Sequence[FlagEdit], text: str, note: str) -> ScriptDiff:
        lines = difflib.unified_diff(
            self._text.splitlines(keepends=True),
            text.splitlines(keepends=True),
            fromfile=self._path.name,
            tofile=f"{self._path.name} (planned)",
        )
        step_s = None
        notes = [note] if note else []
        if text != self._text or not edits:
            prediction = predict_run(run_of_file(text, self._path, self._plan))
            step_s = float(prediction.estimate.step_time_s)
            assert self._plan.predicted is not None
            planned_s = self._plan.predicted.step_time_s
            if abs(step_s / planned_s - 1) > SAME_PRICE:
                rest = (
                    "the order of ranks (mapping/ranks.csv of -o DIR) and what the file cannot say"
                )
                notes.append(
                    f"the edited file is priced at {step_s:.3f} s, the plan at {planned_s:.3f} s: {rest}"
                )
        return ScriptDiff(
            edits=[
                ScriptEdit(name=edit.flag, before=_joined(edit.before), after=_joined(edit.after))
                for edit in edits
            ],
            patch="".join(
                line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
                for line in lines
            ),
            step_time_s=step_s,
            note="; ".join(notes),
        )


class KeyChange(FileChange):
    """Keys of a configuration file."""

    def __init__(
        self, path: Path, text: str, plan: Plan, document: dict[str, Any], wants: dict[str, Any]
    ) -> None:
        super().__init__(path, text, plan)
        self._has, self._wants = leaves_of(document), wants

    def _diff(self, names: Iterable[str], note: str) -> ScriptDiff:
        """The fewest edits of some keys, and the file with them."""
        pairs = ((name, self._has.get(name), self._wants.get(name)) for name in names)
        edits = [key_edit(name, has, wants) for name, has, wants in pairs if has != wants]
        edits = self._smallest(
            edits, [[edit] for edit in edits], lambda tried: self._meaning(self._edited(tried))
        )
        return self._result(edits, self._edited(edits) if edits else self._text, note)

    @abstractmethod
    def _edited(self, edits: Sequence[FlagEdit]) -> str:
        """The file with some edits."""


def _joined(values: tuple[str, ...] | None) -> str | None:
    return None if values is None else " ".join(values)


def run_of_file(text: str, path: Path, plan: Plan) -> Run:
    return run_of_inputs(launch_of_text(text, path, plan.inputs.model), plan.inputs, path)


def launch_meaning(launch: LaunchRun, plan: Plan, path: Path) -> object:
    """All that prices a launch of a plan's model, in one way of writing: what is alike costs the same.

    Raises InputError where its settings do not fit together.

    Parameters
    ----------
    launch
        What was read of a file, or of a file with edits.
    plan
        Whose inputs stand in for what the file leaves open, its model included.
    path
        Of the file, for messages.
    """
    run = run_of_inputs(launch, plan.inputs, path)
    workload = run.workload
    try:
        stages, _ = arrangement(run)
    except ValueError:
        return None
    longest = max(max(rank) for rank in stages)
    layout = replace(run.layout, recompute_layers=min(int(run.layout.recompute_layers), longest))
    execution = Execution.within(workload).of_layout(layout)
    names = ("precision", "optimizer", "framework", "gpus", "global_batch", "seq_len")
    settings = [*(getattr(workload, name) for name in names), stack_constants(workload)]
    return layout, stages, execution, run.rank_order, settings, launch.repeats_pipeline


def leaves_of(document: dict[str, Any], place: str = "") -> dict[str, Any]:
    """Values by their dotted path.

    Parameters
    ----------
    document
        Sections within sections; lists count as values.
    place
        Path of the document itself, with a dot behind it; empty at the top.
    """
    leaves: dict[str, Any] = {}
    for key, value in document.items():
        name = f"{place}{key}"
        if isinstance(value, dict):
            leaves |= leaves_of(value, f"{name}.")
        else:
            leaves[name] = value
    return leaves


def key_edit(name: str, before: object, after: object) -> FlagEdit:
    first, last = (None if value is None else (json.dumps(value),) for value in (before, after))
    return FlagEdit(flag=name, before=first, after=last)


# Keys of a configuration file that a plan changes.


class DocumentChange(KeyChange):
    """Keys of a DeepSpeed or accelerate configuration."""

    def diff(self) -> ScriptDiff:
        """The edits, and the file with them."""
        return self._diff({**self._wants, **self._has}, "")

    def _edited(self, edits: Sequence[FlagEdit]) -> str:
        leaves = dict(self._has)
        for edit in edits:
            if edit.after is None:
                leaves.pop(edit.flag, None)
            else:
                leaves[edit.flag] = self._wants[edit.flag]
        document: dict[str, Any] = {}
        for name, value in leaves.items():
            *sections, key = name.split(".")
            section = document
            for part in sections:
                section = section.setdefault(part, {})
            section[key] = value
        if self._path.suffix == ".json":
            indent = re.match(r"\s*\{\n([ \t]+)", self._text)
            return json.dumps(document, indent=indent[1] if indent else 2) + "\n"
        return yaml.safe_dump(document, sort_keys=False)


# Keys of a torchtitan TOML file that a plan changes, each where it stands.


_OF_MODULE = ("module", "config")
"""Flags that name a module of Python, which a TOML file has no place for."""


class TomlChange(KeyChange):
    """Keys of a TOML file; sections, comments and what the plan says nothing of stay as they are."""

    def diff(self) -> ScriptDiff:
        """The edits, and the file with them."""
        return self._diff(self._wants, self._note())

    def _note(self) -> str:
        """Keys whose values are lists, which are left as they are."""
        layout, lists = self._plan.layout, []
        if layout is not None and layout.pp > 1:
            lists.append(f"parallelism.{MODEL_PARTS}")
        if self._plan.inputs.precision != "bf16":
            lists.append("model.converters")
        return f"set by hand as -o DIR writes it: {' and '.join(lists)}" if lists else ""

    def _edited(self, edits: Sequence[FlagEdit]) -> str:
        document = tomlkit.parse(self._text if self._text.endswith("\n") else f"{self._text}\n")
        for edit in edits:
            *sections, key = edit.flag.split(".")
            table: Any = document
            for section in sections:
                if section not in table:
                    table.add(section, tomlkit.table())
                table = table[section]
            table[key] = self._wants[edit.flag]
        return tomlkit.dumps(document)


def _keys(words: Sequence[str], has: dict[str, Any]) -> dict[str, object]:
    """Values by section and key, of torchtitan's flags; keys by the name that the file has for them."""
    renamed = {new: old for old, new in OLD_NAMES.items() if old in has}
    keys: dict[str, object] = {}
    for index, word in enumerate(words):
        if word.startswith(_SUBCOMMAND):
            keys["activation_checkpoint.mode"] = word.removeprefix(_SUBCOMMAND)
        section, dot, key = word.removeprefix("--").partition(".")
        if not word.startswith("--") or not dot or section in _OF_MODULE:
            continue
        following = words[index + 1] if index + 1 < len(words) else "--"
        value: object = int(following) if following.isdecimal() else following
        if following.startswith("--") or following.startswith(_SUBCOMMAND):
            value = not key.startswith("no-")
        name = f"{section}.{key.removeprefix('no-')}".replace("-", "_")
        keys[renamed.get(name, name)] = value
    return keys


# Flags of a launch script that a plan changes.


_ANCHORS = (
    *(
        MEGATRON_ARGUMENTS[word].flag
        for word in ("micro_batch", "tp", "pp", "global_batch", "seq_len")
    ),
    *(
        TORCHTITAN_ARGUMENTS[word].flag
        for word in ("tp", "local_batch", "seq_len", "configuration")
    ),
)
"""Flags behind which new ones are written."""
_DEFAULTS = (("1",), ("none",), ("adam",), ("0",))
"""Values of new flags that mostly hold without them."""
_FAMILIES = {"recompute", "cuda", "fp8", "fp4", "checkpoint"}
"""First words of flags that are refused or mean nothing without one another."""


class ScriptChange(FileChange):
    """Flags of a script, or of a JSON list of arguments."""

    def __init__(self, path: Path, text: str, plan: Plan, wanted: list[str]) -> None:
        super().__init__(path, text, plan)
        listed = launch_document(path, text)
        self._listed = [str(word) for word in listed] if isinstance(listed, list) else None
        line = words_of(text, str(path)) if self._listed is None else None
        words = self._listed if line is None else line.words
        self._now = launch_of_text(text, path).settings
        self._gpus = {key: self._now[key] for key in ("gpus",) if key in self._now}
        self._has = _flags(words or [])
        self._wants = _flags(wanted)
        self._concerned = self._flags_of_changes()

    def diff(self) -> ScriptDiff:
        """The edits, written into the text where that is possible."""
        candidates = self._started([*self._sets(), *self._removals()])
        # The fewest edits with the meaning of all; flags that begin with the same word stay together.
        subjects = dict.fromkeys(_subject(edit.flag) for edit in candidates)
        free = [edit for edit in candidates if edit.flag not in self._concerned]
        groups = [[edit for edit in free if _subject(edit.flag) == name] for name in subjects]
        # A new flag may say what holds without it.
        groups += [[edit] for edit in candidates if edit.before is None and edit.after in _DEFAULTS]
        edits = self._smallest(candidates, groups, self._meaning_of)
        text = self._written(edits, self._meaning_of(candidates))
        if text is None:
            return self._result(
                edits, self._text, "change the flags by hand: the script computes them"
            )
        return self._result(edits, text, "")

    def _started(self, edits: list[FlagEdit]) -> list[FlagEdit]:
        """The edits, with the removals without which the framework refuses the others."""
        if self._meaning_of(edits) is not None:
            return edits
        edited = self._wants.keys() | {edit.flag for edit in edits}
        others = [
            FlagEdit(flag=flag, before=values, after=None)
            for flag, values in self._has.items()
            if flag and flag not in edited
        ]
        return self._smallest([*edits, *others], [[edit] for edit in others], self._meaning_of)

    def _flags_of_changes(self) -> set[str]:
        """Flags that arguments written for the plan have otherwise than arguments written for today's layout.

        Some have no price, and the framework refuses the others without them. None where what runs today
        cannot be written.
        """
        inputs = self._plan.inputs
        writer = writer_of(inputs.framework)
        try:
            run = run_of_file(self._text, self._path, self._plan)
            stages, _ = arrangement(run)
            workload = run.workload
            settings = {"precision": workload.precision, "optimizer": workload.optimizer}
            launch = replace(
                legal_launch(self._plan, writer.framework),
                plan=self._plan.model_copy(update={"inputs": inputs.model_copy(update=settings)}),
                layout=layout_document(run.layout, stages),
                execution=Execution.within(workload).of_layout(run.layout),
            )
            today = _flags(writer.start(launch).args)
        except (InputError, InfeasibleError, ValueError):
            return set()
        flags = {*today, *self._wants}
        changed = {flag for flag in flags if today.get(flag) != self._wants.get(flag)}
        spellings = ({argument.flag, *argument.also} for argument in MEGATRON_ARGUMENTS.values())
        return changed.union(*(names for names in spellings if names & changed))

    def _sets(self) -> list[FlagEdit]:
        """Flags that the plan's arguments have and the script has not, or has with other values."""
        edits = []
        for flag, after in self._wants.items():
            before = self._has.get(flag)
            if before is not None:
                before = before[: max(len(after), 1)] if after else ()
            if before != after:
                edits.append(FlagEdit(flag=flag, before=before, after=after))
        return edits

    def _removals(self) -> list[FlagEdit]:
        """Flags of the script that the plan's arguments do without, of what changes or read for a price."""
        removed = {flag for flag in self._has if flag in self._concerned - self._wants.keys()}
        for flag in self._has:
            words = _words({key: value for key, value in self._has.items() if key != flag})
            launch = self._launch(words)
            if flag not in self._wants and launch is not None and launch.settings != self._now:
                removed.add(flag)
        families = {_subject(flag) for flag in removed} & _FAMILIES
        edits = []
        for flag, values in self._has.items():
            companion = _subject(flag) in families and flag not in self._wants
            if flag in removed or companion:
                edits.append(FlagEdit(flag=flag, before=values, after=None))
        return edits

    def _written(self, edits: Sequence[FlagEdit], target: object) -> str | None:
        """The file with the edits, in the first way of writing them that its reader understands."""
        if self._listed is not None:
            return json.dumps(self._edited_words(edits), indent=1) + "\n"
        anchors = [
            edit.flag for edit in edits if edit.before and edit.after and edit.flag != _SUBCOMMAND
        ]
        for through_variables in (True, False):
            text = edited_text(
                self._text, edits, [*anchors, *_ANCHORS], through_variables=through_variables
            )
            if self._meaning(text) == target:
                return text
        return None

    def _edited_words(self, edits: Iterable[FlagEdit]) -> list[str]:
        flags = dict(self._has)
        for edit in edits:
            if edit.after is None:
                flags.pop(edit.flag, None)
            else:
                flags[edit.flag] = edit.after
        return _words(flags)

    def _meaning_of(self, edits: Sequence[FlagEdit]) -> object:
        return self._meaning_of_launch(self._launch(self._edited_words(edits)))

    def _launch(self, words: list[str]) -> LaunchRun | None:
        """What some words say, on as many GPUs as the script; None where they cannot be read."""
        try:
            launch = launch_of_text(json.dumps(words), self._path.with_suffix(".json"))
        except InputError:
            return None
        return replace(launch, settings={**launch.settings, **self._gpus})


def _flags(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Values by flag; what stands before the first flag is under an empty name."""
    flags: dict[str, list[str]] = {}
    flag = ""
    for word in CommandLine(words, "").words:
        if word.startswith("--") and len(word) > 2:
            flag = word
            flags[flag] = []
        elif word.startswith(_SUBCOMMAND):
            flags[_SUBCOMMAND] = [word.removeprefix(_SUBCOMMAND)]
        else:
            flags.setdefault(flag, []).append(word)
    return {name: tuple(values) for name, values in flags.items()}


def _words(flags: dict[str, tuple[str, ...]]) -> list[str]:
    words = []
    for flag, values in flags.items():
        if flag != _SUBCOMMAND:
            words += [flag, *values] if flag else list(values)
    return words + [_SUBCOMMAND + value for value in flags.get(_SUBCOMMAND, ())]


def _subject(flag: str) -> str:
    """The first word of a flag, by which flags that go together are named."""
    return flag.removeprefix("--").replace("_", "-").split("-")[0]


# The smallest change of a launch file that people have to one that starts a plan.
#
# Flags and keys that the plan's own launch files set otherwise are candidates. Each is dropped again where
# the file says the same without it, as its reader understands it; flags of one subject stay together, and
# those that launch files of today's layout and of the plan's have differently stay.


_ARGUMENTS = ("megatron_args.json", "torchtitan_args.json")
_DOCUMENTS = ("ds_config.json", "accelerate.yaml")
_BY_TARGET = "`launch --target {}` of the plan's file writes the plan's"
_OTHER_KIND = "the plan's files are of another kind: -o DIR writes them"


def with_script_diff(plan: Plan) -> Plan:
    """A plan whose baseline is a launch file, with the smallest change of that file that reaches the plan.

    Any other plan is returned as it is. Raises InputError where the file cannot be read.

    Parameters
    ----------
    plan
        With a layout where it has a baseline; the baseline's file is read again.
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
    their_framework = framework_of_stack(run_of_file(text, path, plan).workload.framework).name
    if ours != their_framework:
        note = f"the file is {their_framework}'s, the plan {ours}'s: -o DIR writes that framework's files"
        return ScriptDiff(note=note)
    document = launch_document(path, text)
    by_swift = document is None and swift_command(words_of(text, str(path))) is not None
    target = "ms-swift" if by_swift else "bridge" if are_overrides(document) else None
    try:
        files = plan_files(plan, target)
    except InfeasibleError as error:
        return ScriptDiff(note=str(error))
    if isinstance(document, dict):
        return _document_diff(path, text, plan, document, files)
    wanted = next((files[name] for name in _ARGUMENTS if name in files), None)
    if wanted is None:
        fields = path.with_suffix(".yaml") if by_swift else path
        is_own = files.get(path.name) == text and _is_written(fields, files)
        reason = _BY_TARGET.format(target) if target else unlaunched(plan.inputs) or _OTHER_KIND
        return ScriptDiff(note="" if is_own else reason)
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


def _is_written(path: Path, files: Mapping[str, str]) -> bool:
    """Whether a file is there as it is written for a plan."""
    return path.is_file() and read_text(path, MAX_FILE_BYTES) == files.get(path.name)


def _document_diff(
    path: Path, text: str, plan: Plan, document: dict[str, Any], files: dict[str, str]
) -> ScriptDiff:
    """The change of a configuration file, of torchtitan's flags where it is a TOML file."""
    if is_toml(text):
        arguments = json.loads(files["torchtitan_args.json"])
        wants = _keys(arguments, leaves_of(document))
        return TomlChange(path, text, plan, document, wants).diff()
    wanted = next((files[name] for name in _DOCUMENTS if name in files), None)
    if wanted is None:
        return ScriptDiff(note=_OTHER_KIND)
    wants = leaves_of(yaml.safe_load(wanted))
    return DocumentChange(path, text, plan, document, wants).diff()


@known_keywords
def compare(
    plan: str | PathLike[str] | AnyPlan,
    baseline: str | PathLike[str],
    *,
    tokens: float | None = None,
    days: float | None = None,
    gpu_hour_price: float | None = None,
) -> AnyPlan:
    """What a plan brings over what is run today.

    Parameters
    ----------
    plan
        A plan, on a mixed cluster too, its file or its folder.
    baseline
        A launch script, a run file of one run, or another plan on one kind of device. For a plan on a mixed
        cluster, a script is priced on the part where it runs fastest.
    tokens
        Tokens of the whole training, above 0 to 1e18: adds its days, GPU hours and kWh.
    days
        Above 0 to 1e6: with `tokens` the deadline; without, how long is trained.
    gpu_hour_price
        Dollars, 0 to 1e6: adds the price of the training; the cluster file's own when None.

    Returns
    -------
    Plan or MixedPlan
        With `baseline`: the speed-up, what each change brings alone and in turn, and for a launch script the
        smallest edit of it that reaches the plan.

    Raises
    ------
    InputError
        If a file cannot be read or priced, or trains another model.
    InfeasibleError
        If the plan has no layout.
    """
    compared = plan if isinstance(plan, AnyPlan) else read_any_plan(plan)
    budget = Budget(tokens=tokens, days=days, gpu_hour_price=gpu_hour_price)
    file = path_of(baseline, "baseline")
    if isinstance(compared, MixedPlan):
        return parts_against(
            compared, read_baseline_on_parts(file, inputs_by_part(compared)), budget
        )
    return against(compared, read_baseline(file, compared.inputs), budget)


def against(plan: Plan, today: Baseline, budget: Budget | None = None) -> Plan:
    """A plan with its `baseline`, edits included; as it is without a layout. `budget` is of the training.

    Parameters
    ----------
    plan
        Of any status; returned as it is without a layout.
    today
        What `read_baseline` made of today's file.
    budget
        What is to be trained, for days and dollars of both; None where nobody asks.
    """
    if plan.layout is None:
        return plan
    return with_script_diff(with_baseline(plan, today, budget))


def parts_against(plan: MixedPlan, today: Baseline, budget: Budget | None = None) -> MixedPlan:
    """The same of a pipeline through parts, to which no edit of a script leads: its hosts stand in order.

    Parameters
    ----------
    plan
        Of any status; returned as it is without a pipeline through parts.
    today
        What `read_baseline_on_parts` made of today's file.
    budget
        As in `against`.
    """
    if plan.layout is None:
        return plan
    compared = parts_with_baseline(plan, today, budget)
    if compared.baseline is None or today.kind != "launch":
        return compared
    note = "a pipeline through parts is started by the files of -o DIR, whose hostfile has the plan's order"
    baseline = compared.baseline.model_copy(update={"diff": ScriptDiff(note=note)})
    return compared.model_copy(update={"baseline": baseline})


def result_against(
    result: MixedResult, today: Baseline, budget: Budget | None = None
) -> MixedResult:
    """What came out on a mixed cluster with its `baseline`, that of the plan of a part alone included.

    Parameters
    ----------
    result
        Of a search over a mixed cluster, with the plan of a part where that alone is fastest.
    today
        As in `parts_against`.
    budget
        As in `against`.
    """
    alone = result.alone
    if alone is None:
        document = parts_against(result.document, today, budget)
        return replace(result, document=with_digest(document))
    alone = with_digest(against(alone, today, budget))
    if alone.baseline is None:
        return result
    stated = PartBaselineDoc(**dict(alone.baseline), part=today.part)
    document = result.document.model_copy(update={"baseline": stated})
    return replace(result, document=with_digest(document), alone=alone)
