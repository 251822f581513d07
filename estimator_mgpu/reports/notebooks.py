"""Tables in HTML: how a notebook shows what `verify()` and `explain()` return.

In: the cells of tables. Out: HTML, for the method `_repr_html_` that notebooks call.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

_LEFT = 'style="text-align: left"'


class Table(NamedTuple):
    """A table with a title. Without rows, it isn't shown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def html_of(tables: Sequence[Table]) -> str:
    """Returns the HTML of tables, one below the other."""
    lines = []
    for title, columns, rows in tables:
        if rows:
            lines += ['<table>', f'<caption {_LEFT}><b>{html.escape(title)}</b></caption>']
            lines.append(_row('th', columns))
            lines += [_row('td', row) for row in rows]
            lines.append('</table>')
    return '\n'.join(lines)


def _row(tag: str, cells: Sequence[Any]) -> str:
    """Returns a row, whose cells have a tag: `th` in a header, and otherwise `td`."""
    texts = [f'<{tag} {_LEFT}>{html.escape(str(cell))}</{tag}>' for cell in cells]
    return f'<tr>{"".join(texts)}</tr>'
