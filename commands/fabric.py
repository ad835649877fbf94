"""Where ranks go on a fabric, what starts them there, and what crosses it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.commands.options import (
    PATH,
    choice_option,
    default_option,
    experts_options,
    placing_options,
    value_option,
)
from meshwright.commands.terminal import (
    ProgressLine,
    answer,
    common,
    force_option,
    give,
    print_json,
    say,
    warn,
    warn_of_edits,
    why_option,
    write_plan,
)
from meshwright.errors import ExitCode, InputError

if TYPE_CHECKING:
    from meshwright.planner.experts.service import ExpertPlan


@click.command("map")
@click.argument("plan", type=PATH, metavar="PLAN")
@placing_options
@choice_option(
    "--objective",
    "planner.analysis.traffic.OBJECTIVES",
    "traffic: all up-links' time together. "
    "spread: pods, then leaves, that a group touches at most, then traffic.",
    default="traffic",
)
@default_option(
    "--dp-weight",
    click.FloatRange(0.0, 1.0),
    0.5,
    "A",
    "Objective spread: what a data-parallel group's reach counts; a pipeline's counts 1 - A.",
)
@default_option("--spares", int, 0, "K", "Nodes to keep free.")
@choice_option(
    "--order",
    "planner.analysis.traffic.ORDERS",
    "hostname leaves no choice at all.",
    default="best",
)
@default_option(
    "--time-limit time_limit_s", click.FloatRange(0.1, 86_400), 30.0, "S", "Seconds for the search."
)
@value_option("-o --output", PATH, "DIR", "Folder for the plan with its new mapping.")
@force_option
@common
def map_(
    *,
    plan: Path,
    cluster: str | None,
    nodes: str | None,
    dp_weight: float,
    output: Path | None,
    force: bool,
    as_json: bool,
    **search: Any,
) -> None:
    """Place the ranks of a plan's layout on a cluster's free nodes, with a bound.

    Which nodes form which pipeline stage and replica is chosen so that the least time is spent on the
    up-links of leaves and pods, or groups reach few of them; hostname order is printed beside it. The plan is
    priced on its new places. A pipeline through parts of a mixed cluster keeps to the nodes of each part in
    turn; what other places could spare is said.
    """
    with ProgressLine("starting"):
        from meshwright.documents import refuse_taken
        from meshwright.planner.analysis.traffic import (
            map_parts,
            map_plan,
            mapped_parts_document,
            mapping_document,
            nodes_to_place_on,
        )
        from meshwright.planner.launch.plan_files import MIXED_FILES, PLAN_FILES, plan_files
        from meshwright.planner.mapping.spread_build import ReachWeights
        from meshwright.planner.mixed.document import MixedPlan, read_any_plan
        from meshwright.planner.report.traffic_view import mapped_parts_view, mapping_view

    laid_out = read_any_plan(plan)
    warn_of_edits(laid_out)
    if isinstance(laid_out, MixedPlan):
        _check_places_in_turn(search)
        if output is not None:
            refuse_taken(output, MIXED_FILES, force)
        with ProgressLine("placing ranks"):
            on_parts = map_parts(laid_out, cluster, nodes, time_limit_s=search["time_limit_s"])
            document = mapped_parts_document(on_parts)
        give(as_json, document, partial(mapped_parts_view, document))
        if output is not None:
            write_plan(output, plan_files(on_parts.plan), force)
        return
    onto = nodes_to_place_on(laid_out, cluster, nodes)
    if output is not None:
        refuse_taken(output, PLAN_FILES, force)
    weights = ReachWeights.of(dp_weight)
    with ProgressLine("placing ranks"):
        mapped = map_plan(laid_out, onto, weights=weights, **search)
        document = mapping_document(mapped)
    give(as_json, document, partial(mapping_view, document))
    if output is not None:
        write_plan(output, plan_files(mapped.plan), force)


def _check_places_in_turn(search: dict[str, Any]) -> None:
    """Raises InputError for what a pipeline through parts cannot have, as it keeps to nodes in turn."""
    for name, plain in (("objective", "traffic"), ("spares", 0)):
        if search[name] != plain:
            what = (
                "does not go with a pipeline through parts, whose ranks run through the nodes of each in "
                "turn: say with --nodes which these are"
            )
            raise InputError(what, where=f"--{name}", value=search[name])


@click.command("launch")
@click.argument("plan", type=PATH, metavar="PLAN")
@choice_option(
    "--target",
    "planner.launch.plan_files.TARGETS",
    "A framework or scheduler; by default the plan's framework.",
)
@click.option(
    "-o", "--output", type=PATH, metavar="DIR", required=True, help="Folder for the files."
)
@placing_options
@force_option
@common
def launch_command(
    *,
    plan: Path,
    target: str | None,
    cluster: str | None,
    nodes: str | None,
    output: Path,
    force: bool,
    as_json: bool,
) -> None:
    """Write the files that start a plan in a framework.

    With --nodes or --cluster its ranks are placed there first, as `map` does, and the plan is priced there.
    A plan on a mixed cluster is started by its own framework, on nodes of its own parts.
    """
    from meshwright.documents import write_files
    from meshwright.planner.analysis.traffic import moved
    from meshwright.planner.launch.plan_files import plan_files
    from meshwright.planner.mixed.document import read_any_plan

    with ProgressLine("placing ranks" if cluster or nodes else "writing launch files"):
        planned = read_any_plan(plan)
        warn_of_edits(planned)
        files = plan_files(moved(planned, cluster, nodes), target)
    write_files(output, files, force)
    if as_json:
        print_json({"target": target, "directory": str(output), "files": list(files)})
    else:
        say("\n".join(str(output / name) for name in files))


@click.command("traffic")
@click.argument("plan", type=PATH, metavar="PLAN")
@value_option(
    "--matrix",
    PATH,
    "FILE.csv",
    "Write the bytes of a step from rank to rank: source,target,bytes.",
)
@force_option
@why_option
@common
@click.pass_context
def traffic_command(
    ctx: click.Context,
    /,
    *,
    plan: Path,
    matrix: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Show what a plan sends over every level of the fabric: bytes, links busy, and what each cut allows.

    Exit code 1 where what must cross a cut within a phase takes longer than the phase.
    """
    with ProgressLine("starting"):
        from meshwright.planner.analysis.traffic import traffic_of
        from meshwright.planner.mixed.document import read_any_plan
        from meshwright.planner.report.traffic_view import traffic_view

    with ProgressLine("counting what every rank sends"):
        planned = read_any_plan(plan)
        warn_of_edits(planned)
        traffic = traffic_of(planned)
        if matrix is not None:
            from meshwright.documents import write_files
            from meshwright.planner.analysis.traffic import rank_matrix_csv

            text = rank_matrix_csv(traffic.axes, traffic.ranks)
            write_files(matrix.parent, {matrix.name: text}, force)
    if not as_json:
        warn("warning", traffic.broken)
    answer(traffic.document(), traffic_view, "traffic")
    ctx.exit(ExitCode.NO_ANSWER if traffic.broken else ExitCode.DONE)


# `experts`: places, writes the files that were asked for, prints.


@click.command("experts")
@click.argument("loads", type=PATH, metavar="LOADS")
@experts_options
@why_option
@common
def experts_command(
    *,
    as_json: bool,
    form: str,
    output: Path | None,
    heat_map: Path | None,
    force: bool,
    **options: Any,
) -> None:
    """Place experts on GPUs from measured LOADS: even, with a bound, and with little traffic."""
    with ProgressLine("starting"):
        from meshwright.api import place_experts
        from meshwright.planner.report.traffic_view import experts_view

    from meshwright.documents import refuse_taken_file

    for path in (output, heat_map):
        if path is not None:
            refuse_taken_file(path, force)
    if heat_map is not None and heat_map.suffix.lower() != ".svg":
        raise InputError(f"heat-map: must end in .svg, got {heat_map.name[:60]!r}")
    with ProgressLine("placing experts") as progress:
        plan = place_experts(progress=progress, **options)
    _write(plan, form, output, heat_map, force)
    warn("warning", plan.warnings)
    answer(plan.document, experts_view, "experts")
    if output is not None and not as_json:
        from meshwright.planner.experts.placements import READERS

        say(f"\n{output}, for {READERS[form].replace('FILE', str(output))}")


def _write(
    plan: ExpertPlan, form: str, output: Path | None, heat_map: Path | None, force: bool
) -> None:
    from meshwright.documents import write_files
    from meshwright.planner.experts.placements import placement_text

    if output is not None:
        write_files(output.parent, {output.name: placement_text(plan.placed, form)}, force)
    if heat_map is not None:
        from meshwright.planner.report.traffic_view import heat_map_svg

        write_files(heat_map.parent, {heat_map.name: heat_map_svg(plan.gpu_share)}, force)
