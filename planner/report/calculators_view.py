"""The answers of the single-formula calculators as views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import InputError
from meshwright.planner.drawing import Chart, LogScale, count, counted, gigabytes, percent, seconds
from meshwright.planner.report.view import (
    BAR,
    BYTES,
    COUNT,
    NUMBER,
    PERCENT,
    PLAIN,
    SECONDS,
    Bullets,
    Column,
    Columns,
    Facts,
    Heading,
    Kind,
    Table,
    View,
    decimals,
    optional,
    section,
    table,
)

Document = Mapping[str, Any]
MOST_RANKS_SHOWN = 32


def formulas_view(formulas: Sequence[Document]) -> View:
    """What `--why` adds: formula and source of each number; nothing without any.

    Parameters
    ----------
    formulas
        Of each number its name, formula and source.
    """
    columns: Columns = {"what": "what", "formula": "formula", "source": "source"}
    return section("Formulas", formulas, columns)


_LEVELS: Columns = {
    "name": "level",
    "medium": "medium",
    "ranks_inside": Column("ranks inside", NUMBER),
    "nominal_gb_per_s": Column("GB/s a GPU", PLAIN),
    "crossover_bytes": "crossover",
}


def collective_view(document: Document) -> View:
    """The time of a collective, the algorithms compared, the links that the group has.

    Parameters
    ----------
    document
        What `collective --json` prints, on a cluster or over one link.
    """
    where = f" of {document['cluster']}" if "cluster" in document else ""
    in_step_s, by_hierarchy_s = document.get("step_seconds"), document.get("hierarchical_s")
    facts = [
        ("operation", f"{document['operation']} of {_size(document['bytes'])}"),
        ("group", f"{document['ranks']} ranks{where}"),
        ("time", f"{seconds(document['seconds'])} ({document['algorithm']})"),
        ("algorithm bandwidth", f"{document['algorithm_gb_per_s']:.1f} GB/s"),
        ("bus bandwidth", optional(document.get("bus_gb_per_s"), "{:.1f} GB/s".format)),
        ("in a training step, by a ring", optional(in_step_s or None, seconds)),
        ("by hierarchy, three calls", optional(by_hierarchy_s or None, seconds)),
    ]
    has_levels = "levels" in document
    links = section("Levels", document["levels"], _LEVELS) if has_levels else _own_link(document)
    return [Facts(facts), Heading("Algorithms"), _algorithms(document), *links, *_sweep(document)]


def _algorithms(document: Document) -> Table:
    """Algorithms, the fastest first."""
    steps, rates = document.get("steps_by_algorithm"), document.get("gb_per_s_by_algorithm", {})
    times = sorted(document["seconds_by_algorithm"].items(), key=lambda item: item[1])
    if steps is None:
        return Table([Column("algorithm"), Column("time", SECONDS)], times)
    rows = [[name, _steps(steps[name]), time_s, rates[name]] for name, time_s in times]
    rate = Column("n / t", decimals(1), unit="GB/s")
    return Table([Column("algorithm"), Column("steps"), Column("time", SECONDS), rate], rows)


def _steps(steps: int | Mapping[str, int]) -> str:
    if isinstance(steps, int):
        return count(steps)
    return f"{steps['inside']} inside, {steps['between']} between"


def _own_link(document: Document) -> View:
    """Which algorithm is fastest from which size on, and the crossover of this link and others."""
    fastest: Columns = {"algorithm": "algorithm", "from_bytes": Column("from", Kind(_kilobytes))}
    columns: Columns = {
        "link": "link",
        "alpha_s": "start-up",
        "gb_per_s": Column("GB/s", PLAIN),
        "crossover_bytes": Column("crossover", Kind(_kilobytes)),
    }
    return [
        Heading("Fastest by size"),
        table(document["fastest_from_bytes"], fastest),
        *_what_helps(document),
        Heading("Size whose start-up takes as long as its transfer"),
        table([{**document, "link": "this one"}, *document["tiers"]], columns),
    ]


def _what_helps(document: Document) -> View:
    """What shortens a message of this size: fewer start-ups below the crossover, fewer bytes above it."""
    size, crossover = document["bytes"], document["crossover_bytes"]
    # Start-ups over this link of the fastest algorithm.
    steps = document["steps_by_algorithm"][document["algorithm"]]
    start_up_s = document["alpha_s"] * int(steps if isinstance(steps, int) else steps["between"])
    share = percent(min(1.0, start_up_s / document["seconds"]))
    if size < crossover:
        advice = f"start-ups are {share} of the time: send several tensors as one (explain message fusion)"
    else:
        advice = f"start-ups are {share} of the time: fewer bits (compress) or overlap help, fusion does not"
    return [Heading("What would help"), Bullets([advice])]


def _size(number_bytes: float) -> str:
    return gigabytes(number_bytes) if number_bytes >= 1e6 else _kilobytes(number_bytes)


def _kilobytes(number_bytes: float) -> str:
    return f"{number_bytes / 1e3:,.1f} KB"


def _sweep(document: Document) -> View:
    """Times by size, where there are several."""
    sweep = document["sweep"]
    if len(sweep) < 2:
        return []
    names = list(sweep[0]["seconds_by_algorithm"])
    columns = [Column("bytes", COUNT), *(Column(name, SECONDS) for name in names)]
    rows = [[row["bytes"], *row["seconds_by_algorithm"].values()] for row in sweep]
    return [Heading("Sizes"), Table(columns, rows)]


def fitted_view(document: Document) -> View:
    """Alpha and beta of a log, and the times that they give beside those measured.

    Parameters
    ----------
    document
        Alpha and beta that were fitted to a log of nccl-tests, with its rows.
    """
    startups = f"{document['startups']:,} start-ups of a ring"
    facts = [
        ("operation", f"{document['operation']} of {document['ranks']} ranks, {startups}"),
        ("alpha", f"{seconds(document['alpha_s'])} a message"),
        ("beta", f"1 / {document['gb_per_s']:.1f} GB/s of a rank"),
        ("crossover", _size(document["crossover_bytes"])),
        ("mean error", f"{document['mean_error_pct']:.1f} %"),
    ]
    columns: Columns = {
        "bytes": Column("bytes", COUNT),
        "measured_s": "measured",
        "fitted_s": "fitted",
        "error_pct": "error",
    }
    heading = Heading("Measured against fitted")
    return [Facts(facts), heading, table(document["rows"], columns)]


_STAGES: Columns = {
    "stage": Column("stage", COUNT),
    "rank": Column("rank", COUNT),
    "layers": Column("layers", PLAIN),
    "passes": Column("passes", COUNT),
    "compute_s": "compute",
}


def pipeline_view(document: Document) -> View:
    """The step of a schedule, what each rank holds, and what would shorten its bubble.

    Parameters
    ----------
    document
        What `pipeline --json` prints.
    """
    shape = f"{counted(document['pp'], 'rank')} of {counted(document['vpp'], 'virtual stage')}"
    of_step, of_ideal = percent(document["bubble_of_step"]), percent(document["bubble_of_ideal"])
    facts = [
        ("schedule", f"{document['schedule']}, {shape}"),
        ("micro-batches", count(document["num_micro_batches"])),
        ("step", seconds(document["seconds"])),
        (
            "bubble",
            f"{seconds(document['bubble_seconds'])}: {of_step} of the step, {of_ideal} of the work",
        ),
        ("efficiency", percent(document["efficiency"])),
    ]
    transfer = document["transfer"]
    if transfer is not None:
        sent = gigabytes(transfer["bytes_both_ways"])
        everywhere = gigabytes(transfer["bytes_all_boundaries"])
        boundaries = counted(transfer["boundaries"], "boundary", "boundaries")
        facts += [
            ("transfer of a step", f"{sent} over each boundary, both directions"),
            ("in all", f"{everywhere} over {boundaries}"),
            ("needed speed", f"{transfer['needed_gbit_per_s']:.2f} Gb/s, both directions"),
            ("peak activation", gigabytes(transfer["peak_activation_bytes"])),
        ]
    advice = [
        f"{row['change']} from {row['from']} to {row['to']}: efficiency {percent(row['efficiency'])}"
        for row in document["advice"]
    ]
    remedies: View = [Heading("What would help"), Bullets(advice)] if advice else []
    ranks = list(enumerate(document["in_flight"]))[:MOST_RANKS_SHOWN]
    return [
        Facts(facts),
        *remedies,
        *section("Virtual stages", (document["stages"] or [])[:MOST_RANKS_SHOWN], _STAGES),
        Heading("Micro-batches whose activations a rank holds"),
        Table([Column("rank"), Column("in flight", PLAIN)], ranks),
    ]


_AXES: Columns = {
    "axis": "axis",
    "communication_s": "links busy",
    "overlap_ratio": Column("overlap ratio", decimals(3)),
    "exposed_s": "exposed",
    "hidden_share": Column("hidden", PERCENT),
}


def overlap_view(document: Document) -> View:
    """What hides beside compute, the chunks, and the ring-attention buffer, as far as asked.

    Parameters
    ----------
    document
        What `overlap --json` prints. What was not asked is not in it.
    """
    view: View = []
    if "plan" in document:
        plan = document["plan"]
        axes, buckets = plan["axes"], plan["gradient_buckets"]
        facts = [("compute of a step", seconds(plan["compute_s"]))]
        if buckets is not None:
            size = f"{buckets['count']} of {buckets['bucket_mb']:,.0f} MB"
            facts.append(("gradient buckets", f"{size}, {buckets['chosen_by']}"))
        busy_s = [
            (f"{axis} {words}", row[name])
            for axis, row in axes.items()
            for words, name in (("all", "communication_s"), ("exposed", "exposed_s"))
        ]
        rows = [{"axis": axis, **row} for axis, row in axes.items()]
        view += [Facts(facts), table(rows, _AXES), _bars("time of links", "", busy_s)]
    if "step" in document:
        step = document["step"]
        step_s, serial_s = seconds(step["step_s"]), seconds(step["serial_s"])
        facts = [
            ("overlap ratio", f"{step['overlap_ratio']:.3f}"),
            ("can be hidden", "all of it" if step["can_hide"] else percent(step["hidden_share"])),
            ("step", f"{step_s} overlapped, {serial_s} one after the other"),
        ]
        view.append(Facts(facts))
    if "chunks" in document:
        chunks = document["chunks"]
        of_compute = optional(
            chunks["share_of_compute"], lambda share: f", {percent(share, 2)} of the compute"
        )
        sizes = f"{chunks['chunks']} of {gigabytes(chunks['chunk_bytes'])}"
        best = f"{chunks['best_chunks']} of {gigabytes(chunks['best_chunk_bytes'])}"
        facts = [
            ("chunks", f"{sizes}, {seconds(chunks['chunk_s'])} each"),
            ("in all", f"{chunks['seconds'] * 1e3:.2f} ms{of_compute}"),
            ("not hidden", seconds(chunks["exposed_s"])),
            ("best", f"{best}: {seconds(chunks['best_exposed_s'])} not hidden"),
        ]
        view.append(Facts(facts))
    if "ring_attention" in document:
        ring = document["ring_attention"]
        view.append(Facts([("ring-attention buffer", gigabytes(ring["buffer_bytes"]))]))
        names = {"one buffer": "single_buffer_s", "double buffering": "double_buffer_s"}
        if ring["single_buffer_s"]:
            passes = [(words, ring[name]) for words, name in names.items()]
            view.append(_bars("pass", "time", passes))
    return view


def _bars(what: str, time: str, rows: Sequence[tuple[str, float]]) -> Table:
    """Durations, each with a bar as long as its share of the longest."""
    longest_s = max(value_s for _, value_s in rows)
    cells = [[words, value_s, value_s / longest_s] for words, value_s in rows]
    return Table([Column(what), Column(time, SECONDS), Column("", BAR)], cells)


def volumes_view(document: Document) -> View:
    """States and traffic by ZeRO stage, and what activations take and make each axis send.

    Parameters
    ----------
    document
        What `volumes --json` prints. What was not asked is not in it.
    """
    view: View = []
    if "states_bytes" in document:
        sent = document["data_parallel_bytes"]
        rows = [[stage, size, sent[stage]] for stage, size in document["states_bytes"].items()]
        columns = [Column("stage"), Column("states", BYTES), Column("sent a step", BYTES)]
        size = gigabytes(document["gpu_memory_bytes"])
        view += [
            Table(columns, rows),
            _sizes("states of the whole model", document["states_parts_bytes"]),
            Facts([("GPUs that the states fill", f"{document['gpus']:,} of {size}")]),
        ]
    if "hybrid_sharded" in document:
        hybrid = document["hybrid_sharded"]
        inside, between = (gigabytes(hybrid[f"{where}_bytes"]) for where in ("inside", "between"))
        view.append(Facts([("hybrid", f"{inside} inside a shard group, {between} between groups")]))
    shape = document.get("shape", {})
    without = document.get("activation_bytes_without_sequence_parallel")
    facts = [
        ("activations", optional(document.get("activation_bytes"), gigabytes)),
        (
            "without sequence parallelism",
            optional(without if shape.get("tp", 1) > 1 else None, gigabytes),
        ),
    ]
    for axis in ("tensor_parallel", "expert_parallel"):
        if axis in document:
            layer, model = (gigabytes(document[axis][name]) for name in ("layer_bytes", "bytes"))
            facts.append((axis.replace("_", " "), f"{layer} a layer, {model} in all"))
    boundary = optional(document.get("pipeline_boundary_bytes"), gigabytes)
    view.append(Facts([*facts, ("pipeline boundary", boundary)]))
    if "sent_bytes" in document:
        view.append(_sizes("sent by a rank in a step", document["sent_bytes"]))
    return view


def _sizes(what: str, sizes_bytes: Mapping[str, float]) -> Table:
    rows = [[name.replace("_", " "), size_bytes] for name, size_bytes in sizes_bytes.items()]
    return Table([Column(what), Column("", BYTES)], rows)


def compress_view(document: Document) -> View:
    """Each way to compress gradients beside the plain exchange.

    Parameters
    ----------
    document
        What `compress --json` prints.
    """
    columns: Columns = {
        "method": "method",
        "bytes": "sent by a rank",
        "codec_s": "codec",
        "exchange_s": "exchange",
        "speed_up": Column("speed-up", decimals(2)),
        "pays_below_gb_per_s": Column("pays below", decimals(1), unit="GB/s"),
    }
    plain = f"{gigabytes(document['bytes'])} over {document['ranks']} ranks"
    facts = [("plain exchange", f"{seconds(document['seconds'])} for {plain}")]
    return [Facts(facts), table(document["methods"], columns)]


def memory_view(document: Document) -> View:
    """Components down, stages across: the first, the fullest and the last; of several runs one by one.

    Parameters
    ----------
    document
        Memory of one run by stage, or of several under `runs`.
    """
    if "runs" in document:
        return [block for run in document["runs"] for block in memory_view(run)]
    peaks, parts = document["memory_gib"], document["memory_parts_gib"]
    fullest = max(range(len(peaks)), key=lambda stage: peaks[stage])
    stages = sorted({0, fullest, len(peaks) - 1})
    columns = [Column("component")]
    for stage in stages:
        mark = " (fullest)" if stage == fullest and len(stages) > 1 else ""
        columns.append(Column(f"stage {stage}{mark}", decimals(2)))
    rows = [[name, *(parts[stage][name] for stage in stages)] for name in parts[0]]
    rows.append(["peak", *(peaks[stage] for stage in stages)])
    facts = [
        ("run", document["id"]),
        ("device", f"{document['device']}, {document['hbm_gib']:g} GiB"),
        ("usable", f"{document['usable_gib']:.1f} GiB"),
        ("outside the allocator", f"{document['context_gib']:.2f} GiB of context and NCCL buffers"),
    ]
    return [Facts(facts), Heading("GiB on one GPU"), Table(columns, rows)]


# Roofs of compute, memory and network as views: of one product, of data parallelism, of a plan.


def roofline_view(document: Document) -> View:
    """A matrix product under the roof of its device, and data parallelism under those of the network.

    Parameters
    ----------
    document
        What `roofline --json` prints. What was not asked is not in it.
    """
    product = [_product(document)] if "m" in document else []
    network = _network_view(document["network"]) if "network" in document else []
    planned = _roofs_of_plan(document["plan"]) if "plan" in document else []
    return [*planned, *product, *network]


def _roofs_of_plan(plan: Document) -> View:
    """The products of a plan under its device's roof, and its gradients under those of the network."""
    columns: Columns = {
        "what": "product of a micro-batch",
        "flop_per_byte": Column("FLOP/byte", COUNT),
        "bound": "bound by",
        "attainable_tflops": Column("attainable", COUNT, unit="TFLOP/s"),
        "attained": Column(
            "in a step", COUNT, unit="TFLOP/s", value=lambda row: row["attained"]["tflops"]
        ),
    }
    facts = [
        ("device", plan["device"]),
        ("peak", f"{plan['peak_tflops']:,.1f} TFLOP/s of {plan['precision']}"),
        ("ridge of memory", f"{plan['memory_ridge_flop_per_byte']:,.0f} FLOP/byte"),
        ("batch of a rank", f"{plan['batch_of_a_rank']:g} sequences a step"),
        ("compute of a step", seconds(plan["compute_s"])),
    ]
    compute_s = plan["breakdown_s"]
    parts = [
        [name.replace("_", " "), part, part / sum(compute_s.values())]
        for name, part in compute_s.items()
    ]
    computed = Table([Column("part"), Column("time", SECONDS), Column("share", PERCENT)], parts)
    network = _network_view(plan["network"]) if plan["network"] else []
    return [Facts(facts), computed, table(plan["products"], columns), *network]


def _product(document: Document) -> Facts:
    shape = f"[{document['m']}, {document['k']}] x [{document['k']}, {document['n']}]"
    share = document["attainable_tflops"] / document["peak_tflops"]
    reached = document["attained"]
    roof = f"{reached['peak_tflops']:.0f} TFLOP/s and {reached['hbm_gb_per_s']:,.0f} GB/s at best"
    in_step = f"{seconds(reached['seconds'])}, {reached['tflops']:.1f} TFLOP/s; {roof}"
    return Facts(
        [
            ("product", f"{shape}, {document['precision']}"),
            ("device", document["device"]),
            ("work", f"{document['flop'] / 1e9:,.1f} GFLOP, {gigabytes(document['bytes'])}"),
            ("intensity", f"{document['flop_per_byte']:.1f} FLOP/byte"),
            ("ridge point", f"{document['ridge_flop_per_byte']:.1f} FLOP/byte"),
            ("bound by", document["bound"]),
            (
                "attainable",
                f"{document['attainable_tflops']:.1f} TFLOP/s, {percent(share)} of the peak",
            ),
            ("least time", seconds(document["least_seconds"])),
            ("in a training step", in_step),
        ]
    )


_BATCHES: Columns = {
    "batch": Column("batch", PLAIN),
    "flop_per_byte": Column("FLOP/byte", COUNT),
    "regime": "regime",
    "efficiency_overlapped": Column("overlapped", PERCENT),
    "efficiency_serial": Column("one after the other", PERCENT),
}


def _network_view(network: Document) -> View:
    """Ridge of every level, and what bounds each batch there."""
    wished = percent(network["efficiency_wished"])
    key = f"batch_{100 * network['efficiency_wished']:.4g}"
    levels: Columns = {
        "level": "level",
        "gb_per_s": Column("GB/s a GPU", PLAIN),
        "ridge_flop_per_byte": Column("ridge", COUNT, unit="FLOP/byte"),
        "critical_batch": Column("critical batch", decimals(2)),
        **{kind: Column(f"{wished} {kind}", decimals(2)) for kind in ("overlapped", "serial")},
    }
    rows = [{**level, **level[key]} for level in network["levels"]]
    title = f"Data parallelism at {network['peak_tflops']:,.1f} TFLOP/s"
    view: View = [Heading(title), table(rows, levels)]
    for level in network["levels"]:
        advice = {row["regime"]: row["advice"] for row in level["batches"]}
        view += section(f"Batches of a rank over {level['level']}", level["batches"], _BATCHES)
        view.append(Bullets([f"{regime}: {words}" for regime, words in advice.items()]))
    return view


# Time of a collective against its size, a line for each algorithm, or for a measurement and its fit.


_MARGIN = 1.4
_MICROSECONDS = 1e6


def sweep_picture(document: Mapping[str, Any]) -> str:
    """The sweep of a `collective` document as SVG text. Raises InputError for fewer than two sizes.

    Parameters
    ----------
    document
        With a time of every algorithm for each size.
    """
    sweep = document["sweep"]
    if len(sweep) < 2:
        raise InputError("a picture needs two sizes; give --end", where="--picture")
    sizes = [row["bytes"] for row in sweep]
    lines = {
        algorithm: [row["seconds_by_algorithm"][algorithm] for row in sweep]
        for algorithm in sweep[0]["seconds_by_algorithm"]
    }
    return _lines_of_times(document, sizes, lines)


def fitted_picture(document: Mapping[str, Any]) -> str:
    """Times of a log of nccl-tests and those of the fitted link, of a `fitted` document, as SVG text.

    Parameters
    ----------
    document
        As `fitted_view` takes it.
    """
    rows = document["rows"]
    lines = {name: [row[f"{name}_s"] for row in rows] for name in ("measured", "fitted")}
    return _lines_of_times(document, [row["bytes"] for row in rows], lines)


def _lines_of_times(
    document: Mapping[str, Any], sizes: Sequence[float], lines_s: Mapping[str, Sequence[float]]
) -> str:
    """Seconds of each line at the sizes, both axes logarithmic."""
    lines_us = {name: [_MICROSECONDS * time for time in line] for name, line in lines_s.items()}
    chart = Chart(
        across=LogScale.of_tens(sizes, _MARGIN),
        down=LogScale.of_tens([time for line in lines_us.values() for time in line], _MARGIN),
        title=f"{document['operation']} over {document['ranks']} ranks",
        across_title="bytes of the full buffer",
        down_title="us",
    )
    for name, line in lines_us.items():
        chart.line(list(zip(sizes, line, strict=True)), chart.named_colour(name))
    return chart.document()
