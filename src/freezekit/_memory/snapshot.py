"""A CUDA memory snapshot as an event stream.

``torch.cuda.memory._record_memory_history()`` and ``_snapshot()`` are private, and the only way to
see what the allocator did. A snapshot holds the final state (``segments``) and a trace of actions
(``device_traces``), of which ``alloc`` and ``free_completed`` matter here. Layout measured with
torch 2.6 to 2.11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from freezekit._memory.events import Allocation, Category, Event, EventStream, Phase

__all__ = ["stream_of_snapshot"]


def stream_of_snapshot(
    snapshot: Mapping[str, Any],
    device: int = 0,
    known: Mapping[int, tuple[Category, str]] | None = None,
) -> EventStream:
    """The allocations and frees that a snapshot recorded.

    What was alive before the recording comes first, in phase ``"setup"``: blocks that are freed
    without having been allocated, and blocks alive at the end that never were.

    Args:
        snapshot: what ``torch.cuda.memory._snapshot()`` gives.
        device: the GPU's index.
        known: category and module of the allocation at an address.

    Raises:
        ValueError: not a snapshot, or no trace of that device.
    """
    if not {"segments", "device_traces"} <= set(snapshot):
        raise ValueError(
            "not a CUDA memory snapshot: expected the keys 'segments' and 'device_traces', got "
            f"{sorted(snapshot)}"
        )
    traces = snapshot["device_traces"]
    if not 0 <= device < len(traces):
        raise ValueError(f"the snapshot has traces of {len(traces)} device(s), none of {device}")
    actions = [a for a in traces[device] if a["action"] in ("alloc", "free_completed")]
    builder = _Builder(known or {})
    for address, nbytes in _alive_before(snapshot["segments"], actions, device):
        builder.alloc(address, nbytes)
    builder.step = 0
    for action in actions:
        if action["action"] == "alloc":
            builder.alloc(action["addr"], action["size"])
        else:
            builder.free(action["addr"])
    return EventStream(tuple(builder.allocations), tuple(builder.events))


class _Builder:
    def __init__(self, known: Mapping[int, tuple[Category, str]]) -> None:
        self.known = known
        self.step = -1
        self.allocations: list[Allocation] = []
        self.events: list[Event] = []
        self._live: dict[int, int] = {}

    def alloc(self, address: int, nbytes: int) -> None:
        category, module = self.known.get(address, ("temporaries", ""))
        phase: Phase = "setup" if self.step < 0 else "forward"
        self._live[address] = len(self.allocations)
        self.events.append(Event(len(self.allocations), is_alloc=True, phase=phase, step=self.step))
        self.allocations.append(Allocation(nbytes, category, module, "", phase, self.step))

    def free(self, address: int) -> None:
        index = self._live.pop(address, None)
        if index is not None:
            self.events.append(Event(index, is_alloc=False, phase="forward", step=self.step))


def _alive_before(
    segments: Sequence[Mapping[str, Any]], actions: Sequence[Mapping[str, Any]], device: int
) -> list[tuple[int, int]]:
    """Addresses and bytes of what was alive when the recording began."""
    before: dict[int, int] = {}
    made: set[int] = set()
    for action in actions:
        if action["action"] == "alloc":
            made.add(action["addr"])
        elif action["addr"] not in made:
            before.setdefault(action["addr"], action["size"])
        else:
            made.discard(action["addr"])
    for segment in segments:
        if segment.get("device", device) != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            place = block.get("address", address)
            if block["state"] == "active_allocated" and place not in made:
                before.setdefault(place, block.get("requested_size", block["size"]))
            address += block["size"]
    return sorted(before.items())
