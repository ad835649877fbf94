"""One matrix product on one device's roofline: what bounds it, and the least time it can take.

Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model for multicore
architectures": attainable FLOP/s = min(peak, FLOP per byte x bytes/s).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.cluster_specs.allocation import fabric_levels
from meshwright.cluster_specs.reader import load_device, read_cluster
from meshwright.cluster_specs.schema import ClusterSpec, DeviceSpec
from meshwright.costmodel.kernels import gemm_s
from meshwright.costmodel.rates import device_rates, named_constants, peak_flops
from meshwright.costmodel.ratios import (
    ELEMENT_BYTES,
    data_parallel_flop_per_byte,
    regime,
    ridge_flop_per_byte,
)
from meshwright.errors import InputError
from meshwright.frameworks.catalog import DEFAULT_FRAMEWORK

RESULT_BYTES = 2.0
"""Of a result element: results are written in 16 bits."""
MOST = 2**40


def roofline_document(device: str, m: int, n: int, k: int, precision: str) -> dict[str, Any]:
    """The product [m, k] x [k, n] under a device's roofline, at nominal peaks.

    Parameters
    ----------
    device
        Name of a device of the catalog.
    m, n, k
        Rows and columns of the result, and depth of the product; 1 to `MOST` each.
    precision
        Of the inputs, one of `ELEMENT_BYTES`.

    Returns
    -------
    dict
        FLOP, bytes moved once, FLOP per byte beside the ridge point, attainable TFLOP/s, and the least time
        in seconds; under `attained` what such a product reaches in a training step, as `estimate` prices it.

    Raises
    ------
    InputError
        For a size or precision that is not allowed, or an unknown device.
    """
    for name, size in (("--m", m), ("--n", n), ("--k", k)):
        if not 1 <= size <= MOST:
            raise InputError(f"must be from 1 to {MOST}", where=name, value=size)
    if precision not in ELEMENT_BYTES:
        raise InputError(
            "no such precision", where="--precision", value=precision, allowed=ELEMENT_BYTES
        )
    spec = load_device(device)
    product = product_under_roof(spec, (float(m), float(n), float(k)), precision)
    return {"device": spec.name, "precision": precision, **product, "m": m, "n": n, "k": k}


def nominal_level_rates(cluster: ClusterSpec) -> dict[str, float]:
    """Nominal bytes a second of one GPU at every level of a cluster, one direction."""
    levels = fabric_levels(cluster, cluster.gpus)
    rates = zip(levels.names, levels.gb_per_s, strict=True)
    return {name: float(gb_per_s) * 1e9 for name, gb_per_s in rates}


def peak_and_rates(
    device: str | None, cluster: str | None, precision: str
) -> tuple[float | None, dict[str, float]]:
    """Nominal FLOP/s of a device, and bytes a second at every level of a cluster.

    Parameters
    ----------
    device
        Name of a device of the catalog; without one, the cluster's.
    cluster
        Catalog name or file of a cluster; without one there are no levels.
    precision
        Of the products, one of `ELEMENT_BYTES`.

    Raises
    ------
    InputError
        For an unknown device, or a cluster that cannot be read.
    """
    spec = None if cluster is None else read_cluster(cluster)
    rates = {} if spec is None else nominal_level_rates(spec)
    if device is not None:
        return peak_flops(load_device(device), precision), rates
    return None if spec is None else peak_flops(spec.device, precision), rates


def product_under_roof(
    spec: DeviceSpec, shape: tuple[float, float, float], precision: str
) -> dict[str, Any]:
    """One product under the roof of a device, and what such a product reaches in a training step.

    Parameters
    ----------
    spec
        The device.
    shape
        m, n, k: rows and columns of the result, and depth of the product; above 0.
    precision
        Of the inputs, one of `ELEMENT_BYTES`.

    Returns
    -------
    dict
        What `roofline_document` says of a product.
    """
    m, n, k = shape
    flop = 2.0 * m * n * k
    moved_bytes = ELEMENT_BYTES[precision] * (m * k + k * n) + RESULT_BYTES * m * n
    intensity = flop / moved_bytes
    peak, bytes_per_s = peak_flops(spec, precision), spec.hbm_gb_per_s * 1e9
    ridge = float(ridge_flop_per_byte(peak, bytes_per_s))
    attainable = min(peak, intensity * bytes_per_s)
    constants = named_constants(spec.name, spec.architecture, DEFAULT_FRAMEWORK, {})
    rates = device_rates(spec, precision, constants)
    seconds = float(gemm_s(m, n, k, rates))
    return {
        "m": m,
        "n": n,
        "k": k,
        "flop": flop,
        "bytes": moved_bytes,
        "flop_per_byte": intensity,
        "ridge_flop_per_byte": ridge,
        "bound": "compute" if intensity >= ridge else "memory",
        "peak_tflops": peak / 1e12,
        "hbm_gb_per_s": spec.hbm_gb_per_s,
        "attainable_tflops": attainable / 1e12,
        "least_seconds": flop / attainable,
        "attained": {
            "tflops": flop / seconds / 1e12,
            "seconds": seconds,
            "peak_tflops": rates.gemm_flops / 1e12,
            "hbm_gb_per_s": rates.hbm_bytes_per_s / 1e9,
        },
    }


# Compute against the network: FLOP per byte of data parallelism beside the ridge point of every level.
#
# A step of N parameters on a rank takes 6 N tokens FLOP and moves each of N gradients twice, so that the
# ratio depends on the tokens alone: CCR = 3 tokens / gradient bytes. Against the ridge CCR* = peak FLOP/s
# over bytes/s it says what bounds the step.


ADVICE = {
    "severely communication-bound": "raise the micro-batches of a step (accumulate gradients), or shard less",
    "communication-bound": "raise the batch of a rank, overlap the exchange, or send gradients in fewer bits",
    "near the ridge": "overlap the exchange with the backward pass: both take about as long",
    "compute-bound": "nothing to gain from the network: look at kernels and precision",
}
"""What helps, by regime."""


def network_roofline(
    peak_flops: float,
    bytes_per_s: Mapping[str, float],
    *,
    seq_len: int,
    batches: Sequence[float],
    gradient_bytes: float = 2.0,
    efficiency: float = 0.9,
) -> dict[str, Any]:
    """Where batches of a rank lie under the roofs of the levels that their gradients may cross.

    Parameters
    ----------
    peak_flops
        Of a GPU, FLOP/s, above 0.
    bytes_per_s
        Of a GPU, by level, above 0.
    seq_len, batches
        Tokens of a sequence, and sequences of a rank and step; above 0.
    gradient_bytes
        Of an element as it is sent.
    efficiency
        Wished, above 0 and below 1: the batch that reaches it is said too.

    Returns
    -------
    dict
        Ridge (FLOP per byte), critical batch (sequences a rank), and by batch the ratio, the regime, what
        helps, and the efficiency with the exchange hidden and with none of it hidden. `batch_90`, or
        what percentage was wished, has the batch of a rank from which both reach it.

    Raises
    ------
    InputError
        For sizes that are not above 0.
    """
    if min(seq_len, gradient_bytes, peak_flops, *batches, *bytes_per_s.values()) <= 0:
        raise InputError("must be above 0", where="--seq-len, --batch, --gradient-bytes")
    if not 0 < efficiency < 1:
        raise InputError("must be above 0 and below 1", where="--efficiency", value=efficiency)
    rows = {
        batch: float(data_parallel_flop_per_byte(batch * seq_len, gradient_bytes))
        for batch in batches
    }
    levels = []
    for name, rate in bytes_per_s.items():
        ridge = float(ridge_flop_per_byte(peak_flops, rate))
        critical = ridge / float(data_parallel_flop_per_byte(seq_len, gradient_bytes))
        of_batches = [_batch(batch, ratio, ridge) for batch, ratio in rows.items()]
        levels.append(
            {
                "level": name,
                "gb_per_s": rate / 1e9,
                "ridge_flop_per_byte": ridge,
                "critical_batch": critical,
                f"batch_{100 * efficiency:.4g}": {
                    "overlapped": critical * efficiency,
                    "serial": critical * efficiency / (1.0 - efficiency),
                },
                "batches": of_batches,
            }
        )
    return {
        "efficiency_wished": efficiency,
        "peak_tflops": peak_flops / 1e12,
        "seq_len": seq_len,
        "gradient_bytes": gradient_bytes,
        "levels": levels,
    }


def _batch(batch: float, ratio: float, ridge: float) -> dict[str, Any]:
    bounds = regime(ratio, ridge)
    return {
        "batch": batch,
        "flop_per_byte": ratio,
        "regime": bounds,
        "advice": ADVICE[bounds],
        "efficiency_overlapped": min(1.0, ratio / ridge),
        "efficiency_serial": ratio / (ratio + ridge),
    }
