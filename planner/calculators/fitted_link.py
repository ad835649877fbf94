"""Start-up and rate of a link, fitted to a log of nccl-tests: T(n) = a + b n, and what is left over.

A ring takes 2 (P-1) start-ups in an all-reduce and P - 1 in a gather, a scatter or an all-to-all, and moves
2 (P-1)/P or (P-1)/P of the buffer (Thakur, Rabenseifner and Gropp 2005, sections 3 and 4), so that alpha is a
over those start-ups and the rate is bus bandwidth, as nccl-tests counts it (NVIDIA/nccl-tests,
doc/PERFORMANCE.md). Rows are weighted by one over their time: each counts by its relative error, the smallest
as much as the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.importers.facts import SourceText
from meshwright.cluster_specs.importers.nccl_tests import read_nccl_times
from meshwright.errors import InputError

MOST_LOG_BYTES = 16_000_000
Floats = NDArray[np.float64]
_PASSES = {"all_reduce": 2.0}


def fitted_document(source: SourceText) -> dict[str, Any]:
    """Alpha and beta of a log, and every size measured beside fitted.

    Parameters
    ----------
    source
        The text of one run of all_reduce_perf, all_gather_perf, reduce_scatter_perf or alltoall_perf.

    Returns
    -------
    dict
        `alpha_s`, of a message; `gb_per_s`, 1 / beta, of a rank; the start-ups of the collective; the size
        from which a transfer takes longer than a start-up; the mean of the relative errors; and `rows`.

    Raises
    ------
    InputError
        Where the log cannot be read, has fewer than two sizes, or its times do not grow with size.
    """
    log = read_nccl_times(source)
    size = np.array([row[0] for row in log.rows], dtype=np.float64)
    time_s = np.array([row[1] for row in log.rows])
    if len(np.unique(size)) < 2:
        raise InputError(f"{source.name}: alpha and beta need at least two sizes of messages")
    start_s, byte_s = _line(size, time_s)
    if byte_s <= 0:
        raise InputError(
            f"{source.name}: times do not grow with the size; measure up to 1 GiB (-e 1G)"
        )
    passes = _PASSES.get(log.collective, 1.0)
    startups = passes * (log.gpus - 1)
    beta_s = byte_s / (passes * (log.gpus - 1) / log.gpus)
    fitted_s = start_s + byte_s * size
    return {
        "operation": log.collective.replace("_", "-").replace("alltoall", "all-to-all"),
        "ranks": log.gpus,
        "alpha_s": start_s / startups,
        "beta_s_per_byte": beta_s,
        "gb_per_s": 1e-9 / beta_s,
        "startups": int(startups),
        "crossover_bytes": start_s / startups / beta_s,
        "mean_error_pct": 100.0 * float(np.mean(np.abs(fitted_s / time_s - 1.0))),
        "rows": _rows(size, time_s, fitted_s),
    }


def _line(size: Floats, time_s: Floats) -> tuple[float, float]:
    """Least squares of relative errors: seconds of no bytes, at least 0, and of one byte."""
    columns = np.stack([1.0 / time_s, size / time_s], axis=1)
    scale = columns.max(axis=0)
    (start, byte), *_ = np.linalg.lstsq(columns / scale, np.ones(len(size)), rcond=None)
    if start >= 0:
        return float(start / scale[0]), float(byte / scale[1])
    share = size / time_s
    return 0.0, float(share.sum() / (share**2).sum())


def _rows(size: Floats, time_s: Floats, fitted_s: Floats) -> Sequence[dict[str, float]]:
    return [
        {
            "bytes": float(n),
            "measured_s": float(t),
            "fitted_s": float(f),
            "error_pct": 100 * (f / t - 1),
        }
        for n, t, f in zip(size.tolist(), time_s.tolist(), fitted_s.tolist(), strict=True)
    ]
