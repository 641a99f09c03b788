"""One description of a report's content, and its renderings: text, rich, HTML.

A report describes itself once, as sections of lines and tables of plain strings; every renderer
shows all of it, so that no two renderings can disagree.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["WIDTH", "Column", "Section", "Table", "render_html", "render_rich", "render_text"]

# A report must be readable in a log, a terminal split in two, an issue: 100 columns.
WIDTH = 100
# Names cut shorter than this tell nothing.
_NARROWEST = 12
_FEWEST = 5
_BREAKS = re.compile(r"[\t\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")


class Column(NamedTuple):
    """A column's header and alignment.

    ``shrink`` tells in which order columns give way when a table is too wide: 1 before 2;
    0 never does.
    """

    header: str
    align: Literal["left", "right"] = "left"
    shrink: int = 0


class Table(NamedTuple):
    """Rows of cells; ``total``, if any, is set apart at the foot."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    total: tuple[str, ...] | None = None


class Section(NamedTuple):
    """Lines of text, then a table. A line's own indentation is kept where it wraps."""

    lines: tuple[str, ...] = ()
    table: Table | None = None


# -- plain text --------------------------------------------------------------------------------


def render_text(sections: Iterable[Section], width: int = WIDTH) -> str:
    """The sections as text: no colour, no trailing blanks, no line over ``width`` columns."""
    blocks = []
    for section in sections:
        lines = [part for line in section.lines for part in _wrap(line, width)]
        if section.table is not None:
            lines += _text_table(section.table, width)
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(blocks)


def _wrap(line: str, width: int) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_on_hyphens=False, drop_whitespace=True
    ) or [""]


def _text_table(table: Table, width: int) -> list[str]:
    rows = [tuple(column.header for column in table.columns), *table.rows]
    if table.total is not None:
        rows.append(table.total)
    rows = [tuple(_BREAKS.sub(" ", cell) for cell in row) for row in rows]
    widths = _column_widths(table.columns, rows, width)
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    lines = [_text_row(row, table.columns, widths) for row in rows]
    lines.insert(1, rule)
    if table.total is not None:
        lines.insert(-1, rule)
    return lines


def _column_widths(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int
) -> list[int]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    excess = sum(widths) + 2 * (len(widths) - 1) - width
    for i in sorted(range(len(columns)), key=lambda i: columns[i].shrink):
        if columns[i].shrink and excess > 0:
            taken = min(excess, max(widths[i] - _NARROWEST, 0))
            widths[i] -= taken
            excess -= taken
    # Still too wide: whatever is text gives way, the widest first.
    texts = [i for i, column in enumerate(columns) if column.align == "left"]
    while excess > 0 and any(widths[i] > _FEWEST for i in texts):
        widths[max(texts, key=lambda i: widths[i])] -= 1
        excess -= 1
    return widths


def _text_row(row: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    cells = [
        cell.rjust(size) if column.align == "right" else _clip(cell, size).ljust(size)
        for cell, column, size in zip(row, columns, widths, strict=True)
    ]
    return "  ".join(cells)


def _clip(cell: str, size: int) -> str:
    """The cell, or its two ends: the end of a dotted name tells as much as its beginning."""
    if len(cell) <= size:
        return cell
    head = (size - 3) // 2
    return f"{cell[:head]}...{cell[len(cell) - (size - 3 - head) :]}"


# -- rich and HTML -----------------------------------------------------------------------------


def render_rich(sections: Iterable[Section]) -> Group:
    """The sections as a rich renderable. Cells are literal text: brackets are not markup."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    parts: list[Text | RichTable] = []
    for section in sections:
        parts.extend(Text(line) for line in section.lines)
        if section.table is not None:
            grid = RichTable(box=box.SIMPLE_HEAD, show_footer=section.table.total is not None)
            footers = section.table.total or ("",) * len(section.table.columns)
            for column, footer in zip(section.table.columns, footers, strict=True):
                grid.add_column(
                    Text(column.header),
                    Text(footer),
                    justify=column.align,
                    overflow="fold",
                    no_wrap=not column.shrink,
                )
            for row in section.table.rows:
                grid.add_row(*(Text(cell) for cell in row))
            parts.append(grid)
    return Group(*parts)


def render_html(sections: Iterable[Section]) -> str:
    """The sections as HTML: real tables, everything escaped, the page's own colours."""
    import html

    parts = []
    for section in sections:
        if section.lines:
            text = html.escape("\n".join(section.lines))
            parts.append(f'<pre style="white-space:pre-wrap;margin:0.5em 0">{text}</pre>')
        if section.table is not None:
            parts.append(_html_table(section.table))
    return f'<div class="freezekit">{"".join(parts)}</div>'


def _html_table(table: Table) -> str:
    import html

    def row(cells: Sequence[str], tag: str, rule: str = "") -> str:
        edge = f";border-{rule}:1px solid currentColor" if rule else ""
        return (
            "<tr>"
            + "".join(
                f'<{tag} style="text-align:{column.align};white-space:pre{edge}">'
                f"{html.escape(cell)}</{tag}>"
                for cell, column in zip(cells, table.columns, strict=True)
            )
            + "</tr>"
        )

    head = row([column.header for column in table.columns], "th", "bottom")
    body = "".join(row(cells, "td") for cells in table.rows)
    foot = f"<tfoot>{row(table.total, 'td', 'top')}</tfoot>" if table.total is not None else ""
    return f"<table><thead>{head}</thead><tbody>{body}</tbody>{foot}</table>"
