"""The fields of a script: flags of its command line as transformers' HfArgumentParser and ms-swift read them.

Sums that the script works out in the shell are worked out here; nothing is run.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from meshwright.planner.runs.launches.command_line import (
    CommandLine,
    number_in,
)

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
    """Words of a shell in which a sum with spaces, $(expr 16 / 8), is one word."""
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
    """A value as YAML would have it; a sum of numbers and of the script's variables is worked out."""
    whole = _SUM.fullmatch(text)
    if whole is None or depth >= _DEEPEST:
        return scalar(text)
    terms = whole["expr"] or whole["shell"] or ""

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
    """A word as a number or a switch where it is one."""
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
    """Processes that torchrun, accelerate, deepspeed or swift starts; None where it is not said."""
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


_TRAINS = frozenset(("train", "sft", "pt", "axolotl.cli.train", f"--{RECIPE}"))


def recipe_named(line: CommandLine) -> str | None:
    """The YAML file that a training command names, `trl sft --config x.yaml` or `axolotl train x.yaml`.

    >>> recipe_named(CommandLine("llamafactory-cli train lora.yaml".split(), "run.sh"))
    'lora.yaml'
    """
    pairs = zip(line.words, line.words[1:], strict=False)
    named = (
        after for word, after in pairs if word in _TRAINS and after.endswith((".yaml", ".yml"))
    )
    return next(named, None)
