"""The single-formula calculators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.commands.parameters import ChoiceIn
from meshwright.commands.terminal import PATH, common, print_json, show

if TYPE_CHECKING:
    from meshwright.planner.calculators.textbook import Network
    from meshwright.planner.report.view import View

why_option = click.option(
    "--why", is_flag=True, help="Say the formula and the source of every number."
)
_JOINED = ("allreduce", "allgather", "alltoall", "reducescatter")


def _answer(
    document: dict[str, Any],
    view: Callable[[dict[str, Any]], View],
    calculator: str,
    *,
    as_json: bool,
    why: bool,
) -> None:
    """Prints the answer of a calculator, and with `why` what is behind it."""
    if why:
        from meshwright.planner.calculators.formulas import formulas

        document["formulas"] = formulas(calculator, document.get("operation"))
    if as_json:
        print_json(document)
        return
    from meshwright.planner.report.calculators_view import formulas_view

    show([*view(document), *formulas_view(document.get("formulas", []))])


def operation_word(text: str) -> str:
    """The name of a collective that nccl-tests writes as `all_reduce_perf` or `alltoall`."""
    word = text.lower().removesuffix("_perf").replace("_", "-")
    if word in _JOINED:
        for first in ("all", "reduce"):
            word = word.replace(first, f"{first}-", 1) if word.startswith(first) else word
        return word.replace("all-to", "all-to-")
    return "send" if word in ("sendrecv", "send-recv") else word


@click.command()
@click.option(
    "--op",
    "operation",
    type=ChoiceIn("costmodel.collectives.nccl", "OPERATIONS", operation_word),
    required=True,
    help="Also as nccl-tests writes it: all_reduce, alltoall.",
)
@click.option("--bytes", "size", required=True, metavar="N", help="Full buffer: 1GiB, 512MB, 1G.")
@click.option("--end", metavar="N", help="Sweep sizes from --bytes up to this one.")
@click.option(
    "--factor",
    type=click.FloatRange(1.1, 1024),
    default=2.0,
    show_default=True,
    metavar="F",
    help="From one size of the sweep to the next.",
)
@click.option("--ranks", type=int, required=True, metavar="P", help="Members, packed tightly.")
@click.option("--cluster", help="Catalog name or cluster YAML; or give a link of your own.")
@click.option(
    "--link", type=ChoiceIn("planner.calculators.links", "LINKS"), help="A link by its name."
)
@click.option("--alpha", metavar="T", help="Start-up of a message on a link of your own: 1.5us.")
@click.option("--beta", metavar="R", help="Its rate, 50GB/s or 400Gb/s, or seconds a byte.")
@click.option("--gamma", metavar="R", help="Reduction, as --beta; free when absent.")
@click.option(
    "--per-node", type=int, default=1, metavar="G", help="Ranks of a node, which share the link."
)
@click.option("--inside-alpha", default="1us", show_default=True, metavar="T", help="In a node.")
@click.option("--inside-beta", default="450GB/s", show_default=True, metavar="R", help="In a node.")
@click.option("--in-switch", is_flag=True, help="The link's switches reduce (NVLS, SHARP).")
@click.option("--nccl", is_flag=True, help="All-to-all by NCCL, not DeepEP's kernels.")
@click.option("--picture", type=PATH, metavar="FILE.svg", help="Draw the sweep.")
@why_option
@common
def collective(
    *,
    operation: str,
    size: str,
    end: str | None,
    factor: float,
    ranks: int,
    cluster: str | None,
    nccl: bool,
    picture: Path | None,
    why: bool,
    as_json: bool,
    **network: Any,
) -> None:
    """Time one collective alone, by algorithm: on a cluster, or on a link of your own."""
    from meshwright.planner.calculators.sizes import read_sizes
    from meshwright.planner.report.calculators_view import collective_view

    sizes_bytes = read_sizes(size, end, factor)
    if (cluster is None) == (network["link"] is None and network["beta"] is None):
        raise click.UsageError("give either --cluster, or --link or --alpha and --beta")
    if cluster is None:
        from meshwright.planner.calculators.textbook import textbook_document

        document = textbook_document(operation, sizes_bytes, ranks, _network(**network))
    else:
        from meshwright.planner.calculators.collective import collective_document

        document = collective_document(
            operation, sizes_bytes, ranks, cluster, deduplicated=not nccl
        )
    if picture is not None:
        from meshwright.documents.output_files import write_files
        from meshwright.planner.report.sweep_picture import sweep_picture

        write_files(picture.parent, {picture.name: sweep_picture(document)}, True)
    _answer(document, collective_view, "collective", as_json=as_json, why=why)


def _network(
    *,
    link: str | None,
    alpha: str | None,
    beta: str | None,
    gamma: str | None,
    per_node: int,
    inside_alpha: str,
    inside_beta: str,
    in_switch: bool,
) -> Network:
    """The network that the options describe."""
    from dataclasses import replace

    from meshwright.costmodel.collectives.alpha_beta import Link
    from meshwright.planner.calculators.links import link_named
    from meshwright.planner.calculators.sizes import read_rate, read_seconds
    from meshwright.planner.calculators.textbook import Network

    own = Link(alpha_s=0.0, bytes_per_s=1.0) if link is None else link_named(link)
    if alpha is not None:
        own = replace(own, alpha_s=read_seconds(alpha, "--alpha"))
    if beta is not None:
        own = replace(own, bytes_per_s=read_rate(beta, "--beta"))
    if gamma is not None:
        own = replace(own, gamma_s_per_byte=1.0 / read_rate(gamma, "--gamma"))
    inside = Link(
        alpha_s=read_seconds(inside_alpha, "--inside-alpha"),
        bytes_per_s=read_rate(inside_beta, "--inside-beta"),
    )
    return Network(link=own, inside=inside, per_node=per_node, in_switch=in_switch)


@click.command()
@click.option(
    "--device", required=True, metavar="D", help="Name from `meshwright catalog devices`."
)
@click.option("--m", type=int, required=True, metavar="M", help="Rows of the result.")
@click.option("--n", type=int, required=True, metavar="N", help="Columns of the result.")
@click.option("--k", type=int, required=True, metavar="K", help="Depth of the product.")
@click.option(
    "--precision",
    type=ChoiceIn("planner.calculators.roofline", "ELEMENT_BYTES"),
    default="bf16",
    show_default=True,
)
@why_option
@common
def roofline(
    *, device: str, m: int, n: int, k: int, precision: str, why: bool, as_json: bool
) -> None:
    """Place one matrix product under a device's roofline."""
    from meshwright.planner.calculators.roofline import roofline_document
    from meshwright.planner.report.calculators_view import roofline_view

    document = roofline_document(device, m, n, k, precision)
    _answer(document, roofline_view, "roofline", as_json=as_json, why=why)


@click.command()
@click.option("--pp", type=int, required=True, metavar="P", help="Pipeline ranks.")
@click.option(
    "--vpp", type=int, default=1, show_default=True, metavar="V", help="Virtual stages of a rank."
)
@click.option(
    "--micro-batches", type=int, required=True, metavar="M", help="Micro-batches of a step."
)
@click.option(
    "--schedule",
    type=ChoiceIn("costmodel.pipeline.schedules", "SCHEDULE_NAMES"),
    default="1f1b",
    show_default=True,
)
@click.option(
    "--forward-ms", type=float, default=1.0, show_default=True, metavar="F", help="Of a rank."
)
@click.option(
    "--backward-ms", type=float, default=2.0, show_default=True, metavar="B", help="Of a rank."
)
@why_option
@common
def pipeline(
    *,
    pp: int,
    vpp: int,
    micro_batches: int,
    schedule: str,
    forward_ms: float,
    backward_ms: float,
    why: bool,
    as_json: bool,
) -> None:
    """Play one pipeline schedule: step, bubble, activations in flight."""
    from meshwright.planner.calculators.pipeline import pipeline_document
    from meshwright.planner.report.calculators_view import pipeline_view

    document = pipeline_document(
        schedule, pp, vpp, micro_batches, forward_s=forward_ms / 1e3, backward_s=backward_ms / 1e3
    )
    _answer(document, pipeline_view, "pipeline", as_json=as_json, why=why)


@click.command()
@click.argument("run", type=PATH, metavar="RUN.yaml")
@why_option
@common
def memory(run: Path, why: bool, as_json: bool) -> None:
    """Break down the memory of one fully given configuration, by stage and component."""
    from meshwright.planner.calculators.memory import memory_document
    from meshwright.planner.report.calculators_view import memory_view
    from meshwright.planner.runs.prediction import price_runs

    documents = [
        memory_document(
            priced.run.id,
            priced.run.workload,
            priced.prediction.memory_parts_gib,
            priced.prediction.context_gib,
        )
        for priced in price_runs(run)
    ]
    if as_json and len(documents) > 1:
        print_json({"runs": documents})
        return
    for document in documents:
        _answer(document, memory_view, "memory", as_json=as_json, why=why)
