"""How long the cost model takes: one full estimate, and bounds of a hundred thousand layouts.

Run from the repository root: `python benchmarks/cost_model_speed.py [--profile]`.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable

import numpy as np

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.estimate import estimate_layout, peak_memory_gib, stage_memory_gib
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.placement import level_factors, nested_placement, placement_from_matrix
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.bounds.mappings import matrices
from meshwright.planner.bounds.pricing import CostModelPricing

MANY = 100_000
GPUS = 16_384


def workload(model: str) -> Workload:
    return Workload(
        model=load_catalog_model(model),
        cluster=read_cluster("llama3-24k"),
        gpus=GPUS,
        global_batch=2048,
        seq_len=8192,
        dp_overlap=True,
        tp_overlap=True,
        pp_overlap=True,
    )


def one_layout(work: Workload) -> tuple[Layout, tuple[tuple[int, ...], ...]]:
    pp = 16
    layers = work.model.layers
    stages = tuple((layers // pp + (rank < layers % pp),) for rank in range(pp))
    moe = work.model.moe is not None
    layout = Layout(
        tp=8,
        pp=pp,
        dp=GPUS // 128,
        ep=64 if moe else 1,
        num_micro_batches=16,
        zero_stage=1,
        sequence_parallel=True,
    )
    return layout, stages


def many_layouts(work: Workload, count: int = MANY) -> Layout:
    """Random powers of two on all GPUs; every combination a search would look at, and then some."""
    rng = np.random.default_rng(0)
    tp, cp, pp = (2 ** rng.integers(0, high, count) for high in (4, 4, 5))
    dp = GPUS // (tp * cp * pp)
    again = rng.integers(0, 4, count)
    moe = work.model.moe is not None
    return Layout(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        ep=2 ** rng.integers(0, 6, count) if moe else np.ones(count, dtype=np.int64),
        etp=np.ones(count, dtype=np.int64),
        vpp=np.where(pp > 1, 2 ** rng.integers(0, 2, count), 1),
        micro_batch=2 ** rng.integers(0, 3, count),
        num_micro_batches=2 ** rng.integers(0, 7, count),
        sequence_parallel=rng.integers(0, 2, count) == 1,
        zero_stage=rng.integers(0, 4, count),
        recompute=np.where(again > 0, int(Recompute.FULL), 0),
        recompute_layers=again,
    )


def timed(function: Callable[[], object], repeats: int) -> float:
    """Median seconds, after one call to warm up."""
    function()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(model: str) -> None:
    work = workload(model)
    layout, stages = one_layout(work)
    placement = nested_placement(work.cluster, layout)
    table = matrices(layout, level_factors(work.cluster, GPUS).tolist())
    placements = placement_from_matrix(layout, table)
    many = many_layouts(work)
    rows: list[tuple[str, Callable[[], object], int, float, str]] = [
        ("one estimate", lambda: estimate_layout(work, layout, placement, stages), 200, 1e3, "ms"),
        (
            f"one estimate of {len(table['tp'])} placements",
            lambda: estimate_layout(work, layout, placements, stages),
            100,
            1e3,
            "ms",
        ),
        ("memory of one split", lambda: stage_memory_gib(work, layout, stages), 200, 1e3, "ms"),
        (
            f"time bounds of {MANY:,} layouts",
            lambda: CostModelPricing(work).lower_bound_s(many),
            3,
            1.0,
            "s",
        ),
        (f"memory bounds of {MANY:,} layouts", lambda: peak_memory_gib(work, many), 3, 1.0, "s"),
    ]
    for what, function, repeats, scale, unit in rows:
        print(f"{model:16s} {what:40s} {timed(function, repeats) * scale:8.3f} {unit}")


def profile(model: str) -> None:
    work = workload(model)
    layout, stages = one_layout(work)
    placement = nested_placement(work.cluster, layout)
    many = many_layouts(work)
    for function in (
        lambda: [estimate_layout(work, layout, placement, stages) for _ in range(200)],
        lambda: CostModelPricing(work).lower_bound_s(many),
        lambda: peak_memory_gib(work, many),
    ):
        function()
        profiler = cProfile.Profile()
        profiler.runcall(function)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(14)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true", help="where the time goes, for one model")
    if parser.parse_args().profile:
        profile("deepseek-v3")
        return
    for model in ("llama-3.1-405b", "deepseek-v3"):
        measure(model)


if __name__ == "__main__":
    main()
