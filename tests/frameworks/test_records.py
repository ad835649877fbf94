"""The records agree with the rules, the prices and the launch files that ask them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import get_args

import pytest

from meshwright.constraints.registry import FRAMEWORK_RULES, GENERAL, rules_of
from meshwright.costmodel.execution_names import SCHEDULE_NAMES
from meshwright.costmodel.stacks import framework_constants, framework_names, memory_profile
from meshwright.frameworks.catalog import (
    FRAMEWORK_NAMES,
    RECORDS,
    STACK_NAMES,
    binding_framework,
    framework_of_stack,
    planned,
    stack_in_words,
    stack_named,
)
from meshwright.frameworks.record import Framework, FrameworkName, Setting
from meshwright.planner.launch.plan_files import TARGETS


def settings_of(record: Framework) -> Iterator[tuple[str, Setting]]:
    """Every setting of a record, with the field and the value that it stands at."""
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Setting):
            yield field.name, value
        elif isinstance(value, Mapping):
            yield from ((f"{field.name} {name}", setting) for name, setting in value.items())


def test_the_names_of_the_type_are_those_of_the_records() -> None:
    assert get_args(FrameworkName) == FRAMEWORK_NAMES
    assert set(FRAMEWORK_NAMES) < set(TARGETS)


@pytest.mark.parametrize("record", RECORDS, ids=FRAMEWORK_NAMES)
def test_a_record_is_whole(record: Framework) -> None:
    assert record.stacks[0].name == record.name
    assert set(record.measured_as) <= set(STACK_NAMES)
    assert set(record.schedules) <= set(SCHEDULE_NAMES)
    assert {"tp", "dp"} <= set(planned(record.axes))
    for words, setting in settings_of(record):
        assert setting.source, words
        assert setting.flag or not setting.value, words


@pytest.mark.parametrize("record", RECORDS, ids=FRAMEWORK_NAMES)
def test_every_rule_that_a_record_names_binds_it(record: Framework) -> None:
    bound = {rule.name for rule in (*GENERAL, *rules_of(record))}
    for words, setting in settings_of(record):
        assert set(setting.rules) <= bound, words


def test_every_rule_of_a_framework_is_named_by_a_record() -> None:
    named = {name for record in RECORDS for name in record.rules}
    assert set(FRAMEWORK_RULES) <= named


def test_every_stack_has_its_constants() -> None:
    assert set(STACK_NAMES) == set(framework_names())
    for name in STACK_NAMES:
        framework_constants(name)
        memory_profile(name)


@pytest.mark.parametrize(
    ("stack", "bound_by"),
    [
        ("megatron", "megatron"),
        ("megatron-bridge", "megatron"),
        ("megatron-deepspeed", None),
        ("torchtitan-eager", "torchtitan"),
        ("fsdp2", "fsdp2"),
        ("llm-foundry", None),
        ("fsdp1-fused", None),
        ("nemo-automodel", None),
    ],
)
def test_the_rules_that_bind_a_stack(stack: str, bound_by: str | None) -> None:
    record = binding_framework(stack)
    assert (None if record is None else record.name) == bound_by
    assert stack_named(stack) in framework_of_stack(stack).stacks


@pytest.mark.parametrize(
    ("words", "stack"),
    [
        ("Megatron-LM 2022", "megatron-2022"),
        (
            "Megatron-LM 23e00ed0, TE 2.11, torch 2.10 (NGC 26.01), cross-entropy fusion",
            "megatron-lm",
        ),
        ("NeMo 25.02.01 (recipe v25.04)", "nemo"),
        ("NeMo AutoModel (FSDP2, PyTorch)", "nemo-automodel"),
        ("Megatron-Bridge / NeMo 26.04 container", "megatron-bridge"),
        ("Megatron-DeepSpeed (BigScience), 1F1B", "megatron-deepspeed"),
        ("llm-foundry v0.0.4-ish, PyTorch 2.x, FlashAttention", "llm-foundry"),
        ("PyTorch FSDP 1, compiled", "fsdp1-fused"),
        ("PaddlePaddle 2.5.1 (FlagPerf)", "paddle"),
        ("PyTorch FSDP", "fsdp2"),
        ("torchtitan 2024", "torchtitan-compile"),
        ("torchtitan 0.1.0 compile", "torchtitan-compile"),
        ("torchtitan v0.2.2", "torchtitan"),
        ("torchtitan 0.10.1", "torchtitan"),
        ("torchtitan 1.2 compile", "torchtitan"),
        ("torchtitan v0.3.0 (eager)", "torchtitan-eager"),
        ("torchtitan (2026)", "torchtitan-compile"),
        ("torchtitan eager", "torchtitan-eager"),
        ("DeepSpeed 0.19", "deepspeed"),
        ("megatron", "megatron"),
        ("torchtitan", "torchtitan"),
        ("Nemotron", None),
    ],
)
def test_stacks_are_known_by_the_words_of_a_source(words: str, stack: str | None) -> None:
    meant = stack_in_words(words)
    assert (None if meant is None else meant.name) == stack
