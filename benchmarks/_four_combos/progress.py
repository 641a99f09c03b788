"""Progress on standard error: a bar with the time left, or plain lines where nobody watches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress(Protocol):
    """What the measuring code tells about how far it is."""

    def start(self, part: str) -> None:
        """Say that ``part`` begins."""

    def advance(self, work: float, note: str) -> None:
        """Say that ``work`` of the total is done, and what it was."""


class LineProgress:
    """Plain lines: each part as it begins, then at each tenth of the whole."""

    def __init__(self, console: Console, total: float) -> None:
        self._console = console
        self._total = total
        self._done = 0.0
        self._said = 0
        self._begun = time.monotonic()

    def start(self, part: str) -> None:
        self._say(part)

    def advance(self, work: float, note: str) -> None:
        self._done += work
        tenths = int(10 * self._done / self._total + 1e-9)
        if tenths > self._said:
            self._said = tenths
            self._say(f"{note} done")

    def _say(self, text: str) -> None:
        seconds = time.monotonic() - self._begun
        line = f"[{seconds:5.0f} s, {self._done / self._total:4.0%}] {text}"
        self._console.print(line, markup=False, highlight=False)


class BarProgress:
    """A bar with the time left."""

    def __init__(self, bar: Bar, total: float) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total)

    def start(self, part: str) -> None:
        self._bar.update(self._task, description=part)

    def advance(self, work: float, note: str) -> None:
        self._bar.update(self._task, advance=work, note=note)


@contextmanager
def open_progress(console: Console, total: float) -> Iterator[Progress]:
    """Show progress towards ``total`` on ``console`` while the block runs."""
    if not console.is_terminal:
        yield LineProgress(console, total)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("left"),
        # The default window of 30 s would judge by the last, perhaps dearest, combination alone.
        TimeRemainingColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True, speed_estimate_period=120) as bar:
        yield BarProgress(bar, total)
