"""The layout and the prediction of a plan or a run, as blocks of a view."""

from __future__ import annotations

from itertools import groupby

from meshwright.costmodel.layout import AXES
from meshwright.costmodel.memory.footprint import usable_hbm_gib
from meshwright.costmodel.workload import Workload
from meshwright.planner.drawing.quantities import count, counted, percent, ranges, seconds
from meshwright.planner.plan.document import Mapping, MoreBlocksDoc
from meshwright.planner.report.view import (
    BAR,
    BYTES,
    COUNT,
    NUMBER,
    PERCENT,
    SECONDS,
    Column,
    Facts,
    Heading,
    Table,
    View,
    Words,
    decimals,
    line,
)
from meshwright.planner.runs.predicted import LayoutDoc, Predicted

MOST_MEMORY_ROWS = 8
SMALLEST_SHARE = 0.0005
"""Parts of the step below this share are counted together."""


def layout_view(
    layout: LayoutDoc, mapping: Mapping | None, predicted: Predicted | None = None
) -> View:
    """Degrees, how they lie on the fabric, and the choices of the schedule."""
    degrees = {axis: int(getattr(layout, axis)) for axis in AXES}
    gpus = degrees["tp"] * degrees["cp"] * degrees["dp"] * degrees["pp"]
    product = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    view: View = [
        Heading("Layout"),
        line(f"{product} = {count(gpus)} GPUs"),
        Facts(_choices(layout)),
    ]
    if mapping is None:
        return view
    if mapping.matrix and len(mapping.levels) > 1:
        view += [line(), _matrix(degrees, mapping)]
    if mapping.more_blocks is not None and predicted is not None:
        view.append(line(more_blocks_text(mapping.more_blocks, predicted.step_time_s)))
    order = Words("rank order, innermost first: ", "dim")
    return [*view, line(order, " ".join(mapping.order))]


def more_blocks_text(more: MoreBlocksDoc, step_time_s: float) -> str:
    """What equal parts in more blocks than needed bring: the step on as few, and on these."""
    blocks = ", ".join(
        f"{count(n)} of {name} for {count(more.fewest[name])}" for name, n in more.used.items()
    )
    share = more.step_time_s_on_fewest / step_time_s - 1.0
    on_fewest = f"{seconds(more.step_time_s_on_fewest)}, {100 * share:+.2g} %"
    return f"more blocks than needed ({blocks}), in equal parts: on the fewest the step takes {on_fewest}"


def _matrix(degrees: dict[str, int], mapping: Mapping) -> Table:
    """How many members of a group lie inside one block of each level, beyond those inside the level below."""
    columns = [Column("axis"), Column("degree", COUNT)]
    columns += [Column(f"in {name}", NUMBER) for name in mapping.levels]
    rows = []
    for axis, degree in degrees.items():
        if axis in mapping.matrix:
            factors = [None if factor == 1 else factor for factor in mapping.matrix[axis]]
            rows.append([axis, degree, *factors])
    return Table(columns, rows)


def _choices(layout: LayoutDoc) -> list[tuple[str, str]]:
    sequences = counted(layout.micro_batch, "sequence")
    micro_batches = counted(layout.num_micro_batches, "micro-batch", "micro-batches")
    schedule = "no pipeline"
    if layout.pp > 1:
        schedule = layout.schedule
        if layout.vpp > 1:
            schedule += f", {layout.vpp} virtual stages a rank"
    rows = [
        ("micro-batch", f"{sequences} x {micro_batches} x dp {count(layout.dp)}"),
        ("schedule", schedule),
        ("layers", stages_text(layout.stages)),
        ("recompute", recompute_text(layout)),
        ("ZeRO stage", sharding_text(layout)),
        ("sequence parallel", "yes" if layout.sequence_parallel else "no"),
    ]
    if layout.ep > 1 or layout.etp > 1:
        rows.insert(0, ("experts", f"ep {layout.ep}, etp {layout.etp}"))
    return rows


def sharding_text(layout: LayoutDoc) -> str:
    """The ZeRO stage, the groups of replicas that shard by themselves and what is offloaded: `1 in 4 groups
    of 8, 50 % of the optimizer offloaded`.
    """
    words = str(layout.zero_stage)
    if layout.shard_groups > 1:
        ranks = layout.dp * layout.cp // layout.shard_groups
        words = f"{words} in {layout.shard_groups} groups of {ranks}"
    if layout.optimizer_offload:
        words = f"{words}, {layout.optimizer_offload} % of the optimizer offloaded"
    return words


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
        ranks = list(members)
        name = "rank" if len(ranks) == 1 else "ranks"
        parts.append(f"{name} {ranges(ranks)}: {'+'.join(map(str, sizes))}")
    return "; ".join(parts)


def prediction_view(predicted: Predicted, workload: Workload) -> View:
    """Rates, the step's breakdown, memory and traffic."""
    per_gpu = predicted.tokens_per_s_per_gpu
    tokens_per_s = workload.global_batch * workload.seq_len / predicted.step_time_s
    band = predicted.error_band
    low = seconds(predicted.step_time_s * band.low)
    high = seconds(predicted.step_time_s * band.high)
    basis = f"90 % of {count(band.rows)} measured steps on {band.basis}"
    rows = [
        ("step time", seconds(predicted.step_time_s)),
        (
            "throughput",
            f"{count(tokens_per_s)} tokens/s, {count(per_gpu)} tokens/s per GPU",
        ),
        (
            "compute",
            f"{predicted.tflops_per_gpu:.1f} TFLOP/s per GPU, MFU {percent(predicted.mfu)}",
        ),
        ("likely", f"{low} to {high}, as {basis}"),
    ]
    return [
        Heading("Predicted"),
        Facts(rows),
        *breakdown_view(predicted.breakdown_s),
        *_memory(predicted, workload),
        *_traffic(predicted),
    ]


def breakdown_view(breakdown_s: dict[str, float]) -> View:
    """Where the seconds of a step go, by parts that add up to it; the largest first."""
    step_s = sum(breakdown_s.values())
    parts = [
        (name.replace("_", " "), part_s)
        for name, part_s in breakdown_s.items()
        if abs(part_s) >= SMALLEST_SHARE * step_s
    ]
    parts.sort(key=lambda part: -part[1])
    rest_s = step_s - sum(part_s for _, part_s in parts)
    if rest_s > SMALLEST_SHARE * step_s / 10:
        parts.append(("everything else", rest_s))
    columns = [
        Column("part"),
        Column("time", SECONDS),
        Column("share", PERCENT),
        Column("", BAR),
    ]
    rows = []
    for name, part_s in parts:
        time = part_s if part_s > 0 else f"{part_s:.3f} s"
        rows.append([name, time, part_s / step_s, part_s / step_s])
    return [Heading("Where the step's time goes"), Table(columns, rows)]


def _memory(predicted: Predicted, workload: Workload) -> View:
    """GiB of each pipeline stage against what a GPU has to give; many stages are put together."""
    limit_gib = usable_hbm_gib(workload)
    hbm_gib = workload.cluster.device.hbm_gib
    columns = [
        Column("stage"),
        Column("peak", decimals(1)),
        Column("of usable", PERCENT),
        Column("", BAR),
    ]
    rows = [
        [stages, f"{gib:.1f} GiB", gib / limit_gib, gib / limit_gib]
        for stages, gib in memory_groups(predicted.memory_gib)
    ]
    view: View = [
        Heading(f"Memory per GPU: {limit_gib:.1f} GiB usable of {hbm_gib:g} GiB HBM"),
        Table(columns, rows),
    ]
    fullest = max(range(len(predicted.memory_gib)), key=lambda stage: predicted.memory_gib[stage])
    if fullest < len(predicted.memory_parts_gib):
        words = _memory_parts(predicted, fullest)
        view.append(line(Words(f"stage {fullest} holds (GiB): ", "dim"), words))
    if predicted.host_memory_gib:
        words = f"the host of a node holds {predicted.host_memory_gib:.0f} GiB of what is offloaded"
        view.append(line(Words(words)))
    over_gib = predicted.memory_gib[fullest] - limit_gib
    if over_gib > 0:
        words = f"stage {fullest} is {over_gib:.1f} GiB over the limit"
        view.append(line(Words(words, "bold red")))
    return view


def _memory_parts(predicted: Predicted, stage: int) -> str:
    parts = sorted(predicted.memory_parts_gib[stage].items(), key=lambda part: -part[1])
    words = ", ".join(f"{name.replace('_', ' ')} {gib:.1f}" for name, gib in parts if gib >= 0.05)
    if predicted.memory_context_gib is not None:
        words += f"; outside the allocator: context {predicted.memory_context_gib:.1f}"
    return words


def memory_groups(memory_gib: list[float]) -> list[tuple[str, float]]:
    """(stages, GiB of the fullest): neighbours that print alike together, coarser until the rows are few."""
    tolerance = 0.05
    while True:
        groups = _alike(memory_gib, tolerance)
        if len(groups) <= MOST_MEMORY_ROWS:
            return [(ranges(group), max(memory_gib[stage] for stage in group)) for group in groups]
        tolerance *= 2


def _alike(memory_gib: list[float], tolerance: float) -> list[list[int]]:
    """Stages in runs whose figures lie within a tolerance of each other."""
    groups: list[list[int]] = []
    for stage, gib in enumerate(memory_gib):
        values = [gib]
        if groups:
            values += [memory_gib[member] for member in groups[-1]]
        if groups and max(values) - min(values) <= tolerance:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return groups


def _traffic(predicted: Predicted) -> View:
    if not predicted.level_traffic:
        return []
    columns = [
        Column("level"),
        Column("mean GPU", BYTES),
        Column("fullest", BYTES),
        Column("links busy", SECONDS),
        Column("of step", PERCENT),
        Column("mean busy", SECONDS),
    ]
    rows = [
        [
            level.level,
            level.bytes_per_step,
            level.most_bytes_per_step or level.bytes_per_step,
            level.busy_s,
            level.utilisation,
            level.mean_s,
        ]
        for level in predicted.level_traffic
    ]
    title = "Traffic that one GPU sends across each fabric level in a step"
    return [Heading(title), Table(columns, rows)]
