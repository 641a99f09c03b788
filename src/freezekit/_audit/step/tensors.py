"""The tensors in what modules take and give: nested tuples, mappings, dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["has_graph", "storage_of", "tensors_in"]

_DEPTH = 4


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """All tensors in a nest, a few levels deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth == 0:
        return
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth - 1)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage; None for one that has none of its own (sparse, a subclass)."""
    try:
        storage = tensor.untyped_storage()
        return storage if storage.data_ptr() else None
    except (NotImplementedError, RuntimeError):
        return None


def has_graph(tensor: torch.Tensor) -> bool:
    """Whether the tensor was computed from others with gradients on."""
    try:
        return tensor.requires_grad and tensor.grad_fn is not None
    except RuntimeError:  # a view whose base was changed in place may not be asked
        return False
