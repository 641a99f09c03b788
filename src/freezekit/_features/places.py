"""Where each sample lies: from its place in the data to a shard and a row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
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
    """Looks up samples.

    Runs of one writer follow each other, and are looked up as they are. Those of several writers
    interleave: a million batches are expanded and sorted by torch, not by a loop.
    """

    def __init__(self, runs: Sequence[Sequence[Sequence[int]]]) -> None:
        every = [(shard, Run(*run)) for shard, of_shard in enumerate(runs) for run in of_shard]
        every.sort(key=lambda found: found[1].first)
        self.batches = sum(run.batches for _, run in every)
        self._starts: list[int] = []
        self._shards: list[int] = []
        self._rows: list[int] = []
        self.samples = 0
        if all(_last(one) < other.first for (_, one), (_, other) in pairwise(every)):
            for shard, run in every:
                self._starts.append(self.samples)
                self._shards.append(shard)
                self._rows.append(run.row)
                self.samples += run.batches * run.rows
        else:
            self._interleave(every)
        self._ahead = [start - row for start, row in zip(self._starts, self._rows, strict=True)]

    def _interleave(self, every: Sequence[tuple[int, Run]]) -> None:
        table = torch.tensor([(shard, *run) for shard, run in every], dtype=torch.int64)
        batches = table[:, 3]
        run_of = torch.repeat_interleave(torch.arange(len(table)), batches)
        before = torch.repeat_interleave(batches.cumsum(0) - batches, batches)
        position = torch.arange(len(run_of)) - before
        shard, first, step, _, row, rows = table[run_of].unbind(1)
        _, order = (first + position * step).sort()
        row = (row + position * rows)[order]
        shard, rows = shard[order], rows[order]
        starts = rows.cumsum(0) - rows
        # Batches that follow each other in one shard are one piece.
        new = torch.ones(len(shard), dtype=torch.bool)
        new[1:] = (shard[1:] != shard[:-1]) | (row[1:] != row[:-1] + rows[:-1])
        self.samples = int(rows.sum())
        self._starts = starts[new].tolist()
        self._shards = shard[new].tolist()
        self._rows = row[new].tolist()

    def find(self, sample: int) -> tuple[int, int]:
        """The shard and the row of a sample."""
        piece = bisect_right(self._starts, sample) - 1
        return self._shards[piece], sample - self._ahead[piece]

    def find_all(self, samples: Sequence[int]) -> list[tuple[int, int]]:
        """The shard and the row of each of some samples."""
        starts, shards = self._starts, self._shards
        ahead = self._ahead
        pieces = [bisect_right(starts, sample) - 1 for sample in samples]
        return [(shards[p], sample - ahead[p]) for p, sample in zip(pieces, samples, strict=True)]


def _last(run: Run) -> int:
    return run.first + (run.batches - 1) * run.step
