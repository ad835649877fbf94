"""Hostile files: real ones cut, flipped and filled with what nobody should write."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import yaml

NASTY_WORDS = (
    b"NaN", b".inf", b"-1", b"0", b"1e999", b"9" * 400, b"-0.0", b"null", b"true", b"[]", b"{}", b"\x00",
    b"\xff\xfe", b"!!python/object/apply:os.system ['touch fuzzed']", b"&a [*a, *a]", b"<<: *a", b"../../x",
    b"$(touch fuzzed)", b"`touch fuzzed`", b"'", b'"', b"\\", b"\n", b"\r\n", b"\t", b"|", b"#", b"--", b"=",
    b"%s%n", b"[0-99999999999]", b"node[1-4294967296]", b"\xe2\x80\xae", b"1_000", b"0x7f", b"1e-400",
    b"[" * 200, b"{" * 200, b"2001-13-45", b"9223372036854775808", b"<!ENTITY a 'b'>", b"]]>",
)  # fmt: skip
NASTY_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 0.0, -0.0, 1e-320, 1e308, float("nan"),
    float("inf"), float("-inf"), "", "x", "0", "-1", "nan", "1e9", "../../etc/passwd", "\x00", "é" * 300,
    "a" * 5000, [], {}, [[]], [None], [0], ["x"] * 50, {"": 0}, {"a": {"b": {"c": []}}}, {"1": 1},
    "$(touch fuzzed)", "x; touch fuzzed", "--option", "%d", "llama-3-8b", "dgx-h100",
)  # fmt: skip
LONGEST = 400_000


def hostile(rng: random.Random, data: bytes, value: Any) -> bytes:
    """One variant of a file: `value` is put into a document, or bytes are changed."""
    if rng.random() < 0.5:
        structured = _with_value(rng, data, value)
        if structured is not None:
            return structured[:LONGEST]
    for _ in range(rng.choice((1, 1, 2, 5))):
        data = rng.choice(_CHANGES)(rng, data)
    return data[:LONGEST]


def _with_value(rng: random.Random, data: bytes, value: Any) -> bytes | None:
    """The document with one of its values replaced, removed or moved; None for a file that is no document."""
    try:
        text = data.decode()
        document = json.loads(text) if text.lstrip()[:1] in "{[" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError):
        return None
    if not isinstance(document, dict | list):
        return None
    places = list(_places(document))
    if not places:
        return None
    parent, key = rng.choice(places)
    kind = rng.random()
    if kind < 0.7:
        parent[key] = value if rng.random() < 0.5 else rng.choice(NASTY_VALUES)
    elif kind < 0.8:
        del parent[key]
    elif kind < 0.9:
        parent[key] = [parent[key], parent[key]]
    elif isinstance(parent, dict):
        parent[rng.choice(("", "x", "name", "gpus", 7, None))] = parent.pop(key)
    if text.lstrip()[:1] in "{[":
        try:
            return json.dumps(document).encode()
        except (TypeError, ValueError):
            return None
    return yaml.safe_dump(document).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        children = part.items() if isinstance(part, dict) else enumerate(part)
        for key, child in list(children):
            yield part, key
            if isinstance(child, dict | list):
                waiting.append(child)


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _flipped(rng: random.Random, data: bytes) -> bytes:
    if not data:
        return b"\xff"
    changed = bytearray(data)
    for _ in range(rng.choice((1, 3, 30))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _inserted(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(NASTY_WORDS) + data[at:]


def _replaced(rng: random.Random, data: bytes) -> bytes:
    """A word or number of the file gives way to a nasty one."""
    words = data.split(b" ")
    words[rng.randrange(len(words))] = rng.choice(NASTY_WORDS)
    return b" ".join(words)


def _repeated(rng: random.Random, data: bytes) -> bytes:
    if not data:
        return data
    begin = rng.randrange(len(data))
    end = min(len(data), begin + rng.choice((1, 10, 1000)))
    return data[:end] + data[begin:end] * rng.choice((1, 10, 200)) + data[end:]


def _lines_moved(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    rng.shuffle(lines)
    return b"\n".join(lines[: rng.randrange(1, len(lines) + 1)])


def _digits_changed(rng: random.Random, data: bytes) -> bytes:
    places = [at for at, byte in enumerate(data) if 48 <= byte < 58]
    if not places:
        return data
    at = rng.choice(places)
    number = rng.choice((b"0", b"-1", b"9" * 25, b"1.5", b"1e300", b"nan", b""))
    return data[:at] + number + data[at + 1 :]


_CHANGES = (_cut, _flipped, _inserted, _replaced, _repeated, _lines_moved, _digits_changed)
