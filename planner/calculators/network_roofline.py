"""Compute against the network: FLOP per byte of data parallelism beside the ridge point of every level.

A step of N parameters on a rank takes 6 N tokens FLOP and moves each of N gradients twice, so that the ratio
depends on the tokens alone: CCR = 3 tokens / gradient bytes. Against the ridge CCR* = peak FLOP/s over
bytes/s it says what bounds the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.costmodel.ratios import data_parallel_flop_per_byte, regime, ridge_flop_per_byte
from meshwright.errors import InputError

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
