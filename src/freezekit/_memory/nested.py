"""Tensors in nested containers: of inputs, outputs and operators' arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["map_tensors", "tensors_in"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclass-like outputs.

    Of a sparse tensor, which has no storage of its own, the indices and values.
    """
    if isinstance(value, torch.Tensor):
        if value.layout is torch.sparse_coo:
            yield value._indices()
            yield value._values()
        else:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same tuples, lists and dicts with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(map_tensors(item, change) for item in value)
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value
