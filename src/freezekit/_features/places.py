"""Where each sample lies: from its place in the data to a shard and a row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

__all__ = ["Places", "Run", "make_runs"]


class Run(NamedTuple):
    """Batches of one size at an even distance, whose rows follow each other in a shard.

    Batches ``first``, ``first + step``, ... (``batches`` of them) of ``rows`` samples each, the
    first at row ``row``.
    """

    first: int
    step: int
    batches: int
    row: int
    rows: int


def make_runs(batches: Iterable[tuple[int, int, int]]) -> list[Run]:
    """``(batch, row, rows)``, in order of batches, as few runs as they make."""
    runs: list[Run] = []
    for batch, row, rows in batches:
        if runs:
            last = runs[-1]
            end = last.first + (last.batches - 1) * last.step
            fits = rows == last.rows and row == last.row + last.batches * last.rows
            if fits and (last.batches == 1 or batch == end + last.step):
                step = batch - last.first if last.batches == 1 else last.step
                runs[-1] = last._replace(step=step, batches=last.batches + 1)
                continue
        runs.append(Run(batch, 1, 1, row, rows))
    return runs


class Places:
    """Looks up samples; a million batches are expanded and sorted by torch, not by a loop."""

    def __init__(self, runs: Sequence[Sequence[Sequence[int]]]) -> None:
        every = [(shard, *Run(*run)) for shard, of_shard in enumerate(runs) for run in of_shard]
        table = torch.tensor(every, dtype=torch.int64).reshape(-1, 6)
        count = table[:, 3]
        run_of = torch.repeat_interleave(torch.arange(len(table)), count)
        position = torch.arange(len(run_of)) - torch.repeat_interleave(
            count.cumsum(0) - count, count
        )
        shard, first, step, _, row, rows = table[run_of].unbind(1)
        batch, order = (first + position * step).sort()
        shard, rows = shard[order], rows[order]
        row = (row + position * table[run_of][:, 5])[order]
        starts = rows.cumsum(0) - rows
        # Batches that follow each other in one shard are one piece.
        new = torch.ones(len(batch), dtype=torch.bool)
        new[1:] = (shard[1:] != shard[:-1]) | (row[1:] != row[:-1] + rows[:-1])
        self.samples = int(rows.sum())
        self.batches = len(batch)
        self._starts: list[int] = starts[new].tolist()
        self._shards: list[int] = shard[new].tolist()
        self._rows: list[int] = row[new].tolist()

    def find(self, sample: int) -> tuple[int, int]:
        """The shard and the row of a sample."""
        piece = bisect_right(self._starts, sample) - 1
        return self._shards[piece], self._rows[piece] + sample - self._starts[piece]
