"""Where ranks go on a fabric, and what crosses it."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.commands.calculators import answer, why_option
from meshwright.commands.parameters import ChoiceIn
from meshwright.commands.terminal import (
    PATH,
    common,
    force_option,
    print_json,
    show,
    warn,
    write_plan,
)
from meshwright.errors import ExitCode


@click.command("map")
@click.argument("plan", type=PATH, metavar="PLAN")
@click.option("--cluster", help="Catalog name or cluster YAML; the plan's own cluster when absent.")
@click.option(
    "--objective", type=ChoiceIn("planner.analysis.rank_mapping", "OBJECTIVES"), default="traffic",
    show_default=True,
    help="traffic: all up-links' time together. busiest: the busiest up-link's. "
    "spread: pods, then leaves, that a group touches at most, then traffic.",
)  # fmt: skip
@click.option(
    "--dp-weight", type=click.FloatRange(0.0, 1.0), default=0.5, show_default=True, metavar="A",
    help="Objective spread: what a data-parallel group's reach counts; a pipeline's counts 1 - A.",
)  # fmt: skip
@click.option(
    "--spares", type=int, default=0, show_default=True, metavar="K", help="Nodes to keep free."
)
@click.option(
    "--order",
    type=ChoiceIn("planner.analysis.rank_mapping", "ORDERS"),
    default="best",
    show_default=True,
    help="hostname leaves no choice at all.",
)
@click.option(
    "--time-limit", "time_limit_s", type=click.FloatRange(0.1, 86_400), default=30.0, show_default=True,
    metavar="S", help="Seconds for the search.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=PATH, metavar="DIR", help="Folder for the plan with its new mapping."
)
@force_option
@common
def map_(
    *,
    plan: Path,
    cluster: str | None,
    objective: str,
    dp_weight: float,
    spares: int,
    order: str,
    time_limit_s: float,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Place the ranks of a plan's layout on a cluster's free nodes, with a bound.

    Which nodes form which pipeline stage and replica is chosen so that the least time is spent on the
    up-links of leaves and pods, or groups reach few of them; hostname order is printed beside it.
    """
    from meshwright.cluster_specs.reader import read_cluster
    from meshwright.documents.output_files import refuse_taken
    from meshwright.planner.analysis.rank_mapping import map_plan, mapping_document
    from meshwright.planner.launch.plan_files import PLAN_FILES, plan_files
    from meshwright.planner.mapping.spread.bound import ReachWeights
    from meshwright.planner.plan.texts import read_feasible_plan
    from meshwright.planner.report.mapping_view import mapping_view

    laid_out = read_feasible_plan(plan)
    onto = None if cluster is None else read_cluster(cluster)
    if output is not None:
        refuse_taken(output, PLAN_FILES, force)
    mapped = map_plan(
        laid_out, onto, objective=objective, order=order, spares=spares, time_limit_s=time_limit_s,
        weights=ReachWeights(data_parallel=round(1000 * dp_weight)),
    )  # fmt: skip
    document = mapping_document(mapped)
    print_json(document) if as_json else show(mapping_view(document))
    if output is not None:
        write_plan(output, plan_files(mapped.plan), force)


@click.command()
@click.argument("plan", type=PATH, metavar="PLAN")
@click.option(
    "--matrix", type=PATH, metavar="FILE.csv",
    help="Write the bytes of a step from rank to rank: source,target,bytes.",
)  # fmt: skip
@force_option
@why_option
@common
@click.pass_context
def traffic(
    ctx: click.Context,
    /,
    *,
    plan: Path,
    matrix: Path | None,
    force: bool,
    why: bool,
    as_json: bool,
) -> None:
    """Show what a plan sends over every level of the fabric: bytes, links busy, and what each cut allows.

    Exit code 1 where what must cross a cut within a phase takes longer than the phase.
    """
    from meshwright.planner.analysis.traffic import plan_traffic, traffic_document
    from meshwright.planner.plan.texts import read_feasible_plan
    from meshwright.planner.report.traffic_view import traffic_view

    plan_use = plan_traffic(read_feasible_plan(plan))
    if matrix is not None:
        from meshwright.documents.output_files import write_files
        from meshwright.planner.analysis.traffic_matrix import rank_matrix_csv

        write_files(matrix.parent, {matrix.name: rank_matrix_csv(plan_use.use)}, force)
    if not as_json:
        warn("warning", plan_use.broken)
    document = traffic_document(plan_use)
    answer(document, traffic_view, "traffic", as_json=as_json, why=why)
    ctx.exit(ExitCode.NO_ANSWER if plan_use.broken else ExitCode.DONE)
