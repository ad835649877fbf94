"""The formula behind each number of a calculator, and where it is from: what `--why` prints."""

from __future__ import annotations

import re
from math import floor, log
from typing import Any

from meshwright.costmodel.textbook import ALGORITHMS
from meshwright.errors import InputError

THAKUR = "Thakur, Rabenseifner and Gropp 2005, IJHPCA 19(1), sections 3 and 4"
NVLS = "NVIDIA NCCL 2.17 release notes; the switch reads n/P of every member and sends n"
NARAYANAN = "Narayanan et al. 2021, arXiv 2104.04473, section 2.2"
ROOFLINE = "Williams, Waterman and Patterson 2009, CACM 52(4)"

FORMULAS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "collective": (
        ("hierarchical all-reduce", "reduce-scatter inside + all-reduce of n/g between + all-gather inside",
         "Thakur 2005, its three steps; g ranks of a node share its link"),
        ("crossover", "n* = α / β: below it start-ups take longer than transfers", THAKUR),
        ("bus bandwidth", "n/t x 2(P-1)/P (all-reduce), (P-1)/P (gather, scatter, all-to-all), 1 (others)",
         "NVIDIA/nccl-tests, doc/PERFORMANCE.md"),
        ("on a cluster", "hops α + (P-1)/P n (1 + sqrt(n0/n)) / slowest level's rate",
         "NVIDIA/nccl, src/graph/tuning.cc; rates: costmodel/data/collectives.yaml"),
    ),
    "fitted": (
        ("time of n bytes", "a + b n, by least squares of relative errors", "alpha-beta model"),
        ("alpha", "a / start-ups of a ring: 2 (P-1) of an all-reduce, P-1 of others", THAKUR),
        ("beta", "b P / (2 (P-1)) of an all-reduce, b P / (P-1) of others: 1 / bus bandwidth",
         "NVIDIA/nccl-tests, doc/PERFORMANCE.md"),
    ),
    "pipeline": (
        ("bubble of ideal compute", "(p-1)/(v m)", NARAYANAN),
        ("bubble of the step", "(p-1)/(v m + p-1); efficiency is 1 less it", NARAYANAN),
        ("in flight", "GPipe: m; 1F1B: min(m, p-i) at stage i", NARAYANAN),
        ("transfer of a step", "2 m boundary bytes: activations forward, gradients backward", NARAYANAN),
        ("over all boundaries", "x (p v - 1); in a V the turn stays on a rank: p v - 2", NARAYANAN),
        ("needed speed", "transfer of a step / compute of a step", "both directions beside the compute"),
        ("peak activation", "micro-batches in flight x boundary bytes", NARAYANAN),
    ),
    "roofline": (
        ("attainable FLOP/s", "min(peak, FLOP per byte x bytes/s)", ROOFLINE),
        ("compute to communication", "CCR = 6 N tokens / (2 N bytes) = 3 tokens / gradient bytes",
         "a ring all-reduce moves each gradient twice; Kaplan et al. 2020, arXiv 2001.08361, for 6 N"),
        ("ridge point", "CCR* = peak FLOP/s / network bytes/s", ROOFLINE),
        ("regimes", "below 0.2 CCR*, below 0.8, up to 1.2, above", "the guides' convention"),
        ("critical batch", "CCR* x gradient bytes / (3 sequence length)", "CCR = CCR* solved for the batch"),
        ("efficiency", "overlapped: min(1, CCR / CCR*); one after the other: CCR / (CCR + CCR*)", ROOFLINE),
        ("batch of an efficiency E", "overlapped: E x critical; one after the other: E / (1 - E) x critical",
         "efficiency solved for the batch"),
    ),
    "memory": (
        ("states", "weights 2 + gradients 2 (4 in fp32) + fp32 weights 4 + moments 8 bytes a parameter",
         "Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1"),
        ("activations", "s b h (34 + 5 a s / h) bytes a layer, less what is fused or recomputed",
         "Korthikanti et al. 2022, arXiv 2205.05198, section 4"),
    ),
    "overlap": (
        ("overlap ratio", "R = T_comm / T_comp; up to 1 all can be hidden", "the guides' convention"),
        ("hidden share of an axis", "1 - exposed / time that links carry it",
         "parts of the step's price"),
        ("step", "T = max(T_comp, T_comm) + T_sync", "the guides' convention"),
        ("chunks", "time of c chunks: c α + n β", "alpha-beta, Thakur 2005"),
        ("best chunks", "exposed c α + n β / c is least at c = sqrt(n β / α)", "its derivative is zero"),
        ("ring-attention buffer", "2 S/N H bytes", "Liu et al. 2023, arXiv 2310.01889, section 3"),
    ),
    "experts": (
        ("balance", "largest over mean load of a GPU", "the slowest receiver ends a layer"),
        ("permutation density", "mean over GPUs j of 1 - (1 - p_j)^choices",
         "occupancy: Feller, An Introduction to Probability Theory 1, section IV.2"),
        ("share inside a node or leaf", "its GPUs / all GPUs", "sources and experts are unrelated"),
        ("all-to-all", "bytes that a GPU receives from other nodes / its link's rate; times the balance",
         "alpha-beta, start-ups left out"),
    ),
    "traffic": (
        ("bytes of a level", "2(P-1)/P n an all-reduce, (P-1)/P n a gather, scatter or all-to-all", THAKUR),
        ("a cut is busy", "bytes that must cross it in a phase / its rate",
         "max-flow min-cut: Ford and Fulkerson 1956"),
        ("oversubscription", "step on the fabric - step were it non-blocking", "the cost model, twice"),
        ("predictability, PFC and ECMP", "by pattern: rings and chains steady, all-to-all by the router",
         "the guides' table; docs/fabric.md"),
    ),
    "volumes": (
        ("states", "2 N weights + 2 N gradients + 12 N optimizer, each over the ranks that ZeRO shards it on",
         "Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1"),
        ("GPUs of the states", "(2 + gradient bytes + 12) N / memory, up", "states alone, sharded"),
        ("data parallelism", "2 N/T elements a step; ZeRO-3: 3 N/T; of them 2 N/T gradients, under ZeRO N/T",
         "Rajbhandari et al. 2020, arXiv 1910.02054, section 7"),
        ("hybrid sharding", "3 N elements inside a shard group + 2 N / shards between groups",
         "Zhao et al. 2023, arXiv 2304.11277, section 3.2.2"),
        ("activations", "s b h (34 + 5 a s / h) L / T",
         "Korthikanti et al. 2022, arXiv 2205.05198, equations 1 and 4"),
        ("without sequence parallelism", "s b h (10 + (24 + 5 a s / h) / T) L",
         "the same, equation 2"),
        ("tensor parallelism", "4 x 2 (T-1)/T b s h x 2 bytes a layer",
         "Shoeybi et al. 2019, arXiv 1909.08053, section 3"),
        ("expert parallelism", "4 b s k h x 2 (E-1)/E bytes a layer", "dispatch and combine, both passes"),
        ("pipeline boundary", "2 b s h x 2 bytes a micro-batch", NARAYANAN),
    ),
    "compress": (
        ("pays", "t(codec) + t(compressed exchange) < 2(P-1)α + 2(P-1)/P n β",
         "Agarwal et al. 2022, arXiv 2103.00543"),
        ("quantised", "bits/16 of the bytes, all-reduced", "Alistarh et al. 2017, arXiv 1610.02132"),
        ("top-k", "k values and k 4-byte indices of every rank, all-gathered",
         "Lin et al. 2018, arXiv 1712.01887"),
        ("PowerSGD", "2 r / width of the bytes, all-reduced as two factors",
         "Vogels et al. 2019, arXiv 1905.13727"),
    ),
}  # fmt: skip
"""By calculator: (what, formula, source)."""


def formulas(calculator: str, operation: str | None = None) -> list[dict[str, Any]]:
    """Formula and source of every number that a calculator gives.

    Parameters
    ----------
    calculator
        A key of `FORMULAS`.
    operation
        Of a collective: its algorithms come first.

    Returns
    -------
    list of dict
        `what`, `formula` and `source`.
    """
    rows = FORMULAS[calculator]
    if operation is not None:
        algorithms = ALGORITHMS[operation].items()
        named = [
            (f"{name} {operation}", a.formula, NVLS if a.in_switch else THAKUR)
            for name, a in algorithms
        ]
        rows = (*named, *rows)
    return [{"what": what, "formula": formula, "source": source} for what, formula, source in rows]


# Amounts as people write them.


_UNITS = {"": 1.0, "b": 1.0} | {
    prefix.lower() + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("b", 1e3), ("ib", 1024.0), ("", 1024.0))
}
"""Bytes; a bare K, M, G or T is a power of 1,024, as nccl-tests has it."""
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_RATE_BYTES = {"b/s": 1.0, "kb/s": 1e3, "mb/s": 1e6, "gb/s": 1e9, "tb/s": 1e12}
_NUMBER_AND_UNIT = re.compile(
    r"\s*(\d{1,15}(?:\.\d{1,15})?(?:e[+-]?\d{1,2})?)\s*([A-Za-z/]{0,5})\s*"
)
_GIGABIT = 1e9 / 8
_AMOUNT = re.compile(r"\s*(\d{1,15}(?:\.\d{1,15})?(?:e\d{1,2})?)\s*([a-z]{0,3})\s*")
MOST_BYTES = 2.0**60
LONGEST_TEXT = 60
MOST_SIZES = 400


def read_bytes(text: str, where: str) -> float:
    """Bytes of an amount as people write it.

    Parameters
    ----------
    text
        Such as `1GiB`, `512 MB` or `1e9`.
    where
        The option that it comes from, for the message.

    Returns
    -------
    float
        Bytes, from 1 to `MOST_BYTES`.

    Raises
    ------
    InputError
        With what is allowed.
    """
    match = _AMOUNT.fullmatch(text[:LONGEST_TEXT].lower())
    if match is None or match[2] not in _UNITS:
        raise InputError(
            "no amount of bytes; write a number with B, KB, MB, GB, TB (powers of 1,000) or KiB, MiB, GiB, "
            "TiB, K, M, G, T (of 1,024), such as 1GiB",
            where=where,
            value=text,
        )
    amount = float(match[1]) * _UNITS[match[2]]
    if not 1 <= amount <= MOST_BYTES:
        raise InputError(
            f"{amount:g} bytes; must be from 1 to {MOST_BYTES:g}", where=where, value=text
        )
    return amount


def sizes_between(first_bytes: float, end_bytes: float | None, factor: float) -> list[float]:
    """The sizes of a sweep in bytes, `factor` apart; the first alone without an end.

    Raises InputError for more than `MOST_SIZES`.
    """
    if end_bytes is None:
        return [first_bytes]
    count = 1 + floor(log(max(end_bytes / first_bytes, 1.0), factor) + 1e-9)
    if count > MOST_SIZES:
        raise InputError(f"{count} sizes, at most {MOST_SIZES}", where="--end, --factor")
    return [first_bytes * factor**step for step in range(count)]


def read_seconds(text: str, where: str) -> float:
    """Seconds of a duration as people write it.

    Parameters
    ----------
    text
        Such as `1.5us`, `20 ms` or `0`; a number without unit is seconds.
    where
        The option that it comes from, for the message.

    Returns
    -------
    float
        Seconds, 0 or more.

    Raises
    ------
    InputError
        With what is allowed.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text[:LONGEST_TEXT])
    if match is None or (match[2] or "s") not in _SECONDS:
        raise InputError(
            "no duration; write a number with s, ms, us or ns, such as 1.5us",
            where=where,
            value=text,
        )
    return float(match[1]) * _SECONDS[match[2] or "s"]


def read_rate(text: str, where: str) -> float:
    """Bytes a second of a rate as people write it.

    Parameters
    ----------
    text
        Such as `450GB/s` or `400Gb/s` (gigabit); or, as beta and gamma are defined, the seconds of one byte,
        a number without unit such as `2.2e-12`.
    where
        The option that it comes from, for the message.

    Returns
    -------
    float
        Bytes a second, above 0.

    Raises
    ------
    InputError
        With what is allowed.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text[:LONGEST_TEXT])
    number = 0.0 if match is None else float(match[1])
    unit = "" if match is None else match[2]
    if number > 0 and not unit:
        return 1.0 / number
    if number > 0 and unit in ("Gb/s", "Gbps"):
        return number * _GIGABIT
    if number > 0 and unit.lower() in _RATE_BYTES:
        return number * _RATE_BYTES[unit.lower()]
    raise InputError(
        "no rate; write a number above 0 with GB/s (bytes) or Gb/s (bits), such as 450GB/s, or the seconds "
        "of one byte, such as 2.2e-12",
        where=where,
        value=text,
    )
