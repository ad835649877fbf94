"""What `meshwright calibrate` reads: run files, and logs of nccl-tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.cluster_specs.fabric import full_levels
from meshwright.cluster_specs.importers.facts import SourceText
from meshwright.cluster_specs.importers.registry import read_facts
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.collectives.nccl import isolated_fabric
from meshwright.documents.reader import read_text
from meshwright.errors import InputError
from meshwright.planner.runs.calibration.evidence import Benchmark
from meshwright.planner.runs.run_file import Run, read_runs

RUN_FILES = (".yaml", ".yml", ".json")
MOST_LOG_BYTES = 4 * 2**20
_LOG_NOISE = 0.05
"""Relative: repeated nccl-tests, and what a step attains of what they reach."""


def read_sources(
    paths: Sequence[Path], known: Sequence[Run] = ()
) -> tuple[tuple[Run, ...], tuple[Benchmark, ...]]:
    """Runs of the run files, and rates of the nccl-tests logs on the cluster of the largest run.

    Parameters
    ----------
    paths : sequence of Path
        Run files end with one of `RUN_FILES`; all others are logs.
    known : sequence of Run, optional
        Runs that were read before.

    Returns
    -------
    tuple of runs and of benchmarks

    Raises
    ------
    InputError
        If a file cannot be read, or there is no run.
    """
    runs: list[Run] = list(known)
    for path in paths:
        if path.suffix.lower() in RUN_FILES:
            runs += read_runs(path)
    if not runs:
        raise InputError("no run file among the sources: give one with `runs:`", value=paths)
    cluster = max(runs, key=lambda run: run.workload.gpus).workload.cluster
    logs = [path for path in paths if path.suffix.lower() not in RUN_FILES]
    return tuple(runs), tuple(_rates(logs, cluster))


def _rates(logs: Sequence[Path], cluster: ClusterSpec) -> list[Benchmark]:
    """The share of its nominal rate that each log reached, over what nccl-tests usually reach there."""
    if not logs:
        return []
    texts = [SourceText(name=str(path), text=read_text(path, MOST_LOG_BYTES)) for path in logs]
    levels = full_levels(cluster)
    benchmarks = []
    for measured in read_facts("nccl-tests", texts, cluster).measured:
        level = levels.names.index(measured.level)
        links = isolated_fabric(cluster, measured.gpus, deduplicated=False).links
        rates = links.bytes_per_s
        if measured.collective == "alltoall":
            rates = links.all_to_all_bytes_per_s
        usual = float(rates[level]) / (float(levels.gb_per_s[level]) * 1e9)
        ratio = measured.attained_fraction / usual
        benchmarks.append(
            Benchmark(
                factor="scale_up" if level == 0 else "network",
                ratio=ratio,
                noise=_LOG_NOISE,
                words=f"{measured.source}: {measured.bus_gb_per_s:.3g} GB/s over {measured.level}, "
                f"{ratio:.0%} of what is usual",
            )
        )
    return benchmarks
