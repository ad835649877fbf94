"""All records, found by the name of a framework or by the name or words of a software stack."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TypeVar

from meshwright.frameworks.deepspeed import DEEPSPEED
from meshwright.frameworks.fsdp2 import FSDP2
from meshwright.frameworks.megatron import MEGATRON, PYTORCH
from meshwright.frameworks.record import Framework, FrameworkName, InputOffload, Setting, Stack
from meshwright.frameworks.torchtitan import TORCHTITAN

RECORDS: tuple[Framework, ...] = (MEGATRON, TORCHTITAN, DEEPSPEED, FSDP2)
FRAMEWORK_NAMES: tuple[FrameworkName, ...] = tuple(record.name for record in RECORDS)
DEFAULT_FRAMEWORK: FrameworkName = MEGATRON.name
STACK_NAMES: tuple[str, ...] = tuple(
    dict.fromkeys(stack.name for record in RECORDS for stack in record.stacks)
)

Value = TypeVar("Value")


def planned(choice: Mapping[Value, Setting]) -> tuple[Value, ...]:
    """The values of a choice that plans may take, in the order of the record.

    Parameters
    ----------
    choice
        By value, how the framework takes it: a field of `Framework`.
    """
    return tuple(value for value, setting in choice.items() if setting.planned)


def framework_named(name: str) -> Framework:
    """The record of a framework. Raises KeyError for a name that is not in `FRAMEWORK_NAMES`.

    Parameters
    ----------
    name
        One of `FRAMEWORK_NAMES`.
    """
    return _records_by_name()[name]


def stack_named(name: str) -> Stack:
    """A software stack by its name. Raises KeyError for a name that is not in `STACK_NAMES`.

    Parameters
    ----------
    name
        One of `STACK_NAMES`.
    """
    return _stacks_by_name()[name][1]


def framework_of_stack(name: str) -> Framework:
    """The record that a software stack belongs to. Raises KeyError for a name not in `STACK_NAMES`.

    Parameters
    ----------
    name
        One of `STACK_NAMES`.
    """
    return _stacks_by_name()[name][0]


def as_compiled(stack_name: str, *, compiled: bool) -> str:
    """The stack that runs compiled layers, or eager ones, where its framework has both.

    Parameters
    ----------
    stack_name
        One of `STACK_NAMES`.
    compiled
        Whether layers run under torch.compile.

    Returns
    -------
    str
        The stack itself where its framework has no other for eager layers.
    """
    record = framework_of_stack(stack_name)
    if not record.eager_stack:
        return stack_name
    return record.name if compiled else record.eager_stack


def binding_framework(stack_name: str) -> Framework | None:
    """The record whose rules bind a software stack; None where those of no record do.

    Parameters
    ----------
    stack_name
        One of `STACK_NAMES`.
    """
    record, stack = _stacks_by_name()[stack_name]
    return record if stack.bound else None


def input_offload(stack_name: str, modules: str) -> InputOffload | None:
    """How a stack moves inputs of layers to the host; None where what it offloads is something else.

    A loop over eager PyTorch has the hooks of trainers, whoever shards it or not.

    Parameters
    ----------
    stack_name
        One of `STACK_NAMES`.
    modules
        What is offloaded, a word of `OFFLOADED_MODULES`.

    >>> input_offload("deepspeed", "layer_inputs").hides
    True
    """
    record = FSDP2 if stack_name == PYTORCH.name else framework_of_stack(stack_name)
    setting = record.offloads.get(modules)
    return setting if isinstance(setting, InputOffload) else None


def stack_in_words(text: str) -> Stack | None:
    """The software stack that a source means by some words; None where none is meant.

    Parameters
    ----------
    text
        As a source writes its framework and version, in any case of letters.

    >>> stack_in_words("Megatron-LM v0.9").name
    'megatron-lm'
    """
    words = text.strip().lower()
    if words in STACK_NAMES:
        return stack_named(words)
    for record in RECORDS:
        for stack in record.stacks:
            if stack.written and re.match(stack.written, words):
                return stack
    return None


def nearest_stack(text: str, zero_stage: int) -> Stack:
    """The stack that an unknown framework is priced as, from its words and the ZeRO stage that it runs.

    Descendants of Megatron are taken for Megatron, whose kernels they run whoever shards the weights
    (`--use-torch-fsdp2`), others that shard weights for FSDP, the rest for a loop over eager PyTorch.

    Parameters
    ----------
    text
        As a source writes its framework.
    zero_stage
        0 to 3.

    >>> nearest_stack("our own loop (eager PyTorch)", 1).name
    'pytorch'
    """
    if MEGATRON.name in text.lower():
        return MEGATRON.stacks[0]
    if zero_stage == 3:
        return FSDP2.stacks[0]
    return PYTORCH


@cache
def _records_by_name() -> dict[str, Framework]:
    return {record.name: record for record in RECORDS}


@cache
def _stacks_by_name() -> dict[str, tuple[Framework, Stack]]:
    return {stack.name: (record, stack) for record in RECORDS for stack in record.stacks}
