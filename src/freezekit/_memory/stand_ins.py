"""Answers for code that asks a fake tensor what only data could tell.

Values: the usual questions are whether a mask is all padding, or whether there is something to
skip. Sizes: a result is taken as large as it can be, which is what memory has to be planned for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

import torch

__all__ = [
    "batch_norm",
    "batch_norm_backward",
    "grouped_product",
    "place",
    "sized",
    "split_sizes",
    "value",
]

Count: TypeAlias = Callable[[torch.Tensor], int]


def value(dtype: torch.dtype) -> bool | int | float:
    """``False`` for a question, else 1: ``True`` would keep loops going that wait for a value."""
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


def place(shape: Sequence[int], offset: int) -> int:
    """An entry of ``nonzero`` where nothing is zero: a coordinate of the elements in order.

    So a loop over the experts that have tokens meets each of them.
    """
    element, dim = divmod(offset, len(shape))
    return element // prod(shape[dim + 1 :]) % shape[dim]


def sized(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], count: Count) -> Any:
    """The largest result that an operator with a data-dependent size can have.

    Args:
        operator: an overload.
        args: of its call.
        kwargs: likewise.
        count: how many of a tensor's elements are taken.

    Raises:
        KeyError: an operator that is not known here.
    """
    return _SIZED[str(operator.overloadpacket)](operator, args, kwargs, count)


def split_sizes(source: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> Sequence[int]:
    """Even sizes if the given ones, told by data, do not add up: as many tokens to each expert."""
    total = source.shape[dim]
    if sum(sizes) == total:
        return sizes
    size, rest = divmod(total, len(sizes))
    return [size + (part < rest) for part in range(len(sizes))]


def grouped_product(args: tuple[Any, ...]) -> torch.Tensor | None:
    """The result of ``_grouped_mm`` in dtypes that its fake kernel refuses and the real ones take.

    Rows of the first, columns of the second or the inner dimension are grouped by offsets.
    """
    a, b, offsets = (*args, None)[:3]
    if a.dtype == torch.bfloat16:
        return None
    if a.dim() == 2 and b.dim() == 2:
        assert offsets is not None
        parts: torch.Tensor = a.new_empty((offsets.shape[0], a.shape[0], b.shape[1]))
        return parts
    rows = a.shape[:-1] if a.dim() <= b.dim() else a.shape[1:-1]
    whole: torch.Tensor = a.new_empty((*rows, b.shape[-1]))
    return whole


# Fake batch norms are decomposed into some 30 operators, which takes 5 ms a layer: a quarter of a
# CNN's trace. In the plain case the results are known.


def batch_norm(args: tuple[Any, ...]) -> tuple[torch.Tensor, ...] | None:
    """Results of ``native_batch_norm`` (output, mean, inverse deviation), or ``None``."""
    source, training = args[0], args[5]
    if not _is_plain(source):
        return None
    count = source.shape[1] if training else 0
    return torch.empty_like(source), source.new_empty(count), source.new_empty(count)


def batch_norm_backward(args: tuple[Any, ...]) -> tuple[torch.Tensor, ...] | None:
    """Gradients of ``native_batch_norm`` (input, weight, bias), or ``None``."""
    gradient, source, weight, wanted = args[0], args[1], args[2], args[9]
    if weight is None or not all(wanted) or not (_is_plain(gradient) and _is_plain(source)):
        return None
    return torch.empty_like(source), torch.empty_like(weight), torch.empty_like(weight)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.dim() > 1


def _nonzero(_: Any, args: tuple[Any, ...], __: dict[str, Any], count: Count) -> torch.Tensor:
    source: torch.Tensor = args[0]
    return source.new_empty((count(source), source.dim()), dtype=torch.long)


def _masked_select(_: Any, args: tuple[Any, ...], __: dict[str, Any], count: Count) -> torch.Tensor:
    source, mask = args[:2]
    shape = torch.broadcast_shapes(source.shape, mask.shape)  # type: ignore[no-untyped-call]
    taken = count(mask) * shape.numel() // max(1, mask.numel())
    result: torch.Tensor = source.new_empty(taken)
    return result


def _index(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], count: Count) -> Any:
    """Of a boolean mask one index tensor for each of its dimensions."""
    source, indices, *rest = args
    places: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            taken = count(index)
            places += [index.new_empty(taken, dtype=torch.long) for _ in index.shape]
        else:
            places.append(index)
    return operator(source, places, *rest, **kwargs)


def _unique(
    _: Any, args: tuple[Any, ...], __: dict[str, Any], count: Count
) -> tuple[torch.Tensor, ...]:
    source: torch.Tensor = args[0]
    size = count(source)
    inverse = source.new_empty(source.shape, dtype=torch.long)
    return source.new_empty(size), inverse, source.new_empty(size, dtype=torch.long)


def _unique_pair(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], count: Count
) -> tuple[torch.Tensor, ...]:
    return _unique(operator, args, kwargs, count)[:2]


def _unique_dim(
    _: Any, args: tuple[Any, ...], __: dict[str, Any], count: Count
) -> tuple[torch.Tensor, ...]:
    source, dim = args[:2]
    count(source)  # (whose rows are all taken to differ: that is assumed, too)
    places = source.new_empty(source.shape[dim], dtype=torch.long)
    return torch.empty_like(source), places, torch.empty_like(places)


def _repeat_interleave(
    _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], count: Count
) -> torch.Tensor:
    repeats: torch.Tensor = args[0]
    size = kwargs.get("output_size")
    return repeats.new_empty(count(repeats) if size is None else size, dtype=torch.long)


def _bincount(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], count: Count) -> torch.Tensor:
    """As many bins as asked for: more would have been an oversight of the code."""
    source, *rest = args
    weights = kwargs.get("weights", rest[0] if rest else None)
    bins = kwargs.get("minlength", rest[1] if len(rest) > 1 else 0) or count(source)
    dtype = torch.long
    if weights is not None:
        dtype = torch.float32 if weights.dtype == torch.float32 else torch.float64
    counts: torch.Tensor = source.new_empty(bins, dtype=dtype)
    return counts


_SIZED: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any], Count], Any]] = {
    "aten.bincount": _bincount,
    "aten.nonzero": _nonzero,
    "aten.masked_select": _masked_select,
    "aten.index": _index,
    "aten.index_put": _index,
    "aten.index_put_": _index,
    "aten._unique": _unique_pair,
    "aten._unique2": _unique,
    "aten.unique_consecutive": _unique,
    "aten.unique_dim": _unique_dim,
    "aten.repeat_interleave": _repeat_interleave,
}
