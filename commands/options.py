"""The options of `plan` and `experts`. Only `click`, which the command line has loaded anyway."""

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


def experts_options(command: Decorated) -> Decorated:
    """Adds the options of ExpertRequest, and of the files to write."""
    for add in reversed(_experts_options()):
        command = add(command)
    return command


def _experts_options() -> list[Callable[[Any], Any]]:
    option = click.option
    return [
        option("--cluster", required=True, help="Catalog name or cluster YAML."),
        option(
            "--gpus", type=int, metavar="N", help="Use the first N GPUs; all of the cluster's when absent."
        ),
        option("--slots", type=int, metavar="N", help="Slots in all; more than experts are replicas."),
        option("--groups", type=int, metavar="N", help="Routing groups kept whole on a node; 1 for none."),
        option("--spread", is_flag=True, help="Replicas of an expert on different nodes."),
        option(
            "--balance", type=float, metavar="X", help="Cap on the balance while traffic is lowered [1.02]."
        ),
        option(
            "--window", "windows", multiple=True, metavar="NAME", help="Array of the file that is a window."
        ),
        option("--split", type=int, default=1, metavar="N", help="Cut recorded steps into N windows."),
        option("--hold-out", is_flag=True, help="Place on the first half, report the second too."),
        option("--co-activation", type=_PATH, metavar="FILE", help="Token trace, or counts of expert pairs."),
        option("--from", "current", type=_PATH, metavar="FILE", help="The placement in use."),
        option("--max-moves", type=int, metavar="N", help="Most experts that may come to a GPU, all layers."),
        option("--model", help="Model name or file: routing groups, dense layers, memory, bytes."),
        option(
            "--weight-bytes", type=float, default=2.0, show_default=True, metavar="B", help="Per parameter."
        ),
        option(
            "--tokens-per-gpu", type=int, default=4096, show_default=True, metavar="N", help="Per dispatch."
        ),
        option("--gap", type=float, default=0.005, show_default=True, metavar="X", help="Gap to stop at."),
        option(
            "--time-limit",
            "time_limit_s",
            type=float,
            default=30.0,
            show_default=True,
            metavar="S",
            help="Seconds.",
        ),
        option(
            "--workers", type=int, default=1, show_default=True, metavar="N", help="Processes for CP-SAT."
        ),
        option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of the solver."),
        option(
            "--format",
            "form",
            default="json",
            show_default=True,
            help="json, sglang, trtllm, vllm, megatron.",
        ),
        option("-o", "--output", type=_PATH, metavar="FILE", help="The placement file."),
        option("--heat-map", type=_PATH, metavar="FILE", help="Picture of the GPU loads, PNG or SVG."),
        option("--force", is_flag=True, help="Replace files that are already there."),
    ]
