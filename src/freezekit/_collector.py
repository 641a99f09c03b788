"""Pausing the garbage collector while very many records are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic garbage collection inside the block.

    Records are made by the hundred thousand and make no cycles; each collection that they set
    off would walk all of a large model's objects again, and the cost would grow faster than the
    model.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
