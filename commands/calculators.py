"""The single-formula calculators."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.commands.parameters import ChoiceIn
from meshwright.commands.terminal import PATH, common, print_json, show


@click.command()
@click.option(
    "--op", "operation", type=ChoiceIn("costmodel.collectives.nccl", "OPERATIONS"), required=True
)
@click.option("--bytes", "size", required=True, metavar="N", help="Full buffer: 1GiB, 512MB.")
@click.option("--ranks", type=int, required=True, metavar="P", help="Members, packed tightly.")
@click.option("--cluster", required=True, help="Catalog name or cluster YAML.")
@click.option("--nccl", is_flag=True, help="All-to-all by NCCL, not DeepEP's kernels.")
@common
def collective(
    *, operation: str, size: str, ranks: int, cluster: str, nccl: bool, as_json: bool
) -> None:
    """Time one collective alone on a cluster, by algorithm."""
    from meshwright.planner.calculators.collective import collective_document
    from meshwright.planner.calculators.sizes import read_bytes
    from meshwright.planner.report.calculators_view import collective_view

    buffer_bytes = read_bytes(size, "--bytes")
    document = collective_document(operation, buffer_bytes, ranks, cluster, deduplicated=not nccl)
    print_json(document) if as_json else show(collective_view(document))


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
@common
def roofline(*, device: str, m: int, n: int, k: int, precision: str, as_json: bool) -> None:
    """Place one matrix product under a device's roofline."""
    from meshwright.planner.calculators.roofline import roofline_document
    from meshwright.planner.report.calculators_view import roofline_view

    document = roofline_document(device, m, n, k, precision)
    print_json(document) if as_json else show(roofline_view(document))


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
@common
def pipeline(
    *,
    pp: int,
    vpp: int,
    micro_batches: int,
    schedule: str,
    forward_ms: float,
    backward_ms: float,
    as_json: bool,
) -> None:
    """Play one pipeline schedule: step, bubble, activations in flight."""
    from meshwright.planner.calculators.pipeline import pipeline_document
    from meshwright.planner.report.calculators_view import pipeline_view

    document = pipeline_document(
        schedule, pp, vpp, micro_batches, forward_s=forward_ms / 1e3, backward_s=backward_ms / 1e3
    )
    print_json(document) if as_json else show(pipeline_view(document))


@click.command()
@click.argument("run", type=PATH, metavar="RUN.yaml")
@common
def memory(run: Path, as_json: bool) -> None:
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
    if as_json:
        print_json(documents[0] if len(documents) == 1 else {"runs": documents})
        return
    for document in documents:
        show(memory_view(document))
