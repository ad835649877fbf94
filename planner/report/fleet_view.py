"""What a fleet shows: which job got what, and how good that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.planner.drawing.quantities import counted, hours, percent, seconds
from meshwright.planner.many.fleet.service import Fleet, fleet_document
from meshwright.planner.report.cost_words import cost_columns
from meshwright.planner.report.plan_words import row_host_words
from meshwright.planner.report.view import (
    COUNT,
    NUMBER,
    SECONDS,
    Column,
    Kind,
    Table,
    View,
    line,
    percents,
)

Document = Mapping[str, Any]


def fleet_view(fleet: Fleet) -> View:
    """The jobs in a table, then the objective with its proof, the leaves, and what it took."""
    document = fleet_document(fleet)
    leaves = document["leaves_touched"]
    bound = document["least_leaves_touched"]
    proof = "the fewest" if bound == leaves else f"at least {bound}"
    planning, solving = seconds(fleet.planning_s), seconds(fleet.solving_s)
    hosts = [
        f"{job['name']} needs {words}" for job in document["jobs"] if (words := row_host_words(job))
    ]
    return [
        _jobs(document["jobs"], scheduled=fleet.objective != "throughput"),
        *_reasons(document["jobs"]),
        line(),
        *map(line, hosts),
        line(_objective(document)),
        line(f"Leaves that jobs touch, in all: {leaves}, {proof} for these sizes."),
        line(f"{fleet.planned} plans in {planning}, shared out in {solving}."),
    ]


def _jobs(jobs: list[Document], *, scheduled: bool) -> Table:
    columns = {
        "name": Column("job"),
        "gpus": Column("GPUs", NUMBER),
        "tokens_per_s": Column("tokens/s", COUNT),
        "share_of_best": Column("of its best", percents(0)),
    }
    if scheduled:
        columns["start_s"] = Column("start", Kind(hours), absent="")
        columns["end_s"] = Column("end", Kind(hours), absent="")
        columns["late_s"] = Column("late", Kind(hours), absent="")
    else:
        columns["step_time_s"] = Column("step", SECONDS, absent="")
    columns |= cost_columns(jobs)
    columns["leaves"] = Column("leaves", Kind(lambda leaves: str(len(leaves))))
    rows = []
    for job in jobs:
        row = {name: job[name] for name in columns}
        if not job["gpus"] and not job["reason"]:
            row["name"] += f" ({job['status']})"
        if not job["late_s"] and scheduled:
            row["late_s"] = None
        rows.append(list(row.values()))
    return Table(list(columns.values()), rows)


def _reasons(jobs: list[Document]) -> View:
    """Why jobs have no plan; the others were shared out without them."""
    return [
        line(f"{job['name']} ({job['status']}): {job['reason']}") for job in jobs if job["reason"]
    ]


def _objective(document: Document) -> str:
    jobs, objective = document["jobs"], document["objective"]
    value = objective["value"]
    proof = "optimal"
    if document["sizes_left_out"]:
        proof = f"of the sizes planned in time, {document['sizes_left_out']} were left out"
    elif document["sizes_not_proven"]:
        proof = f"of the plans found, {document['sizes_not_proven']} are not proven to be the best"
    elif objective["status"] != "optimal":
        proof = f"within {percent(objective['gap'], 2)} of the best"
    results = {
        "throughput": f"weighted throughput {value:.4g}, {proof}",
        "makespan": f"all done after {hours(value)}, {proof}",
        "deadlines": f"all done after {hours(value)}; time past deadlines comes first; {proof}",
    }
    blocks = f"{document['units_used']} of {document['units']} blocks"
    size = document["gpus_per_unit"]
    result = results[objective["name"]]
    planned = counted(sum(not job["reason"] for job in jobs), "job")
    return f"{planned} on {blocks} of {size} GPUs: {result}."
