"""Views as HTML, in a page that needs nothing else: it loads nothing, and runs what lies in it alone."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from typing import Any

from meshwright.planner.report.view import (
    Bar,
    Block,
    Bullets,
    Cell,
    Facts,
    Heading,
    Line,
    Table,
    View,
)

LIBRARY, STYLE, SCRIPT = "echarts.min.js", "page.css", "page.js"
"""Files of the `page` folder that every page holds; the first is Apache ECharts as it is published."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page under its title: a sentence, controls, charts, and tables that may be folded."""

    key: str
    """Of its place in the page."""
    title: str
    words: str = ""
    before: str = ""
    """HTML above the charts."""
    charts: Sequence[tuple[str, int]] = ()
    """(name in the page's script, height in pixels)."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What the charts draw, by name."""
    more: str = ""
    """HTML below the charts; folded up where there are charts."""
    folded: str = ""
    """What the fold is called; by default `Tables`."""

    def html(self) -> str:
        """The text of the section."""
        parts = [f"<h2>{escape(self.title)}</h2>"] if self.title else []
        parts += [f"<p>{escape(self.words)}</p>"] if self.words else []
        parts.append(self.before)
        if self.charts:
            label = escape(f"{self.title}. {self.words}", quote=True)
            places = (
                f'<div class="chart" id="chart-{name}" role="img" aria-label="{label}" '
                f'style="height:{height}px"></div>'
                for name, height in self.charts
            )
            parts.append(f'<div class="charts">{"".join(places)}</div>')
        if self.more:
            more = f'<div class="wide">{self.more}</div>'
            name = self.folded or ("Tables" if self.charts else "")
            kind = ' class="document"' if self.folded else ""
            fold = f"<details{kind}><summary>{escape(name)}</summary>{more}</details>"
            parts.append(fold if name else more)
        return f'<section id="{self.key}">{"".join(parts)}</section>'


def page(
    title: str,
    words: str,
    headline: str,
    cards: Sequence[tuple[str, str]],
    parts: Sequence[Section],
) -> str:
    """A whole page.

    Parameters
    ----------
    title, words
        What it is about, in a few words and in a line.
    headline
        The answer, in a sentence.
    cards
        Figures: (what, value).
    parts
        The sections; where none has figures the page holds no script.
    """
    figures = {name: figure for part in parts for name, figure in part.figures.items()}
    cards_html = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
        for what, value in cards
    )
    links = "".join(
        f'<li><a href="#{part.key}">{escape(part.title)}</a></li>' for part in parts if part.charts
    )
    body = "\n".join(part.html() for part in parts)
    scripts = [_asset(LIBRARY), _asset(SCRIPT)] if figures else []
    data = json.dumps(figures, separators=(",", ":")).replace("<", "\\u003c")
    tail = f'<script type="application/json" id="figures">{data}</script>\n' if figures else ""
    tail += "".join(f"<script>{script}</script>\n" for script in scripts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title><style>{_asset(STYLE)}</style></head>\n"
        f'<body><main><h1>{escape(title)}</h1><p class="soft">{escape(words)}</p>'
        f'<p class="headline">{escape(headline)}</p><div class="cards">{cards_html}</div>\n'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n'
        f"{body}\n</main>\n{tail}</body></html>\n"
    )


def _asset(name: str) -> str:
    """A file of the `page` folder."""
    return resources.files(__package__).joinpath("page", name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str]) -> str:
    """Nothing is loaded, and nothing runs but these scripts."""
    hashes = (b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes) or "'none'"
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"


def section_html(title: str, view: View) -> str:
    """The blocks of a section under its title."""
    parts = [f"<h2>{escape(title)}</h2>"] if title else []
    return "\n".join([*parts, *map(block_html, view)])


def block_html(block: Block) -> str:
    """One block of a view."""
    match block:
        case Heading():
            return f"<h2>{escape(block.title)}</h2>"
        case Line():
            words = escape(str(block))
            return f"<p>{words}</p>" if words.strip() else ""
        case Facts():
            rows = (
                f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in block.rows
            )
            return f"<dl>{''.join(rows)}</dl>"
        case Bullets():
            return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in block.items) + "</ul>"
        case Table():
            return _html_table(block)


def _html_table(table: Table) -> str:
    kinds = [' class="left"' if column.kind.is_left else "" for column in table.columns]
    head = _row("th", kinds, map(escape, table.head))
    body = "".join(_row("td", kinds, map(_cell, row)) for row in table.cells)
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _row(tag: str, kinds: Sequence[str], cells: Iterable[str]) -> str:
    parts = (f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
    return f"<tr>{''.join(parts)}</tr>"


def _cell(cell: Cell) -> str:
    if not isinstance(cell, Bar):
        return escape(cell.text)
    over = " over" if cell.fraction > 1 else ""
    return f'<span class="bar{over}"><i style="width:{100 * cell.filled:.0f}%"></i></span>'
