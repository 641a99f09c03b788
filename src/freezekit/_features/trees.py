"""Tensors in nested values: what models take and return.

torch's own pytree is private and takes a dataclass for a leaf, so that a graph would leak through
it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["detach", "is_namedtuple", "iter_tensors", "map_tensors"]


def is_namedtuple(value: object) -> bool:
    """Whether ``value`` is made as ``type(value)(*fields)``."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in ``value``, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from iter_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from iter_tensors(item)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from iter_tensors(getattr(value, field.name, None))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with every tensor changed, of the same type; the same object if none changed.

    Looks into mappings (``ModelOutput`` too), lists, tuples, named tuples and dataclasses; what
    is none of these is passed on as it is.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return _map_mapping(value, change)
    if isinstance(value, list | tuple):
        items = [map_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if is_namedtuple(value) else type(value)(items)
    if _is_dataclass(value):
        return _map_dataclass(value, change)
    return value


def detach(value: Any) -> Any:
    """``value`` without a graph, and usable in training: no tensor of inference mode either."""
    return map_tensors(value, _detach)


def _detach(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not torch.compiler.is_compiling() and tensor.is_inference():
        return tensor.clone()
    return tensor


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _map_mapping(value: Mapping[Any, Any], change: Callable[[Tensor], Tensor]) -> Any:
    changed = {key: map_tensors(item, change) for key, item in value.items()}
    if all(changed[key] is item for key, item in value.items()):
        return value
    if type(value) is dict:
        return changed
    # ModelOutput, BatchEncoding, OrderedDict: their own class, with whatever else it carries.
    result = copy.copy(value)
    for key, item in changed.items():
        result[key] = item  # type: ignore[index]
    return result


def _map_dataclass(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name, None)
        new = map_tensors(old, change)
        if new is not old:
            changed[field.name] = new
    if not changed:
        return value
    # Not dataclasses.replace: it runs __init__, which need not take the fields.
    result = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(result, name, new)
    return result
