"""Micro-benchmarks of `calibrate --measure`: matrix products, attention, copies and all-reduces, with torch.

One process a GPU, started by torchrun; without it, the first GPU alone. On a machine without a GPU they run
on the CPU with gloo, which tests them and says nothing of a training cluster.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from meshwright.costmodel.collectives.nccl import collective_time, isolated_fabric
from meshwright.costmodel.constants.rates import constants_for, kernel_rates, peak_flops
from meshwright.errors import InputError
from meshwright.planner.runs.calibration.evidence import Benchmark
from meshwright.planner.runs.run_file import Run

_BEST_GEMM = {"ampere": 0.869, "hopper": 0.803, "cdna3": 0.514}
"""Of the 16-bit peak, best shape of the search of stas00/ml-engineering (compute/accelerator, MAMF)."""
_BEST_COPY = 0.9
"""Of the nominal HBM rate that a large copy attains: assumed."""
_REPEATS = 10
_WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class MeasuredRates:
    """What one process measured."""

    gemm_flops: float
    attention_flops: float
    """Of the causal half."""
    copy_bytes_per_s: float
    """Read and written."""
    all_reduces: tuple[tuple[int, float, float], ...] = ()
    """Of some groups: ranks, bytes, seconds."""


def measured_rates() -> MeasuredRates | None:
    """Runs the benchmarks on this process' device.

    Returns
    -------
    MeasuredRates or None
        None on every rank but the first.

    Raises
    ------
    InputError
        Without torch.
    """
    try:
        import torch
    except ImportError:
        what = "needs PyTorch, which is not installed here; leave --measure out, or install torch"
        raise InputError(what, where="--measure") from None
    on_gpu = bool(torch.cuda.is_available())
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    all_reduces = _all_reduces(torch, device)
    if int(os.environ.get("RANK", "0")) > 0:
        return None
    size, tokens, copied = (8192, 4096, 2**30) if on_gpu else (256, 128, 2**22)
    return MeasuredRates(
        gemm_flops=_gemm_flops(torch, device, size),
        attention_flops=_attention_flops(torch, device, tokens),
        copy_bytes_per_s=_copy_bytes_per_s(torch, device, copied),
        all_reduces=all_reduces,
    )


def _seconds(torch: Any, device: Any, work: Callable[[], object]) -> float:
    """Median of some repeats."""
    times = []
    for repeat in range(_WARM_UP + _REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat >= _WARM_UP:
            times.append(time.perf_counter() - began)
    return float(np.median(times))


def _gemm_flops(torch: Any, device: Any, size: int) -> float:
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    right = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2.0 * size**3 / _seconds(torch, device, lambda: left @ right)


def _attention_flops(torch: Any, device: Any, tokens: int) -> float:
    heads, width = 32, 128
    shape = (1, heads, tokens, width)
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    seconds = _seconds(torch, device, lambda: attend(query, key, value, is_causal=True))
    return 2.0 * tokens**2 * heads * width / seconds


def _copy_bytes_per_s(torch: Any, device: Any, size_bytes: int) -> float:
    source = torch.zeros(size_bytes, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2.0 * size_bytes / _seconds(torch, device, lambda: target.copy_(source))


def _all_reduces(torch: Any, device: Any) -> tuple[tuple[int, float, float], ...]:
    """Of this node's ranks, and of all where there are several nodes; nothing without torchrun."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2:
        return ()
    dist = torch.distributed
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    sizes = sorted({local, world} - {1})
    size_bytes = 2**30 if device.type == "cuda" else 2**20
    buffer = torch.ones(size_bytes // 4, device=device, dtype=torch.float32)
    out = []
    for size in sizes:
        groups = [
            dist.new_group(list(range(first, first + size))) for first in range(0, world, size)
        ]
        group = groups[int(os.environ.get("RANK", "0")) // size]
        seconds = _seconds(torch, device, partial(dist.all_reduce, buffer, group=group))
        out.append((size, float(size_bytes), seconds))
    dist.destroy_process_group()
    return tuple(out)


def benchmarks_of(rates: MeasuredRates, runs: Sequence[Run]) -> tuple[Benchmark, ...]:
    """The rates as evidence for the device and cluster of some runs.

    Parameters
    ----------
    rates : MeasuredRates
        Of this machine, which is taken for one like the runs'.
    runs : sequence of Run
        At least one.

    Returns
    -------
    tuple of Benchmark
        Matrix products count only on architectures whose best measured shape is known.
    """
    workload = max(runs, key=lambda run: run.workload.gpus).workload
    device, cluster = workload.cluster.device, workload.cluster
    attained = kernel_rates(workload, constants_for(workload))
    benchmarks = []
    if device.architecture in _BEST_GEMM:
        best = peak_flops(device, "bf16") * _BEST_GEMM[device.architecture]
        words = f"matrix product: {rates.gemm_flops / 1e12:.3g} TFLOP/s"
        benchmarks.append(_benchmark("gemm", rates.gemm_flops / best, 0.05, words))
    ratio = rates.attention_flops / attained.attention_forward_flops
    words = f"attention: {rates.attention_flops / 1e12:.3g} TFLOP/s"
    benchmarks.append(_benchmark("attention", ratio, 0.25, words))
    ratio = rates.copy_bytes_per_s / (device.hbm_gb_per_s * 1e9 * _BEST_COPY)
    words = f"copy: {rates.copy_bytes_per_s / 1e9:.4g} GB/s"
    benchmarks.append(_benchmark("hbm", ratio, 0.15, words))
    inside = max(cluster.nvlink_domain, cluster.gpus_per_node)
    for ranks, size_bytes, seconds in rates.all_reduces:
        if ranks <= cluster.gpus:
            usual = collective_time("all-reduce", size_bytes, isolated_fabric(cluster, ranks))
            factor = "scale_up" if ranks <= inside else "network"
            words = f"all-reduce of {ranks} ranks: {seconds * 1e3:.3g} ms"
            benchmarks.append(_benchmark(factor, usual.seconds / seconds, 0.1, words))
    return tuple(benchmarks)


def _benchmark(factor: str, ratio: float, noise: float, words: str) -> Benchmark:
    usual = f"{words}, {ratio:.0%} of what is usual"
    return Benchmark(factor=factor, ratio=ratio, noise=noise, words=usual)
