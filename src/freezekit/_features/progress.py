"""How far an extraction is: a bar on a terminal, a line now and then in a log, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["Progress", "open_progress"]

# In a log: at most one line in so many seconds.
_EVERY_SECONDS = 10.0


class Progress(Protocol):
    """What the extraction tells."""

    def advance(self, samples: int) -> None:
        """One more batch of so many samples is done."""


class _Silent:
    def advance(self, samples: int) -> None:
        pass


class _Lines:
    """Plain lines on standard error, where nobody watches a bar."""

    def __init__(self, batches: int | None) -> None:
        self._batches = batches
        self._done = self._samples = 0
        self._begun = self._said = time.monotonic()

    def advance(self, samples: int) -> None:
        self._done += 1
        self._samples += samples
        now = time.monotonic()
        if now - self._said >= _EVERY_SECONDS:
            self._said = now
            self._say(now)

    def close(self) -> None:
        if self._done:
            self._say(time.monotonic())

    def _say(self, now: float) -> None:
        seconds = max(now - self._begun, 1e-9)
        line = f"features: {self._samples:,} samples, {self._samples / seconds:,.0f}/s"
        if self._batches:
            left = seconds / self._done * max(self._batches - self._done, 0)
            line += f", batch {self._done:,} of {self._batches:,}, {left:,.0f} s left"
        sys.stderr.write(line + "\n")


@contextmanager
def open_progress(batches: int | None, *, shown: bool) -> Iterator[Progress]:
    """Show progress on standard error while the block runs.

    Args:
        batches: how many there are to do, if that is known.
        shown: whether to show anything.
    """
    if not shown:
        yield _Silent()
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        lines = _Lines(batches)
        try:
            yield lines
        finally:
            lines.close()
        return
    with _bar(console, batches) as bar:
        yield bar


class _Bar:
    def __init__(self, bar: object, task: object) -> None:
        self._bar = bar
        self._task = task
        self._samples = 0
        self._begun = time.monotonic()

    def advance(self, samples: int) -> None:
        self._samples += samples
        rate = self._samples / max(time.monotonic() - self._begun, 1e-9)
        note = f"{self._samples:,} samples, {rate:,.0f}/s"
        self._bar.update(self._task, advance=1, note=note)  # type: ignore[attr-defined]


@contextmanager
def _bar(console: object, batches: int | None) -> Iterator[_Bar]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("features"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=console, transient=True) as bar:  # type: ignore[arg-type]
        yield _Bar(bar, bar.add_task("", total=batches, note=""))
