"""What memory does, as one plain value: allocations and frees in order.

A fake trace, a real run on the CPU and a CUDA memory snapshot all become an
:class:`EventStream`, so that each can be replayed, compared and drawn by the same code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["CATEGORIES", "Allocation", "Category", "Event", "EventStream", "Phase"]

Category: TypeAlias = Literal[
    "parameters",
    "buffers",
    "inputs",
    "activations",
    "temporaries",
    "gradients",
    "optimizer_state",
    "workspaces",
]
CATEGORIES: tuple[Category, ...] = (
    "parameters",
    "buffers",
    "inputs",
    "activations",
    "temporaries",
    "gradients",
    "optimizer_state",
    "workspaces",
)

Phase: TypeAlias = Literal["setup", "zero_grad", "forward", "backward", "clip", "optimizer"]


class Allocation(NamedTuple):
    """One piece of memory, from its allocation to its free.

    Attributes:
        nbytes: bytes requested, before any rounding.
        category: what it is for.
        module: FQN of the module whose forward, or whose backward, made it; ``""`` outside.
        operation: the operator that made it, such as ``aten.addmm``.
        phase: the part of the step in which it was made.
        step: the number of the step, from 0; -1 before the first.
        possible: bytes that a library may take here beside ``nbytes``, by a choice of its own.
    """

    nbytes: int
    category: Category
    module: str
    operation: str
    phase: Phase
    step: int
    possible: int = 0


class Event(NamedTuple):
    """An allocation (its index) begins or ends; in which phase of which step."""

    allocation: int
    is_alloc: bool
    phase: Phase
    step: int


@dataclass(frozen=True, slots=True)
class EventStream:
    """Allocations, and the order in which they begin and end.

    Attributes:
        allocations: what was allocated, in order of allocation.
        events: beginnings and ends, in the order in which they happened.
    """

    allocations: tuple[Allocation, ...]
    events: tuple[Event, ...]

    def live_bytes(self) -> list[int]:
        """Requested bytes in use after each event."""
        live, curve = 0, []
        for event in self.events:
            nbytes = self.allocations[event.allocation].nbytes
            live += nbytes if event.is_alloc else -nbytes
            curve.append(live)
        return curve

    def peak_bytes(self) -> int:
        """The most requested bytes that were in use at once."""
        return max(self.live_bytes(), default=0)

    def repeated(self, times: int) -> EventStream | None:
        """The stream with its last step ``times`` more often, or ``None`` if that would be wrong.

        A step may be repeated if it leaves as much behind as it found and took away: what it frees
        of the step before must have its like in what it leaves to the next. (The first step of a
        training does not: it makes optimizer state.)
        """
        return _repeat(self, times)

    def scaled(self, shares: Mapping[int, float]) -> EventStream:
        """The stream with shorter batches: what grows with the batch, by its step's share."""
        allocations = tuple(
            found._replace(nbytes=int(found.nbytes * shares[found.step]))
            if found.step in shares and found.category in ("activations", "temporaries")
            else found
            for found in self.allocations
        )
        return EventStream(allocations, self.events)

    def live_at_end(self, phase: Phase, step: int) -> list[Allocation]:
        """What is in use at the end of a phase; nothing if it never was."""
        wanted = [(event.step, event.phase) == (step, phase) for event in self.events]
        end = max((number for number, inside in enumerate(wanted) if inside), default=-1)
        return [self.allocations[index] for index in self.live_after(end)]

    def live_after(self, number: int) -> list[int]:
        """The allocations (their indices) that are in use after the event of this number."""
        live: dict[int, None] = {}
        for event in self.events[: number + 1]:
            if event.is_alloc:
                live[event.allocation] = None
            else:
                live.pop(event.allocation, None)
        return list(live)

    def boundaries(self) -> dict[tuple[int, Phase], int]:
        """Requested bytes in use at the end of each phase of each step."""
        ends: dict[tuple[int, Phase], int] = {}
        for event, live in zip(self.events, self.live_bytes(), strict=True):
            ends[event.step, event.phase] = live
        return ends


def _repeat(stream: EventStream, times: int) -> EventStream | None:
    last = max((event.step for event in stream.events), default=-1)
    inside = [number for number, event in enumerate(stream.events) if event.step == last]
    if last < 1 or not inside:
        return None
    begin, end = inside[0], inside[-1] + 1
    step, tail = stream.events[begin:end], stream.events[end:]
    heirs = _heirs(stream, step)
    if heirs is None:
        return None
    allocations, events = list(stream.allocations), list(stream.events[:end])
    # Who plays, in the newest repetition, the part of each allocation of the traced step.
    part = {index: index for index in range(len(allocations))}
    for number in range(last + 1, last + 1 + times):
        before = part
        part = dict(before)
        for event in step:
            if event.is_alloc:
                part[event.allocation] = len(allocations)
                allocations.append(stream.allocations[event.allocation]._replace(step=number))
                index = part[event.allocation]
            elif event.allocation in heirs:
                index = before[heirs[event.allocation]]
            else:
                index = part[event.allocation]
            events.append(event._replace(allocation=index, step=number))
    events += [event._replace(allocation=part[event.allocation]) for event in tail]
    return EventStream(tuple(allocations), tuple(events))


def _heirs(stream: EventStream, step: tuple[Event, ...]) -> dict[int, int] | None:
    """For each allocation of an earlier step that ``step`` frees, its like in ``step``."""
    made = {event.allocation for event in step if event.is_alloc}
    freed = [event.allocation for event in step if not event.is_alloc]
    left = sorted(made - set(freed))
    inherited = sorted(index for index in freed if index not in made)
    likes = defaultdict[Allocation, list[int]](list)
    for index in left:
        likes[stream.allocations[index]._replace(step=0)].append(index)
    heirs: dict[int, int] = {}
    for index in inherited:
        candidates = likes[stream.allocations[index]._replace(step=0)]
        if not candidates:
            return None
        heirs[index] = candidates.pop(0)
    return heirs if len(heirs) == len(left) else None
