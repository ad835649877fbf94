"""Fields of launch files by name: flags of scripts, and values of nested documents by their path.

Flags are read as transformers' HfArgumentParser and ms-swift read them. Sums that the script works out in the
shell are worked out here; nothing is run.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from meshwright.errors import InputError
from meshwright.frameworks.fsdp2 import FSDP2
from meshwright.model_specs.adapters import ALL_LINEAR
from meshwright.planner.runs.launches.command_line import CommandLine, number_in
from meshwright.planner.runs.launches.finetuning import adapter_targets, adapters_mapping
from meshwright.planner.runs.launches.launch_run import is_harmless

RECIPE = "config"
_SUM = re.compile(r"\$\(expr (?P<expr>.*)\)|\$\(\((?P<shell>.*)\)\)", re.DOTALL)
"""Numbers added, multiplied and divided: $(expr 16 / 8) or $((16 * (count + 1)))."""
_VARIABLE = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_PLAIN_SUM = re.compile(r"[\d ()+*/-]{1,200}")
_MOST_SUM = 200
_DEEPEST = 8
"""Variables in a sum whose values are sums in turn."""
_SIGNS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}
_SET = re.compile(r"[A-Z][A-Z0-9_]*=")
_SHELL = frozenset(("&&", "&", "|", "||", ";", ">", "2>&1", "-m", "wait", "done", "fi", "sleep"))


def fields_of_line(line: CommandLine) -> dict[str, Any]:
    """Flags of a command line by their names without dashes, with values as YAML would have them.

    Several values make a list, and none true. Numbers that the script divides or multiplies are worked out.

    Parameters
    ----------
    line
        A training command with what stands before it; values end at the next flag, command or script.

    >>> fields_of_line(CommandLine("--bf16 --lora-r 8 --names a b --s $(expr 16 / 8)".split(), "x"))
    {'bf16': True, 'lora_r': 8, 'names': ['a', 'b'], 's': 2}
    """
    fields: dict[str, Any] = {}
    words, position = joined_sums(line.words), 0
    while position < len(words):
        name = words[position]
        position += 1
        if not name.startswith("--") or len(name) <= 2:
            continue
        values = []
        while position < len(words) and not _ends_values(words[position]):
            values.append(words[position])
            position += 1
        fields[name[2:].replace("-", "_")] = _value(values, line)
    return fields


def _ends_values(word: str) -> bool:
    """Whether a word begins another flag, another command or a script."""
    begins = word.startswith("--") or _SET.match(word) is not None
    return begins or word in _SHELL or word.endswith((".py", ".sh"))


def joined_sums(words: list[str]) -> list[str]:
    """Words of a shell in which a sum with spaces, $(expr 16 / 8), is one word.

    Parameters
    ----------
    words
        As the shell splits them, in their order.
    """
    joined: list[str] = []
    for word in words:
        open_before = (
            bool(joined) and "$(" in joined[-1] and joined[-1].count("(") > joined[-1].count(")")
        )
        if open_before and len(joined[-1]) + len(word) < _MOST_SUM:
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined


def script_value(text: str, line: CommandLine, depth: int = 0) -> Any:
    """A value as YAML would have it; a sum of numbers and of the script's variables is worked out.

    Parameters
    ----------
    text
        The word of the shell.
    line
        With the script's variables.
    depth
        Sums that it stands in.
    """
    sum_match = _SUM.fullmatch(text)
    if sum_match is None or depth >= _DEEPEST:
        return scalar(text)
    terms = sum_match["expr"] or sum_match["shell"] or ""

    def number(name: re.Match[str]) -> str:
        return str(script_value(line.variable(name[1]) or "?", line, depth + 1))

    plain = _VARIABLE.sub(number, terms[:_MOST_SUM])
    if not _PLAIN_SUM.fullmatch(plain):
        return text
    try:
        return _sum_of(ast.parse(plain.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return text


def _sum_of(node: ast.expr) -> int:
    """Raises ValueError for what is no sum of whole numbers."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_sum_of(node.left), _sum_of(node.right))
    raise ValueError(node)


def _value(words: list[str], line: CommandLine) -> Any:
    values = [script_value(word, line) for word in words]
    if not values:
        return True
    return values[0] if len(values) == 1 else values


def scalar(word: str) -> Any:
    """A word as a number or a switch where it is one.

    Parameters
    ----------
    word
        In any case of letters where it is true, false, none or null.
    """
    lowered = word.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in ("none", "null"):
        return None
    for number in (int, float):
        try:
            return number(word)
        except ValueError:
            continue
    return word


def launched_gpus(line: CommandLine) -> int | None:
    """Processes that torchrun, accelerate, deepspeed or swift starts; None where it is not said.

    Parameters
    ----------
    line
        The flags of the launcher, and the variables NPROC_PER_NODE and NNODES.
    """
    gpus = line.torchrun_gpus()
    if gpus is not None:
        return gpus
    fields = fields_of_line(line)
    for each, nodes in (("num_processes", None), ("num_gpus", "num_nodes")):
        count, times = fields.get(each), 1 if nodes is None else fields.get(nodes, 1)
        if type(count) is int and type(times) is int:
            return count * times
    names = {"NPROC_PER_NODE": "", "NNODES": "1"}
    each_node, all_nodes = (number_in(line.variable(n) or usual) for n, usual in names.items())
    return None if each_node is None or all_nodes is None else each_node * all_nodes


_TRAINS = frozenset(
    ("train", "src/train.py", "sft", "pt", "rlhf", "axolotl.cli.train", f"--{RECIPE}")
)
_RECIPE_NAMES = (".yaml", ".yml", ".json")


def recipe_named(line: CommandLine) -> str | None:
    """The YAML or JSON file that a training command names, as in `axolotl train x.yaml`.

    >>> recipe_named(CommandLine("llamafactory-cli train lora.yaml".split(), "run.sh"))
    'lora.yaml'
    """
    pairs = zip(line.words, line.words[1:], strict=False)
    named = (after for word, after in pairs if word in _TRAINS and after.endswith(_RECIPE_NAMES))
    return next(named, None)


# Values of nested documents by their path, taken one at a time so that the rest is known.


_DEEPEST_SECTION = 12
MOST_LETTERS = 2_000
"""Of a value once references in it are put in."""


class NestedFields:
    """Values of a nested document by their path, `section.key`; what is asked for counts as read."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = dict(values)
        self.where = where
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """A value, or a default where it is absent or null.

        Parameters
        ----------
        name
            Its path, as `section.key`; it counts as read.
        default
            Where it is absent or null.
        """
        self._read.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def on(self, name: str, *, default: bool = False) -> bool:
        """Whether a switch is true; numbers and words are not.

        Parameters
        ----------
        name
            Its path, as `section.key`; it counts as read.
        default
            Where it is absent or null.
        """
        return self.get(name, default) is True

    def first(self, names: Iterable[str], default: Any = None) -> Any:
        """The first of some values that is there; all count as read.

        Parameters
        ----------
        names
            Their paths, the one that wins first.
        default
            Where none is there.
        """
        there = [self.get(name) for name in names]
        return next((value for value in there if value is not None), default)

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1. Raises InputError for anything else, and where there is none.

        Parameters
        ----------
        name
            Its path, as `section.key`; it counts as read.
        default
            Where it is absent; an error where None.
        """
        value = self.get(name, default)
        if value is None:
            raise InputError("is needed", where=f"{self.where}: {name}")
        if type(value) is not int or value < 1:
            what = "must be a whole number of at least 1"
            raise InputError(what, where=f"{self.where}: {name}", value=value)
        return value

    def names(self, name: str) -> list[str]:
        """A list of texts, empty where it is absent. Raises InputError for anything else.

        Parameters
        ----------
        name
            Its path, as `section.key`; it counts as read.
        """
        value = self.get(name, [])
        if not isinstance(value, list):
            raise InputError("must be a list", where=f"{self.where}: {name}", value=value)
        return [str(each) for each in value]

    def half(self, name: str) -> str:
        """bf16 or fp16 by the name of a type, bfloat16 by default. Raises InputError for other types.

        Parameters
        ----------
        name
            Its path, as `section.key`; it counts as read.
        """
        said = self.get(name, "bfloat16")
        if said not in ("bfloat16", "float16"):
            what = "training in 32 bits has no price"
            raise InputError(what, where=f"{self.where}: {name}", value=said)
        return "bf16" if said == "bfloat16" else "fp16"

    def lora(self, rank: int, modules: str) -> tuple[dict[str, Any], list[str]]:
        """Adapters of the modules that a value names, by default all linear ones; and what is not read.

        Parameters
        ----------
        rank
            Width of the adapters.
        modules
            Path of the field that names the matrices.
        """
        self.get(modules)
        targets, unread = adapter_targets(self.values, modules, self.where, (ALL_LINEAR,))
        return adapters_mapping("lora", rank, targets), unread

    def degrees(self, section: str, axes: Mapping[str, str]) -> dict[str, Any]:
        """Degrees of the axes by the fields of a section that say them, 1 where they do not.

        Parameters
        ----------
        section
            Path of the section, with its dot; empty for the fields at the top.
        axes
            By field, the axis that it says the degree of.
        """
        return {axis: self.count(f"{section}{field}", 1) for field, axis in axes.items()}

    def recompute(self, name: str, *, default: bool = False) -> str:
        """Full recomputation by its switch.

        Parameters
        ----------
        name
            Path of the field.
        default
            What it is where the file does not say.
        """
        return "full" if self.on(name, default=default) else "none"

    def fully_sharded(
        self,
        reshards: str = "",
        groups: str = "",
        offloads: Iterable[str] = (),
        *,
        syncs: bool = False,
    ) -> dict[str, Any]:
        """FSDP2 by the names of its switches, which count as read.

        Parameters
        ----------
        reshards
            The switch by which weights are gathered anew for each pass, as they are without it.
        groups
            The number of groups of replicas that shard by themselves.
        offloads
            Switches that put weights and optimizer on the host.
        syncs
            Whether gradients of each micro-batch are reduced.
        """
        keeps = bool(reshards) and not self.on(reshards, default=True)
        settings: dict[str, Any] = {"framework": FSDP2.name, "zero_stage": 2 if keeps else 3}
        settings["overlap"] = {"dp": True}
        replicas = self.count(groups, 1) if groups else 1
        if replicas > 1:
            settings["shard_groups"] = replicas
        if self.first(offloads) is True:
            settings["optimizer_offload"] = 100
        if syncs:
            settings["sync_each_batch"] = True
        return settings

    def refuse(self, what: str, *names: str) -> None:
        """Raises InputError for the first of some values that is there and not off.

        Parameters
        ----------
        what
            Is said of the value.
        names
            Their paths; those up to the first that is on count as read.
        """
        for name in names:
            if self.get(name):
                raise InputError(what, where=f"{self.where}: {name}", value=self.values[name])

    def has_section(self, name: str) -> bool:
        """Whether a value, or a section with any, is there; nothing counts as read.

        Parameters
        ----------
        name
            Its path, as `section.key`.
        """
        return name in self.values or any(key.startswith(f"{name}.") for key in self.values)

    def unread(self, kind: str) -> list[str]:
        """Paths that nobody has asked for and that may change the price.

        Parameters
        ----------
        kind
            The program whose configuration it is, by its section of flag_effects.yaml.
        """
        return [
            name
            for name, value in self.values.items()
            # A null or an empty section leaves a field to its default, as if it were not there.
            if value not in (None, {}, [])
            and name not in self._read
            and not is_harmless(kind, name, "none" if value in (None, [], {}, "") else str(value))
        ]


def nested_fields(document: Mapping[str, Any], place: str = "", depth: int = 0) -> dict[str, Any]:
    """Values of a nested document by their path, `section.key`; lists and empty sections are values.

    Parameters
    ----------
    document
        Mappings in mappings.
    place
        Where it stands in the whole file; empty for the whole.
    depth
        Sections above it; what is too deep stays a mapping.
    """
    leaves: dict[str, Any] = {}
    for key, value in document.items():
        name = f"{place}.{key}" if place else str(key)
        if isinstance(value, dict) and value and depth < _DEEPEST_SECTION:
            leaves |= nested_fields(value, name, depth + 1)
        else:
            leaves[name] = value
    return leaves


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_PRODUCT = re.compile(r"\$\{mul: *(\d{1,12}), *(\d{1,12})\}")


def with_references(values: dict[str, Any]) -> dict[str, Any]:
    """Values with what `${a.b}` and `${mul:2, 3}` stand for, as OmegaConf and NeMo-RL resolve them.

    Parameters
    ----------
    values
        Of nested documents by their path; a reference that leads nowhere is None.
    """
    resolved = dict(values)
    for _ in range(_DEEPEST_SECTION):
        texts = {n: v for n, v in resolved.items() if isinstance(v, str) and "${" in v}
        if not texts:
            break
        resolved |= {name: _resolved(text, resolved) for name, text in texts.items()}
    return resolved


def _resolved(text: str, values: Mapping[str, Any]) -> Any:
    reference = _REFERENCE.fullmatch(text)
    if reference is not None:
        return values.get(reference[1])
    product = _PRODUCT.fullmatch(text)
    if product is not None:
        return int(product[1]) * int(product[2])
    return _REFERENCE.sub(lambda name: str(values.get(name[1]))[:MOST_LETTERS], text)[:MOST_LETTERS]
