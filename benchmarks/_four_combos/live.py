"""The peak of live tensor bytes during one training step on the CPU.

Method: PyTorch's profiler reports each allocation and each release of the CPU allocator, with
address and size. Replaying them in order gives the bytes that the step itself holds at each
moment. What was alive before the step (parameters, buffers, optimizer state, the batch) is
counted by its storages and added. The step must therefore begin without gradients and with the
optimizer's state already there, so that nothing counted as alive before is released during it.

Not counted: memory that is no tensor (oneDNN's and OpenMP's scratch space, Python, code).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from _four_combos.saved import address

Event = tuple[int, int]
"""Address, and bytes: positive for an allocation, negative for a release."""


def peak_of_events(events: Iterable[Event]) -> int:
    """Replay allocations and releases and return the largest sum of live bytes.

    A release of an address that these events did not allocate is passed over: it belongs to
    something older, which is not in the sum either.
    """
    live: dict[int, int] = {}
    now = peak = 0
    for where, size in events:
        if size > 0:
            live[where] = size
            now += size
            peak = max(peak, now)
        else:
            now -= live.pop(where, 0)
    return peak


def record_events(step: Callable[[], object]) -> list[Event]:
    """Run ``step`` under the profiler and return the CPU allocator's events in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    found = [e for e in trace["traceEvents"] if e.get("name") == "[memory]"]
    found.sort(key=lambda event: event["ts"])
    cpu_device_type = 0
    return [
        (event["args"]["Addr"], event["args"]["Bytes"])
        for event in found
        if event["args"]["Device Type"] == cpu_device_type
    ]


def peak_during(step: Callable[[], object]) -> int:
    """Return the peak bytes of tensors that ``step`` allocates, over what was there before."""
    return peak_of_events(record_events(step))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Sum the bytes of the tensors' storages, each storage once."""
    return sum({address(t): t.untyped_storage().nbytes() for t in tensors}.values())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return every tensor in the optimizer's state."""
    states = optimizer.state.values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]
