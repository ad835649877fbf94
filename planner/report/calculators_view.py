"""The answers of the single-formula calculators as views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import InputError
from meshwright.planner.drawing import (
    Chart,
    LogScale,
    count,
    counted,
    distinct_colour,
    gigabytes,
    percent,
    seconds,
)
from meshwright.planner.report.view import (
    BAR,
    BYTES,
    COUNT,
    NUMBER,
    PERCENT,
    SECONDS,
    Bullets,
    Column,
    Facts,
    Heading,
    Kind,
    Table,
    View,
    decimals,
)

Document = Mapping[str, Any]
MOST_RANKS_SHOWN = 32
_PLAIN = Kind(lambda value: f"{value:g}")


def formulas_view(formulas: Sequence[Document]) -> View:
    """What `--why` adds: formula and source of each number; nothing without any."""
    if not formulas:
        return []
    rows = [[row["what"], row["formula"], row["source"]] for row in formulas]
    return [
        Heading("Formulas"),
        Table([Column("what"), Column("formula"), Column("source")], rows),
    ]


def collective_view(document: Document) -> View:
    """The time of a collective, the algorithms compared, the links that the group has."""
    where = f" of {document['cluster']}" if "cluster" in document else ""
    facts = [
        ("operation", f"{document['operation']} of {_size(document['bytes'])}"),
        ("group", f"{document['ranks']} ranks{where}"),
        ("time", f"{seconds(document['seconds'])} ({document['algorithm']})"),
        ("algorithm bandwidth", f"{document['algorithm_gb_per_s']:.1f} GB/s"),
    ]
    if "bus_gb_per_s" in document:
        facts.append(("bus bandwidth", f"{document['bus_gb_per_s']:.1f} GB/s"))
    if document.get("step_seconds"):
        facts.append(("in a training step, by a ring", seconds(document["step_seconds"])))
    if document.get("hierarchical_s"):
        facts.append(("by hierarchy, three calls", seconds(document["hierarchical_s"])))
    links = _levels(document["levels"]) if "levels" in document else _own_link(document)
    return [Facts(facts), Heading("Algorithms"), _algorithms(document), *links, *_sweep(document)]


def _algorithms(document: Document) -> Table:
    """Algorithms, the fastest first."""
    times = sorted(document["seconds_by_algorithm"].items(), key=lambda item: item[1])
    steps = document.get("steps_by_algorithm")
    if steps is None:
        return Table([Column("algorithm"), Column("time", SECONDS)], times)
    columns = [
        Column("algorithm"),
        Column("steps"),
        Column("time", SECONDS),
        Column("n / t", decimals(1), unit="GB/s"),
    ]
    rate = document["gb_per_s_by_algorithm"]
    return Table(columns, [[name, _steps(steps[name]), time, rate[name]] for name, time in times])


def _steps(steps: int | Mapping[str, int]) -> str:
    if isinstance(steps, int):
        return count(steps)
    return f"{steps['inside']} inside, {steps['between']} between"


def _levels(levels: Sequence[Document]) -> View:
    columns = {
        "name": Column("level"),
        "medium": Column("medium"),
        "ranks_inside": Column("ranks inside", NUMBER),
        "nominal_gb_per_s": Column("GB/s a GPU", _PLAIN),
        "crossover_bytes": Column("crossover", BYTES),
    }
    rows = [[level[name] for name in columns] for level in levels]
    return [Heading("Levels"), Table(list(columns.values()), rows)]


def _own_link(document: Document) -> View:
    """Which algorithm is fastest from which size on, and the crossover of this link and others."""
    fastest = [[row["algorithm"], row["from_bytes"]] for row in document["fastest_from_bytes"]]
    this = ["this one", document["alpha_s"], document["gb_per_s"], document["crossover_bytes"]]
    columns = {
        "link": Column("link"),
        "alpha_s": Column("start-up", SECONDS),
        "gb_per_s": Column("GB/s", _PLAIN),
        "crossover_bytes": Column("crossover", Kind(_kilobytes)),
    }
    tiers = [[tier[name] for name in columns] for tier in document["tiers"]]
    return [
        Heading("Fastest by size"),
        Table([Column("algorithm"), Column("from", Kind(_kilobytes))], fastest),
        *_what_helps(document),
        Heading("Size whose start-up takes as long as its transfer"),
        Table(list(columns.values()), [this, *tiers]),
    ]


def _what_helps(document: Document) -> View:
    """What shortens a message of this size: fewer start-ups below the crossover, fewer bytes above it."""
    size, crossover = document["bytes"], document["crossover_bytes"]
    start_up_s = document["alpha_s"] * _startups(document)
    share = percent(min(1.0, start_up_s / document["seconds"]))
    if size < crossover:
        advice = f"start-ups are {share} of the time: send several tensors as one (explain message fusion)"
    else:
        advice = f"start-ups are {share} of the time: fewer bits (compress) or overlap help, fusion does not"
    return [Heading("What would help"), Bullets([advice])]


def _startups(document: Document) -> int:
    """Start-ups over this link of the fastest algorithm."""
    steps = document["steps_by_algorithm"][document["algorithm"]]
    return int(steps if isinstance(steps, int) else steps["between"])


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
    """Alpha and beta of a log, and the times that they give beside those measured."""
    columns = {
        "bytes": Column("bytes", COUNT),
        "measured_s": Column("measured", SECONDS),
        "fitted_s": Column("fitted", SECONDS),
        "error_pct": Column("error", decimals(1), unit="%"),
    }
    rows = [[row[name] for name in columns] for row in document["rows"]]
    startups = f"{document['startups']:,} start-ups of a ring"
    return [
        Facts(
            [
                ("operation", f"{document['operation']} of {document['ranks']} ranks, {startups}"),
                ("alpha", f"{seconds(document['alpha_s'])} a message"),
                ("beta", f"1 / {document['gb_per_s']:.1f} GB/s of a rank"),
                ("crossover", _size(document["crossover_bytes"])),
                ("mean error", f"{document['mean_error_pct']:.1f} %"),
            ]
        ),
        Heading("Measured against fitted"),
        Table(list(columns.values()), rows),
    ]


def pipeline_view(document: Document) -> View:
    """The step of a schedule, what each rank holds, and what would shorten its bubble."""
    shape = f"{counted(document['pp'], 'rank')} of {counted(document['vpp'], 'virtual stage')}"
    of_step, of_ideal = percent(document["bubble_of_step"]), percent(document["bubble_of_ideal"])
    bubble = f"{seconds(document['bubble_seconds'])}: {of_step} of the step, {of_ideal} of the work"
    ranks = list(enumerate(document["in_flight"]))[:MOST_RANKS_SHOWN]
    facts = [
        ("schedule", f"{document['schedule']}, {shape}"),
        ("micro-batches", count(document["num_micro_batches"])),
        ("step", seconds(document["seconds"])),
        ("bubble", bubble),
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
    stages = document["stages"]
    if stages:
        names = {
            "stage": COUNT,
            "rank": COUNT,
            "layers": _PLAIN,
            "passes": COUNT,
            "compute_s": SECONDS,
        }
        words = {"compute_s": "compute"}
        columns = [Column(words.get(name, name), kind) for name, kind in names.items()]
        shown = [[row[name] for name in names] for row in stages[:MOST_RANKS_SHOWN]]
        remedies = [*remedies, Heading("Virtual stages"), Table(columns, shown)]
    return [
        Facts(facts),
        *remedies,
        Heading("Micro-batches whose activations a rank holds"),
        Table([Column("rank"), Column("in flight", _PLAIN)], ranks),
    ]


def overlap_view(document: Document) -> View:
    """What hides beside compute, the chunks, and the ring-attention buffer, as far as asked."""
    view: View = []
    if "plan" in document:
        view += _overlap_by_axis(document["plan"])
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
        view += _chunks(document["chunks"])
    if "ring_attention" in document:
        view += _ring_attention(document["ring_attention"])
    return view


def _overlap_by_axis(plan: Document) -> View:
    columns = {
        "communication_s": Column("links busy", SECONDS),
        "overlap_ratio": Column("overlap ratio", decimals(3)),
        "exposed_s": Column("exposed", SECONDS),
        "hidden_share": Column("hidden", PERCENT),
    }
    table = [[axis, *(row[name] for name in columns)] for axis, row in plan["axes"].items()]
    facts = [("compute of a step", seconds(plan["compute_s"]))]
    buckets = plan["gradient_buckets"]
    if buckets is not None:
        size = f"{buckets['count']} of {buckets['bucket_mb']:,.0f} MB"
        facts.append(("gradient buckets", f"{size}, {buckets['chosen_by']}"))
    bars = [
        [f"{axis} {words}", row[name], row[name] / longest_s]
        for longest_s in [max(row["communication_s"] for row in plan["axes"].values())]
        for axis, row in plan["axes"].items()
        for words, name in (("all", "communication_s"), ("exposed", "exposed_s"))
    ]
    return [
        Facts(facts),
        Table([Column("axis"), *columns.values()], table),
        Table([Column("time of links"), Column("", SECONDS), Column("", BAR)], bars),
    ]


def _chunks(chunks: Document) -> View:
    share = chunks["share_of_compute"]
    of_compute = "" if share is None else f", {percent(share, 2)} of the compute"
    sizes = f"{chunks['chunks']} of {gigabytes(chunks['chunk_bytes'])}"
    best = f"{chunks['best_chunks']} of {gigabytes(chunks['best_chunk_bytes'])}"
    facts = [
        ("chunks", f"{sizes}, {seconds(chunks['chunk_s'])} each"),
        ("in all", f"{chunks['seconds'] * 1e3:.2f} ms{of_compute}"),
        ("not hidden", seconds(chunks["exposed_s"])),
        ("best", f"{best}: {seconds(chunks['best_exposed_s'])} not hidden"),
    ]
    return [Facts(facts)]


def _ring_attention(ring: Document) -> View:
    """The buffer, and a bar for a pass with one buffer and with two."""
    buffer = Facts([("ring-attention buffer", gigabytes(ring["buffer_bytes"]))])
    longest = ring["single_buffer_s"]
    if not longest:
        return [buffer]
    rows: list[list[object]] = [
        [words, ring[name], ring[name] / longest]
        for words, name in (
            ("one buffer", "single_buffer_s"),
            ("double buffering", "double_buffer_s"),
        )
    ]
    columns = [Column("pass"), Column("time", SECONDS), Column("", BAR)]
    return [buffer, Table(columns, rows)]


def volumes_view(document: Document) -> View:
    """States and traffic by ZeRO stage, and what activations take and make each axis send."""
    view: View = []
    if "states_bytes" in document:
        sent = document["data_parallel_bytes"]
        rows = [[stage, size, sent[stage]] for stage, size in document["states_bytes"].items()]
        columns = [Column("stage"), Column("states", BYTES), Column("sent a step", BYTES)]
        view.append(Table(columns, rows))
        parts = [[name.replace("_", " "), n] for name, n in document["states_parts_bytes"].items()]
        view.append(Table([Column("states of the whole model"), Column("", BYTES)], parts))
        room = gigabytes(document["gpu_memory_bytes"])
        view.append(Facts([("GPUs that the states fill", f"{document['gpus']:,} of {room}")]))
    if "hybrid_sharded" in document:
        hybrid = document["hybrid_sharded"]
        inside, between = (gigabytes(hybrid[f"{where}_bytes"]) for where in ("inside", "between"))
        view.append(Facts([("hybrid", f"{inside} inside a shard group, {between} between groups")]))
    facts = []
    if "activation_bytes" in document:
        facts.append(("activations", gigabytes(document["activation_bytes"])))
        if document["shape"]["tp"] > 1:
            without = document["activation_bytes_without_sequence_parallel"]
            facts.append(("without sequence parallelism", gigabytes(without)))
    for axis in ("tensor_parallel", "expert_parallel"):
        if axis in document:
            layer, model = (gigabytes(document[axis][name]) for name in ("layer_bytes", "bytes"))
            facts.append((axis.replace("_", " "), f"{layer} a layer, {model} in all"))
    if "pipeline_boundary_bytes" in document:
        facts.append(("pipeline boundary", gigabytes(document["pipeline_boundary_bytes"])))
    if facts:
        view.append(Facts(facts))
    if "sent_bytes" in document:
        sent = [[axis.replace("_", " "), size] for axis, size in document["sent_bytes"].items()]
        view.append(Table([Column("sent by a rank in a step"), Column("", BYTES)], sent))
    return view


def compression_view(document: Document) -> View:
    """Each way to compress gradients beside the plain exchange."""
    columns = {
        "method": Column("method"),
        "bytes": Column("sent by a rank", BYTES),
        "codec_s": Column("codec", SECONDS),
        "exchange_s": Column("exchange", SECONDS),
        "speed_up": Column("speed-up", decimals(2)),
        "pays_below_gb_per_s": Column("pays below", decimals(1), unit="GB/s"),
    }
    rows = [[method[name] for name in columns] for method in document["methods"]]
    plain = f"{gigabytes(document['bytes'])} over {document['ranks']} ranks"
    return [
        Facts([("plain exchange", f"{seconds(document['seconds'])} for {plain}")]),
        Table(list(columns.values()), rows),
    ]


def memory_view(document: Document) -> View:
    """Components down, stages across: the first, the fullest and the last."""
    peaks, parts = document["memory_gib"], document["memory_parts_gib"]
    fullest = max(range(len(peaks)), key=lambda stage: peaks[stage])
    stages = sorted({0, fullest, len(peaks) - 1})
    columns = [Column("component")]
    for stage in stages:
        mark = " (fullest)" if stage == fullest and len(stages) > 1 else ""
        columns.append(Column(f"stage {stage}{mark}", decimals(2)))
    rows = [[name, *(parts[stage][name] for stage in stages)] for name in parts[0]]
    rows.append(["peak", *(peaks[stage] for stage in stages)])
    outside = f"{document['context_gib']:.2f} GiB of context and NCCL buffers"
    return [
        Facts(
            [
                ("run", document["id"]),
                ("device", f"{document['device']}, {document['hbm_gib']:g} GiB"),
                ("usable", f"{document['usable_gib']:.1f} GiB"),
                ("outside the allocator", outside),
            ]
        ),
        Heading("GiB on one GPU"),
        Table(columns, rows),
    ]


# Roofs of compute, memory and network as views: of one product, of data parallelism, of a plan.


def roofline_view(document: Document) -> View:
    """A matrix product under the roof of its device, and data parallelism under those of the network."""
    product = [_product(document)] if "m" in document else []
    network = _network_view(document["network"]) if "network" in document else []
    planned = _roofs_of_plan(document["plan"]) if "plan" in document else []
    return [*planned, *product, *network]


def _roofs_of_plan(plan: Document) -> View:
    """The products of a plan under its device's roof, and its gradients under those of the network."""
    ridge = f"{plan['memory_ridge_flop_per_byte']:,.0f} FLOP/byte"
    peak = f"{plan['peak_tflops']:,.1f} TFLOP/s of {plan['precision']}"
    columns = [
        Column("product of a micro-batch"),
        Column("FLOP/byte", COUNT),
        Column("bound by"),
        Column("attainable", COUNT, unit="TFLOP/s"),
        Column("in a step", COUNT, unit="TFLOP/s"),
    ]
    rows = [
        [
            row["what"],
            row["flop_per_byte"],
            row["bound"],
            row["attainable_tflops"],
            row["attained"]["tflops"],
        ]
        for row in plan["products"]
    ]
    facts = [
        ("device", plan["device"]),
        ("peak", peak),
        ("ridge of memory", ridge),
        ("batch of a rank", f"{plan['batch_of_a_rank']:g} sequences a step"),
    ]
    network = plan["network"]
    return [Facts(facts), Table(columns, rows), *(_network_view(network) if network else [])]


def _product(document: Document) -> Facts:
    shape = f"[{document['m']}, {document['k']}] x [{document['k']}, {document['n']}]"
    share = document["attainable_tflops"] / document["peak_tflops"]
    attainable = f"{document['attainable_tflops']:.1f} TFLOP/s, {percent(share)} of the peak"
    return Facts(
        [
            ("product", f"{shape}, {document['precision']}"),
            ("device", document["device"]),
            ("work", f"{document['flop'] / 1e9:,.1f} GFLOP, {gigabytes(document['bytes'])}"),
            ("intensity", f"{document['flop_per_byte']:.1f} FLOP/byte"),
            ("ridge point", f"{document['ridge_flop_per_byte']:.1f} FLOP/byte"),
            ("bound by", document["bound"]),
            ("attainable", attainable),
            ("least time", seconds(document["least_seconds"])),
            ("in a training step", _attained(document["attained"])),
        ]
    )


def _attained(attained: Document) -> str:
    """What training reaches of the roof: rates of a large product and of streaming, and this product's."""
    roof = f"{attained['peak_tflops']:.0f} TFLOP/s and {attained['hbm_gb_per_s']:,.0f} GB/s at best"
    return f"{seconds(attained['seconds'])}, {attained['tflops']:.1f} TFLOP/s; {roof}"


def _network_view(network: Document) -> View:
    """Ridge of every level, and what bounds each batch there."""
    wished = percent(network["efficiency_wished"])
    levels = [
        Column("level"),
        Column("GB/s a GPU", _PLAIN),
        Column("ridge", COUNT, unit="FLOP/byte"),
        Column("critical batch", decimals(2)),
        Column(f"{wished} overlapped", decimals(2)),
        Column(f"{wished} serial", decimals(2)),
    ]
    names = ("level", "gb_per_s", "ridge_flop_per_byte", "critical_batch")
    key = f"batch_{100 * network['efficiency_wished']:.4g}"
    rows = [
        [*(level[name] for name in names), level[key]["overlapped"], level[key]["serial"]]
        for level in network["levels"]
    ]
    view: View = [
        Heading(f"Gradients of data parallelism at {network['peak_tflops']:,.1f} TFLOP/s"),
        Table(levels, rows),
    ]
    batches = {
        "batch": Column("batch", _PLAIN),
        "flop_per_byte": Column("FLOP/byte", COUNT),
        "regime": Column("regime"),
        "efficiency_overlapped": Column("overlapped", PERCENT),
        "efficiency_serial": Column("one after the other", PERCENT),
    }
    for level in network["levels"]:
        rows = [[row[name] for name in batches] for row in level["batches"]]
        advice = {row["regime"]: row["advice"] for row in level["batches"]}
        view += [
            Heading(f"Batches of a rank over {level['level']}"),
            Table(list(batches.values()), rows),
            Bullets([f"{regime}: {words}" for regime, words in advice.items()]),
        ]
    return view


# Time of a collective against its size, a line for each algorithm, or for a measurement and its fit.


_MARGIN = 1.4
_MICROSECONDS = 1e6


def sweep_picture(document: Mapping[str, Any]) -> str:
    """The sweep of a `collective` document as SVG text. Raises InputError for fewer than two sizes."""
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
    """Times of a log of nccl-tests and those of the fitted link, of a `fitted` document, as SVG text."""
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
    for index, (name, line) in enumerate(lines_us.items()):
        colour = distinct_colour(index)
        chart.line(list(zip(sizes, line, strict=True)), colour)
        chart.name(name, colour)
    return chart.document()
