"""One matrix product on one device's roofline: what bounds it, and the least time it can take.

Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model for multicore
architectures": attainable FLOP/s = min(peak, FLOP per byte x bytes/s).
"""

from __future__ import annotations

from typing import Any

from meshwright.cluster_specs.catalog import load_device
from meshwright.cluster_specs.fabric import fabric_levels
from meshwright.cluster_specs.reader import read_cluster
from meshwright.cluster_specs.schema import ClusterSpec, DeviceSpec
from meshwright.costmodel.constants.rates import device_rates, named_constants, peak_flops
from meshwright.costmodel.layers.kernels import gemm_s
from meshwright.costmodel.ratios import ELEMENT_BYTES, ridge_flop_per_byte
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
