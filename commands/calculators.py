"""The single-formula calculators."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import click

import meshwright
from meshwright.commands.options import (
    PATH,
    Amount,
    ChoiceIn,
    NumberList,
    calibration_option,
    choice_option,
    complete_cluster,
    default_option,
    value_option,
)
from meshwright.commands.terminal import answer, answered

_BYTES, _SECONDS, _RATE = Amount("bytes"), Amount("seconds"), Amount("rate")
_JOINED = ("allreduce", "allgather", "alltoall", "reducescatter")


def _show(calculator: str, document: dict[str, Any]) -> None:
    """Prints what a calculator answers, by its view and with its formulas where they are asked for."""
    views = import_module("meshwright.planner.report.calculators_view")
    answer(document, getattr(views, f"{calculator}_view"), calculator)


def operation_word(text: str) -> str:
    """The name of a collective that nccl-tests writes as `all_reduce_perf` or `alltoall`.

    Parameters
    ----------
    text
        In any case of letters, with or without `_perf`.
    """
    word = text.lower().removesuffix("_perf").replace("_", "-")
    if word in _JOINED:
        for first in ("all", "reduce"):
            word = word.replace(first, f"{first}-", 1) if word.startswith(first) else word
        return word.replace("all-to", "all-to-")
    return "send" if word in ("sendrecv", "send-recv") else word


@click.command("collective")
@click.option(
    "--op",
    "operation",
    type=ChoiceIn("costmodel.textbook", "OPERATIONS", operation_word),
    help="Also as nccl-tests writes it: all_reduce, alltoall.",
)
@value_option("--bytes size", _BYTES, "N", "Full buffer: 1GiB, 512MB, 1G.")
@value_option("--end", _BYTES, "N", "Sweep sizes from --bytes up to this one.")
@default_option(
    "--factor", click.FloatRange(1.1, 1024), 2.0, "F", "From one size of the sweep to the next."
)
@click.option("--ranks", type=int, metavar="P", help="Members, packed tightly.")
@value_option("--from log", PATH, "NCCL.log", "Fit alpha and beta to a log of nccl-tests.")
@click.option(
    "--cluster",
    help="Catalog name or cluster YAML; or give a link of your own.",
    shell_complete=complete_cluster,
)
@choice_option("--link", "planner.calculators.collective.LINKS", "A link by its name.")
@value_option("--alpha", _SECONDS, "T", "Start-up of a message on a link of your own: 1.5us.")
@value_option("--beta", _RATE, "R", "Its rate, 50GB/s or 400Gb/s, or seconds a byte.")
@value_option("--gamma", _RATE, "R", "Reduction, as --beta; free when absent.")
@value_option("--per-node", int, "G", "Ranks of a node, which share the link.", default=1)
@default_option("--inside-alpha", _SECONDS, "1us", "T", "In a node.")
@default_option("--inside-beta", _RATE, "450GB/s", "R", "In a node.")
@click.option("--in-switch", is_flag=True, help="The link's switches reduce (NVLS, SHARP).")
@click.option("--nccl", is_flag=True, help="All-to-all by NCCL, not DeepEP's kernels.")
@value_option(
    "--picture", PATH, "FILE.svg", "Draw the sweep, or with --from times measured and fitted."
)
@calibration_option
@answered
def collective_command(*, log: Path | None, picture: Path | None, **question: Any) -> None:
    """Time one collective alone, by algorithm: on a cluster, or on a link of your own.

    Give --op, --bytes and --ranks with a network; or --from, for the link that a log measured.
    """
    document = meshwright.collective(log=log, **question)
    kind = "collective" if log is None else "fitted"
    _draw(picture, "sweep" if log is None else kind, document)
    _show(kind, document)


def _draw(path: Path | None, kind: str, document: dict[str, Any]) -> None:
    """Writes the sweep of a collective, or a log and its fit, as SVG where a file is named."""
    if path is not None:
        from meshwright.documents import write_files

        views = import_module("meshwright.planner.report.calculators_view")
        picture: str = getattr(views, f"{kind}_picture")(document)
        write_files(path.parent, {path.name: picture}, True)


@click.command("roofline")
@click.argument("plan", type=PATH, required=False)
@click.option("--device", metavar="D", help="Name from `meshwright catalog devices`.")
@click.option("--m", type=int, metavar="M", help="Rows of the result.")
@click.option("--n", type=int, metavar="N", help="Columns of the result.")
@click.option("--k", type=int, metavar="K", help="Depth of the product.")
@choice_option("--precision", "costmodel.textbook.ELEMENT_BYTES", default="bf16")
@click.option(
    "--cluster",
    help="Catalog name or cluster YAML: the ridge at each of its levels.",
    shell_complete=complete_cluster,
)
@value_option("--beta", _RATE, "R", "A network of your own: 900GB/s.")
@value_option("--peak-tflops", click.FloatRange(0.001), "F", "Instead of a device's.")
@default_option("--seq-len", int, 2048, "S", "Tokens of a sequence.")
@default_option(
    "--batch batches", NumberList(float), "1,4,16,64,256", "LIST", "Sequences of a rank and step."
)
@click.option("--gradient-bytes", type=float, default=2.0, show_default=True, metavar="B")
@default_option("--efficiency", float, 0.9, "E", "Say the batch that reaches it.")
@answered
def roofline_command(*, plan: Path | None, **question: Any) -> None:
    """Place a matrix product and data parallelism under the roofs of compute, memory and network.

    Give a PLAN, for the products and gradients of it; or --device, --m, --n and --k; or a network.
    """
    _show("roofline", meshwright.roofline(plan, **question))


@click.command("pipeline")
@click.option("--pp", type=int, required=True, metavar="P", help="Pipeline ranks.")
@default_option("--vpp", int, 1, "V", "Virtual stages of a rank.")
@value_option("--micro-batches", int, "M", "Micro-batches of a step.", required=True)
@choice_option("--schedule", "costmodel.execution_names.SCHEDULE_NAMES", default="1f1b")
@default_option("--forward-ms", float, 1.0, "F", "Of a rank.")
@default_option("--backward-ms", float, 2.0, "B", "Of a rank.")
@click.option("--compute-ms", type=float, metavar="C", help="Of a step, a third of it forward.")
@value_option("--boundary-bytes", _BYTES, "N", "Activations of a micro-batch between stages.")
@click.option("--layers", type=int, metavar="L", help="Of the model: the layers of each stage.")
@answered
def pipeline_command(**question: Any) -> None:
    """Play one pipeline schedule: step, bubble, activations in flight, speed needed between stages."""
    _show("pipeline", meshwright.pipeline(**question))


@click.command("memory")
@click.argument("run", type=PATH, metavar="RUN.yaml")
@answered
def memory_command(run: Path) -> None:
    """Break down the memory of one fully given configuration, by stage and component."""
    documents = meshwright.memory(run)
    _show("memory", documents[0] if len(documents) == 1 else {"runs": documents})


# Calculators of overlap, of textbook volumes and of gradient compression.


@click.command("overlap")
@click.argument("plan", type=PATH, required=False)
@value_option("--compute compute_s", _SECONDS, "T", "Compute of a step: 100ms.")
@value_option("--comm comm_s", _SECONDS, "T", "Communication that may run beside it.")
@value_option("--sync sync_s", _SECONDS, "T", "What can run beside nothing.", default="0")
@value_option("--bytes size", _BYTES, "N", "Gradients of a rank, sent in chunks.")
@default_option("--alpha", _SECONDS, "5us", "T", "Start of a chunk.")
@value_option("--beta", _RATE, "R", "Rate of the link: 300GB/s.")
@click.option("--chunks", type=int, metavar="C", help="The best count when absent.")
@default_option("--passes", click.IntRange(1, 2), 2, None, "2: an all-reduce. 1: a reduce-scatter.")
@click.option("--seq-len", type=int, metavar="S", help="Ring attention: tokens of a sequence.")
@click.option("--cp", type=int, default=1, metavar="N", help="Ring attention: ranks.")
@click.option("--width", type=int, metavar="H", help="Ring attention: width of keys.")
@click.option("--element-bytes", type=float, default=2.0, show_default=True, metavar="B")
@answered
def overlap_command(*, plan: Path | None, **question: Any) -> None:
    """Say what communication hides beside compute, in how many chunks, and in which buffers.

    Give a PLAN, for every axis of it; or --compute and --comm; or --bytes and --beta;
    or --seq-len, --cp and --width.
    """
    _show("overlap", meshwright.overlap(plan, **question))


@click.command("volumes")
@value_option("--params", float, "N", "Parameters of the model: 7e9.", default="0")
@click.option("--layers", type=int, default=1, show_default=True, metavar="L")
@click.option("--hidden", type=int, default=0, metavar="H", help="Width of the model.")
@click.option("--heads", type=int, default=0, metavar="A", help="Attention heads.")
@click.option("--seq-len", type=int, default=2048, show_default=True, metavar="S")
@click.option("--micro-batch", type=int, default=1, show_default=True, metavar="B")
@click.option("--dp", type=int, default=1, show_default=True, help="Ranks that ZeRO shards over.")
@default_option("--shard-group", int, 1, "G", "Ranks of a group of hybrid sharding (HSDP).")
@default_option(
    "--gradient-bytes",
    click.FloatRange(0.5, 8),
    2.0,
    "B",
    "Of a gradient as it is added up and sent.",
)
@default_option(
    "--gpu-memory gpu_memory_bytes",
    _BYTES,
    "80GB",
    "N",
    "How many GPUs of this size the states fill.",
)
@click.option("--tp", type=int, default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--ep", type=int, default=1, show_default=True, help="Expert-parallel ranks.")
@click.option("--top-k", type=int, default=1, show_default=True, help="Experts of a token.")
@answered
def volumes_command(**sizes: Any) -> None:
    """Count by the textbook what a GPU holds, and what each kind of parallelism makes it send."""
    _show("volumes", meshwright.volumes(**sizes))


@click.command("compress")
@value_option("--bytes size", _BYTES, "N", "16-bit gradients of a rank.", required=True)
@click.option("--ranks", type=int, required=True, metavar="P", help="Data-parallel ranks.")
@default_option("--alpha", _SECONDS, "5us", "T", "Start of a message.")
@value_option("--beta", _RATE, "R", "Rate between members: 12.5GB/s.", required=True)
@default_option("--codec", _RATE, "500GB/s", "R", "Rate of packing and unpacking.")
@click.option("--keep", type=float, default=0.01, show_default=True, help="Share that top-k sends.")
@click.option("--rank", type=int, default=4, show_default=True, help="Of PowerSGD's factors.")
@click.option("--width", type=int, default=4096, show_default=True, help="Edge of a gradient.")
@answered
def compress_command(**question: Any) -> None:
    """Say when compressed gradients are exchanged sooner: 8 and 4 bits, top-k, PowerSGD."""
    _show("compress", meshwright.compress(**question))
