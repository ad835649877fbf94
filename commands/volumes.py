"""Calculators of overlap, of textbook volumes and of gradient compression."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from meshwright.commands.calculators import answer, why_option
from meshwright.commands.terminal import PATH, common


@click.command()
@click.argument("plan", type=PATH, required=False)
@click.option("--compute", metavar="T", help="Compute of a step: 100ms.")
@click.option("--comm", metavar="T", help="Communication that may run beside it.")
@click.option("--sync", default="0", metavar="T", help="What can run beside nothing.")
@click.option("--bytes", "size", metavar="N", help="Gradients of a rank, sent in chunks.")
@click.option("--alpha", default="5us", show_default=True, metavar="T", help="Start of a chunk.")
@click.option("--beta", metavar="R", help="Rate of the link: 300GB/s.")
@click.option("--chunks", type=int, metavar="C", help="The best count when absent.")
@click.option(
    "--passes",
    type=click.IntRange(1, 2),
    default=2,
    show_default=True,
    help="2: an all-reduce. 1: a reduce-scatter.",
)
@click.option("--seq-len", type=int, metavar="S", help="Ring attention: tokens of a sequence.")
@click.option("--cp", type=int, default=1, metavar="N", help="Ring attention: ranks.")
@click.option("--width", type=int, metavar="H", help="Ring attention: width of keys.")
@click.option("--element-bytes", type=float, default=2.0, show_default=True, metavar="B")
@why_option
@common
def overlap(
    *,
    plan: Path | None,
    compute: str | None,
    comm: str | None,
    sync: str,
    size: str | None,
    alpha: str,
    beta: str | None,
    chunks: int | None,
    passes: int,
    seq_len: int | None,
    cp: int,
    width: int | None,
    element_bytes: float,
    why: bool,
    as_json: bool,
) -> None:
    """Say what communication hides beside compute, in how many chunks, and in which buffers.

    Give a PLAN, for every axis of it; or --compute and --comm; or --bytes and --beta;
    or --seq-len, --cp and --width.
    """
    from meshwright.costmodel.collectives.alpha_beta import Link
    from meshwright.planner.calculators import overlap as documents
    from meshwright.planner.calculators.sizes import read_bytes, read_rate, read_seconds
    from meshwright.planner.report.calculators_view import overlap_view

    compute_s = None if compute is None else read_seconds(compute, "--compute")
    rate = None if beta is None else read_rate(beta, "--beta")
    document: dict[str, Any] = {}
    if plan is not None:
        from meshwright.planner.analysis.overlap import plan_overlap
        from meshwright.planner.plan.texts import read_feasible_plan

        document["plan"] = plan_overlap(read_feasible_plan(plan))
    if compute_s is not None and comm is not None:
        exchange_s, sync_s = read_seconds(comm, "--comm"), read_seconds(sync, "--sync")
        document["step"] = documents.overlap_document(compute_s, exchange_s, sync_s)
    if size is not None and rate is not None:
        link = Link(alpha_s=read_seconds(alpha, "--alpha"), bytes_per_s=rate)
        document["chunks"] = documents.chunks_document(
            read_bytes(size, "--bytes"), link, chunks=chunks, passes=passes, beside_s=compute_s
        )
    if seq_len is not None and width is not None:
        document["ring_attention"] = documents.ring_attention_document(
            seq_len, cp, width, element_bytes, compute_s=compute_s or 0.0, bytes_per_s=rate
        )
    if not document:
        raise click.UsageError(
            "give a plan, --compute and --comm, --bytes and --beta, or --seq-len, --cp and --width"
        )
    answer(document, overlap_view, "overlap", as_json=as_json, why=why)


@click.command()
@click.option(
    "--params", default="0", metavar="N", help="Parameters of the model: 7e9.", type=float
)
@click.option("--layers", type=int, default=1, show_default=True, metavar="L")
@click.option("--hidden", type=int, default=0, metavar="H", help="Width of the model.")
@click.option("--heads", type=int, default=0, metavar="A", help="Attention heads.")
@click.option("--seq-len", type=int, default=2048, show_default=True, metavar="S")
@click.option("--micro-batch", type=int, default=1, show_default=True, metavar="B")
@click.option("--dp", type=int, default=1, show_default=True, help="Ranks that ZeRO shards over.")
@click.option(
    "--shard-group",
    type=int,
    default=1,
    show_default=True,
    metavar="G",
    help="Ranks of a group of hybrid sharding (HSDP).",
)
@click.option(
    "--gradient-bytes",
    type=click.FloatRange(0.5, 8),
    default=2.0,
    show_default=True,
    metavar="B",
    help="Of a gradient as it is added up and sent.",
)
@click.option(
    "--gpu-memory",
    default="80GB",
    show_default=True,
    metavar="N",
    help="How many GPUs of this size the states fill.",
)
@click.option("--tp", type=int, default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--ep", type=int, default=1, show_default=True, help="Expert-parallel ranks.")
@click.option("--top-k", type=int, default=1, show_default=True, help="Experts of a token.")
@why_option
@common
def volumes(*, gpu_memory: str, why: bool, as_json: bool, **sizes: Any) -> None:
    """Count by the textbook what a GPU holds, and what each kind of parallelism makes it send."""
    from meshwright.planner.calculators.sizes import read_bytes
    from meshwright.planner.calculators.volumes import TransformerShape, volumes_document
    from meshwright.planner.report.calculators_view import volumes_view

    memory = read_bytes(gpu_memory, "--gpu-memory")
    document = volumes_document(TransformerShape(gpu_memory_bytes=memory, **sizes))
    answer(document, volumes_view, "volumes", as_json=as_json, why=why)


@click.command()
@click.option("--bytes", "size", required=True, metavar="N", help="16-bit gradients of a rank.")
@click.option("--ranks", type=int, required=True, metavar="P", help="Data-parallel ranks.")
@click.option("--alpha", default="5us", show_default=True, metavar="T", help="Start of a message.")
@click.option("--beta", required=True, metavar="R", help="Rate between members: 12.5GB/s.")
@click.option(
    "--codec",
    default="500GB/s",
    show_default=True,
    metavar="R",
    help="Rate of packing and unpacking.",
)
@click.option("--keep", type=float, default=0.01, show_default=True, help="Share that top-k sends.")
@click.option("--rank", type=int, default=4, show_default=True, help="Of PowerSGD's factors.")
@click.option("--width", type=int, default=4096, show_default=True, help="Edge of a gradient.")
@why_option
@common
def compress(
    *,
    size: str,
    ranks: int,
    alpha: str,
    beta: str,
    codec: str,
    keep: float,
    rank: int,
    width: int,
    why: bool,
    as_json: bool,
) -> None:
    """Say when compressed gradients are exchanged sooner: 8 and 4 bits, top-k, PowerSGD."""
    from meshwright.costmodel.collectives.alpha_beta import Link
    from meshwright.planner.calculators.compression import compression_document
    from meshwright.planner.calculators.sizes import read_bytes, read_rate, read_seconds
    from meshwright.planner.report.calculators_view import compression_view

    link = Link(alpha_s=read_seconds(alpha, "--alpha"), bytes_per_s=read_rate(beta, "--beta"))
    document = compression_document(
        read_bytes(size, "--bytes"),
        ranks,
        link,
        codec_bytes_per_s=read_rate(codec, "--codec"),
        keep=keep,
        rank=rank,
        width=width,
    )
    answer(document, compression_view, "compress", as_json=as_json, why=why)
