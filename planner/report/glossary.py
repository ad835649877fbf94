"""The words of messages and documents: docs/glossary.md, which the package holds."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

_ROW = re.compile(r"^\| (?P<term>[^|]+?) \| (?P<meaning>.+?) \|$", re.MULTILINE)
_HEADS = ("word", "---")


@cache
def meanings() -> dict[str, str]:
    """Every word of the glossary with what it means, in the order of the page."""
    page = resources.files("meshwright").joinpath("docs/glossary.md").read_text(encoding="utf-8")
    rows = [(row["term"].strip("`"), row["meaning"]) for row in _ROW.finditer(page)]
    return {term: meaning for term, meaning in rows if term not in _HEADS}


def meaning_of(words: str) -> tuple[str, str] | None:
    """The glossary's own spelling of a word, and its meaning; None for a word that it does not have.

    Case, dashes and underscores do not matter, nor a plural's s.

    >>> meaning_of("TP")[0]
    'tp'
    """
    wanted = _key(words)
    for term, meaning in meanings().items():
        names = [_key(name) for name in term.split(", ")]
        if wanted in names or wanted in [f"{name}s" for name in names]:
            return term, meaning
    return None


def rule_meaning(name: str) -> tuple[str, str] | None:
    """The rule of this name, and what it says; None where no rule is called so.

    >>> rule_meaning("heads-by-tp")
    ('heads-by-tp', 'heads mod tp = 0')
    """
    from meshwright.constraints.registry import rule_named, sentence_of

    rule = rule_named(name.strip())
    return None if rule is None else (rule.name, sentence_of(rule))


def _key(words: str) -> str:
    return words.strip().lower().replace("-", " ").replace("_", " ")
