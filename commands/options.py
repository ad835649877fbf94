"""The options of commands that have many. Only `click`, which the command line has loaded anyway."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from meshwright.frameworks.catalog import DEFAULT_FRAMEWORK, FRAMEWORK_NAMES

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
            "--gpus",
            type=int,
            metavar="N",
            help="Use the first N GPUs; all of the cluster's when absent.",
        ),
        *_workload_options(),
        click.option(
            "--reserve-gib",
            type=float,
            default=0.0,
            metavar="G",
            help="HBM to leave free on every GPU.",
        ),
        click.option(
            "--expert-loads",
            type=_PATH,
            metavar="FILE",
            help="Measured routing: experts are placed too.",
        ),
        click.option(
            "--moe-dispatch",
            default="alltoall",
            show_default=True,
            help="Or deduplicated: one copy of a token to each block that holds its experts (DeepEP).",
        ),
        click.option("--method", default="cp-sat", show_default=True, help="cp-sat or exhaustive."),
        click.option(
            "--top",
            "top_k",
            type=int,
            default=1,
            metavar="K",
            help="Report the best K layouts, proven.",
        ),
        click.option(
            "--time-limit", "time_limit_s", type=float, metavar="S", help="Seconds for the search."
        ),
        click.option(
            "--seed",
            type=int,
            default=0,
            show_default=True,
            metavar="N",
            help="Seed of the solver.",
        ),
        click.option(
            "-o",
            "--output",
            type=_PATH,
            metavar="DIR",
            help="Folder for the plan and its launch files.",
        ),
    ]


def _workload_options() -> list[Callable[[Any], Any]]:
    return [
        click.option(
            "--global-batch", type=int, required=True, metavar="B", help="Sequences per step."
        ),
        click.option(
            "--seq-len", type=int, required=True, metavar="S", help="Tokens per sequence."
        ),
        click.option(
            "--precision",
            default="bf16",
            show_default=True,
            help="bf16, fp16, fp8, mxfp8 or nvfp4.",
        ),
        click.option("--optimizer", default="adam", show_default=True, help="adam, sgd or muon."),
        click.option(
            "--framework",
            default=DEFAULT_FRAMEWORK,
            show_default=True,
            help=f"One of {', '.join(FRAMEWORK_NAMES)}.",
        ),
        click.option(
            "--pin",
            "pins",
            multiple=True,
            metavar="A=X,...",
            help="Fix choices: tp=8,recompute=none.",
        ),
        click.option(
            "--forbid",
            "forbids",
            multiple=True,
            metavar="A,...",
            help="Exclude choices: full-recompute,cp.",
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
            "--gpus",
            type=int,
            metavar="N",
            help="Use the first N GPUs; all of the cluster's when absent.",
        ),
        option(
            "--slots", type=int, metavar="N", help="Slots in all; more than experts are replicas."
        ),
        option(
            "--groups",
            type=int,
            metavar="N",
            help="Routing groups kept whole on a node; 1 for none.",
        ),
        option("--spread", is_flag=True, help="Replicas of an expert on different nodes."),
        option(
            "--balance",
            type=float,
            metavar="X",
            help="Cap on the mean balance while traffic is lowered; 1.02 if absent.",
        ),
        option(
            "--window",
            "windows",
            multiple=True,
            metavar="NAME",
            help="Array of the file that is a window.",
        ),
        option(
            "--score-window",
            "score_windows",
            multiple=True,
            metavar="NAME",
            help="Array to score on only, against each window placed alone.",
        ),
        option(
            "--robust",
            type=click.Choice(["guarded", "worst", "cvar"]),
            default="guarded",
            show_default=True,
            help="Over several windows: the worst and even routing, the worst, or the CVaR.",
        ),
        option(
            "--cvar-share",
            type=float,
            default=0.5,
            show_default=True,
            metavar="X",
            help="Share of the windows, the worst ones, that the CVaR is the mean of.",
        ),
        option(
            "--split", type=int, default=1, metavar="N", help="Cut recorded steps into N windows."
        ),
        option("--hold-out", is_flag=True, help="Place on the first half, report the second too."),
        option(
            "--co-activation",
            type=_PATH,
            metavar="FILE",
            help="Token trace, or counts of expert pairs.",
        ),
        option("--from", "current", type=_PATH, metavar="FILE", help="The placement in use."),
        option(
            "--max-moves",
            type=int,
            metavar="N",
            help="Most experts that may come to a GPU, all layers.",
        ),
        option("--model", help="Model name or file: routing groups, dense layers, memory, bytes."),
        option(
            "--weight-bytes",
            type=float,
            default=2.0,
            show_default=True,
            metavar="B",
            help="Per parameter.",
        ),
        option(
            "--tokens-per-gpu",
            type=int,
            default=4096,
            show_default=True,
            metavar="N",
            help="Per dispatch.",
        ),
        option(
            "--replica-choice",
            type=click.Choice(["turns", "touched"]),
            default="turns",
            show_default=True,
            help="Replica that a token takes: each in turn, or one in a node that it touches anyway.",
        ),
        option(
            "--gap",
            type=float,
            default=0.005,
            show_default=True,
            metavar="X",
            help="Gap to stop at.",
        ),
        option(
            "--time-limit",
            "time_limit_s",
            type=float,
            default=30.0,
            show_default=True,
            metavar="S",
            help="Work of about so many seconds on 2 cores.",
        ),
        option(
            "--workers",
            type=int,
            default=2,
            show_default=True,
            metavar="N",
            help="Processes, by rows of layers.",
        ),
        option(
            "--seed",
            type=int,
            default=0,
            show_default=True,
            metavar="N",
            help="Seed of the solver.",
        ),
        option(
            "--format",
            "form",
            default="json",
            show_default=True,
            help="json, sglang, trtllm, vllm, megatron.",
        ),
        option("-o", "--output", type=_PATH, metavar="FILE", help="The placement file."),
        option(
            "--heat-map", type=_PATH, metavar="FILE", help="Picture of the GPU loads, PNG or SVG."
        ),
        option("--force", is_flag=True, help="Replace files that are already there."),
    ]


def _cache_options() -> list[Callable[[Any], Any]]:
    where = "Folder of kept answers; by default in the user's cache folder."
    return [
        click.option("--cache", type=_PATH, metavar="DIR", help=where),
        click.option("--no-cache", is_flag=True, help="Keep no answers, use none."),
    ]


def batch_options(command: Decorated) -> Decorated:
    """Adds the options of BatchOptions, and the output folder."""
    for add in reversed(_batch_options()):
        command = add(command)
    return command


def _batch_options() -> list[Callable[[Any], Any]]:
    option, number = click.option, click.IntRange(1, 1024)
    engines = click.Choice(["local", "ray"])
    return [
        option(
            "-o",
            "--output",
            type=_PATH,
            metavar="DIR",
            required=True,
            help="Journal, plans, results.",
        ),
        option(
            "--workers", type=number, metavar="N", help="Processes; one for each core by default."
        ),
        option(
            "--engine", type=engines, default="local", show_default=True, help="Where jobs run."
        ),
        option(
            "--ray-address",
            metavar="A",
            help="With ray: auto, or HOST:PORT; else a cluster of its own.",
        ),
        option("--resume", is_flag=True, help="Go on with the batch in the folder."),
        option("--strict", is_flag=True, help="Start nothing while a job has a mistake."),
        option("--format", "formats", default="csv,json", show_default=True, help="Or parquet."),
        *_cache_options(),
    ]


def fleet_options(command: Decorated) -> Decorated:
    """Adds the options of FleetOptions, and the output folder."""
    for add in reversed(_fleet_options()):
        command = add(command)
    return command


def _fleet_options() -> list[Callable[[Any], Any]]:
    option, number = click.option, click.IntRange(1, 1024)
    kinds = "throughput, makespan or deadlines."
    return [
        option("--cluster", required=True, help="Catalog name or cluster YAML."),
        option(
            "--gpus",
            type=int,
            metavar="N",
            help="Use the first N GPUs; all of the cluster's when absent.",
        ),
        option("--objective", default="throughput", show_default=True, help=kinds),
        option("--busy", multiple=True, metavar="NODE,...", help="Nodes that are in use already."),
        option(
            "--workers", type=number, metavar="N", help="Processes; one for each core by default."
        ),
        option(
            "--time-limit", "time_limit_s", type=float, metavar="S", help="Seconds for each proof."
        ),
        option(
            "--seed",
            type=int,
            default=0,
            show_default=True,
            metavar="N",
            help="Seed of the solver.",
        ),
        *_cache_options(),
        option(
            "-o",
            "--output",
            type=_PATH,
            metavar="DIR",
            help="Folder for the answer, pictures and plans.",
        ),
    ]


def recommend_options(command: Decorated) -> Decorated:
    """Adds the options of a wish, and the output folder."""
    for add in reversed(_recommend_options()):
        command = add(command)
    return command


def _recommend_options() -> list[Callable[[Any], Any]]:
    option, number = click.option, click.IntRange(1, 1024)
    return [
        option(
            "--cluster",
            "clusters",
            multiple=True,
            required=True,
            help="Name or YAML; more to compare.",
        ),
        option(
            "--gpus",
            type=int,
            metavar="N",
            help="At most N GPUs; all of the cluster's when absent.",
        ),
        option("--step-time", type=float, metavar="S", help="Target: seconds of a step, at most."),
        option(
            "--tokens-per-s", type=float, metavar="T", help="Target: tokens per second, at least."
        ),
        *_workload_options(),
        option("--sizes", multiple=True, metavar="N,...", help="GPUs to sweep over."),
        option(
            "--reserve-gib",
            "reserves",
            multiple=True,
            metavar="G,...",
            help="HBM to keep free, to sweep.",
        ),
        option(
            "--workers", type=number, metavar="N", help="Processes; one for each core by default."
        ),
        *_cache_options(),
        option(
            "-o",
            "--output",
            type=_PATH,
            metavar="DIR",
            help="Folder for table, picture and the plan.",
        ),
    ]
