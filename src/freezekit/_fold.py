"""Folding numbered names: twelve layers alike are one line, in the pattern grammar's own slices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

__all__ = ["fold_names", "is_number", "slice_text", "split_runs"]


def is_number(name: str) -> bool:
    """Whether a child is named by a number; ``"07"`` is a name like any other."""
    return name.isdecimal() and str(int(name)) == name


def fold_names(names: Iterable[str]) -> tuple[str, ...]:
    """``fold_names(["layer.0.w", "layer.1.w", "head.w"])`` is ``("layer[0:2].w", "head.w")``.

    Results read as patterns (where a container's children are numbered from 0 without a gap).
    Names keep the order in which their first one came.
    """
    rows = [tuple(name.split(".")) for name in dict.fromkeys(names)]
    deepest = max((len(row) for row in rows), default=0)
    # From the innermost number outwards, so that [0:12] of [0:3] folds too.
    for position in range(deepest - 1, -1, -1):
        rows = _fold_at(rows, position)
    return tuple(_join(row) for row in rows)


def _fold_at(rows: list[tuple[str, ...]], position: int) -> list[tuple[str, ...]]:
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
    slot_of: dict[tuple[tuple[str, ...], tuple[str, ...]], int] = {}
    slots: list[list[tuple[str, ...]]] = []
    for row in rows:
        if position < len(row) and is_number(row[position]):
            key = (row[:position], row[position + 1 :])
            groups.setdefault(key, []).append(int(row[position]))
            if key not in slot_of:
                slot_of[key] = len(slots)
                slots.append([])
        else:
            slots.append([row])
    for (head, tail), numbers in groups.items():
        slots[slot_of[head, tail]] = [
            (*head, str(run[0]) if len(run) == 1 else slice_text(run), *tail)
            for run in split_runs(numbers)
        ]
    return [row for slot in slots for row in slot]


def split_runs(numbers: Sequence[int]) -> list[list[int]]:
    """``split_runs([0, 1, 2, 7])`` is ``[[0, 1, 2], [7]]``; one even stride is one run."""
    numbers = sorted(numbers)
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1:
        return [list(numbers)]
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def slice_text(run: Sequence[int]) -> str:
    """``slice_text([4, 5, 6])`` is ``"[4:7]"``; ``slice_text([0, 2, 4])`` is ``"[0:5:2]"``."""
    step = run[1] - run[0] if len(run) > 1 else 1
    return f"[{run[0]}:{run[-1] + 1}]" if step == 1 else f"[{run[0]}:{run[-1] + 1}:{step}]"


def _join(row: Sequence[str]) -> str:
    return ".".join(row).replace(".[", "[")
