"""The second step of a training from the first, without tracing it.

Forward and backward allocate in every step what they allocate in the first; what differs are the
optimizer's step, whose state is there by then, and what the step before leaves to be freed. So one
step is traced, then a second optimizer step and the clearing, and the second step is put together
of these. Where a step leaves anything else behind (a module that keeps a tensor) that would be
wrong, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from freezekit._memory.events import Allocation, Event, EventStream

__all__ = ["FirstStep", "ZeroGrad"]

ZeroGrad = Literal["start", "before_backward", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """A traced step, and after it what the second does otherwise; positions in ``stream.events``.

    Attributes:
        stream: what was seen.
        zero_grad: where in a step gradients are cleared.
        begin: where the step begins.
        returned: the first forward has returned: here the last step's output would go.
        bound: its loss is bound: here the last step's loss would go.
        backward: its backward begins.
        trained: the last backward has ended, and the first optimizer step begins.
        optimized: the second optimizer step begins.
        again: the clearing of the gradients begins.
        cleared: the output goes.
        unbound: the loss goes.
    """

    stream: EventStream
    zero_grad: ZeroGrad
    begin: int
    returned: int
    bound: int
    backward: int
    trained: int
    optimized: int
    again: int
    cleared: int
    unbound: int

    def two_steps(self) -> EventStream | None:
        """The stream of two steps, or ``None`` if a second step would not be like the first."""
        events, allocations = self.stream.events, self.stream.allocations
        passes = events[self.begin : self.trained]
        made = {event.allocation for event in passes if event.is_alloc}
        freed = {event.allocation for event in events if not event.is_alloc}
        # Taken at a first use, and kept: a library's workspaces.
        kept = {i for i in made - freed if allocations[i].category == "workspaces"}
        if not made - kept <= freed or not self._is_closed(made):
            return None
        return self._compose(made - kept)

    def _is_closed(self, made: set[int]) -> bool:
        """Whether the passes free what they made alone, and the optimizer nothing of it."""
        events = self.stream.events
        passes, steps = events[self.begin : self.trained], events[self.trained : self.again]
        return all(event.is_alloc or event.allocation in made for event in passes) and all(
            event.is_alloc or event.allocation not in made for event in steps
        )

    def _compose(self, made: set[int]) -> EventStream:
        events = self.stream.events
        allocations = list(self.stream.allocations)
        twins = {}
        for index in sorted(made):
            twins[index] = len(allocations)
            allocations.append(allocations[index]._replace(step=1))

        def again(begin: int, end: int) -> list[Event]:
            """These events of the first step, in the second."""
            return [
                event._replace(allocation=twins[event.allocation], step=1)
                for event in events[begin:end]
                if event.allocation in twins
            ]

        clearing = list(events[self.again : self.cleared])
        output = list(events[self.cleared : self.unbound])
        loss = list(events[self.unbound :])
        at = self.zero_grad
        found = list(events[: self.optimized])
        found += clearing if at != "before_backward" else []
        found += [*again(self.begin, self.returned), *output]
        found += [*again(self.returned, self.bound), *loss, *again(self.bound, self.backward)]
        found += clearing if at == "before_backward" else []
        found += [*again(self.backward, self.trained), *events[self.optimized : self.again]]
        if at == "end":
            found += again(self.again, self.cleared)
        # What the loop lets go of at its end.
        found += [
            event._replace(phase="setup", step=-1) for event in again(self.cleared, len(events))
        ]
        return _numbered(allocations, found)


def _numbered(allocations: list[Allocation], events: Iterable[Event]) -> EventStream:
    """The stream with its allocations in the order in which they are made."""
    number: dict[int, int] = {}
    ordered: list[Event] = []
    for event in events:
        if event.is_alloc:
            number[event.allocation] = len(number)
        ordered.append(event._replace(allocation=number[event.allocation]))
    return EventStream(tuple(allocations[index] for index in number), tuple(ordered))
