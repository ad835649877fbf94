"""The words of messages and documents: docs/glossary.md, which the package holds."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

_ROW = re.compile(r"^\| (?P<term>[^|]+?) \| (?P<meaning>.+?) \|$", re.MULTILINE)
_FIGURES = (
    (re.compile(r"^within [\d.]+ ?% of the best$"), "within x % of the best"),
    (re.compile(r"^batch [\d.]+$"), "batch x"),
    (re.compile(r"^[\d.]+ ?% (overlapped|serial)$"), r"\1"),
)
"""Words with a figure in them, and how the glossary has them."""
_HEADS = ("word", "---")
_UNITS = (
    " gb per s",
    " per gpu s",
    " gib",
    " gbps",
    " gbps per gpu",
    " bytes",
    " mb",
    " pct",
    " s",
    " w",
    " h",
)
"""At the end of keys of documents, as `_key` leaves them."""
_STATISTICS = (" mean", " max")


@cache
def meanings() -> dict[str, str]:
    """Every word of the glossary with what it means, in the order of the page."""
    page = resources.files("meshwright").joinpath("docs/glossary.md").read_text(encoding="utf-8")
    rows = [(row["term"].strip("`"), row["meaning"]) for row in _ROW.finditer(page)]
    return {term: meaning for term, meaning in rows if term not in _HEADS}


def meaning_of(words: str) -> tuple[str, str] | None:
    """The glossary's own spelling of a word, and its meaning; None for a word that it does not have.

    Case, dashes and underscores do not matter, nor a plural's s, nor the unit at the end of a key. Of words
    joined by `+` each is explained.

    >>> meaning_of("TP")[0]
    'tp'
    >>> meaning_of("step_time_s")[0]
    'step time'
    """
    own = _meaning_of_one(words)
    if own is not None or "+" not in words:
        return own
    parts = [_meaning_of_one(part) for part in words.split("+")]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return words.strip(), " ".join(f"{term}: {meaning}" for term, meaning in known)


def _meaning_of_one(words: str) -> tuple[str, str] | None:
    for wanted in _spellings(_key(words)):
        term = _terms().get(wanted)
        if term is not None:
            return term, meanings()[term]
    return None


def _spellings(key: str) -> list[str]:
    """A word as it stands, and without a statistic, a unit and a plural's s behind it."""
    figure = _without(key, _STATISTICS)
    forms = [key, figure, _without(figure, _UNITS)]
    return list(dict.fromkeys(each for form in forms for each in (form, form.removesuffix("s"))))


def _without(key: str, endings: tuple[str, ...]) -> str:
    ending = next((each for each in endings if key.endswith(each)), "")
    return key.removesuffix(ending)


@cache
def _terms() -> dict[str, str]:
    """Every spelling of the glossary's words, the first row first."""
    terms: dict[str, str] = {}
    for term in meanings():
        for name in (term, *term.split(", ")):
            terms.setdefault(_key(name), term)
    return terms


def rule_meaning(name: str) -> tuple[str, str] | None:
    """The rule of this name, and what it says; None where no rule is called so.

    >>> rule_meaning("heads-by-tp")
    ('heads-by-tp', 'heads mod tp = 0')
    """
    from meshwright.constraints.registry import rule_named, sentence_of

    rule = rule_named(name.strip())
    return None if rule is None else (rule.name, sentence_of(rule))


def _key(words: str) -> str:
    plain = words.strip().lower().replace("-", " ").replace("_", " ")
    for pattern, word in _FIGURES:
        plain = pattern.sub(word, plain)
    return plain
