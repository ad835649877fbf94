"""A mapping in tables: what it costs on the fabric, beside hostname order."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table
from rich.text import Text

from meshwright.planner.analysis.rank_mapping import MappedPlan
from meshwright.planner.mapping.problem import Loads, Spread, spread_of
from meshwright.planner.mapping.spread.bound import Reach
from meshwright.planner.mapping.spread.least import SpreadSolution
from meshwright.planner.report.parts import Renderable, counted, gigabytes, grid, percent, seconds

_Shown = Callable[[Loads, Spread, Spread], str]


def mapping_view(found: MappedPlan) -> list[Renderable]:
    """The certificate in a sentence, the figures in a table, and what stays idle."""
    problem, slots = found.instance.problem, found.instance.slots
    mapping = found.plan.mapping
    order = "-".join(mapping.order) if mapping is not None else ""
    head = (
        f"{counted(len(found.ranks), 'rank')} in the order {order}: "
        f"{counted(problem.stages, 'stage')} of {counted(problem.slots, 'slot')} of "
        f"{counted(slots.gpus, 'GPU')}; leaves: {len(problem.leaf_slots)}, pods: {problem.pods}"
    )
    return [Text(head), _table(found), Text(_certificate(found)), *_idle(found)]


def _certificate(found: MappedPlan) -> str:
    solution = found.solution
    if isinstance(solution, SpreadSolution):
        return _spread_certificate(solution)
    saved = 1.0 - solution.price_s / solution.hostname_s if solution.hostname_s > 0 else 0.0
    what = "busy up-links" if solution.objective == "traffic" else "the busiest up-link"
    proof = (
        "proven least within the cost model"
        if solution.proven
        else f"bound {seconds(solution.bound_s)}, gap {percent(solution.gap, 2)}"
    )
    return f"{what}: {percent(saved)} less than hostname order; {proof}; {seconds(solution.wall_s)}"


def _spread_certificate(solution: SpreadSolution) -> str:
    parts = []
    for name, reach in (("pods", solution.pods), ("leaves", solution.leaves)):
        proof = "proven least" if reach.proven else f"none before {_pair(reach.bound)}"
        parts.append(
            f"{name}: {_pair(reach.found)}, hostname order {_pair(reach.hostname)}, {proof}"
        )
    more = solution.price_s / solution.hostname_s - 1.0 if solution.hostname_s > 0 else 0.0
    traffic = (
        f"busy up-links: {percent(abs(more))} {'more' if more > 0 else 'less'} than hostname order"
    )
    head = "touched at most (a data-parallel group, a pipeline)"
    return f"{head}: {'; '.join(parts)}; {traffic}; {seconds(solution.wall_s)}"


def _pair(reach: Reach) -> str:
    return f"({reach[0]}, {reach[1]})"


def _table(found: MappedPlan) -> Table:
    solution, problem = found.solution, found.instance.problem
    hostname = problem.hostname_assignment()
    columns = [
        (solution.hostname_loads, spread_of(hostname), spread_of(problem.pod_of[hostname])),
        (
            solution.loads,
            spread_of(solution.assignment),
            spread_of(problem.pod_of[solution.assignment]),
        ),
    ]
    rows = [(name, *(shown(*column) for column in columns)) for name, shown in _rows()]
    return grid(("a step", "hostname order", "this mapping"), rows)


def _rows() -> list[tuple[str, _Shown]]:
    return [
        ("up-links busy, all together", lambda loads, leaves, pods: seconds(loads.total_s)),
        ("busiest up-link busy", lambda loads, leaves, pods: seconds(loads.busiest_s)),
        (
            "sent up from leaves",
            lambda loads, leaves, pods: gigabytes(float(loads.leaf_bytes.sum())),
        ),
        ("sent up from pods", lambda loads, leaves, pods: gigabytes(float(loads.pod_bytes.sum()))),
        (
            "leaves of a data-parallel group",
            lambda loads, leaves, pods: _reach(leaves, pipeline=False),
        ),
        ("leaves of a pipeline", lambda loads, leaves, pods: _reach(leaves, pipeline=True)),
        ("pods of a data-parallel group", lambda loads, leaves, pods: _reach(pods, pipeline=False)),
        ("pods of a pipeline", lambda loads, leaves, pods: _reach(pods, pipeline=True)),
    ]


def _reach(spread: Spread, *, pipeline: bool) -> str:
    most = spread.pipeline_max if pipeline else spread.data_parallel_max
    mean = spread.pipeline_mean if pipeline else spread.data_parallel_mean
    return f"{most} at most, {mean:.1f} mean"


def _idle(found: MappedPlan) -> list[Renderable]:
    if not found.idle:
        return []
    shown = ", ".join(found.idle[:8]) + (", ..." if len(found.idle) > 8 else "")
    return [Text(f"{counted(len(found.idle), 'node')} without a rank: {shown}")]
