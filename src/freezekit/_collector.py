"""Keeping the garbage collector cheap while very many objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_of_new_objects", "collector_paused"]

# CPython 3.12 starts with some 375 frozen objects of its own; who freezes has all of a program's.
_OWN = 2_000


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


@contextmanager
def collector_of_new_objects() -> Iterator[None]:
    """Cyclic garbage collection that does not walk what was there before the block.

    For code that makes cycles which hold memory, and must have them collected, beside a large
    model and large libraries.
    """
    if gc.get_freeze_count() > _OWN:
        # Somebody else froze objects: to thaw ours would thaw theirs.
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
