"""Replay an event stream through the simulated allocator."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from freezekit._memory.allocator import Block, CachingAllocator, Counters
from freezekit._memory.events import Event, EventStream, Phase

__all__ = ["PhaseMemory", "Replayed", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """A phase of a step; bytes.

    Attributes:
        step: number of the step, from 0; -1 before the first.
        phase: ``"forward"``, ``"backward"``, ...
        peak_allocated: the most that was in use in it.
        end_allocated: what was in use at its end.
        reserved: what had been taken from the device by its end.
    """

    step: int
    phase: Phase
    peak_allocated: int
    end_allocated: int
    reserved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What the allocator made of a stream; bytes.

    Attributes:
        peak_allocated: the most that was in use at once, as charged.
        peak_reserved: the most that was taken from the device.
        peak_event: index of the event at which most was in use.
        live_at_peak: allocations in use then: their index, and what is charged for them.
        phases: the phases in order.
    """

    peak_allocated: int
    peak_reserved: int
    peak_event: int
    live_at_peak: tuple[tuple[int, int], ...]
    phases: tuple[PhaseMemory, ...]


def replay(
    stream: EventStream,
    allocator: CachingAllocator | None = None,
    *,
    possible: float = 0.0,
    emptied: Collection[int] = (),
) -> Replayed:
    """Give the stream's allocations and frees to an allocator (by default a fresh one).

    Args:
        stream: what happens.
        allocator: takes it.
        possible: how much of what libraries may take beside is taken.
        emptied: steps before which the cache is emptied, as by ``torch.cuda.empty_cache``.

    Raises:
        SimulatedOutOfMemoryError: it does not fit under the allocator's capacity.
    """
    allocator = allocator or CachingAllocator()
    counters = allocator.counters
    blocks: dict[int, Block] = {}
    charged: dict[int, int] = {}
    peak, peak_event = -1, 0
    phases = _Phases()
    step = -1
    for number, event in enumerate(stream.events):
        if event.step > step:
            step = event.step
            if step in emptied:
                allocator.empty_cache()
        phases.enter(event, counters)
        if event.is_alloc:
            found = stream.allocations[event.allocation]
            block = allocator.malloc(found.nbytes + int(possible * found.possible))
            if block is not None:
                blocks[event.allocation], charged[event.allocation] = block, block.size
            if counters.allocated > peak:
                peak, peak_event = counters.allocated, number
        elif event.allocation in blocks:
            allocator.free(blocks.pop(event.allocation))
        phases.note(counters)
    return Replayed(
        peak_allocated=counters.peak_allocated,
        peak_reserved=counters.peak_reserved,
        peak_event=peak_event,
        live_at_peak=tuple(
            (index, charged.get(index, 0)) for index in stream.live_after(peak_event)
        ),
        phases=phases.all(),
    )


class _Phases:
    """Collects the peak and the end of each stretch of events in the same phase."""

    def __init__(self) -> None:
        self._done: list[PhaseMemory] = []
        self._where: tuple[int, Phase] | None = None
        self._peak = self._allocated = self._reserved = 0

    def enter(self, event: Event, counters: Counters) -> None:
        if (event.step, event.phase) != self._where:
            self._finish()
            self._where = event.step, event.phase
            self._peak = counters.allocated

    def note(self, counters: Counters) -> None:
        self._allocated, self._reserved = counters.allocated, counters.reserved
        self._peak = max(self._peak, counters.allocated)

    def all(self) -> tuple[PhaseMemory, ...]:
        self._finish()
        return tuple(self._done)

    def _finish(self) -> None:
        if self._where is None:
            return
        self._done.append(
            PhaseMemory(
                step=self._where[0],
                phase=self._where[1],
                peak_allocated=self._peak,
                end_allocated=self._allocated,
                reserved=self._reserved,
            )
        )
