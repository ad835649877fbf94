"""Which layers are of a kind, in the notation of Megatron-LM's flags: a Python list of 0 and 1."""

from __future__ import annotations

from meshwright.model_specs.layer_order import repeated_part, runs


def layer_list(order: str, one: str) -> str:
    """A list with a 1 for each layer whose letter is `one`, as `moe_freq_type` of Megatron-LM evaluates it.

    >>> layer_list("FFFWW", "W"), layer_list("FWFWFW", "W"), layer_list("LL", "L")
    ('([0]*3+[1]*2)', '([0,1]*3)', '([1]*2)')
    """
    digits = "".join("1" if letter == one else "0" for letter in order)
    part = repeated_part(digits)
    terms = "+".join(f"[{digit}]*{count}" for digit, count in runs(digits))
    repeated = f"[{','.join(digits[:part])}]*{len(digits) // part}"
    return f"({min(terms, repeated, key=len)})"
