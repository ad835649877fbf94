"""The layout and the prediction of a plan or a run, as renderables."""

from __future__ import annotations

from itertools import groupby

from rich.text import Text

from meshwright.costmodel.memory.footprint import usable_hbm_gib
from meshwright.costmodel.workload import Workload
from meshwright.planner.plan.document import Mapping
from meshwright.planner.report.parts import (
    Renderable,
    bar,
    count,
    counted,
    facts,
    gigabytes,
    grid,
    heading,
    line,
    percent,
    ranges,
    seconds,
)
from meshwright.planner.runs.predicted import LayoutDoc, Predicted

MOST_MEMORY_ROWS = 8
SMALLEST_SHARE = 0.0005
"""Parts of the step below this share are counted together."""


def layout_view(layout: LayoutDoc, mapping: Mapping | None) -> list[Renderable]:
    """Degrees, how they lie on the fabric, and the choices of the schedule."""
    degrees = {axis: int(getattr(layout, axis)) for axis in ("tp", "cp", "dp", "pp")}
    gpus = degrees["tp"] * degrees["cp"] * degrees["dp"] * degrees["pp"]
    product = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    shown: list[Renderable] = [heading("Layout"), line(f"{product} = {count(gpus)} GPUs")]
    shown.append(facts(_choices(layout)))
    if mapping is not None and mapping.matrix and len(mapping.levels) > 1:
        shown.append(line(""))
        rows = [
            [axis, count(degrees[axis]), *("-" if f == 1 else f"{f}" for f in mapping.matrix[axis])]
            for axis in degrees
            if axis in mapping.matrix
        ]
        shown.append(grid(["axis", "degree", *(f"in {name}" for name in mapping.levels)], rows))
    if mapping is not None:
        shown.append(line(("rank order, innermost first: ", "dim"), " ".join(mapping.order)))
    return shown


def _choices(layout: LayoutDoc) -> list[tuple[str, str]]:
    experts = f"ep {layout.ep}, etp {layout.etp}"
    batch = f"{counted(layout.micro_batch, 'sequence')} x {count(layout.num_micro_batches)} micro-batches"
    schedule = layout.schedule + (f", {layout.vpp} virtual stages a rank" if layout.vpp > 1 else "")
    rows = [
        ("experts", experts),
        ("micro-batch", f"{batch} x dp {count(layout.dp)}"),
        ("schedule", schedule if layout.pp > 1 else "no pipeline"),
        ("layers", stages_text(layout.stages)),
        ("recompute", recompute_text(layout)),
        ("ZeRO stage", str(layout.zero_stage)),
        ("sequence parallel", "yes" if layout.sequence_parallel else "no"),
    ]
    return rows if layout.ep > 1 or layout.etp > 1 else rows[1:]


def recompute_text(layout: LayoutDoc) -> str:
    """What is computed again in the backward pass."""
    if layout.recompute == "selective":
        return f"selective ({', '.join(layout.recompute_modules)})"
    if layout.recompute == "full":
        longest = max(max(rank) for rank in layout.stages)
        if layout.recompute_layers >= longest:
            return "full, every layer"
        return f"full, {counted(layout.recompute_layers, 'layer')} of each virtual stage"
    return "none"


def stages_text(stages: list[list[int]]) -> str:
    """Layers of every pipeline rank; equal neighbours are counted: `rank 0: 7; ranks 1-15: 8`."""
    if len(stages) == 1 and len(stages[0]) == 1:
        return f"{stages[0][0]}, all on one stage"
    if len({tuple(rank) for rank in stages}) == 1:
        return f"{'+'.join(map(str, stages[0]))} on each of {count(len(stages))} ranks"
    parts = []
    for sizes, members in groupby(range(len(stages)), key=lambda rank: tuple(stages[rank])):
        numbers = list(members)
        name = "rank" if len(numbers) == 1 else "ranks"
        parts.append(f"{name} {ranges(numbers)}: {'+'.join(map(str, sizes))}")
    return "; ".join(parts)


def prediction_view(predicted: Predicted, workload: Workload) -> list[Renderable]:
    """Rates, the step's breakdown, memory and traffic."""
    gpus = workload.gpus
    rate = f"{count(predicted.tokens_per_s_per_gpu)} tokens/s per GPU"
    total = f"{count(predicted.tokens_per_s_per_gpu * gpus)} tokens/s"
    speed = f"{predicted.tflops_per_gpu:.1f} TFLOP/s per GPU, MFU {percent(predicted.mfu)}"
    rows = [
        ("step time", seconds(predicted.step_time_s)),
        ("throughput", f"{total}, {rate}"),
        ("compute", speed),
    ]
    band = predicted.error_band
    low, high = (seconds(predicted.step_time_s * end) for end in (band.low, band.high))
    rows.append(
        ("likely", f"{low} to {high}, as 90 % of {count(band.rows)} measured steps on {band.basis}")
    )
    return [
        heading("Predicted"),
        facts(rows),
        *_breakdown(predicted),
        *memory_view(predicted, workload),
        *_traffic(predicted),
    ]


def _breakdown(predicted: Predicted) -> list[Renderable]:
    whole = predicted.step_time_s
    parts = sorted(predicted.breakdown_s.items(), key=lambda item: -item[1])
    shown = [(name.replace("_", " "), s) for name, s in parts if abs(s) >= SMALLEST_SHARE * whole]
    rest = whole - sum(s for _, s in shown)
    if rest > SMALLEST_SHARE * whole / 10:
        shown.append(("everything else", rest))
    rows: list[list[str | Text]] = [
        [name, seconds(s) if s > 0 else f"{s:.3f} s", percent(s / whole), bar(s / whole)]
        for name, s in shown
    ]
    return [
        heading("Where the step's time goes"),
        grid(["part", "time", "share", ""], rows, left=(0, 3)),
    ]


def memory_view(predicted: Predicted, workload: Workload) -> list[Renderable]:
    """GiB of each pipeline stage against what a GPU has to give; many stages are put together."""
    limit = usable_hbm_gib(workload)
    rows: list[list[str | Text]] = [
        [name, f"{gib:.1f} GiB", percent(gib / limit), bar(gib / limit)]
        for name, gib in memory_groups(predicted.memory_gib)
    ]
    title = f"Memory per GPU: {limit:.1f} GiB usable of {workload.cluster.device.hbm_gib:g} GiB HBM"
    shown: list[Renderable] = [
        heading(title),
        grid(["stage", "peak", "of usable", ""], rows, left=(0, 3)),
    ]
    fullest = max(range(len(predicted.memory_gib)), key=lambda stage: predicted.memory_gib[stage])
    if fullest < len(predicted.memory_parts_gib):
        parts = sorted(predicted.memory_parts_gib[fullest].items(), key=lambda item: -item[1])
        words = ", ".join(
            f"{name.replace('_', ' ')} {gib:.1f}" for name, gib in parts if gib >= 0.05
        )
        if predicted.memory_context_gib is not None:
            words += f"; outside the allocator: context {predicted.memory_context_gib:.1f}"
        shown.append(line((f"stage {fullest} holds (GiB): ", "dim"), words))
    over = predicted.memory_gib[fullest] - limit
    if over > 0:
        shown.append(line((f"stage {fullest} is {over:.1f} GiB over the limit", "bold red")))
    return shown


def memory_groups(memory_gib: list[float]) -> list[tuple[str, float]]:
    """(stages, GiB of the fullest): neighbours that print alike together, coarser until the rows are few."""
    tolerance = 0.05
    while True:
        groups: list[list[int]] = []
        for stage, gib in enumerate(memory_gib):
            here = [memory_gib[member] for member in groups[-1]] if groups else []
            if here and max(*here, gib) - min(*here, gib) <= tolerance:
                groups[-1].append(stage)
            else:
                groups.append([stage])
        if len(groups) <= MOST_MEMORY_ROWS:
            return [(ranges(group), max(memory_gib[stage] for stage in group)) for group in groups]
        tolerance *= 2


def _traffic(predicted: Predicted) -> list[Renderable]:
    if not predicted.level_traffic:
        return []
    rows: list[list[str | Text]] = [
        [
            level.level,
            gigabytes(level.bytes_per_step),
            seconds(level.busy_s),
            percent(level.utilisation),
            bar(level.utilisation),
        ]
        for level in predicted.level_traffic
    ]
    title = "Traffic that one GPU sends across each fabric level in a step"
    return [heading(title), grid(["level", "sent", "links busy", "of step", ""], rows, left=(0, 4))]
