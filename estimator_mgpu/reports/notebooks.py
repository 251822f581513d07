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
    return '\n'.join(_html_of_table(table) for table in tables if table.rows)


def _html_of_table(table: Table) -> str:
    lines = ['<table>', f'<caption {_LEFT}><b>{_escaped(table.title)}</b></caption>']
    lines.append(_row('th', table.columns))
    lines += [_row('td', row) for row in table.rows]
    lines.append('</table>')
    return '\n'.join(lines)


def _row(tag: str, cells: Sequence[Any]) -> str:
    """Returns a row, whose cells have a tag: `th` in a header, and otherwise `td`."""
    return '<tr>' + ''.join(f'<{tag} {_LEFT}>{_escaped(cell)}</{tag}>' for cell in cells) + '</tr>'


def _escaped(cell: Any) -> str:
    return html.escape(str(cell))
