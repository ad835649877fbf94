"""The options of `plan`. Only `click`, which the command line has loaded anyway."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
_PATH = click.Path(path_type=Path)


def plan_options(command: Decorated) -> Decorated:
    """Adds the options of a plan request, and the output folder."""
    for add in reversed(_options()):
        command = add(command)
    return command


def _options() -> list[Callable[[Any], Any]]:
    return [
        click.option("--cluster", required=True, help="Catalog name or cluster YAML."),
        click.option(
            "--gpus", type=int, metavar="N", help="Use the first N GPUs; all of the cluster's when absent."
        ),
        click.option("--global-batch", type=int, required=True, metavar="B", help="Sequences per step."),
        click.option("--seq-len", type=int, required=True, metavar="S", help="Tokens per sequence."),
        click.option(
            "--precision", default="bf16", show_default=True, help="bf16, fp16, fp8, mxfp8 or nvfp4."
        ),
        click.option("--optimizer", default="adam", show_default=True, help="adam, sgd or muon."),
        click.option(
            "--framework", default="megatron", show_default=True, help="Or torchtitan, deepspeed, fsdp2."
        ),
        click.option(
            "--pin", "pins", multiple=True, metavar="A=X,...", help="Fix choices: tp=8,recompute=none."
        ),
        click.option(
            "--forbid", "forbids", multiple=True, metavar="A,...", help="Exclude choices: full-recompute,cp."
        ),
        click.option(
            "--reserve-gib", type=float, default=0.0, metavar="G", help="HBM to leave free on every GPU."
        ),
        click.option("--method", default="cp-sat", show_default=True, help="cp-sat or exhaustive."),
        click.option(
            "--top", "top_k", type=int, default=1, metavar="K", help="Report the best K layouts, proven."
        ),
        click.option("--time-limit", "time_limit_s", type=float, metavar="S", help="Seconds for the search."),
        click.option(
            "--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of the solver."
        ),
        click.option(
            "-o", "--output", type=_PATH, metavar="DIR", help="Folder for the plan and its launch files."
        ),
    ]
