"""The replay of recorded traces tells exact ones from others."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

import allocator_replay
from _traces import FORMAT
from freezekit._memory.allocator import Block, CachingAllocator


def record(steps: int = 200) -> dict[str, Any]:
    """A trace of a random run, as the format has it."""
    choose = random.Random(0)
    allocator = CachingAllocator()
    events: list[list[Any]] = []
    live: list[Block] = []
    for _ in range(steps):
        if live and choose.random() < 0.45:
            block = live.pop(choose.randrange(len(live)))
            events.append(["f", block.address, block.requested])
            allocator.free(block)
            continue
        before = set(allocator.segments)
        size = choose.choice([700, 300_000, 3 << 20, 30 << 20])
        block_ = allocator.malloc(size)
        assert block_ is not None
        grown = set(allocator.segments) - before
        events += [["s+", address, allocator.segments[address].size] for address in grown]
        events.append(["a", block_.address, size])
        live.append(block_)
    counters = allocator.counters
    return {
        "format": FORMAT,
        "initial": {"segments": []},
        "events": events,
        "expected": {
            "peak_allocated": counters.peak_allocated,
            "peak_reserved": counters.peak_reserved,
            "final_allocated": counters.allocated,
            "final_reserved": counters.reserved,
        },
    }


def write(path: Path, trace: dict[str, Any]) -> Path:
    """Write a trace as the files have it."""
    with gzip.open(path, "wt") as file:
        json.dump(trace, file)
    return path


def test_an_exact_trace(tmp_path: Path) -> None:
    """Every block and segment of an unchanged trace is met."""
    result = allocator_replay.replay(write(tmp_path / "same.json.gz", record()))
    assert result.exact
    assert result.blocks == result.right_blocks > 50
    assert result.segments == result.right_segments > 3


@pytest.mark.parametrize("change", ["address", "size", "segment", "peak"])
def test_a_changed_trace_is_noticed(tmp_path: Path, change: str) -> None:
    """One number that differs anywhere makes a trace not exact."""
    trace = record()
    events = trace["events"]
    last = max(i for i, event in enumerate(events) if event[0] == "a")
    if change == "address":
        events[last][1] += 512
    elif change == "size":
        grown = next(i for i, event in enumerate(events) if event[0] == "s+")
        events[grown + 1][2] += 64 << 20
    elif change == "segment":
        del events[next(i for i, event in enumerate(events) if event[0] == "s+")]
    else:
        trace["expected"]["peak_reserved"] += 512
    result = allocator_replay.replay(write(tmp_path / "changed.json.gz", trace))
    assert not result.exact


def test_another_format_is_refused(tmp_path: Path) -> None:
    """A file of another format is an error that names it."""
    path = write(tmp_path / "other.json.gz", {"format": "other/1"})
    with pytest.raises(ValueError, match=r"other\.json\.gz: expected the format .* got 'other/1'"):
        allocator_replay.replay(path)
