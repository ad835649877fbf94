"""The words of a command line: found in a script, and taken one flag at a time so that the rest is known."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import translate
from functools import cache
from itertools import takewhile
from typing import Any, NamedTuple

from meshwright.documents import packaged_document
from meshwright.errors import InputError
from meshwright.frameworks.record import Argument

# What flags and keys that no reader takes do to the price: nothing, something, or nobody knows.
#
# flag_effects.yaml beside this file lists them by program.


_LAUNCHERS = "launchers"
_OFF = re.compile(r"(--[\w-]+\.)no-(.+)")
"""A switch of torchtitan that is turned off."""
_AS_DEFAULT = frozenset(("auto", "none"))
"""Values that leave a setting to the program."""


class _Effects(NamedTuple):
    no_effect: tuple[re.Pattern[str], ...]
    changes: tuple[tuple[re.Pattern[str], str | None], ...]
    """Names, and the value that asks for nothing."""


def has_no_effect(kind: str, name: str, value: str = "true") -> bool:
    """Whether a flag or a key that is not read leaves the price as it is.

    Parameters
    ----------
    kind
        The program whose it is, by its section of the file; flags of launchers such as torchrun and srun are
        known beside every program's.
    name
        A flag with its dashes, `section.key` of a document, or an override.
    value
        What follows it, in any case of letters; `true` for a switch.

    >>> has_no_effect("megatron", "--log-interval", "10")
    True
    >>> has_no_effect("torchtitan", "--parallelism.no-enable-async-tensor-parallel")
    True
    >>> has_no_effect("megatron", "--some-new-flag")
    False
    """
    off = _OFF.fullmatch(name)
    said = value.strip().lower()
    effects = (_effects(_LAUNCHERS), _effects(kind))
    if any(pattern.fullmatch(name) for each in effects for pattern in each.no_effect):
        return True
    if off is not None:
        name, said = off[1] + off[2], "false"
    return any(
        default is not None and pattern.fullmatch(name) and _same(said, default)
        for each in effects
        for pattern, default in each.changes
    )


def changes_price(name: str) -> bool:
    """Whether a flag or a key is known to change the price of a step, of whichever program it is.

    Parameters
    ----------
    name
        A flag with its dashes, or `section.key` of a document.
    """
    kinds = [section for section in _sections() if section != _LAUNCHERS]
    return any(pattern.fullmatch(name) for kind in kinds for pattern, _ in _effects(kind).changes)


def unread_words(name: str) -> str:
    """What is said of a flag or a key that no reader takes.

    Parameters
    ----------
    name
        As its file writes it; it opens the sentence.
    """
    if changes_price(name):
        return f"{name} is not read, and changes the price"
    return f"{name} is not read: nothing is known of it, and it may change the price"


def _same(value: str, default: str) -> bool:
    """Whether a value is a default, also where numbers are written in other ways."""
    if value in _AS_DEFAULT or value == default:
        return True
    try:
        return float(value) == float(default)
    except ValueError:
        return False


@cache
def _sections() -> dict[str, dict[str, str]]:
    sections: dict[str, dict[str, str]] = packaged_document(
        "meshwright.planner.runs.launches", "flag_effects.yaml"
    )
    return sections


@cache
def _effects(section: str) -> _Effects:
    entry = _sections()[section]
    no_effect = (re.compile(translate(name)) for name in entry["no_effect"].split())
    changes = (word.partition("=") for word in entry.get("changes", "").split())
    return _Effects(
        tuple(no_effect),
        tuple(
            (re.compile(translate(name)), value.lower() if sign else None)
            for name, sign, value in changes
        ),
    )


MOST_WORDS = 200_000
MOST_LINE_LETTERS = 200_000
MOST_LETTERS = 500_000
"""Of a script, also once its variables have their values, which may grow from line to line."""
_ASSIGNMENT = re.compile(r"^(?:export\s+|local\s+)?([A-Za-z_]\w*)(\+?)=(.*)$")
_SBATCH = re.compile(
    r"^#SBATCH\s+(?:--(nodes|gpus-per-node)=|-(N)\s*)(?:\w+:)?(\d{1,6})\b", re.MULTILINE
)
_REFERENCE = re.compile(
    r"\$\{(?P<braced>[A-Za-z_]\w*)(?:\[@\])?(?::?[-=](?P<otherwise>[^{}$]*))?\}"
    r"|\$\{?(?P<bare>[A-Za-z_]\w*)(?:\[@\])?"
)
"""A variable, with what it is where it has no value: $NAME, ${NAME}, ${NAME[@]}, ${NAME:-8}."""


class CommandLine:
    """Flags with their values. What no reader has asked for is in `unread`.

    Parameters
    ----------
    words
        Of a shell, without quotes; `--flag=value` counts as two.
    where
        The file's name, for messages.
    job
        `nodes`, and `gpus` of each, that the script's batch job asks for; `world` processes that it starts.
    variables
        What the script's own variables are at its end.
    """

    def __init__(
        self,
        words: Iterable[str],
        where: str,
        job: Mapping[str, int] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.where = where
        self.variables = dict(variables or {})
        self._job = dict(job or {})
        self.words: list[str] = []
        for word in words:
            name, sign, value = word.partition("=")
            if sign and name.startswith("--"):
                self.words += [name, value]
            else:
                self.words.append(word)
        self._read: set[int] = set()

    def with_dashes(self) -> CommandLine:
        """The same words, none read yet, with dashes for underscores in the names of flags."""
        words = [word.replace("_", "-") if word.startswith("--") else word for word in self.words]
        return CommandLine(words, self.where, self._job, self.variables)

    def after(self, words: Iterable[str]) -> CommandLine:
        """The same words, none read yet, behind others that they win over.

        Parameters
        ----------
        words
            Flags and values that lose where both say something, since the last of a flag counts.
        """
        return CommandLine([*words, *self.words], self.where, self._job, self.variables)

    def until(self, end: int) -> CommandLine:
        """The words before a position, none read yet.

        Parameters
        ----------
        end
            Number of words that are kept, from 0.
        """
        return CommandLine(self.words[:end], self.where, self._job, self.variables)

    def variable(self, name: str) -> str | None:
        """The value of a variable: set for the command, `NAME=value`, or by the script.

        Parameters
        ----------
        name
            Without its dollar sign.
        """
        set_here = [word for word in self.words if word.startswith(f"{name}=")]
        if set_here:
            return set_here[-1].partition("=")[2]
        return self.variables.get(name)

    def switch(self, flag: str) -> bool:
        """Whether torchtitan's flag is on: its own, `--section.no-name`, or a value; the last one wins.

        Parameters
        ----------
        flag
            With its dashes, and a section before the first point: `--section.name`.
        """
        section, _, name = flag.partition(".")
        off = self._position(f"{section}.no-{name}")
        on = self._position(flag)
        if on is None or (off is not None and off > on):
            return False
        follows = self.words[on + 1].lower() if on + 1 < len(self.words) else ""
        if follows in ("true", "false"):
            self._read.add(on + 1)
        return follows != "false"

    def has(self, flag: str) -> bool:
        """Whether a flag is there; it counts as read.

        Parameters
        ----------
        flag
            With its dashes, as it is written: other spellings are other flags.
        """
        return self._position(flag) is not None

    def text(self, flag: str, default: str | None = None) -> str | None:
        """The value after a flag, the last one where it is repeated. Raises InputError where none follows.

        Parameters
        ----------
        flag
            With its dashes.
        default
            Where it is not there.
        """
        position = self._position(flag)
        if position is None:
            return default
        if position + 1 >= len(self.words):
            raise InputError("needs a value", where=f"{self.where}: {flag}")
        self._read.add(position + 1)
        return self.words[position + 1]

    def integer(self, flag: str, default: int) -> int:
        """A whole number after a flag. Raises InputError for anything else.

        Parameters
        ----------
        flag
            With its dashes.
        default
            Where it is not there.
        """
        value = self._written_as(flag, r"-?\d{1,12}", "a whole number")
        return default if value is None else int(value)

    def _written_as(self, flag: str, pattern: str, what: str) -> str | None:
        """The text after a flag. Raises InputError where it is not written as a pattern says."""
        value = self.text(flag)
        if value is not None and not re.fullmatch(pattern, value):
            raise InputError(f"must be {what}", where=f"{self.where}: {flag}", value=value)
        return value

    def count(self, flag: str, default: int = 1) -> int:
        """A whole number of one or more after a flag. Raises InputError for anything else.

        Parameters
        ----------
        flag
            With its dashes.
        default
            Where it is not there.
        """
        value = self.integer(flag, default)
        if value < 1:
            raise InputError("must be at least 1", where=f"{self.where}: {flag}", value=value)
        return value

    def number(self, flag: str, default: float) -> float:
        """A number of zero or more after a flag. Raises InputError for anything else.

        Parameters
        ----------
        flag
            With its dashes.
        default
            Where it is not there.
        """
        pattern = r"\d{1,12}(\.\d*)?([eE][-+]?\d{1,2})?|\.\d+"
        value = self._written_as(flag, pattern, "a number")
        return default if value is None else float(value)

    def several(self, flag: str) -> list[str]:
        """All values after a flag, up to the next one.

        Parameters
        ----------
        flag
            With its dashes; where it is repeated the last one counts.
        """
        position = self._position(flag)
        if position is None:
            return []
        values = list(takewhile(lambda word: not word.startswith("--"), self.words[position + 1 :]))
        self._read.update(range(position + 1, position + 1 + len(values)))
        return values

    def torchrun_gpus(self) -> int | None:
        """Nodes times processes of each, where torchrun's flags or the batch job's give both as numbers.

        Without a number of nodes anywhere torchrun starts on one (torch/distributed/run.py).
        """
        nodes = self._started("--nnodes", self._job.get("nodes"))
        processes = self._started("--nproc-per-node", self._job.get("gpus"))
        if nodes is None and processes and not self._job and not self._has_either("--nnodes"):
            nodes = 1
        if nodes is None or processes is None:
            return self._job.get("world")
        return nodes * processes

    def _started(self, flag: str, otherwise: int | None) -> int | None:
        """The number after a flag of torchrun, in either spelling."""
        value = self.text(flag) or self.text(_underscored(flag)) or ""
        number = number_in(value)
        return otherwise if number is None else number

    def _has_either(self, flag: str) -> bool:
        return flag in self.words or _underscored(flag) in self.words

    def unread(self, kind: str) -> list[str]:
        """Flags that nobody has asked for and that are not known to leave the price as it is.

        `kind` is the program whose flags they are.
        """
        flags: dict[str, bool] = {}
        for position, word in enumerate(self.words):
            if not word.startswith("--") or len(word) <= 2 or position in self._read:
                continue
            value = next(iter(self.words[position + 1 : position + 2]), "--")
            value = "true" if value.startswith("--") else value
            flags[word] = has_no_effect(kind, word, value)
        return [flag for flag, harmless in flags.items() if not harmless]

    def read_like(self, other: CommandLine) -> None:
        """Takes as read what another reader has taken of the same words.

        Parameters
        ----------
        other
            That begins with these words; what it has behind them is not looked at.
        """
        self._read |= {position for position in other._read if position < len(self.words)}

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Every flag with the word after it, empty where another flag follows; assignments too."""
        for position, word in enumerate(self.words):
            following = next(iter(self.words[position + 1 : position + 2]), "")
            if word.startswith("--"):
                yield word, "" if following.startswith("--") else following
            elif re.match(r"[A-Za-z_][\w.]*=", word):
                name, _, value = word.partition("=")
                yield name, value

    def _position(self, flag: str) -> int | None:
        """Where a flag stands last; all its places count as read."""
        positions = [position for position, word in enumerate(self.words) if word == flag]
        self._read.update(positions)
        return positions[-1] if positions else None


class Said:
    """What a command line says, by the words of a framework's arguments; what is asked for counts as read.

    Parameters
    ----------
    line
        The command line.
    arguments
        Of the framework's record, by word.
    """

    def __init__(self, line: CommandLine, arguments: Mapping[str, Argument]) -> None:
        self.line = line
        self._arguments = arguments

    def __getitem__(self, word: str) -> Any:
        return self.get(word, self._arguments[word].default)

    def get(self, word: str, default: object) -> Any:
        """The value, or a default in place of the framework's. Raises InputError for a wrong one.

        Parameters
        ----------
        word
            Of the framework's record.
        default
            In place of the record's own; of a switch, what it is without the flag.
        """
        argument = self._arguments[word]
        named = (argument.flag, *argument.also)
        if argument.kind in ("switch", "toggle"):
            read = self.line.switch if argument.kind == "toggle" else self.line.has
            there = [read(flag) for flag in named]
            return any(there) != bool(default)
        values = [self._value(argument, flag) for flag in named]
        return next((value for value in values if value not in (None, [], "")), default)

    def has(self, word: str) -> bool:
        """Whether the flag of a word is there, in any of its names.

        Parameters
        ----------
        word
            Of the framework's record.
        """
        argument = self._arguments[word]
        there = [self.line.has(flag) for flag in (argument.flag, *argument.also)]
        return any(there)

    def part(self, prefix: str) -> dict[str, Any]:
        """All that lies in one field, such as `rope.scaling`, by the last of the word.

        Parameters
        ----------
        prefix
            What stands before the last point of the words, such as `rope.scaling` of `rope.scaling.factor`.
        """
        words = [word for word in self._arguments if word.rpartition(".")[0] == prefix]
        return {word.rpartition(".")[2]: self[word] for word in words}

    def needed(self, word: str, what: str) -> int:
        """A whole number above 0. Raises InputError, which says what it is, where it is not there.

        Parameters
        ----------
        word
            Of the framework's record.
        what
            Is said where it is not there.
        """
        number = int(self.get(word, 0))
        if number < 1:
            raise self.error(word, what)
        return number

    def error(self, word: str, what: str, value: object = ...) -> InputError:
        """An error that names the flag of a word.

        Parameters
        ----------
        word
            Of the framework's record.
        what
            Is said of it.
        value
            That it has; nothing is said of one that is left out.
        """
        return InputError(what, where=f"{self.line.where}: {self.flag(word)}", value=value)

    def flag(self, word: str) -> str:
        """What the framework calls a word.

        Parameters
        ----------
        word
            Of the framework's record.
        """
        return self._arguments[word].flag

    def _value(self, argument: Argument, flag: str) -> object:
        line = self.line
        if not line.has(flag):
            return None
        if argument.kind == "several":
            return line.several(flag)
        if argument.kind == "text":
            return line.text(flag)
        if argument.kind == "number":
            return line.number(flag, 0)
        return line.count(flag) if argument.kind == "count" else line.integer(flag, 0)


def _underscored(flag: str) -> str:
    return "--" + flag.removeprefix("--").replace("-", "_")


def words_of(script: str, where: str) -> CommandLine:
    """All words of a shell script, its own variables put in. Nothing is run; `$(...)` stays as it is.

    Raises InputError for more than MOST_WORDS words, or MOST_LETTERS letters.

    Parameters
    ----------
    script
        Its text.
    where
        Its name, for messages.
    """
    if len(script) > MOST_LETTERS:
        raise InputError(f"more than {MOST_LETTERS} letters are no launch script", where=where)
    lines = script.replace("\\\r\n", " ").replace("\\\n", " ").splitlines()
    variables: dict[str, str] = {}
    words: list[str] = []
    letters = 0
    for line in _joined_arrays(lines):
        text = _with_variables(line, variables)
        letters += len(text)
        if letters > MOST_LETTERS:
            what = f"more than {MOST_LETTERS} letters once its variables have their values"
            raise InputError(what, where=where)
        assigned = _ASSIGNMENT.match(text)
        if assigned is None or _before_a_command(assigned[3]):
            words += _split(text)
        else:
            _assign(variables, *assigned.groups())
        if len(words) > MOST_WORDS:
            raise InputError(f"more than {MOST_WORDS} words", where=where)
    # Nodes, and GPUs of each, in the #SBATCH lines of a script, as far as they are plain numbers.
    job = {}
    for name, _, count in _SBATCH.findall(script):
        job["gpus" if name == "gpus-per-node" else "nodes"] = int(count)
    world = number_in(variables.get("WORLD_SIZE", ""))
    if world is not None:
        job["world"] = world
    return CommandLine(filter(None, words), where, job, variables)


def number_in(text: str) -> int | None:
    """A text of 1 to 18 digits as a number; None for any other.

    Parameters
    ----------
    text
        Digits alone: no sign, no space.
    """
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def _before_a_command(value: str) -> bool:
    """Whether what follows `NAME=` is a value and a command that it is set for."""
    plain = re.split(r"\$\(|`", value)[0]
    in_quotes = plain != value and any(plain.count(quote) % 2 for quote in "\"'")
    return not value.startswith("(") and not in_quotes and len(_split(plain)) > 1


def _with_variables(line: str, variables: Mapping[str, str]) -> str:
    """A line with the values of the variables that are known so far."""
    # A quoted array is still one word per element.
    bare = re.sub(r'"(\$\{?\w+\}?(?:\[@\]\}?)?)"', r"\1", line.strip())
    parts: list[str] = []
    letters = end = 0
    for reference in _REFERENCE.finditer(bare):
        otherwise = reference["otherwise"]
        unknown = reference[0] if otherwise is None else otherwise.strip("\"'")
        name = reference["braced"] or reference["bare"]
        parts += [bare[end : reference.start()], variables.get(name, unknown)]
        end = reference.end()
        letters += len(parts[-2]) + len(parts[-1])
        if letters > MOST_LINE_LETTERS:
            break
    return "".join([*parts, bare[end:]])[:MOST_LINE_LETTERS]


def _assign(variables: dict[str, str], name: str, plus: str, value: str) -> None:
    """Sets a variable or, with a plus, adds to it; an array is kept as its words in quotes."""
    if value.startswith("(") and value.endswith(")"):
        text = " ".join(map(shlex.quote, _split(value[1:-1])))
    else:
        text = " ".join(_split(value))
    if plus:
        text = f"{variables.get(name, '')} {text}".strip()
    variables[name] = text


def _joined_arrays(lines: list[str]) -> list[str]:
    """Array assignments over several lines as one line each, without their comments."""
    joined: list[list[str]] = []
    inside = False
    for line in lines:
        bare = re.sub(r"(^|\s)#.*$", "", line).strip()
        if inside:
            joined[-1].append(bare)
        else:
            joined.append([bare])
        opened = inside or bool(re.match(r"^\s*(?:\w+\s+)*[A-Za-z_]\w*\+?=\(", bare))
        inside = opened and not bare.endswith(")")
    return [" ".join(parts) for parts in joined]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quote that closes on another line
        return text.split()


# Flags and fields that train less than the whole model: adapters such as LoRA, and frozen parts.
#
# They have no price yet, and the price of full training is not theirs.


_NAME = re.compile(
    r"(?:^|[-_.])(?:q?lora(?:plus)?|dora|loha|lokr|ia3|peft|p[-_]?tuning|prefix[-_]tuning|prompt[-_]tuning"
    r"|adapter|adapters|unfreeze|freeze|frozen)(?:$|[-_.\d])"
)
_SIZES = re.compile(
    r"(?:^|[-_.])(?:q|kv|o|qk|v|kq|gate)[-_]lora[-_]rank$|freeze[-_]?gc|^no[-_.]freeze"
)
"""Ranks of latent attention, and pauses of Python's garbage collector."""
_KIND = re.compile(
    r"(?:^|[-_.])(?:train|tuner|tuning|finetune|finetuning|sft|peft|adapter|training|component|converters|kind)"
    r"(?:[-_](?:type|scheme|method|mode|strategy))?_?$|^config$|_component_$"
)
"""Names whose value says what is trained."""
_KINDS = re.compile(
    r"(?:^|[-_./\"'\[ ])(?:q?lora|dora|longlora|loha|lokr|ia3|adalora|adapter|freeze|peft|prefix_tuning"
    r"|prompt_tuning|p_tuning|canonical_lora|dpo_lora)(?:$|[-_./\"'\], \d])"
)
_SWITCHED_OFF = frozenset(("false", "none", "null", "0", "off", "no", "[]", "{}", "full"))
_DEEPEST = 12
"""Levels of a document that are looked through; a launch file has two or three."""


_UNPRICED_ADAPTERS = (
    "training of adapters (LoRA and its kin) or of part of a model has no price yet, and that of "
    "full training would be wrong: take the flag out to price full training of the same layout"
)


def refuse_adapters(
    pairs: Iterable[tuple[str, str]], where: str, what: str = _UNPRICED_ADAPTERS
) -> None:
    """Raises InputError for the first flag or field by which a run trains adapters or part of the model.

    Parameters
    ----------
    pairs
        Names and values: flags with what follows them, keys of a document as `section.key`, overrides.
    where
        The file's name.
    what
        Is said of it.
    """
    for name, value in pairs:
        if trains_a_part(name, value):
            raise InputError(what, where=f"{where}: {name}", value=value or None)


def trains_a_part(name: str, value: str = "") -> bool:
    """Whether a flag or a field says that adapters or part of the model are trained.

    Parameters
    ----------
    name
        As it is written, with its hyphens.
    value
        As it is written; empty for a switch.

    Examples
    --------
    >>> trains_a_part("--lora-rank", "8"), trains_a_part("--kv-lora-rank", "512")
    (True, False)
    >>> trains_a_part("--train-type", "lora"), trains_a_part("--train-type", "full")
    (True, False)
    """
    bare = name.lstrip("-").lower()
    said = value.strip().lower()
    if said in _SWITCHED_OFF:
        return False
    if _KIND.search(bare) and _KINDS.search(said):
        return True
    return _NAME.search(bare) is not None and _SIZES.search(bare) is None


def fields_of(document: object, place: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Every key of a document with its value in words, those of inner mappings as `section.key`.

    A section that is there and not empty is a pair of its own.

    Parameters
    ----------
    document
        Mappings and lists; anything else has no keys.
    place
        Where it stands in the whole file, as `section.key`.
    depth
        Levels above it; what is too deep is left out.
    """
    if depth > _DEEPEST:
        return
    if isinstance(document, list):
        for item in document:
            if isinstance(item, dict | list):
                yield from fields_of(item, place, depth + 1)
    if not isinstance(document, Mapping):
        return
    for key, value in document.items():
        name = f"{place}.{key}" if place else str(key)
        if isinstance(value, Mapping):
            yield name, "true" if _is_on(value) else "false"
            if not _is_on(value):
                continue
        else:
            yield name, str(value)
        yield from fields_of(value, name, depth + 1)


def _is_on(section: Mapping[object, object]) -> bool:
    return bool(section) and not any(
        section.get(name) is False for name in ("enabled", "enable", "use")
    )
