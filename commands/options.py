"""The options of commands that have many. Names of values are looked up when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from meshwright.commands.parameters import ChoiceIn, NearMissChoice, NumberList

Command = TypeVar("Command", bound=Callable[..., Any])
Options = Iterable[Callable[[Any], Any]]
_PATH = click.Path(path_type=Path)
_PROCESSES = click.IntRange(1, 1024)


def _add(options: Options, command: Command) -> Command:
    for option in reversed(list(options)):
        command = option(command)
    return command


def _default(*names: str, default: object, help: str, **settings: Any) -> Callable[[Any], Any]:
    """An option whose default `--help` shows."""
    return click.option(*names, default=default, show_default=True, help=help, **settings)


def plan_options(command: Command) -> Command:
    """Adds the options of a plan request, and the output folder."""
    return _add(
        [
            *_cluster_options(),
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
                type=ChoiceIn("costmodel.execution_names", "DISPATCHERS"),
                help="Fix the dispatcher of tokens; deduplicated is deepep or hybridep, by device.",
            ),
            click.option(
                "--without",
                multiple=True,
                metavar="A,...",
                help="Software that is not there: deepep,hybridep,ep-overlap,tp-overlap,cuda-graph,"
                "full-graph,cp-a2a,compile.",
            ),
            click.option(
                "--allow",
                multiple=True,
                metavar="A,...",
                help="What may change the run's numbers: bf16-grads,bf16-moments,fp8-params,"
                "fp8-attention,te-loss|all.",
            ),
            click.option(
                "--inside-domain",
                multiple=True,
                metavar="A,...",
                help="Axes whose groups must each lie in one NVLink domain: tp,cp,ep.",
            ),
            _default(
                "--method",
                type=ChoiceIn("planner.request.names", "METHODS"),
                default="cp-sat",
                help="exhaustive prices every layout.",
            ),
            click.option(
                "--top", type=int, default=1, metavar="K", help="Report the best K layouts, proven."
            ),
            _time_limit("Seconds; what is best by then is the plan."),
            _seed(),
            click.option(
                "--baseline",
                type=_PATH,
                metavar="FILE",
                help="What runs today, to compare with: a launch script, a run file or a plan.",
            ),
            *_cost_options(),
            click.option(
                "--sweep",
                metavar="A=X,...",
                help="A plan for each of several values: gpus=256:2048:x2,precision=bf16+fp8.",
            ),
            click.option(
                "-o",
                "--output",
                type=_PATH,
                metavar="DIR",
                help="Folder for the plan and its launch files.",
            ),
        ],
        command,
    )


def calibration_option(command: Command) -> Command:
    """Adds --calibration."""
    return click.option(
        "--calibration",
        type=_PATH,
        metavar="STACK.yaml",
        help="What `calibrate` learned of your stack.",
    )(command)


def cost_flags(command: Command) -> Command:
    """Adds what a whole training costs, of a comparison with a baseline."""
    return _add(_cost_options(), command)


def _cost_options() -> Options:
    yield click.option(
        "--tokens",
        type=click.FloatRange(min=1, max=1e18),
        metavar="T",
        help="Tokens of the training, for its days against the baseline's.",
    )
    yield click.option(
        "--gpu-hour-price",
        type=click.FloatRange(min=0, max=1e6),
        metavar="P",
        help="Dollars of a GPU hour, for the training's price; with --tokens.",
    )


def experts_options(command: Command) -> Command:
    """Adds the options of ExpertRequest, and of the files to write."""
    return _add([*_cluster_options(), *_expert_options(), *_expert_output_options()], command)


def batch_options(command: Command) -> Command:
    """Adds the options of BatchOptions, and the output folder."""
    output_help = "Journal, plans, results."
    return _add(
        [
            click.option(
                "-o", "--output", type=_PATH, metavar="DIR", required=True, help=output_help
            ),
            _workers(),
            _default(
                "--engine",
                type=NearMissChoice(["local", "ray"]),
                default="local",
                help="Where jobs run.",
            ),
            click.option(
                "--ray-address",
                metavar="A",
                help="With ray: auto, or HOST:PORT; else a cluster of its own.",
            ),
            click.option("--resume", is_flag=True, help="Go on with the batch in the folder."),
            click.option("--strict", is_flag=True, help="Start nothing while a job has a mistake."),
            _default("--format", "formats", default="csv,json", help="Or parquet."),
            *_cache_options(),
        ],
        command,
    )


def fleet_options(command: Command) -> Command:
    """Adds the options of FleetOptions, and the output folder."""
    return _add(
        [
            *_cluster_options(),
            _default(
                "--objective",
                type=ChoiceIn("planner.many.fleet.sharing", "OBJECTIVES"),
                default="throughput",
                help="What the sharing is best in.",
            ),
            click.option(
                "--busy", multiple=True, metavar="NODE,...", help="Nodes that are in use already."
            ),
            _workers(),
            _time_limit("Seconds in all; sizes not planned by then are left out."),
            _seed(),
            *_cache_options(),
            click.option(
                "-o",
                "--output",
                type=_PATH,
                metavar="DIR",
                help="Folder for the answer, pictures and plans.",
            ),
        ],
        command,
    )


def recommend_options(command: Command) -> Command:
    """Adds the options of `recommend`, and the output folder."""
    return _add(
        [
            click.option(
                "--cluster",
                multiple=True,
                required=True,
                help="Name or YAML; more to compare.",
            ),
            click.option(
                "--gpus",
                type=int,
                metavar="N",
                help="At most N GPUs; all of the cluster's when absent.",
            ),
            click.option(
                "--step-time",
                "step_time_s",
                type=float,
                metavar="S",
                help="Target: seconds of a step, at most.",
            ),
            click.option(
                "--tokens-per-s",
                type=float,
                metavar="T",
                help="Target: tokens per second, at least.",
            ),
            *_workload_options(),
            click.option(
                "--sizes",
                type=NumberList(int),
                multiple=True,
                metavar="N,...",
                help="GPUs to sweep over.",
            ),
            click.option(
                "--reserve-gib",
                type=NumberList(float),
                multiple=True,
                metavar="G,...",
                help="HBM to keep free, to sweep.",
            ),
            _workers(),
            *_cache_options(),
            click.option(
                "-o",
                "--output",
                type=_PATH,
                metavar="DIR",
                help="Folder for table, picture and the plan.",
            ),
        ],
        command,
    )


def _cluster_options() -> Options:
    gpus_help = "Use the first N GPUs; all of the cluster's when absent."
    yield click.option("--cluster", required=True, help="Catalog name or cluster YAML.")
    yield click.option("--gpus", type=int, metavar="N", help=gpus_help)


def _workload_options() -> Options:
    option = click.option
    yield option("--global-batch", type=int, required=True, metavar="B", help="Sequences per step.")
    yield option("--seq-len", type=int, required=True, metavar="S", help="Tokens per sequence.")
    yield _default(
        "--precision",
        type=ChoiceIn("planner.request.names", "PRECISIONS"),
        default="bf16",
        help="Of the matrix products.",
    )
    yield _default(
        "--optimizer",
        type=ChoiceIn("planner.request.names", "OPTIMIZERS"),
        default="adam",
        help="Decides the optimizer state.",
    )
    yield _default(
        "--framework",
        type=ChoiceIn("frameworks.catalog", "FRAMEWORK_NAMES"),
        default="megatron",
        help="Decides what a layout may use.",
    )
    yield _default(
        "--memory-risk",
        type=float,
        default=0.05,
        metavar="R",
        help="Share of measured errors of memory with which the plan may not fit; 0.5: as predicted.",
    )
    yield option(
        "--pin", multiple=True, metavar="A=X,...", help="Fix choices: tp=8,recompute=none."
    )
    yield option(
        "--forbid", multiple=True, metavar="A,...", help="Exclude choices: full-recompute,cp."
    )


def _expert_options() -> Options:
    option = click.option
    yield option(
        "--slots", type=int, metavar="N", help="Slots in all; more than experts are replicas."
    )
    yield option(
        "--groups", type=int, metavar="N", help="Routing groups kept whole on a node; 1 for none."
    )
    yield option("--spread", is_flag=True, help="Replicas of an expert on different nodes.")
    yield option(
        "--balance",
        type=float,
        metavar="X",
        help="Cap on the mean balance while traffic is lowered; 1.02 if absent.",
    )
    yield option(
        "--window",
        "windows",
        multiple=True,
        metavar="NAME",
        help="Array of the file that is a window.",
    )
    yield option(
        "--score-window",
        "score_windows",
        multiple=True,
        metavar="NAME",
        help="Array to score on only, against each window placed alone.",
    )
    yield _default(
        "--robust",
        type=ChoiceIn("planner.experts.balance.robust", "ROBUST_OBJECTIVES"),
        default="guarded",
        help="Over several windows: the worst and even routing, the worst, or the CVaR.",
    )
    yield _default(
        "--cvar-share",
        type=float,
        default=0.5,
        metavar="X",
        help="Share of the windows, the worst ones, that the CVaR is the mean of.",
    )
    yield option(
        "--split", type=int, default=1, metavar="N", help="Cut recorded steps into N windows."
    )
    yield option("--hold-out", is_flag=True, help="Place on the first half, report the second too.")
    yield option(
        "--co-activation",
        type=_PATH,
        metavar="FILE",
        help="Token trace, or counts of expert pairs.",
    )
    yield option("--from", "current", type=_PATH, metavar="FILE", help="The placement in use.")
    yield option(
        "--max-moves",
        type=int,
        metavar="N",
        help="Most experts that may come to a GPU, all layers.",
    )
    yield option("--model", help="Model name or file: routing groups, dense layers, memory, bytes.")
    yield _default("--weight-bytes", type=float, default=2.0, metavar="B", help="Per parameter.")
    yield _default("--tokens-per-gpu", type=int, default=4096, metavar="N", help="Per dispatch.")
    yield _default(
        "--replica-choice",
        type=ChoiceIn("planner.experts.traffic.touched", "REPLICA_RULES"),
        default="turns",
        help="Replica that a token takes: each in turn, or one in a node that it touches anyway.",
    )
    yield _default("--gap", type=float, default=0.005, metavar="X", help="Gap to stop at.")
    yield _default(
        "--time-limit",
        "time_limit_s",
        type=float,
        default=30.0,
        metavar="S",
        help="Seconds, at most; work is shared out for 2 cores.",
    )
    yield _default(
        "--workers", type=int, default=2, metavar="N", help="Processes, by rows of layers."
    )
    yield _seed()


def _expert_output_options() -> Options:
    option = click.option
    yield _default(
        "--format",
        "form",
        type=ChoiceIn("planner.experts.files.writers", "PLACEMENT_FORMATS"),
        default="json",
        help="Who reads the file: us (--from); SGLang (--init-expert-location); TensorRT-LLM (moe_config's "
        "load_balancer); vLLM on Ascend (expert_map_path); Megatron checkpoints, permuted by it.",
    )
    yield option("-o", "--output", type=_PATH, metavar="FILE", help="The placement file.")
    yield option("--heat-map", type=_PATH, metavar="FILE", help="Picture of the GPU loads, SVG.")
    yield option("--force", is_flag=True, help="Replace files that are already there.")


def _cache_options() -> Options:
    folder_help = "Folder of kept answers; by default in the user's cache folder."
    yield click.option("--cache", type=_PATH, metavar="DIR", help=folder_help)
    yield click.option("--no-cache", is_flag=True, help="Keep no answers, use none.")


def _workers() -> Callable[[Any], Any]:
    workers_help = "Processes; one for each core by default."
    return click.option("--workers", type=_PROCESSES, metavar="N", help=workers_help)


def _time_limit(words: str) -> Callable[[Any], Any]:
    return click.option("--time-limit", "time_limit_s", type=float, metavar="S", help=words)


def _seed() -> Callable[[Any], Any]:
    return _default("--seed", type=int, default=0, metavar="N", help="Seed of the solver.")
