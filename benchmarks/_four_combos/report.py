"""The results as tables: one description, rendered for the terminal and for the docs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from _four_combos.combos import COMBINATIONS, Combination
from _four_combos.cuda import CAP_ABOVE_DEVICE, OUT_OF_MEMORY
from _four_combos.results import CudaRow, PredictedRow, Results, TrainRow

MIB = 2**20
GIB = 2**30
NO_CUDA = "no CUDA device here: not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A title, columns (the first ``left`` of them aligned left), rows, and notes below.

    A line break in a column's header is where the terminal breaks it; the docs show a blank.
    """

    title: str
    columns: tuple[str, ...]
    left: int
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def tables(results: Results) -> tuple[Table, ...]:
    """Return the tables of all parts, in order."""
    return (
        saved_table(results),
        train_table(results),
        cuda_table(results),
        predicted_table(results),
    )


def rich_table(table: Table) -> Group:
    """Render for the terminal."""
    # Text, not str: rich would read square brackets in a plain string as markup.
    notes = [Text(note) for note in table.notes]
    if not table.rows:
        return Group(Text(table.title, style="bold"), *notes)
    grid = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number, column in enumerate(table.columns):
        justify: Literal["left", "right"] = "left" if number < table.left else "right"
        grid.add_column(Text(column), justify=justify, overflow="fold")
    for row in table.rows:
        grid.add_row(*(Text(cell) for cell in row))
    return Group(Text(table.title, style="bold"), grid, *notes)


def markdown(table: Table) -> str:
    """Render for the docs."""
    rules = ["---" if n < table.left else "---:" for n in range(len(table.columns))]
    lines = (
        [_markdown_row(row) for row in (table.columns, rules, *table.rows)] if table.rows else []
    )
    notes = "\n".join(f"- {note}" for note in table.notes)
    return "\n\n".join(part for part in (f"**{table.title}**", "\n".join(lines), notes) if part)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("\n", " ").replace("|", "\\|") for cell in cells) + " |"


# -- part 1 ------------------------------------------------------------------------------------


def saved_table(results: Results) -> Table:
    """Tabulate what autograd saves for backward on the tutorial's model."""
    settings = results.saved_settings
    rows = [
        (
            row.attention,
            *_switches(row.combination),
            f"{row.marked_trainable:,}",
            f"{row.with_gradient:,}",
            mib(row.backbone_saved_bytes),
            mib(row.head_saved_bytes),
        )
        for row in results.saved
    ]
    quick = "QUICK, " if results.quick else ""
    return Table(
        title=f"1. The tutorial's model at its true size ({quick}CPU, batch {settings.batch_size}, "
        f"length {settings.length})",
        columns=(
            "attention",
            "run",
            "no_grad",
            "requires_grad",
            "marked\ntrainable",
            "receive a\ngradient",
            "BERT saves,\nMiB",
            "head saves,\nMiB",
        ),
        left=4,
        rows=tuple(rows),
        notes=(
            "no_grad: around BERT's forward pass; requires_grad: of BERT's parameters",
            "saves: for backward; parameters and buffers are not counted",
        ),
    )


# -- part 2 ------------------------------------------------------------------------------------


def train_table(results: Results) -> Table:
    """Tabulate the real run."""
    reference = next(row for row in results.train if row.combination == "a")
    warmup = results.train_settings.warmup
    rows = [_train_cells(row, reference, warmup) for row in results.train]
    settings = results.train_settings
    quick = "QUICK, " if results.quick else ""
    return Table(
        title=f"2. Real weights, real text ({quick}CPU, {settings.batches} batches of "
        f"{settings.batch_size}, Adam at {settings.learning_rate:g})",
        columns=(
            "run",
            "step,\nms",
            "middle half,\nms",
            "times a",
            "peak,\nMiB",
            "first\nloss",
            "last\nloss",
            "accuracy",
            "BERT tensors\nchanged",
        ),
        left=1,
        rows=tuple(rows),
        notes=(
            f"a, b and c: {same_head_words(results)}",
            f"step: median of {settings.batches - warmup}; times a: median over the same batches",
            "peak: live tensor bytes during one step of the widest batch",
            f"first and last loss: means over {edge(settings.batches)} training batches",
            f"accuracy: on {results.train[0].tested:,} held-out texts; standard error "
            f"{100 * standard_error(results):.1f} points; one label for all: "
            f"{percent(one_label(results))}",
        ),
    )


def _train_cells(row: TrainRow, reference: TrainRow, warmup: int) -> tuple[str, ...]:
    timing = step_quartiles(row, warmup)
    first, last = loss_edges(row)
    return (
        row.label,
        f"{1000 * timing[1]:.0f}",
        f"{1000 * timing[0]:.0f} to {1000 * timing[2]:.0f}",
        f"{times(row, reference, warmup):.2f}",
        mib(row.peak_bytes),
        first,
        last,
        percent(row.accuracy),
        f"{row.backbone_tensors_changed} of {row.backbone_tensors}",
    )


def step_quartiles(row: TrainRow, warmup: int) -> tuple[float, float, float]:
    """Return the quartiles of the step time, seconds, without the warm-up steps."""
    first, median, third = statistics.quantiles(row.step_seconds[warmup:], method="inclusive")
    return first, median, third


def times(row: TrainRow, reference: TrainRow, warmup: int) -> float:
    """Return the median, over batches, of this run's step time over the reference's."""
    pairs = zip(row.step_seconds[warmup:], reference.step_seconds[warmup:], strict=True)
    return statistics.median(mine / others for mine, others in pairs)


def loss_edges(row: TrainRow) -> tuple[str, str]:
    """Return the mean loss of the first and of the last batches, as text."""
    width = edge(len(row.losses))
    return _mean_loss(row.losses[:width]), _mean_loss(row.losses[-width:])


def edge(batches: int) -> int:
    """Return how many first and last batches a training loss is averaged over."""
    return min(10, batches // 2)


def _mean_loss(losses: Sequence[float | None]) -> str:
    finite = [loss for loss in losses if loss is not None]
    return f"{statistics.fmean(finite):.3f}" if len(finite) == len(losses) else "not finite"


def same_head(results: Results) -> bool:
    """Say whether a, b and c ended with the same head, bit for bit, and the same losses."""
    rows = [row for row in results.train if row.combination in "abc"]
    return len({(row.head_sha256, row.losses) for row in rows}) == 1


def same_head_words(results: Results) -> str:
    """Say in words what :func:`same_head` found."""
    if same_head(results):
        return "every loss and the trained head are the same to the last bit"
    return "the losses or the trained heads DIFFER"


def standard_error(results: Results) -> float:
    """Return the largest standard error that an accuracy can have here, as a share."""
    return math.sqrt(0.25 / results.train[0].tested)


def one_label(results: Results) -> float:
    """Return the accuracy of the commoner label given to every text, as a share."""
    positive = results.data.tested_positive / results.train[0].tested
    return max(positive, 1 - positive)


# -- part 3 ------------------------------------------------------------------------------------


def cuda_table(results: Results) -> Table:
    """Tabulate the capped CUDA run, or say that there was none."""
    settings = results.cuda_settings
    title = (
        f"3. The tutorial's model on CUDA (batch {settings.batch_size}, length {settings.length})"
    )
    if results.cuda is None:
        return Table(title=title, columns=(), left=0, rows=(), notes=(NO_CUDA,))
    device = results.cuda
    return Table(
        title=title,
        columns=(
            "cap, GiB",
            "attention",
            "run",
            "no_grad",
            "requires_grad",
            "allocated, GiB",
            "reserved, GiB",
        ),
        left=5,
        rows=tuple(_cuda_cells(row) for row in device.rows),
        notes=(f"{device.device}, {gib(device.total_bytes)} GiB; peaks of {settings.steps} steps",),
    )


def _cuda_cells(row: CudaRow) -> tuple[str, ...]:
    words = {OUT_OF_MEMORY: "CUDA out of memory", CAP_ABOVE_DEVICE: "device is smaller"}
    allocated, reserved = row.peak_allocated_bytes, row.peak_reserved_bytes
    return (
        gib(row.cap_bytes),
        row.attention,
        *_switches(row.combination),
        words.get(row.outcome, "") if allocated is None else gib(allocated),
        "" if reserved is None else gib(reserved),
    )


# -- part 4 ------------------------------------------------------------------------------------


def predicted_table(results: Results) -> Table:
    """Tabulate what the combinations would take on a GPU."""
    settings = results.predicted_settings
    budget = gib(settings.budget_bytes)
    return Table(
        title=f"4. The tutorial's model on a GPU, predicted (batch {settings.batch_size}, length "
        f"{settings.length})",
        columns=(
            "attention",
            "run",
            "no_grad",
            "requires_grad",
            "allocated,\nGiB",
            "reserved,\nGiB",
            "to plan\nwith, GiB",
            f"fits\n{budget} GiB",
            f"largest batch\non {budget} GiB",
        ),
        left=4,
        rows=tuple(_predicted_cells(row) for row in results.predicted),
        notes=(
            "estimated by freezekit.estimate_memory and max_batch_size: fp32, Adam, no GPU needed",
            "to plan with: reserved and what cannot be known; the CUDA context comes on top, and "
            "is counted in what fits",
        ),
    )


def _predicted_cells(row: PredictedRow) -> tuple[str, ...]:
    return (
        row.attention,
        *_switches(row.combination),
        gib(row.peak_allocated_bytes),
        gib(row.peak_reserved_bytes),
        gib(row.safe_bytes),
        "yes" if row.fits else "no",
        f"{row.largest_batch:,}",
    )


# -- cells -------------------------------------------------------------------------------------


def combination(key: str) -> Combination:
    """Return the combination with this key."""
    return next(each for each in COMBINATIONS if each.key == key)


def _switches(key: str) -> tuple[str, str, str]:
    found = combination(key)
    return key, "yes" if found.no_grad else "no", str(found.requires_grad)


def mib(size: int) -> str:
    """Write bytes as MiB."""
    return f"{size / MIB:,.1f}"


def gib(size: int) -> str:
    """Write bytes as GiB."""
    return f"{size / GIB:,.1f}"


def percent(share: float) -> str:
    """Write a share as a percentage."""
    return f"{100 * share:.1f} %"
