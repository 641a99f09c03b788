"""Replay an event stream through the simulated allocator."""

from __future__ import annotations

from dataclasses import dataclass

from freezekit._memory.allocator import Block, CachingAllocator
from freezekit._memory.events import EventStream

__all__ = ["Replayed", "replay"]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the allocator made of a stream; bytes.

    Attributes:
        peak_allocated: the most that was in use at once, as charged.
        peak_reserved: the most that was taken from the device.
        peak_event: index of the event at which most was in use.
        live_at_peak: allocations in use then: their index, and what is charged for them.
    """

    peak_allocated: int
    peak_reserved: int
    peak_event: int
    live_at_peak: tuple[tuple[int, int], ...]


def replay(stream: EventStream, allocator: CachingAllocator | None = None) -> Replayed:
    """Give the stream's allocations and frees to an allocator (by default a fresh one)."""
    allocator = allocator or CachingAllocator()
    blocks: dict[int, Block] = {}
    charged: dict[int, int] = {}
    peak, peak_event = -1, 0
    for number, event in enumerate(stream.events):
        if event.is_alloc:
            block = allocator.malloc(stream.allocations[event.allocation].nbytes)
            if block is not None:
                blocks[event.allocation], charged[event.allocation] = block, block.size
            if allocator.counters.allocated > peak:
                peak, peak_event = allocator.counters.allocated, number
        elif event.allocation in blocks:
            allocator.free(blocks.pop(event.allocation))
    live: dict[int, int] = {}
    for event in stream.events[: peak_event + 1]:
        if event.is_alloc:
            live[event.allocation] = charged.get(event.allocation, 0)
        else:
            live.pop(event.allocation, None)
    counters = allocator.counters
    return Replayed(
        counters.peak_allocated, counters.peak_reserved, peak_event, tuple(live.items())
    )
