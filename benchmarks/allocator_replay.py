"""Replay recorded CUDA memory traces through the simulated allocator, and compare everything.

    python benchmarks/allocator_replay.py FOLDER

``FOLDER`` holds ``*.json.gz`` files of the format ``cuda-caching-allocator-events/1``:
allocations, frees and segment allocations in order, with real addresses. A file is exact if every
block lands at its recorded address, every segment is asked for at that moment and with that size,
and the final and peak byte counts agree. Exit status 1 if any file is not.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from _traces import SUFFIX, read_trace
from freezekit._memory.allocator import Block, CachingAllocator, Segment


@dataclass(slots=True)
class Replay:
    """How one trace came out; ``problems`` are in words, the first few of them."""

    name: str
    blocks: int = 0
    right_blocks: int = 0
    segments: int = 0
    right_segments: int = 0
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether nothing at all differs."""
        return (
            not self.problems
            and self.blocks == self.right_blocks
            and self.segments == self.right_segments
            and all(expected == found for expected, found in self.counts.values())
        )


class _Replayer:
    """Drives an allocator with a trace; new segments get their recorded addresses."""

    def __init__(self, name: str, trace: dict[str, Any]) -> None:
        self.result = Replay(name)
        self.events: list[tuple[str, int, int]] = [tuple(event) for event in trace["events"]]
        self.recorded: tuple[int, int] | None = None
        self.asked = False
        self.live: dict[int, Block] = {}
        self.allocator = CachingAllocator(place=self.place)
        for found in trace["initial"]["segments"]:
            small = found["pool"] == "small"
            segment = Segment(found["address"], found["size"], small, found["stream"])
            cut = [
                (b["address"], b["size"], b["state"] == "active_allocated") for b in found["blocks"]
            ]
            for block in self.allocator.adopt(segment, cut):
                if block.in_use:
                    self.live[block.address] = block

    def place(self, size: int) -> int:
        """Where the recorded run got its segment; noted if it got none, or another size."""
        self.asked = True
        self.result.segments += 1
        recorded = self.recorded
        if recorded is not None and recorded[1] == size:
            self.result.right_segments += 1
            return recorded[0]
        if recorded is None:
            self.problem(f"a segment of {size} bytes that the recorded run did not ask for")
        else:
            self.problem(f"a segment of {size} bytes, recorded {recorded[1]}")
        return (1 << 50) + self.result.segments * (1 << 40)  # out of every recorded one's way

    def problem(self, text: str) -> None:
        if len(self.result.problems) < 5:
            self.result.problems.append(text)

    def run(self) -> Replay:
        index = 0
        while index < len(self.events):
            operation, address, size = self.events[index]
            if operation == "s+":
                self.recorded = (address, size)
            elif operation == "a":
                self.allocate(address, size)
            elif operation == "f":
                self.allocator.free(self.live.pop(address))
            elif operation == "s-":
                index = self.release(index)
                continue
            else:
                self.problem(f"unknown operation {operation!r}")
            index += 1
        return self.result

    def allocate(self, address: int, size: int) -> None:
        self.asked = False
        block = self.allocator.malloc(size)
        self.result.blocks += 1
        if block is None or block.address != address:
            found = None if block is None else block.address
            self.problem(f"block {self.result.blocks} at {found}, recorded {address}")
        else:
            self.result.right_blocks += 1
        if self.recorded is not None and not self.asked:
            self.problem(f"no segment asked for, recorded one of {self.recorded[1]} bytes")
            self.result.segments += 1
        self.recorded = None
        if block is not None:
            self.live[address] = block

    def release(self, index: int) -> int:
        recorded = set()
        while index < len(self.events) and self.events[index][0] == "s-":
            recorded.add(self.events[index][1])
            index += 1
        released = {segment.address for segment in self.allocator.empty_cache()}
        if released != recorded:
            self.problem(f"{len(released)} segments released, recorded {len(recorded)}")
        return index


def replay(path: Path) -> Replay:
    """Replay one file.

    Raises:
        ValueError: the file is not of the format.
    """
    trace = read_trace(path)
    start = time.perf_counter()
    replayer = _Replayer(path.name.removesuffix(SUFFIX), trace)
    result = replayer.run()
    result.seconds = time.perf_counter() - start
    counters = replayer.allocator.counters
    expected = trace["expected"]
    result.counts = {
        "peak allocated": (expected["peak_allocated"], counters.peak_allocated),
        "peak reserved": (expected["peak_reserved"], counters.peak_reserved),
        "final allocated": (expected["final_allocated"], counters.allocated),
        "final reserved": (expected["final_reserved"], counters.reserved),
    }
    return result


def show(results: list[Replay]) -> None:
    """Print one row a file, then what differed."""
    table = Table()
    table.add_column("trace")
    for header in ("blocks", "segments", "peak allocated", "peak reserved", "seconds", "exact"):
        table.add_column(header, justify="right")
    for result in results:
        table.add_row(
            result.name,
            f"{result.right_blocks:,}/{result.blocks:,}",
            f"{result.right_segments}/{result.segments}",
            *(f"{result.counts[name][1]:,}" for name in ("peak allocated", "peak reserved")),
            f"{result.seconds:.2f}",
            "yes" if result.exact else "NO",
        )
    console = Console(width=110)
    console.print(table)
    for result in results:
        for problem in result.problems:
            console.print(f"{result.name}: {problem}", markup=False)
        for name, (expected, found) in result.counts.items():
            if expected != found:
                console.print(f"{result.name}: {name} {found}, recorded {expected}", markup=False)
    blocks = sum(result.blocks for result in results)
    right = sum(result.right_blocks for result in results)
    console.print(f"{right:,} of {blocks:,} blocks at their recorded addresses")


def main() -> int:
    """Replay every trace in a folder; exit status 1 if one is not exact, 2 if there is none."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        parser.error(f"no *{SUFFIX} in {folder}")
    results = [replay(path) for path in paths]
    show(results)
    return 0 if all(result.exact for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
