"""Quantities as people read them, in tables and in pictures.

>>> seconds(0.0345), percent(0.4567), gigabytes(3.2e9), ranges([0, 1, 2, 5])
('34.5 ms', '45.7 %', '3.20 GB', '0-2, 5')
"""

from __future__ import annotations

from collections.abc import Iterable


def count(number: float) -> str:
    """A whole number with its thousands apart: 4,096."""
    return f"{number:,.0f}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun in the right number: 1 rank, 8 ranks; `plural` where it is not noun + s."""
    if number == 1:
        return f"1 {noun}"
    return f"{count(number)} {plural or noun + 's'}"


def batch_words(sequences: int, tokens: int) -> str:
    """A batch of so many sequences of so many tokens: 2,048 sequences x 8,192 tokens."""
    return f"{counted(sequences, 'sequence')} x {counted(tokens, 'token')}"


def seconds(value_s: float) -> str:
    """A duration to three or four digits: 12.34 s, 345 ms, 6.7 us."""
    if value_s >= 1000:
        return f"{value_s:,.0f} s"
    if value_s >= 100:
        return f"{value_s:.2f} s"
    if value_s >= 1:
        return f"{value_s:.3f} s"
    if value_s >= 0.1:
        return f"{value_s * 1e3:.0f} ms"
    if value_s >= 1e-3:
        return f"{value_s * 1e3:.1f} ms"
    return f"{value_s * 1e6:.1f} us"


def rounded_seconds(value_s: float) -> str:
    """A duration to the four digits that a prediction can claim: 27.95 s, 118.4 s."""
    if value_s >= 1000:
        return f"{value_s:,.0f} s"
    for least_s, digits in ((100.0, 1), (10.0, 2), (1.0, 3)):
        if value_s >= least_s:
            return f"{value_s:.{digits}f} s"
    return seconds(value_s)


def hours(value_s: float) -> str:
    """A time of a schedule in days, hours, minutes or seconds: 3.2 h."""
    for size_s, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if value_s >= 2 * size_s:
            return f"{value_s / size_s:.1f} {name}"
    return f"{value_s:.0f} s"


def amount(number: float) -> str:
    """A large count in thousands, millions, billions (short scale) or trillions: 70.6 B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            digits = ".3g" if number < 999.5 * size else ",.0f"
            return f"{number / size:{digits}} {letter}"
    return f"{number:.3g}"


def gigabytes(number_bytes: float) -> str:
    """Bytes in GB (1e9), or in MB (1e6) while small."""
    if number_bytes >= 1e8:
        return f"{number_bytes / 1e9:,.2f} GB"
    return f"{number_bytes / 1e6:,.2f} MB"


def percent(fraction: float, digits: int = 1) -> str:
    """A fraction as a percentage: 0.4567 is 45.7 %."""
    return f"{100 * fraction:.{digits}f} %"


def ranges(numbers: Iterable[int]) -> str:
    """Rising numbers with runs put together: 0, 1, 2, 5 is `0-2, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
