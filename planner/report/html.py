"""Views as HTML: the same tables and lines as on the terminal, in a page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from rich.table import Table
from rich.text import Text

from meshwright.planner.report.parts import Renderable

_FULL, _EMPTY = "█", "·"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Nothing is loaded and nothing runs."""
_STYLE = """
body{margin:0;background:#f8fafc;color:#0f172a;font:15px/1.5 Inter,'Helvetica Neue',Arial,sans-serif}
main{max-width:1240px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:26px;margin:0 0 4px}h2{font-size:18px;margin:0 0 10px}
p{margin:6px 0}section{background:#fff;border:1px solid #e2e8f0;border-radius:10px;padding:18px 20px;
margin:18px 0;overflow-x:auto}
.cards{display:flex;flex-wrap:wrap;gap:12px;margin:18px 0}
.card{background:#fff;border:1px solid #e2e8f0;border-radius:10px;padding:12px 18px;min-width:130px}
.card b{display:block;font-size:22px}.card span{color:#475569}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th{text-align:right;font-weight:600;color:#475569;border-bottom:1px solid #cbd5e1}
th,td{padding:4px 14px 4px 0;vertical-align:top}td{text-align:right}
th.left,td.left{text-align:left}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 18px;margin:6px 0}
dt{color:#475569}dd{margin:0;overflow-wrap:anywhere}
.bar{display:inline-block;width:160px;height:10px;background:#e2e8f0;border-radius:5px;overflow:hidden}
.bar i{display:block;height:100%;background:#2563a8}.bar.over i{background:#b3261e}
pre{font-size:12px;overflow-x:auto}summary{cursor:pointer;font-weight:600}svg{max-width:100%;height:auto}
@media print{body{background:#fff}section,.card{break-inside:avoid}}
"""


def page(title: str, words: str, cards: Sequence[tuple[str, str]], sections: Iterable[str]) -> str:
    """A whole page: a title, a line under it, figures (what, value) and sections that are HTML already."""
    figures = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
        for what, value in cards
    )
    body = "\n".join(f"<section>{section}</section>" for section in sections)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f'<body><main><h1>{escape(title)}</h1><p>{escape(words)}</p><div class="cards">{figures}</div>\n'
        f"{body}\n</main></body></html>\n"
    )


def sections_of(views: Iterable[Renderable]) -> Iterator[tuple[str, str]]:
    """(title, HTML with the title) for every run of views that a heading begins; the first may have none."""
    title, parts = "", list[str]()
    for view in views:
        words = _heading(view)
        if words is None:
            parts.append(html_of(view))
            continue
        if any(parts):
            yield title, "\n".join(parts)
        title, parts = words, [f"<h2>{escape(words)}</h2>"]
    if any(parts):
        yield title, "\n".join(parts)


def html_of(view: Renderable) -> str:
    """One table, list or line."""
    if isinstance(view, Text):
        return f"<p>{_cell(view)}</p>" if view.plain.strip() else ""
    rows = list(zip(*(list(column.cells) for column in view.columns), strict=True))
    if view.show_header:
        return _table(view, rows)
    if all(_plain(first) == "-" for first, *_ in rows):
        return "<ul>" + "".join(f"<li>{_cell(second)}</li>" for _, second in rows) + "</ul>"
    return "<dl>" + "".join(f"<dt>{_cell(a)}</dt><dd>{_cell(b)}</dd>" for a, b in rows) + "</dl>"


def _table(view: Table, rows: Iterable[Sequence[object]]) -> str:
    kinds = [' class="left"' if column.justify == "left" else "" for column in view.columns]
    head = "".join(
        f"<th{kind}>{_cell(column.header)}</th>"
        for kind, column in zip(kinds, view.columns, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{_cell(value)}</td>" for kind, value in zip(kinds, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _heading(view: Renderable) -> str | None:
    """The title, where a view is one (`parts.heading`)."""
    if isinstance(view, Text) and view.plain.startswith("\n") and len(view.spans) == 1:
        return view.plain.strip()
    return None


def _plain(value: object) -> str:
    return value.plain if isinstance(value, Text) else str(value)


def _cell(value: object) -> str:
    """A text; a bar of characters becomes a drawn one."""
    plain = _plain(value)
    if plain and set(plain) <= {_FULL, _EMPTY}:
        share = 100 * plain.count(_FULL) / len(plain)
        over = isinstance(value, Text) and any(str(span.style) == "red" for span in value.spans)
        return (
            f'<span class="bar{" over" if over else ""}"><i style="width:{share:.0f}%"></i></span>'
        )
    return escape(plain)
