"""What the charts of a page draw: documents of the analysis, with words and numbers as people read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.costmodel.memory.footprint import usable_hbm_gib
from meshwright.errors import InputError
from meshwright.planner.analysis.near_optimal import NearLayout
from meshwright.planner.analysis.pipeline_phases import phases_document
from meshwright.planner.analysis.plan_roofline import roofline_of
from meshwright.planner.analysis.rank_grid import rank_grid
from meshwright.planner.analysis.timeline import Trace, trace_of
from meshwright.planner.analysis.traffic import PlanTraffic, traffic_document
from meshwright.planner.analysis.traffic_matrix import traffic_matrix
from meshwright.planner.drawing.quantities import count, percent, rounded_seconds
from meshwright.planner.mixed.document import MixedPredicted
from meshwright.planner.plan.baseline_document import BaselineDoc
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.placement import workload_of_plan
from meshwright.planner.report.first_screen import layout_line
from meshwright.planner.report.plan_words import status_words
from meshwright.planner.runs.predicted import LayoutDoc, Predicted

Figures = dict[str, Any]

MOST_PASSES_DRAWN = 8_000
SMALLEST_SHARE = 0.0005
"""Parts of the step below this share are not drawn."""
_TITLES = {
    "gpus": ("GPUs", ""),
    "global_batch": ("batch", " sequences"),
    "seq_len": ("sequence length", " tokens"),
    "precision": ("precision", ""),
    "nic_gbps": ("network of a GPU", " Gb/s"),
    "hbm_gib": ("HBM of a GPU", " GiB"),
}
"""Of a control, and the unit of its values."""
_PROOFS = {
    "optimal": "proven: no layout is faster under this cost model",
    "feasible": "not proven to be the fastest",
}


def breakdown_figures(predicted: Predicted | MixedPredicted) -> list[Figures]:
    """The parts of the step, those of no weight left out."""
    step_s = predicted.step_time_s
    return [
        {
            "name": name.replace("_", " "),
            "seconds": seconds,
            "shown": rounded_seconds(seconds),
            "share": percent(seconds / step_s),
        }
        for name, seconds in predicted.breakdown_s.items()
        if seconds > SMALLEST_SHARE * step_s
    ]


def waterfall_figures(baseline: BaselineDoc) -> Figures | None:
    """The bars from today's step to the plan's; None where nothing changes."""
    if not baseline.waterfall:
        return None
    step_s = baseline.waterfall[0].step_time_s - baseline.waterfall[0].in_turn_s
    bars = [_whole_bar("today", step_s)]
    for change in baseline.waterfall:
        words = f"{change.in_turn_s:+.3f} s after the changes above"
        if change.alone_s is not None:
            words += f", {change.alone_s:+.3f} s alone"
        label = f"{change.in_turn_s:+.3f} s"
        ends = {"from_s": change.step_time_s - change.in_turn_s, "to_s": change.step_time_s}
        bars.append({"name": change.change, **ends, "whole": False, "label": label, "words": words})
    bars.append(_whole_bar("plan", baseline.waterfall[-1].step_time_s))
    return {"bars": bars}


def _whole_bar(name: str, step_s: float) -> Figures:
    words = rounded_seconds(step_s)
    return {
        "name": name,
        "from_s": 0.0,
        "to_s": step_s,
        "whole": True,
        "label": words,
        "words": words,
    }


def pipeline_figures(plan: Plan) -> Figures | None:
    """The phases of the pipeline; None without a pipeline, or where it cannot be drawn."""
    trace = _drawable(plan)
    if trace is None:
        return None
    document = phases_document(trace)
    passes = [drawn for phase in document["phases"] for drawn in phase["passes"]]
    kinds = sorted({drawn[1] for drawn in passes})
    return {**document, "kinds": kinds, "micro_batches": trace.num_micro_batches}


def _drawable(plan: Plan) -> Trace | None:
    """As many micro-batches, in whole rounds of the ranks, as a picture takes."""
    layout = plan.layout
    if layout is None or layout.pp == 1:
        return None
    limit = MOST_PASSES_DRAWN // (3 * layout.pp * layout.vpp)
    if layout.num_micro_batches <= limit:
        return trace_of(plan)
    rounds = max(1, limit // (2 * layout.pp))
    try:
        return trace_of(plan, min(rounds * 2 * layout.pp, layout.num_micro_batches))
    except InputError:
        return None


def memory_figures(plan: Plan, predicted: Predicted) -> Figures:
    """Parts of the memory of every stage, beside what a GPU has."""
    stages = predicted.memory_parts_gib
    if not stages:
        stages = [{"memory": gib} for gib in predicted.memory_gib]
    names = {name: None for stage in stages for name, gib in stage.items() if gib > 0}
    return {
        "parts": list(names),
        "stages": stages,
        "usable_gib": usable_hbm_gib(workload_of_plan(plan)),
        "hbm_gib": plan.inputs.cluster.device.hbm_gib,
    }


def traffic_figures(traffic: PlanTraffic) -> Figures:
    """Bytes by level and axis, and from block to block of nodes."""
    return {"levels": traffic_document(traffic)["levels"], "matrix": traffic_matrix(traffic.use)}


def rank_figures(plan: Plan, traffic: PlanTraffic) -> Figures | None:
    """The GPUs with their places on the axes; None where there are too many, or one axis less."""
    moe = plan.inputs.model.moe is not None
    grid = rank_grid(traffic.layout, traffic.places, experts=moe)
    return grid if grid is not None and grid["axes"] else None


def roofline_figures(traffic: PlanTraffic) -> Figures:
    """The matrix products of a layer."""
    return roofline_of(traffic.use.context)


def near_figures(layouts: list[NearLayout], *, experts: bool) -> Figures:
    """The layouts near the optimum, with their words."""
    return {
        "layouts": [
            {
                "step_time_s": near.step_time_s,
                "memory_gib": near.memory_gib,
                "is_plan": near.is_plan,
                "on_front": near.on_front,
                "words": layout_line(near.layout, experts=experts),
            }
            for near in layouts
        ]
    }


def what_if_figures(document: Mapping[str, Any], *, experts: bool) -> Figures:
    """The plans that were made beforehand, with their numbers as the page shows them."""
    axes = []
    for axis in document["axes"]:
        title, unit = _TITLES[axis["name"]]
        shown = [f"{_written(value)}{unit}" for value in axis["values"]]
        axes.append({**axis, "title": title, "shown": shown})
    rows = [{**row, "shown": _shown(row, experts=experts)} for row in document["rows"]]
    return {"axes": axes, "rows": rows}


def _proof(row: Mapping[str, Any]) -> str:
    words = status_words(row["status"], row.get("gap"))
    return _PROOFS.get(words, words)


def _written(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return count(value) if isinstance(value, int) else str(value)


def _shown(row: Mapping[str, Any], *, experts: bool) -> dict[str, str]:
    if row.get("step_time_s") is None:
        return {"status": row["message"]}
    return {
        "step": rounded_seconds(row["step_time_s"]),
        "throughput": count(row["tokens_per_s"]),
        "mfu": percent(row["mfu"]),
        "memory": f"{row['peak_memory_gib']:.1f}",
        "layout": layout_line(LayoutDoc(**row["layout"], stages=[]), experts=experts),
        "status": _proof(row),
    }
