"""Where experts go."""

from __future__ import annotations

from typing import Any

import click

from meshwright.commands.options import experts_options
from meshwright.commands.terminal import PATH, ProgressLine, common, print_json, show, warn


@click.command()
@click.argument("loads", type=PATH, metavar="LOADS")
@experts_options
@common
def experts(as_json: bool, **options: Any) -> None:
    """Place experts on GPUs from measured LOADS: even, with a bound, and with little traffic."""
    from meshwright.planner.experts.command import experts_view, run_experts

    progress = ProgressLine()
    try:
        found = run_experts(progress=progress, **options)
    finally:
        progress.clear()
    warn("warning", found.warnings)
    print_json(found.document) if as_json else show(experts_view(found.document))
