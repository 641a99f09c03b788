"""Code that treats fake tensors otherwise than those that they stand for, made to treat them alike.

Each of these sets an attribute of another library while a trace runs, and puts it back.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from freezekit._memory.known import KnownValues

__all__ = ["as_real"]


@contextmanager
def as_real(known: KnownValues) -> Iterator[None]:
    """While it is entered, fake tensors are treated as real ones, as far as code can tell."""
    with _conversions(), _masks(known), _without_log():
        yield


@contextmanager
def _conversions() -> Iterator[None]:
    """``module.to(dtype)`` in a forward gives fake parameters new data, as it gives real ones.

    torch swaps fake parameters as a whole, which fails for those that are in use.
    """
    swap = torch.utils.swap_tensors

    def swap_data(first: torch.Tensor, second: torch.Tensor) -> None:
        if isinstance(first, FakeTensor) and isinstance(second, FakeTensor):
            first.data = second.data
        else:
            swap(first, second)  # type: ignore[no-untyped-call]

    torch.utils.swap_tensors = swap_data
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


@contextmanager
def _masks(known: KnownValues) -> Iterator[None]:
    """A mask without padding is left out, as transformers does for a real one.

    Since 5.0 it takes a fake mask for a compiler's, which it does not ask (``is_tracing`` in
    transformers/utils/import_utils.py, measured with 5.24). One whose values are known can answer.
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    is_fake = getattr(module, "is_fake_tensor", None)
    if is_fake is None:
        yield
        return
    module.is_fake_tensor = lambda value: is_fake(value) and known.of(value) is None
    try:
        yield
    finally:
        module.is_fake_tensor = is_fake


@contextmanager
def _without_log() -> Iterator[None]:
    """Fake mode logs the traceback of what fails, which the TraceError tells, or no one needs."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = disabled
