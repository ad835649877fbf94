"""Views as HTML, in a page that needs nothing else: it loads nothing and runs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

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
            return _table(block)


def _table(table: Table) -> str:
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
