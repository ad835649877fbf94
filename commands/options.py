"""The options of commands that have many. Names of values are looked up when they are needed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from meshwright.errors import shown, suggestion
from meshwright.planner.request.choices import (
    ALLOW,
    ALLOW_HOST,
    ALLOW_PLACED,
    ALLOW_UNMEASURED,
    BY_NAME,
    FORBIDS,
    PERMISSIONS,
    PINS,
    WITHOUT,
)
from meshwright.planner.request.options import PLAIN, PlanOptions

# Kinds of option values that `click` does not have.


MOST_NUMBERS = 1000
LARGEST_NUMBER = 10**7


@cache
def words_of_others() -> dict[str, Any]:
    """What users of other programs type in place of commands, options and values (`data/words.yaml`)."""
    from meshwright.documents import packaged_document

    words: dict[str, Any] = packaged_document("meshwright.commands", "data/words.yaml")
    return words


OfOption = click.Parameter | None
OfCommand = click.Context | None
"""What click hands to types of values beside the value; None outside a command."""


class NearMissChoice(click.Choice[str]):
    """One of some names; a misspelt one is told its near miss."""

    def convert(self, value: Any, param: OfOption, ctx: OfCommand) -> str:
        """The name itself, or a usage error.

        Parameters
        ----------
        value
            As it was typed.
        param
            The option, whose name says which words of other programs are known; None outside a command.
        ctx
            Of the command, for the message.
        """
        if value in self.choices:
            return str(value)
        name = "" if param is None else str(param.name)
        for row in words_of_others()["values"].get(name, ()):
            if str(value).lower() in row["words"].split():
                what = f"{shown(value)} {row['said']}; allowed: {', '.join(self.choices)}"
                self.fail(what, param, ctx)
        self.fail(f"{shown(value)} is not known{suggestion(value, self.choices)}", param, ctx)


class ChoiceIn(NearMissChoice):
    """One of the names that a module of meshwright holds, which is imported when they are needed.

    `spelled` turns what others call something into the name.
    """

    def __init__(
        self, module: str, collection: str, spelled: Callable[[str], str] = lambda text: text
    ) -> None:
        self.case_sensitive = True
        self._module = module
        self._collection = collection
        self._spelled = spelled

    def convert(self, value: Any, param: OfOption, ctx: OfCommand) -> str:
        """The name that the value spells, or a usage error.

        Parameters
        ----------
        value
            As it was typed, or in another spelling of it.
        param, ctx
            As `NearMissChoice.convert` takes them.
        """
        return super().convert(self._spelled(value), param, ctx)

    def __getattr__(self, name: str) -> Any:
        if name != "choices":
            raise AttributeError(name)
        module = import_module(f"meshwright.{self._module}")
        self.choices = tuple(getattr(module, self._collection))
        return self.choices


class NumberList(click.ParamType[tuple[float, ...]]):
    """Numbers with commas between them, such as `8,16`."""

    name = "numbers"

    def __init__(self, kind: type[float]) -> None:
        self._kind = kind

    def convert(self, value: Any, param: OfOption, ctx: OfCommand) -> tuple[float, ...]:
        """The numbers, or a usage error.

        Parameters
        ----------
        value
            At most `MOST_NUMBERS` numbers from 0 to `LARGEST_NUMBER`, as text.
        param, ctx
            Of the command, for the message.
        """
        parts = [part.strip() for part in str(value).split(",")]
        if len(parts) > MOST_NUMBERS:
            self.fail(f"at most {MOST_NUMBERS} numbers, got {len(parts)}", param, ctx)
        return tuple(self._number(part, param, ctx) for part in parts)

    def _number(self, text: str, param: OfOption, ctx: OfCommand) -> float:
        try:
            number = self._kind(text)
        except ValueError:
            self.fail(f"must be numbers with commas between them, got {shown(text)}", param, ctx)
        if not 0 <= number <= LARGEST_NUMBER:
            self.fail(f"must be from 0 to {LARGEST_NUMBER}, got {shown(number)}", param, ctx)
        return number


class Amount(click.ParamType[float]):
    """Bytes, seconds or a rate as people write them, such as `1GiB`, `1.5us` and `400Gb/s`.

    `name` says which of them, as `planner.calculators.formulas.AMOUNT_READERS` calls it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def convert(self, value: Any, param: OfOption, ctx: OfCommand) -> float:
        """The amount in bytes, seconds or bytes a second; InputError says what is allowed.

        Parameters
        ----------
        value
            As it was typed, such as `1GiB`.
        param
            The option, for the message; None outside a command.
        ctx
            Of the command, for the message.
        """
        from meshwright.planner.calculators import formulas

        return formulas.AMOUNT_READERS[self.name](
            str(value), "" if param is None else param.opts[0]
        )


class NamedPath(click.Path):
    """A path that is not empty, as that of a shell's variable without a value is: it would be this folder."""

    def convert(
        self, value: Any, param: OfOption, ctx: OfCommand
    ) -> str | bytes | os.PathLike[str]:
        """The path; BadParameter where it is empty.

        Parameters
        ----------
        value
            As it was typed.
        param, ctx
            Of the command, for the message.
        """
        if value == "":
            self.fail("the name is empty", param, ctx)
        return super().convert(value, param, ctx)


PATH = NamedPath(path_type=Path)
Command = TypeVar("Command", bound=Callable[..., Any])
Option = Callable[[Any], Any]
"""What click makes: it adds an option to a command."""
Options = Iterable[Option]
_PROCESSES = click.IntRange(1, 1024)
TIME_LIMIT_S = 60.0
"""Of a plan where nothing else is said; the functions of Python have no limit then."""


def _add(options: Options, command: Command) -> Command:
    for option in reversed(list(options)):
        command = option(command)
    return command


def value_option(names: str, kind: Any, metavar: str, help: str, **settings: Any) -> Option:
    """An option that takes a value; `names` are the flag, and the parameter where it has another name.

    Parameters
    ----------
    names
        As in `--top top_k`.
    kind
        A type of click, or a class.
    metavar
        What `--help` calls the value.
    help
        A sentence.
    settings
        Further arguments of `click.option`.
    """
    return click.option(*names.split(), type=kind, metavar=metavar, help=help, **settings)


def default_option(
    names: str, kind: Any, default: object, metavar: str | None, help: str
) -> Option:
    """An option that takes a value and whose default `--help` shows.

    Parameters
    ----------
    names
        The flag, and the parameter where it has another name.
    kind
        A type of click, or a class.
    default
        What stands for an option that is left out.
    metavar
        What `--help` calls the value; None for the kind's own word.
    help
        A sentence.
    """
    settings: dict[str, Any] = {"default": default, "show_default": True}
    return click.option(*names.split(), type=kind, metavar=metavar, help=help, **settings)


def choice_option(names: str, where: str, help: str | None = None, **settings: Any) -> Option:
    """An option that takes one of the names that a module of meshwright holds: `module.NAMES`.

    A default is shown by `--help`.

    Parameters
    ----------
    names
        The flag, and the parameter where it has another name.
    where
        Module and collection; read when they are asked for, so that `--help` of others stays fast.
    help
        A sentence, or none.
    settings
        Further arguments of `click.option`.
    """
    if "default" in settings:
        settings["show_default"] = True
    return click.option(*names.split(), type=_choice_in(where), help=help, **settings)


def _choice_in(where: str) -> ChoiceIn:
    module, _, collection = where.rpartition(".")
    return ChoiceIn(module, collection)


_KINDS: Mapping[str, Any] = {"int": int, "float": float, "FilePath": PATH}
"""Types of click, by what `PlanOptions` says of a value."""
_WORDS_OF: Mapping[str, str] = {
    "Dispatcher": "costmodel.execution_names.DISPATCHERS",
    "FrameworkName": "frameworks.catalog.FRAMEWORK_NAMES",
    "LossName": "costmodel.losses.LOSS_NAMES",
    "Method": "costmodel.execution_names.METHODS",
    "Optimizer": "costmodel.execution_names.OPTIMIZERS",
    "PlanObjective": "costmodel.execution_names.OBJECTIVES",
    "Precision": "costmodel.execution_names.PRECISIONS",
    "ReferencePlace": "costmodel.execution_names.REFERENCE_PLACES",
    "StepKindName": "costmodel.execution_names.KIND_NAMES",
    "packing": "costmodel.lengths.PACKINGS",
    "train": "model_specs.adapters.TRAINED",
}
"""Where the names of a type of `PlanOptions` are, or of an option without a type of its own."""


def plan_option(name: str, help: str, metavar: str | None = None, **settings: Any) -> Option:
    """An option that `PlanOptions` has: its flag, its type and its default are those that stand there.

    Parameters
    ----------
    name
        As there.
    help
        A sentence.
    metavar
        What `--help` calls the value; None for one of some names, or none.
    settings
        Further arguments of `click.option`.
    """
    said = PlanOptions.__annotations__[name].__forward_arg__.removesuffix(" | None")
    default = PLAIN.get(name)
    settings = {"default": default, "show_default": default is not None, **settings}
    flag = f"--{name.removesuffix('_s').replace('_', '-')}"
    where = _WORDS_OF.get(said, _WORDS_OF.get(name))
    if said == "bool":
        return click.option(flag, is_flag=True, help=help)
    kind = _KINDS[said] if where is None else _choice_in(where)
    return click.option(flag, name, type=kind, metavar=metavar, help=help, **settings)


# What a shell completes (click, "Shell Completion"). Catalogs are read when a shell asks, not for `--help`.


Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _complete_names(module: str, *functions: str) -> Complete:
    """Names that functions of a module of meshwright return; files where none begins so."""

    def completed(_: click.Context, __: click.Parameter, typed: str) -> list[CompletionItem]:
        reader = import_module(f"meshwright.{module}")
        names = [name for function in functions for name in getattr(reader, function)()]
        begin_so = [CompletionItem(name) for name in names if name.startswith(typed)]
        return begin_so or [CompletionItem(typed, type="file")]

    return completed


complete_model = _complete_names("model_specs.reader", "catalog_names", "hub_names")
"""Models of the catalog, or names of the hub from an owner on."""
complete_cluster = _complete_names("cluster_specs.reader", "cluster_names")


def _complete_words(words: Callable[[], Sequence[str]]) -> Complete:
    """The last of some words with commas between them."""

    def completed(_: click.Context, __: click.Parameter, typed: str) -> list[CompletionItem]:
        before, comma, last = typed.rpartition(",")
        taken = set(before.split(","))
        open_words = [word for word in words() if word not in taken and word.startswith(last)]
        return [CompletionItem(f"{before}{comma}{word}") for word in open_words]

    return completed


def _pin_words() -> tuple[str, ...]:
    """What pins may say: a name with `=` where a number follows, else with each of its values."""
    choices = [BY_NAME[name] for name in PINS]
    return tuple(f"{choice.name}={word}" for choice in choices for word in choice.words or ("",))


def _domain_words() -> tuple[str, ...]:
    from meshwright.constraints.fabric import INSIDE_DOMAIN

    return INSIDE_DOMAIN


def _several(flag: str, help: str, words: Callable[[], Sequence[str]]) -> Option:
    """An option that takes some of its words with commas between them, as often as wanted."""
    complete = _complete_words(words)
    return click.option(flag, multiple=True, metavar="A,...", help=help, shell_complete=complete)


def plan_options(command: Command) -> Command:
    """Adds the options of a plan request, and the output folder.

    Parameters
    ----------
    command
        A function, or what decorators have made of it; it takes them by name.
    """
    options = [
        *_cluster_options(),
        *_workload_options(has_lengths=True),
        *_training_options(),
        *_image_options(),
        *_kind_options(),
        *_leeway_options(),
        *_search_options(),
        *_cost_options(),
        value_option("-o --output", PATH, "DIR", "Folder for the plan and its launch files."),
    ]
    return _add(options, command)


def placing_options(command: Command) -> Command:
    """Adds where the ranks of a finished plan are to go.

    Parameters
    ----------
    command
        A function, or what decorators have made of it; it takes them by name.
    """
    options = [
        click.option(
            "--cluster",
            help="Catalog name or cluster YAML; the plan's own cluster when absent.",
            shell_complete=complete_cluster,
        ),
        value_option("--nodes", str, "LIST|FILE", "Use only these nodes (host list)."),
    ]
    return _add(options, command)


def _leeway_options() -> Options:
    """What a plan may use and must leave."""
    numbers, hosts, placed, unmeasured = (
        ",".join(words) for words in (ALLOW, ALLOW_HOST, ALLOW_PLACED, ALLOW_UNMEASURED)
    )
    words = "HBM to leave free on every GPU."
    yield plan_option("reserve_gib", words, "G", show_default=False)
    yield plan_option("expert_loads", "Measured routing: experts are placed too.", "FILE")
    words = "Fix the dispatcher of tokens; deduplicated is deepep or hybridep, by device."
    yield plan_option("moe_dispatch", words)
    yield _several(
        "--without", f"Software that is not there: {','.join(WITHOUT)}.", words=lambda: WITHOUT
    )
    yield _several(
        "--allow",
        f"What may change the run's numbers: {numbers}|all; or fill the hosts' memory: {hosts}; "
        f"or assume experts placed by --expert-loads: {placed}; "
        f"or rest on no measured run: {unmeasured}.",
        words=lambda: (*PERMISSIONS, "all"),
    )
    yield _several(
        "--inside-domain",
        "Axes whose groups must each lie in one NVLink domain: tp,cp,ep.",
        words=_domain_words,
    )


def _search_options() -> Options:
    """How a plan is searched, and what it is compared with."""
    yield plan_option("method", "exhaustive prices every layout.")
    yield plan_option("top", "Report the best K layouts, proven.", "K", show_default=False)
    yield _time_limit(
        f"Seconds; what is best by then is the plan, with its gap. {TIME_LIMIT_S:g} by default, and for each "
        "plan of --sweep; none with --method exhaustive."
    )
    yield _seed()
    yield value_option(
        "--baseline",
        PATH,
        "FILE",
        "What runs today, to compare with: a launch script, a run file or a plan.",
    )
    yield click.option(
        "--sweep",
        metavar="A=X,...",
        help="A plan for each of several values: gpus=256:2048:x2,precision=bf16+fp8.",
    )


def calibration_option(command: Command) -> Command:
    """Adds --calibration."""
    words = "What `calibrate` learned of your stack."
    return _add([value_option("--calibration", PATH, "STACK.yaml", words)], command)


def cost_flags(command: Command) -> Command:
    """Adds what a whole training costs."""
    return _add(_cost_options(), command)


def _cost_options() -> Options:
    yield value_option(
        "--tokens",
        click.FloatRange(min=1, max=1e18),
        "T",
        "Tokens of the training: its days, dollars and kWh.",
    )
    yield value_option(
        "--days",
        click.FloatRange(min=0, min_open=True, max=1e6),
        "D",
        "Days of the training: with --tokens a deadline.",
    )
    yield value_option(
        "--gpu-hour-price",
        click.FloatRange(min=0, max=1e6),
        "P",
        "Dollars of a GPU hour, for the training's price; the cluster file's when absent.",
    )


def experts_options(command: Command) -> Command:
    """Adds the options of ExpertRequest, and of the files to write.

    Parameters
    ----------
    command
        A function, or what decorators have made of it; it takes them by name.
    """
    options = [
        *_cluster_options(),
        *_placement_options(),
        *_routing_options(),
        *_effort_options(),
        *_expert_output_options(),
    ]
    return _add(options, command)


def batch_options(command: Command) -> Command:
    """Adds the options of BatchOptions, and the output folder.

    Parameters
    ----------
    command
        A function, or what decorators have made of it; it takes them by name.
    """
    options = [
        value_option("-o --output", PATH, "DIR", "Journal, plans, results.", required=True),
        _workers(),
        default_option(
            "--engine", NearMissChoice(["local", "ray"]), "local", None, "Where jobs run."
        ),
        click.option(
            "--ray-address",
            metavar="A",
            help="With ray: auto, or HOST:PORT; else a cluster of its own.",
        ),
        _time_limit("Seconds for each job that has no time_limit.", TIME_LIMIT_S),
        click.option("--resume", is_flag=True, help="Go on with the batch in the folder."),
        click.option(
            "--force", is_flag=True, help="Begin anew in place of the batch in the folder."
        ),
        click.option("--strict", is_flag=True, help="Start nothing while a job has a mistake."),
        default_option("--format formats", str, "csv,json", None, "Or parquet."),
        *_cost_options(),
        *_cache_options(),
    ]
    return _add(options, command)


def fleet_options(command: Command) -> Command:
    """Adds the options of FleetOptions, and the output folder.

    Parameters
    ----------
    command
        A function, or what decorators have made of it; it takes them by name.
    """
    options = [
        *_cluster_options(),
        choice_option(
            "--objective",
            "planner.many.sharing.OBJECTIVES",
            "What the sharing is best in.",
            default="throughput",
        ),
        click.option(
            "--busy",
            multiple=True,
            metavar="NODE,...",
            help="Nodes that are in use already (host list).",
        ),
        _workers(),
        _time_limit("Seconds in all; sizes not planned by then are left out."),
        _seed(),
        *_cost_options(),
        *_cache_options(),
        value_option("-o --output", PATH, "DIR", "Folder for the answer, pictures and plans."),
    ]
    return _add(options, command)


def recommend_options(command: Command) -> Command:
    """Adds the options of `recommend`, and the output folder.

    Parameters
    ----------
    command
        A function, or what decorators have made of it; it takes them by name.
    """
    numbers, amounts = NumberList(int), NumberList(float)
    options = [
        click.option(
            "--cluster",
            multiple=True,
            required=True,
            help="Name or YAML; more to compare.",
            shell_complete=complete_cluster,
        ),
        value_option("--gpus", int, "N", "At most N GPUs; all of the cluster's when absent."),
        value_option("--step-time step_time_s", float, "S", "Target: seconds of a step, at most."),
        value_option("--tokens-per-s", float, "T", "Target: tokens per second, at least."),
        *_workload_options(),
        *_training_options(),
        *_kind_options(),
        *_cost_options(),
        value_option("--sizes", numbers, "N,...", "GPUs to sweep over.", multiple=True),
        value_option(
            "--reserve-gib", amounts, "G,...", "HBM to keep free, to sweep.", multiple=True
        ),
        _workers(),
        *_cache_options(),
        _time_limit("Seconds for each number of GPUs.", TIME_LIMIT_S),
        value_option("-o --output", PATH, "DIR", "Folder for table, picture and the plan."),
    ]
    return _add(options, command)


def _cluster_options() -> Options:
    yield click.option(
        "--cluster",
        required=True,
        help="Catalog name or cluster YAML.",
        shell_complete=complete_cluster,
    )
    yield plan_option("gpus", "Use the first N GPUs; all of the cluster's when absent.", "N")


def _workload_options(*, has_lengths: bool = False) -> Options:
    yield value_option("--global-batch", int, "B", "Sequences per step.", required=True)
    words = "Tokens per sequence; or give --lengths." if has_lengths else "Tokens per sequence."
    yield plan_option("seq_len", words, "S", required=not has_lengths)
    if has_lengths:
        yield from _length_options()
    yield plan_option("precision", "Of the matrix products.")
    yield plan_option("optimizer", "Decides the optimizer state.")
    yield plan_option("framework", "Decides what a layout may use.")
    words = "Share of measured errors of memory with which the plan may not fit; 0.5: as predicted."
    yield plan_option("memory_risk", words, "R")
    yield click.option(
        "--pin",
        multiple=True,
        metavar="A=X,...",
        help="Fix choices: tp=8,recompute=none.",
        shell_complete=_complete_words(_pin_words),
    )
    yield _several("--forbid", "Exclude choices: full-recompute,cp.", words=lambda: FORBIDS)


def _training_options() -> Options:
    """What is trained."""
    yield plan_option(
        "train",
        "Every parameter; adapters beside frozen weights of 16, 8 or 4 bits; the same with magnitudes.",
    )
    yield plan_option("lora_rank", "Width of the adapters; 16 when absent.", "R")
    yield click.option(
        "--lora-targets",
        metavar="A,...",
        help="Matrices with an adapter: all-linear (when absent), or q_proj,v_proj and so on.",
    )


def _image_options() -> Options:
    """Images in front of the language model."""
    words = "Tokens of a sequence that are of images; 0: text alone, without the encoder."
    yield plan_option("image_tokens", words, "N")
    yield plan_option("images_per_sequence", "Images that share them; one when absent.", "K")
    yield plan_option("freeze_encoder", "Leave the image encoder and its projector as they are.")


def _kind_options() -> Options:
    """What a step does with a sample, and how its loss runs."""
    yield plan_option(
        "loss",
        "Head and loss chunk by chunk; without, on all logits, but of dpo and kto as TRL's trainers do.",
    )
    yield plan_option(
        "kind",
        "Of training step; batches count pairs of dpo, orpo and reward. The update of GRPO or PPO is an sft.",
    )
    words = "Where the reference model of dpo and kto is; resident when absent."
    yield plan_option("reference", words)


def _length_options() -> Options:
    """Sequences that are packs of samples."""
    yield plan_option(
        "lengths",
        "Lengths of training samples, packed: .jsonl, .txt, .npy, .json, or counts as .csv (length,count).",
        "FILE",
    )
    words = "Tokens of a pack; the longest sample, to a multiple of 128, when absent."
    yield plan_option("pack_size", words, "N")
    words = "How packs are filled; first-fit when absent. padded: one sample each."
    yield plan_option("packing", words)
    words = "Hybrid context parallelism: each sample on as many ranks as it needs."
    yield plan_option("hybrid_cp", words)


def _placement_options() -> Options:
    """Slots, and how even they must be over which windows."""
    yield value_option("--slots", int, "N", "Slots in all; more than experts are replicas.")
    yield value_option("--groups", int, "N", "Routing groups kept whole on a node; 1 for none.")
    yield click.option("--spread", is_flag=True, help="Replicas of an expert on different nodes.")
    yield value_option(
        "--balance", float, "X", "Cap on the mean balance while traffic is lowered; 1.02 if absent."
    )
    yield click.option(
        "--window",
        "windows",
        multiple=True,
        metavar="NAME",
        help="Array of the file that is a window; the worst one counts.",
    )
    yield value_option("--split", int, "N", "Cut recorded steps into N windows.", default=1)
    yield click.option(
        "--hold-out", is_flag=True, help="Place on the first half, report the second too."
    )


def _routing_options() -> Options:
    """Which experts go together, where they lie today, and what a token weighs."""
    yield value_option("--co-activation", PATH, "FILE", "Token trace, or counts of expert pairs.")
    yield value_option("--from current", PATH, "FILE", "The placement in use.")
    yield value_option("--max-moves", int, "N", "Most experts that may come to a GPU, all layers.")
    yield click.option(
        "--model", help="Model name or file: routing groups, dense layers, memory, bytes."
    )
    yield default_option("--weight-bytes", float, 2.0, "B", "Per parameter.")
    yield default_option("--tokens-per-gpu", int, 4096, "N", "Per dispatch.")
    yield choice_option(
        "--replica-choice",
        "planner.experts.inputs.REPLICA_RULES",
        "Replica that a token takes: each in turn, or one in a node that it touches anyway.",
        default="turns",
    )


def _effort_options() -> Options:
    """How long a placement is searched for."""
    yield default_option("--gap", float, 0.005, "X", "Gap to stop at.")
    yield default_option(
        "--time-limit time_limit_s",
        float,
        30.0,
        "S",
        "Seconds, at most; work is shared out for 2 cores.",
    )
    yield default_option("--workers", int, 2, "N", "Processes, by rows of layers.")
    yield _seed()


def _expert_output_options() -> Options:
    yield choice_option(
        "--format form",
        "planner.experts.placements.PLACEMENT_FORMATS",
        "Who reads the file: us (--from); SGLang (--init-expert-location); TensorRT-LLM (moe_config's "
        "load_balancer); vLLM on Ascend (expert_map_path); Megatron checkpoints, permuted by it.",
        default="json",
    )
    yield value_option("-o --output", PATH, "FILE", "The placement file.")
    yield value_option("--heat-map", PATH, "FILE", "Picture of the GPU loads, SVG.")
    yield click.option("--force", is_flag=True, help="Replace files that are already there.")


def _cache_options() -> Options:
    yield value_option(
        "--cache", PATH, "DIR", "Folder of kept answers; by default in the user's cache folder."
    )
    yield click.option("--no-cache", is_flag=True, help="Keep no answers, use none.")


def _workers() -> Option:
    workers_help = "Processes; one for each core by default."
    return click.option("--workers", type=_PROCESSES, metavar="N", help=workers_help)


def _time_limit(words: str, default_s: float | None = None) -> Option:
    settings: dict[str, Any] = {"default": default_s, "show_default": True}
    return value_option("--time-limit time_limit_s", float, "S", words, **settings)


def _seed() -> Option:
    return default_option("--seed", int, 0, "N", "Seed of the solver.")


# The commands in groups, each with an example that `--help` shows and a test parses.


LONGEST_LINE = 70

GROUPS: Mapping[str, Mapping[str, str]] = {
    "Plan": {
        "plan": "plan llama-3-8b --cluster dgx-h100 --gpus 64 --global-batch 256 --seq-len 8192 -o run",
        "recommend": "recommend llama-3-8b --cluster dgx-h100 --gpus 64 --global-batch 256 --seq-len 8192"
        " --step-time 5",
        "batch": "batch jobs.yaml -o plans",
        "fleet": "fleet jobs.yaml --cluster superpod-h100 --gpus 128 -o shared",
        "experts": "experts loads.npz --cluster dgx-h100 --gpus 64 --slots 320 --format json -o out.json",
        "serve": "serve --open",
        "mcp": "mcp --folder plans",
    },
    "Ask about a plan": {
        "compare": "compare run/plan.yaml today.sh --tokens 2e12",
        "explain": "explain run/plan.yaml",
        "report": "report run/plan.yaml -o plan.html",
        "trace": "trace run/plan.yaml -o trace.json",
        "traffic": "traffic run/plan.yaml",
        "map": "map run/plan.yaml --cluster nodes.yaml",
        "verify": "verify run",
    },
    "Start it, and learn from it": {
        "launch": "launch run/plan.yaml --target slurm -o job",
        "estimate": "estimate today.sh --from-launch --with cluster=dgx-h100",
        "validate": "validate runs.yaml",
        "calibrate": "calibrate runs.yaml -o stack.yaml",
    },
    "Single formulas": {
        "collective": "collective --op all-reduce --bytes 1G --ranks 64 --cluster dgx-h100",
        "roofline": "roofline --device h100-sxm-80gb --m 4096 --n 4096 --k 4096",
        "pipeline": "pipeline --pp 8 --micro-batches 32",
        "overlap": "overlap --comm 30ms --compute 100ms",
        "volumes": "volumes --params 7e9 --layers 32 --hidden 4096 --heads 32 --tp 8 --dp 8",
        "compress": "compress --bytes 16GB --ranks 64 --beta 50GB/s",
        "memory": "memory run.yaml",
    },
    "Models, clusters, files": {
        "catalog": "catalog models",
        "model": "model config.json",
        "topology": "topology import topology.conf --from slurm --node dgx-h100 -o cluster.yaml",
        "schema": "schema cluster",
    },
}
"""Title of a group, then commands with an example of each, written without the program's name."""


def example_of(command: str) -> str:
    """The example of a command, in lines that a shell joins; empty where it has none.

    Parameters
    ----------
    command
        Its name, as it is typed behind `meshwright`.
    """
    for examples in GROUPS.values():
        if command in examples:
            return _in_lines(f"meshwright {examples[command]}")
    return ""


def _in_lines(words: str) -> str:
    """A command line cut before options, with a backslash at the end of each line but the last."""
    lines = [""]
    for part in re.split(r" (?=-)", words):
        if len(lines[-1]) + len(part) > LONGEST_LINE:
            lines[-1] += " \\"
            lines.append(f"    {part}")
        else:
            lines[-1] = f"{lines[-1]} {part}" if lines[-1] else part
    return "\n".join(f"  {line}" for line in lines)
