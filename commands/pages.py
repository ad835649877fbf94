"""A plan drawn: as a page, and its step as a timeline."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.commands.options import calibration_option
from meshwright.commands.terminal import PATH, common, force_option, print_json


@click.command()
@click.argument("plan", type=PATH, metavar="PLAN")
@click.option("-o", "--output", type=PATH, metavar="FILE", required=True, help="The page, HTML.")
@click.option(
    "--sweep",
    is_flag=False,
    flag_value="",
    metavar="[OPTIONS]",
    help="With controls over other plans: half and twice of everything, or e.g. gpus=256:2048:x2.",
)
@calibration_option
@force_option
@common
def report(
    plan: Path,
    *,
    output: Path,
    sweep: str | None,
    calibration: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a plan as one page: charts, what-if controls, figures, reasons. It loads nothing.

    --sweep plans beforehand for other GPUs, batches, sequences, precisions, networks and HBM; the page has
    a control for each.
    """
    from meshwright.commands.mixed import mixed_page_of
    from meshwright.documents.output_files import refuse_taken, write_files
    from meshwright.planner.many.sweep.what_if import what_if
    from meshwright.planner.mixed.texts import mixed_plan_path
    from meshwright.planner.plan.repriced import repriced
    from meshwright.planner.plan.texts import read_feasible_plan
    from meshwright.planner.report.plan_page import plan_page
    from meshwright.planner.request.calibration_file import read_calibration

    refuse_taken(output.parent, [output.name], force)
    mixed = mixed_plan_path(plan)
    if mixed is not None:
        text = mixed_page_of(mixed, sweep=sweep, calibration=calibration)
    else:
        shown = repriced(read_feasible_plan(plan), read_calibration(calibration))
        other_plans = None if sweep is None else what_if(shown, sweep or None)
        text = plan_page(shown, other_plans)
    write_files(output.parent, {output.name: text}, force)
    if as_json:
        print_json({"file": str(output), "bytes": len(text.encode())})
    else:
        click.echo(str(output))


@click.command()
@click.argument("plan", type=PATH, metavar="PLAN")
@click.option("-o", "--output", type=PATH, metavar="FILE", required=True, help="The trace, JSON.")
@click.option(
    "--micro-batches",
    "num_micro_batches",
    type=int,
    metavar="N",
    help="Draw the first N; all when absent.",
)
@force_option
@common
def trace(
    plan: Path, output: Path, num_micro_batches: int | None, force: bool, as_json: bool
) -> None:
    """Draw a plan's step: every pass on every pipeline rank, communication, the optimizer and memory.

    FILE is in Chrome's trace format: open it in Perfetto (ui.perfetto.dev) or chrome://tracing.
    """
    import json

    from meshwright.documents.output_files import refuse_taken, write_files
    from meshwright.planner.analysis.timeline import trace_of
    from meshwright.planner.analysis.trace_events import trace_document
    from meshwright.planner.drawing.quantities import counted, seconds
    from meshwright.planner.plan.texts import read_feasible_plan

    refuse_taken(output.parent, [output.name], force)
    played = trace_of(read_feasible_plan(plan), num_micro_batches)
    document = trace_document(played)
    write_files(
        output.parent, {output.name: json.dumps(document, separators=(",", ":")) + "\n"}, force
    )
    events = len(document["traceEvents"])
    if as_json:
        print_json({"file": str(output), "events": events, **document["otherData"]})
        return
    micro_batches = counted(played.num_micro_batches, "micro-batch", "micro-batches")
    click.echo(
        f"{output}: {micro_batches} on {counted(played.pp, 'pipeline rank')}, "
        f"{seconds(played.seconds)} drawn, {seconds(played.step_time_s)} predicted"
    )
