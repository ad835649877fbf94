"""`experts`: places, writes the files that were asked for, prints."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.commands.options import experts_options
from meshwright.commands.terminal import PATH, ProgressLine, common, print_json, show, warn
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.planner.experts.service import ExpertPlan


@click.command()
@click.argument("loads", type=PATH, metavar="LOADS")
@experts_options
@common
def experts(
    as_json: bool,
    form: str,
    output: Path | None,
    heat_map: Path | None,
    force: bool,
    **options: Any,
) -> None:
    """Place experts on GPUs from measured LOADS: even, with a bound, and with little traffic."""
    from meshwright.planner.experts.request import ExpertRequest
    from meshwright.planner.experts.service import plan_experts
    from meshwright.planner.report.experts_view import experts_view

    _check_output(form, output, heat_map, force)
    progress = ProgressLine()
    try:
        plan = plan_experts(ExpertRequest(**options), progress)
    finally:
        progress.clear()
    _write(plan, form, output, heat_map, force)
    warn("warning", plan.warnings)
    if as_json:
        print_json(plan.document)
    else:
        show(experts_view(plan))


def _check_output(form: str, output: Path | None, heat_map: Path | None, force: bool) -> None:
    """Raises before anything is solved if the files could not be written."""
    from meshwright.planner.experts.files.writers import PLACEMENT_FORMATS

    if form not in PLACEMENT_FORMATS:
        near = get_close_matches(form[:40], PLACEMENT_FORMATS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        allowed = ", ".join(PLACEMENT_FORMATS)
        raise InputError(f"format: no format {form[:40]!r}{hint}; allowed: {allowed}")
    for path in (output, heat_map):
        if path is not None and path.exists() and not force:
            raise InputError(f"{path} is already there. Choose another name, or say --force.")
    if heat_map is not None and heat_map.suffix.lower() not in (".png", ".svg"):
        raise InputError(f"heat-map: must end in .png or .svg, got {heat_map.name[:60]!r}")


def _write(
    plan: ExpertPlan, form: str, output: Path | None, heat_map: Path | None, force: bool
) -> None:
    from meshwright.documents.output_files import write_files
    from meshwright.planner.experts.files.writers import placement_text

    if output is not None:
        write_files(output.parent, {output.name: placement_text(plan.placed, form)}, force)
    if heat_map is not None:
        from meshwright.planner.report.heat_map import write_heat_map

        write_heat_map(heat_map, plan.gpu_share)
