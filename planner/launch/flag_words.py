"""Flags and their values as the words of a command line."""

from __future__ import annotations

from collections.abc import Mapping


def flag_words(flags: Mapping[str, object]) -> list[str]:
    """The words of a command line, in the order of `flags`.

    Parameters
    ----------
    flags
        Values by flag. True stands for the flag alone, a tuple for several values; a flag of None or False
        is left out.

    >>> flag_words({"--num-layers": 32, "--swiglu": True, "--qk-layernorm": False})
    ['--num-layers', '32', '--swiglu']
    """
    words: list[str] = []
    for flag, value in flags.items():
        if value is None or value is False:
            continue
        words.append(flag)
        if isinstance(value, tuple):
            words += [str(part) for part in value]
        elif value is not True:
            words.append(str(value))
    return words
