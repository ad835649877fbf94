"""What a fleet shows."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from meshwright.planner.many.fleet.service import Fleet, fleet_document
from meshwright.planner.report.parts import Renderable, counted, percent, seconds


def fleet_view(fleet: Fleet) -> list[Renderable]:
    """Who got what, and how good that is."""
    document = fleet_document(fleet)
    scheduled = fleet.objective != "throughput"
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("job", overflow="fold")
    for name in (
        "GPUs",
        "tokens/s",
        "of its best",
        *(("start", "end") if scheduled else ("step",)),
        "leaves",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for job in document["jobs"]:
        times = (
            [hours(job["start_s"]), hours(job["end_s"])]
            if scheduled
            else [_step(job["step_time_s"])]
        )
        late = f" {hours(job['late_s'])} late" if job["late_s"] else ""
        table.add_row(
            job["name"] + ("" if job["gpus"] else " (waits)"),
            str(job["gpus"]),
            f"{job['tokens_per_s']:,.0f}",
            percent(job["share_of_best"], 0),
            *times[:-1],
            times[-1] + late,
            str(len(job["leaves"])),
        )
    return [table, Text(), *(Text(line) for line in _sums(fleet))]


def _sums(fleet: Fleet) -> list[str]:
    sharing, places = fleet.sharing, fleet.places
    units = len(fleet.floor.units)
    used = {unit for row in places.units for unit in row}
    proof = "optimal" if sharing.proven else f"within {percent(sharing.gap, 2)} of the best"
    what = {
        "throughput": f"weighted throughput {sharing.value:.4g}, {proof}",
        "makespan": f"all done after {hours(sharing.value)}, {proof}",
        "deadlines": f"all done after {hours(sharing.value)}; time past deadlines comes first; {proof}",
    }[fleet.objective]
    least = places.least_leaves
    deal = "the fewest" if least == places.leaves_touched else f"at least {least}"
    size = fleet.floor.gpus_per_unit
    return [
        f"{counted(len(fleet.jobs), 'job')} on {len(used)} of {units} blocks of {size} GPUs: {what}.",
        f"Leaves that jobs touch, in all: {places.leaves_touched}, {deal} for these sizes.",
        f"{fleet.planned} plans in {seconds(fleet.planning_s)}, shared out in {seconds(fleet.solving_s)}.",
    ]


def hours(value_s: float | None) -> str:
    """A time of a schedule: seconds, hours or days."""
    if value_s is None:
        return ""
    for size, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if value_s >= 2 * size:
            return f"{value_s / size:.1f} {name}"
    return f"{value_s:.0f} s"


def _step(value_s: float | None) -> str:
    return "" if value_s is None else seconds(value_s)
