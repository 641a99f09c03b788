"""One description, three renderings: text, rich, HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html.parser import HTMLParser
from io import StringIO

import pytest
from rich.console import Console

from freezekit._tables import (
    WIDTH,
    Column,
    Section,
    Table,
    render_html,
    render_rich,
    render_text,
)

SMALL = Table(
    (Column("name"), Column("size", "right")),
    (("encoder", "1,024"), ("head", "2")),
    ("total", "1,026"),
)


def rich_text(sections: Sequence[Section], width: int = 200) -> str:
    """What rich prints for the sections."""
    console = Console(file=StringIO(), width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(render_rich(sections))
    return capture.get()


def words(text: str) -> list[str]:
    """The words of a rendering, its rules left out."""
    return [word for word in text.split() if word.strip("-─━╶╴ ")]


class _Cells(HTMLParser):
    """Collects the text of table cells and of preformatted lines."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: list[str] = []
        self.open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open = tag in ("td", "th", "pre")
        if self.open:
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        self.open = False

    def handle_data(self, data: str) -> None:
        assert self.open, f"text outside of cells: {data!r}"
        self.cells[-1] += data


def html_cells(sections: Sequence[Section]) -> list[str]:
    """The text of each cell and of each block of lines, in order."""
    parser = _Cells()
    parser.feed(render_html(sections))
    return parser.cells


def described_cells(sections: Sequence[Section]) -> list[str]:
    """The cells and blocks of lines that a description holds, in order."""
    cells = []
    for section in sections:
        if section.lines:
            cells.append("\n".join(section.lines))
        if section.table is not None:
            cells += [column.header for column in section.table.columns]
            cells += [cell for row in section.table.rows for cell in row]
            cells += section.table.total or ()
    return cells


# -- text --------------------------------------------------------------------------------------


def test_a_table_is_aligned_and_ruled() -> None:
    """Columns are two blanks apart, numbers to the right, the total set apart."""
    assert render_text([Section(("head",), SMALL)]) == (
        "head\n"
        "name      size\n"
        "--------------\n"
        "encoder  1,024\n"
        "head         2\n"
        "--------------\n"
        "total    1,026"
    )


def test_a_table_without_a_total_has_one_rule() -> None:
    """The rule at the foot belongs to the total."""
    table = Table((Column("name"),), (("a",),))
    assert render_text([Section((), table)]) == "name\n----\na"


def test_sections_are_a_blank_line_apart() -> None:
    """Each section is a paragraph."""
    assert render_text([Section(("a", "b")), Section(("c",))]) == "a\nb\n\nc"


def test_nothing_is_rendered_as_nothing() -> None:
    """No sections make no text."""
    assert render_text([]) == ""


def test_no_line_ends_in_blanks() -> None:
    """Padding at a line's end is taken off."""
    table = Table((Column("name"), Column("note")), (("a", ""), ("b", "long note")))
    lines = render_text([Section(("x  ",), table)]).split("\n")
    assert all(line == line.rstrip() for line in lines)


def test_long_lines_are_wrapped_with_their_indentation() -> None:
    """A line that goes on is indented below its beginning; words stay whole."""
    line = "  cause: " + " ".join(["encoder.layer"] * 20)
    lines = render_text([Section((line,))]).split("\n")
    assert len(lines) > 1
    assert all(len(part) <= WIDTH for part in lines)
    assert all(part.startswith("    encoder.layer") for part in lines[1:])
    assert words(" ".join(lines)) == words(line)


def test_a_name_with_hyphens_is_not_taken_apart() -> None:
    """Names are not broken at their hyphens."""
    line = "where: " + ", ".join(f"conv-block-{i}" for i in range(20))
    for part in render_text([Section((line,))]).split("\n"):
        assert not part.endswith("-")


@pytest.mark.parametrize("extra", [1, 40, 300])
def test_a_wide_table_gives_way_where_it_may(extra: int) -> None:
    """A column that may shrink does, until the table fits; its cells keep both ends."""
    name = "a" + "x" * (WIDTH + extra) + "z"
    table = Table((Column("name", shrink=1), Column("size", "right")), ((name, "12,345"),))
    text = render_text([Section((), table)])
    assert all(len(line) <= WIDTH for line in text.split("\n"))
    (row,) = (line for line in text.split("\n") if "12,345" in line)
    assert row.startswith("ax")
    assert "..." in row
    assert "xz  12,345" in row


def test_columns_give_way_in_their_order() -> None:
    """The column with the lower number shrinks first."""
    table = Table(
        (Column("module", shrink=2), Column("type", shrink=1), Column("size", "right")),
        (("m" * 50, "t" * 60, "1"),),
    )
    (row,) = (line for line in render_text([Section((), table)]).split("\n") if "ttt" in line)
    assert "m" * 50 in row
    assert len(row) == WIDTH


def test_every_column_may_be_too_wide_and_the_table_still_fits() -> None:
    """No line is over 100 columns, also where columns that do not shrink are long."""
    table = Table(
        (Column("module", shrink=2), Column("type", shrink=1), Column("dtype")),
        (("m" * 90, "t" * 90, "f32,bf16,float8_e4m3fn,float8_e5m2,float8_e8m0fnu," * 2),),
    )
    text = render_text([Section((), table)])
    assert max(len(line) for line in text.split("\n")) <= WIDTH


def test_the_width_can_be_chosen() -> None:
    """A narrower rendering wraps and shrinks to its own width."""
    table = Table((Column("name", shrink=1),), (("x" * 60,),))
    text = render_text([Section(("word " * 20,), table)], width=40)
    assert max(len(line) for line in text.split("\n")) == 40


@pytest.mark.parametrize("break_", ["\n", "\r\n", "\t", "\x0b"], ids=["lf", "crlf", "tab", "vt"])
def test_a_cell_is_one_line(break_: str) -> None:
    """A cell with a line break or a tab in it does not break the table."""
    table = Table((Column("pattern"), Column("size", "right")), ((f"re:a{break_}b", "1"),))
    lines = render_text([Section((), table)]).splitlines()
    assert len(lines) == 3
    assert "\t" not in lines[2]


# -- rich and HTML -----------------------------------------------------------------------------

TRICKY = (
    "layer.[abc].weight",
    "[red]x[/red]",
    "[/]",
    "a < b & c > d",
    "<script>alert(1)</script>",
    "&amp;",
    "'\"",
    ":smile:",
    "re:\\[x\\]",
)


def tricky_sections() -> list[Section]:
    """Cells, lines, headers and totals that markup or HTML could take for its own."""
    table = Table(
        (Column("[bold]name", shrink=1), Column("<i>size</i>", "right")),
        tuple((cell, cell) for cell in TRICKY),
        ("[total]", "<total>"),
    )
    return [Section(tuple(f"  line: {cell}" for cell in TRICKY), table), Section(("end",))]


def test_every_renderer_shows_tricky_cells_as_they_are() -> None:
    """Brackets are no markup and angle brackets no tags, in lines, headers, cells and totals."""
    sections = tricky_sections()
    text, rich = render_text(sections), rich_text(sections)
    for cell in (*TRICKY, "[bold]name", "<i>size</i>", "[total]", "<total>"):
        assert cell in text
        assert cell in rich
    assert words(text) == words(rich)
    assert html_cells(sections) == described_cells(sections)


def test_html_has_no_tag_from_a_cell() -> None:
    """Only the renderer's own tags are in the HTML."""
    parser = _Cells()
    parser.feed(render_html(tricky_sections()))
    allowed = {"div", "pre", "table", "thead", "tbody", "tfoot", "tr", "th", "td"}
    assert set(parser.tags) == allowed


def test_html_without_total_has_no_foot() -> None:
    """A table without a total has no foot, a section without lines no block."""
    found = render_html([Section((), Table((Column("a"),), (("b",),)))])
    assert "<tfoot>" not in found
    assert "<pre" not in found


def test_html_takes_the_pages_colours() -> None:
    """Rules are drawn in the page's own colour, so that dark pages work."""
    found = render_html([Section((), SMALL)])
    assert "currentColor" in found
    assert "color:" not in found.replace("currentColor", "")


@pytest.mark.parametrize("width", [200, 100, 60])
def test_rich_shows_all_words_at_any_width(width: int) -> None:
    """A narrow terminal folds, and drops nothing."""
    sections = [Section(("one line", "  another line"), SMALL), Section(("end",))]
    assert words(rich_text(sections, width)) == words(render_text(sections))


def test_rich_folds_a_long_name_and_drops_nothing() -> None:
    """A name too long for the terminal goes on in the next line, to its last letter."""
    name = "".join(chr(ord("a") + i % 26) for i in range(70))
    table = Table((Column("module", shrink=1), Column("size", "right")), ((name, "1"),))
    printed = rich_text([Section((), table)], width=40)
    letters = "".join(c for line in printed.split("\n")[2:] for c in line if c.isalpha())
    assert letters == name


def test_rich_keeps_indentation() -> None:
    """A tree's indentation is kept in rich's table."""
    table = Table((Column("module", shrink=1),), (("encoder",), ("  layer",)))
    lines = [line.rstrip() for line in rich_text([Section((), table)]).split("\n")]
    (outer,) = (line for line in lines if line.strip() == "encoder")
    (inner,) = (line for line in lines if line.strip() == "layer")
    assert inner.index("layer") == outer.index("encoder") + 2
