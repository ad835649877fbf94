"""What `experts` does between parsing and printing: place, write the files, hand back views and document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.documents.output_files import write_files
from meshwright.errors import InputError
from meshwright.planner.experts.files.writers import FORMATS, placement_text
from meshwright.planner.experts.request import ExpertRequest
from meshwright.planner.experts.service import ExpertPlan, plan_experts
from meshwright.planner.report.experts_view import experts_view

__all__ = ["experts_view", "run_experts"]


def run_experts(
    *,
    loads: Path,
    form: str,
    output: Path | None,
    heat_map: Path | None,
    force: bool,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> ExpertPlan:
    """Places, then writes the files that were asked for. Checks before solving that they can be written."""
    if form not in FORMATS:
        from difflib import get_close_matches

        near = get_close_matches(form[:40], FORMATS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"format: no format {form[:40]!r}{hint}; allowed: {', '.join(FORMATS)}")
    for path in (output, heat_map):
        if path is not None and path.exists() and not force:
            raise InputError(f"{path} is already there. Choose another name, or say --force.")
    if heat_map is not None and heat_map.suffix.lower() != ".svg":
        raise InputError(f"heat-map: must end in .svg, got {heat_map.name[:60]!r}")
    found = plan_experts(ExpertRequest(loads=loads, **options), progress)
    if output is not None:
        write_files(output.parent, {output.name: placement_text(found.placed, form)}, force)
    if heat_map is not None:
        from meshwright.planner.report.heat_map import heat_map_svg

        write_files(heat_map.parent, {heat_map.name: heat_map_svg(found.gpu_share)}, force)
    return found
