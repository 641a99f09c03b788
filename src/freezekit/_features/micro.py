"""A large batch in parts, and the outputs of the parts as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from freezekit._features.trees import is_namedtuple, iter_tensors, map_tensors

__all__ = ["batch_size", "merge", "split"]


def batch_size(inputs: Any) -> int | None:
    """The length of dimension 0 of the first tensor that has one."""
    return next((t.shape[0] for t in iter_tensors(inputs) if t.dim()), None)


def split(inputs: Any, size: int, part: int) -> Iterator[Any]:
    """Parts of ``inputs`` of up to ``part`` samples.

    Tensors of which dimension 0 is not ``size`` (position ids for all samples, a scale) go whole
    into every part.
    """
    for start in range(0, size, part):
        bounds = slice(start, min(start + part, size))
        yield map_tensors(inputs, partial(_rows, size, bounds))


def _rows(size: int, bounds: slice, tensor: Tensor) -> Tensor:
    return tensor[bounds] if tensor.dim() and tensor.shape[0] == size else tensor


def merge(parts: Sequence[Any], sizes: Sequence[int], where: str = "the output") -> Any:
    """The outputs of the parts as one output of their type.

    Raises:
        ValueError: something in them is not per sample, and so cannot be put together.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return _merge_tensors(parts, sizes, where)
    if isinstance(first, Mapping):
        if any(part.keys() != first.keys() for part in parts):
            raise ValueError(f"micro_batch_size: {where} has other keys from part to part")
        merged = {
            key: merge([part[key] for part in parts], sizes, f"{where}[{key!r}]") for key in first
        }
        return merged if type(first) is dict else type(first)(**merged)
    if isinstance(first, list | tuple):
        columns = zip(*parts, strict=True)
        items = [merge(column, sizes, f"{where}[{i}]") for i, column in enumerate(columns)]
        return type(first)(*items) if is_namedtuple(first) else type(first)(items)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return dataclasses.replace(
            first,
            **{n: merge([getattr(p, n) for p in parts], sizes, f"{where}.{n}") for n in names},
        )
    plain = first is None or isinstance(first, bool | int | float | str)
    if plain and all(part == first for part in parts):
        return first
    raise ValueError(
        f"micro_batch_size: {where} is a {type(first).__name__}, which cannot be put together from "
        "parts; choose layers or a pool, or switch it off in the backbone (use_cache=False)"
    )


def _merge_tensors(parts: Sequence[Tensor], sizes: Sequence[int], where: str) -> Tensor:
    for part, size in zip(parts, sizes, strict=True):
        if not part.dim() or part.shape[0] != size:
            raise ValueError(
                f"micro_batch_size: {where} has the shape {tuple(part.shape)} for {size} samples: "
                "its dimension 0 is not the batch's"
            )
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise ValueError(f"micro_batch_size: {where} changes its shape from part to part: {shapes}")
    return torch.cat(list(parts))
