"""The CUDA device of a session: figures and events, by private calls where nothing public is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["CudaDevice", "reduce_snapshot"]


class CudaDevice:
    """The current CUDA device."""

    kind = "cuda"

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(0)
        self.name: str = properties.name
        self.total_bytes: int = properties.total_memory
        self.out_of_memory: type[BaseException] = torch.OutOfMemoryError

    def clear(self) -> None:
        """Give cached memory back and begin new peaks."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def limit(self, nbytes: int) -> None:
        """Let this process reserve so much; 0 for all there is."""
        fraction = nbytes / self.total_bytes if nbytes else 1.0
        torch.cuda.set_per_process_memory_fraction(fraction)

    def synchronize(self) -> None:
        """Wait for what runs."""
        torch.cuda.synchronize()

    def figures(self) -> dict[str, int | None]:
        """Peaks, and what the process has beside them, in bytes."""
        free, total = torch.cuda.mem_get_info()
        return {
            "max_allocated": torch.cuda.max_memory_allocated(),
            "max_reserved": torch.cuda.max_memory_reserved(),
            "left_allocated": torch.cuda.memory_allocated(),
            "context": total - free - torch.cuda.memory_reserved(),
        }

    @contextmanager
    def snapshot(self) -> Iterator[Callable[[], Any]]:
        """Record the allocator's events inside the block (private: nothing public does)."""
        memory = torch.cuda.memory
        memory._record_memory_history(max_entries=2_000_000, context=None)  # noqa: SLF001
        try:
            yield lambda: reduce_snapshot(memory._snapshot())  # noqa: SLF001
        finally:
            memory._record_memory_history(enabled=None)  # noqa: SLF001


_OPERATIONS = {
    "alloc": "a",
    "free_completed": "f",
    "segment_alloc": "s+",
    "segment_free": "s-",
}


def reduce_snapshot(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Events of a snapshot as ``[operation, address, bytes]``, addresses less the lowest.

    ``a`` is a block handed out (bytes as requested), ``f`` its return, ``s+`` and ``s-`` a segment
    from and to the device. Stack frames, times and names are left out.
    """
    trace = snapshot["device_traces"][0]
    kept = [action for action in trace if action["action"] in _OPERATIONS]
    # Whole megabytes, so that alignment stays.
    base = min((action["addr"] for action in kept), default=0) // 2**21 * 2**21
    events = [[_OPERATIONS[a["action"]], a["addr"] - base, a["size"]] for a in kept]
    return {"format": "cuda-caching-allocator-events/1", "events": events}
