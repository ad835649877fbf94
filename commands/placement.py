"""`experts`: places, writes the files that were asked for, prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.commands.calculators import answer, why_option
from meshwright.commands.options import experts_options
from meshwright.commands.terminal import PATH, ProgressLine, common, warn
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.planner.experts.service import ExpertPlan


@click.command("experts")
@click.argument("loads", type=PATH, metavar="LOADS")
@experts_options
@why_option
@common
def experts_command(
    *,
    why: bool,
    as_json: bool,
    form: str,
    output: Path | None,
    heat_map: Path | None,
    force: bool,
    **options: Any,
) -> None:
    """Place experts on GPUs from measured LOADS: even, with a bound, and with little traffic."""
    from meshwright.api import place_experts
    from meshwright.planner.report.experts_view import experts_view

    _check_output(output, heat_map, force)
    progress = ProgressLine()
    try:
        plan = place_experts(progress=progress, **options)
    finally:
        progress.clear()
    _write(plan, form, output, heat_map, force)
    warn("warning", plan.warnings)
    answer(plan.document, experts_view, "experts", as_json=as_json, why=why)
    if output is not None and not as_json:
        from meshwright.planner.experts.files.writers import READERS

        click.echo(f"\n{output}, for {READERS[form].replace('FILE', str(output))}")


def _check_output(output: Path | None, heat_map: Path | None, force: bool) -> None:
    """Raises before anything is solved if the files could not be written."""
    from meshwright.documents.output_files import refuse_taken

    for path in (output, heat_map):
        if path is not None:
            refuse_taken(path.parent, [path.name], force)
    if heat_map is not None and heat_map.suffix.lower() != ".svg":
        raise InputError(f"heat-map: must end in .svg, got {heat_map.name[:60]!r}")


def _write(
    plan: ExpertPlan, form: str, output: Path | None, heat_map: Path | None, force: bool
) -> None:
    from meshwright.documents.output_files import write_files
    from meshwright.planner.experts.files.writers import placement_text

    if output is not None:
        write_files(output.parent, {output.name: placement_text(plan.placed, form)}, force)
    if heat_map is not None:
        from meshwright.planner.report.heat_map import heat_map_svg

        write_files(heat_map.parent, {heat_map.name: heat_map_svg(plan.gpu_share)}, force)
