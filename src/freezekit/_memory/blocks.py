"""What the simulated allocator keeps: segments, blocks, pools of free blocks, counters."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Block", "Counters", "Pool", "Segment", "absorb", "with_growth"]


@dataclass(slots=True)
class Segment:
    """A piece of device memory: one cudaMalloc, or one growing range."""

    address: int
    size: int
    small: bool
    stream: int
    expandable: bool = False


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment: in use, free, or (of a growing segment) not mapped yet.

    ``size`` is what is charged: the rounded request, and slack where a block is not split.
    """

    segment: Segment
    address: int
    size: int
    requested: int = 0
    in_use: bool = False
    mapped: bool = True
    prev: Block | None = None
    next: Block | None = None
    born: int = 0

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment with other blocks."""
        return self.prev is not None or self.next is not None


@dataclass(slots=True)
class Counters:
    """Bytes now and at their peak, as ``torch.cuda`` counts them."""

    allocated: int = 0
    reserved: int = 0
    requested: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    peak_requested: int = 0

    def change(self, *, allocated: int = 0, reserved: int = 0, requested: int = 0) -> None:
        """Add to the counters and follow the peaks."""
        self.allocated += allocated
        self.reserved += reserved
        self.requested += requested
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.peak_requested = max(self.peak_requested, self.requested)


class Pool:
    """Free blocks of one pool and stream, ordered by size, then address."""

    def __init__(self) -> None:
        self.keys: list[tuple[int, int]] = []
        self.blocks: dict[int, Block] = {}
        self.calls = 0

    def add(self, block: Block) -> None:
        block.born = self.calls
        bisect.insort(self.keys, (block.size, block.address))
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        del self.keys[bisect.bisect_left(self.keys, (block.size, block.address))]
        del self.blocks[block.address]

    def at_least(self, size: int) -> Iterator[Block]:
        for index in range(bisect.bisect_left(self.keys, (size, -1)), len(self.keys)):
            yield self.blocks[self.keys[index][1]]

    def __iter__(self) -> Iterator[Block]:
        return iter([self.blocks[address] for _, address in self.keys])


def absorb(block: Block, neighbour: Block) -> None:
    """Make a neighbour part of the block."""
    if neighbour is block.prev:
        block.address = neighbour.address
        block.prev = neighbour.prev
        if block.prev is not None:
            block.prev.next = block
    else:
        block.next = neighbour.next
        if block.next is not None:
            block.next.prev = block
    block.size += neighbour.size


def with_growth(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)
