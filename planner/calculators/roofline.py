"""One matrix product on one device's roofline: what bounds it, and the least time it can take.

Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model for multicore
architectures": attainable FLOP/s = min(peak, FLOP per byte x bytes/s).
"""

from __future__ import annotations

from typing import Any

from meshwright.cluster_specs.catalog import load_device
from meshwright.costmodel.constants.rates import peak_flops
from meshwright.costmodel.ratios import ridge_flop_per_byte
from meshwright.errors import InputError
from meshwright.planner.report.parts import Renderable, facts, gigabytes, percent, seconds

ELEMENT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "mxfp8": 1.0, "nvfp4": 0.5}
"""Of an input; results are written in 16 bits."""
MOST = 2**40


def roofline_document(device: str, m: int, n: int, k: int, precision: str) -> dict[str, Any]:
    """[m, k] x [k, n] at nominal peaks: FLOP, bytes, intensity, and what the device allows.

    Raises InputError for a size or precision that is not allowed, InputError for an unknown device.
    """
    for name, size in (("--m", m), ("--n", n), ("--k", k)):
        if not 1 <= size <= MOST:
            raise InputError(f"{name}: {size}, allowed are 1 to {MOST}")
    if precision not in ELEMENT_BYTES:
        raise InputError(f"--precision: {precision[:40]!r}, allowed are {', '.join(ELEMENT_BYTES)}")
    spec = load_device(device)
    each = ELEMENT_BYTES[precision]
    flop = 2.0 * m * n * k
    moved = each * (float(m) * k + float(k) * n) + 2.0 * m * n
    peak, hbm = peak_flops(spec, precision), spec.hbm_gb_per_s * 1e9
    ridge = float(ridge_flop_per_byte(peak, hbm))
    attainable = min(peak, flop / moved * hbm)
    return {
        "device": spec.name,
        "precision": precision,
        "m": m,
        "n": n,
        "k": k,
        "flop": flop,
        "bytes": moved,
        "flop_per_byte": flop / moved,
        "ridge_flop_per_byte": ridge,
        "bound": "compute" if flop / moved >= ridge else "memory",
        "peak_tflops": peak / 1e12,
        "hbm_gb_per_s": spec.hbm_gb_per_s,
        "attainable_tflops": attainable / 1e12,
        "least_seconds": flop / attainable,
    }


def roofline_view(document: dict[str, Any]) -> list[Renderable]:
    """The point and the roof above it."""
    shape = f"[{document['m']}, {document['k']}] x [{document['k']}, {document['n']}]"
    share = document["attainable_tflops"] / document["peak_tflops"]
    return [
        facts(
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
            ]
        )
    ]
