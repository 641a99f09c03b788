"""What CUDA's reductions take from the allocator while they sum.

Where there are few results and many values for each, several thread blocks share a result: each
leaves its part in a buffer in global memory, and counters (semaphores) tell which block is the
last. A bias's gradient, a sum over all rows of a batch, takes 108 MiB on an A100.

This follows ``setReduceConfig`` and ``ReduceConfig::global_memory_size`` in
ATen/native/cuda/Reduce.cuh (torch 2.13; unchanged since 1.9), and how ``TensorIterator`` orders and
merges dimensions. On a trace recorded on a GPU (torch 2.11, RMSNorm's gradients) it gives the
buffers to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

__all__ = ["reduction_workspace"]

Dimension = tuple[int, int]  # stride in bytes, size

_OVER_DIMENSIONS = frozenset({"aten.sum", "aten.mean", "aten.amax", "aten.amin"})
_NORMS = frozenset({"aten.linalg_vector_norm"})
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WARP = 32
_MOST_THREADS = 512
_LEAST_VALUES, _MOST_VALUES = 16, 256  # per thread
_INDEX_LIMIT = 2**31 - 1


def reduction_workspace(operation: str, args: Sequence[Any], threads: int) -> tuple[int, ...]:
    """Bytes of the buffer and of the counters; nothing where each result has its own block.

    Args:
        operation: such as ``"aten.sum"``.
        args: its arguments.
        threads: how many threads the GPU holds at once.
    """
    if operation in _OVER_DIMENSIONS:
        over = args[1] if len(args) > 1 else None
    elif operation in _NORMS:
        over = args[2] if len(args) > 2 else None
    else:
        return ()
    data = args[0]
    if data.dtype not in _FLOATS or not data.numel():
        return ()
    dimensions = range(data.dim())
    reduced = set(dimensions) if not over else {axis % data.dim() for axis in _listed(over)}
    within = [(data.stride(axis) * data.itemsize, data.shape[axis]) for axis in dimensions]
    return _workspace(
        _merged([within[axis] for axis in dimensions if axis in reduced]),
        _merged([within[axis] for axis in dimensions if axis not in reduced]),
        data.itemsize,
        threads,
    )


def _listed(value: Any) -> Sequence[int]:
    return [value] if isinstance(value, int) else value


def _merged(dimensions: list[Dimension]) -> list[Dimension]:
    """The dimensions, the smallest stride first, those that follow on each other as one."""
    merged: list[Dimension] = []
    for stride, size in sorted(each for each in dimensions if each[1] != 1):
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = merged[-1][0], merged[-1][1] * size
        else:
            merged.append((stride, size))
    return merged


def _workspace(
    reduced: list[Dimension], kept: list[Dimension], itemsize: int, threads: int
) -> tuple[int, ...]:
    if sum(stride * (size - 1) for stride, size in (*reduced, *kept)) >= _INDEX_LIMIT:
        # It is done in halves of the longest dimension, one after the other.
        return _workspace(*_halved(reduced, kept), itemsize, threads)
    results, values = prod(size for _, size in kept), prod(size for _, size in reduced)
    along = not kept or (bool(reduced) and reduced[0][0] < kept[0][0])
    vector = 1
    if along:
        width, height = values, results
        if reduced and reduced[0][0] == itemsize and width > 128 and len(reduced) + len(kept) == 1:
            width //= 4
    else:
        width, height = results, values
        if kept[0][0] == itemsize:
            strides = [stride // itemsize for stride, _ in (*reduced, *kept[1:])]
            vector = _vector(kept[0][1], strides)
            width //= vector
    block_width, block_height = _block(width, height, _MOST_THREADS // vector)
    input_step, output_step = (block_width, 1) if along else (1, block_width)
    if -(-values // input_step) < min(block_height * 16, _MOST_VALUES):
        return ()
    input_step *= block_height
    grid = -(-(results // vector) // output_step)
    target = threads // (block_width * block_height)
    each = -(-values // input_step)
    if each < _MOST_VALUES or grid > target:
        return ()
    blocks = max(min(-(-target // grid), -(-each // _LEAST_VALUES)), -(-each // _MOST_VALUES))
    if blocks <= 1:
        return ()
    accumulated = max(itemsize, 4)
    buffer = accumulated * results * blocks * (1 if along else block_width * vector)
    return buffer, 4 * grid


def _halved(
    reduced: list[Dimension], kept: list[Dimension]
) -> tuple[list[Dimension], list[Dimension]]:
    longest = max((*reduced, *kept), key=lambda each: each[0] * (each[1] - 1))

    def half(dimensions: list[Dimension]) -> list[Dimension]:
        return [(s, n - n // 2) if (s, n) == longest else (s, n) for s, n in dimensions]

    return half(reduced), half(kept)


def _vector(results: int, strides: list[int]) -> int:
    """How many neighbouring results a thread computes: all rows begin at a multiple of it."""
    vector = 4
    for number in (results, *strides):
        while number % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    wide, high = (_power_below(size) if size < most else most for size in (width, height))
    block_width = min(wide, _WARP)
    block_height = min(high, most // block_width)
    return min(wide, most // block_height), block_height


def _power_below(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)
