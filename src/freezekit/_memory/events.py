"""What memory does, as one plain value: allocations and frees in order.

A fake trace, a real run on the CPU and a CUDA memory snapshot all become an
:class:`EventStream`, so that each can be replayed, compared and drawn by the same code.
"""

from __future__ import annotations

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
    """

    nbytes: int
    category: Category
    module: str
    operation: str
    phase: Phase
    step: int


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

    def boundaries(self) -> dict[tuple[int, Phase], int]:
        """Requested bytes in use at the end of each phase of each step."""
        ends: dict[tuple[int, Phase], int] = {}
        for event, live in zip(self.events, self.live_bytes(), strict=True):
            ends[event.step, event.phase] = live
        return ends
