"""What cuDNN takes from the allocator beside a convolution's results.

Tensor cores compute on channels-last data: for tensors in the usual layout (NCHW) cuDNN makes
converted copies, in a workspace that lives as long as the kernel. Which kernel its heuristics take,
and with what workspace, cuDNN (since 9.8) tells for a described GPU, without one; the rules below
are what versions 9.8 and 9.24 answer for V100, T4, A100, H100, B200 and RTX 3060, and what
measured peaks bear out:

* Half precision in NCHW: input and output are both copied, in all three directions; in
  channels-last nothing is.
* fp32 where TF32 is much faster than fp32 (compute capability 8.0, 9.0, 10.0): the forward copies
  its input, the backward both. The gradient of the weight sums over all pixels, in as many parts as
  fill the GPU: each has a copy of the weight. Images of up to 4 channels are read as they are, in
  the backward only under kernels of up to 3 by 3; and kernels of one pixel are plain matrix
  products, for which measured peaks show no copy.
* fp32 elsewhere: kernels without tensor cores hold their own, and these need next to nothing.
* What another choice may take (``cudnn.benchmark``, a card where the answers are mixed) is told
  beside: copies of input and output, twice for a search that tries several.
* Depthwise convolutions are torch's own kernels: cuDNN is not asked (``use_cudnn_depthwise`` in
  ATen/native/Convolution.cpp; with half precision it may be).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import torch

from freezekit._memory.devices import Target

__all__ = ["convolution_workspaces"]

Direction = Literal["forward", "backward_data", "backward_filter"]

# TF32 has eight times the rate of fp32 on A100, H100 and B200; on 8.6, 8.9 and 12.0 it is at most
# twice.
_FAST_TF32 = frozenset({(8, 0), (9, 0), (10, 0)})
# Rows and columns of the weight's gradient that one thread block of the usual kernels computes.
_TILE = 128
_HALF = (torch.float16, torch.bfloat16)
_IMAGE_CHANNELS = 4


def convolution_workspaces(
    operation: str, args: Sequence[Any], target: Target
) -> tuple[tuple[int, int], ...]:
    """Bytes of workspace taken, and possible beside, for each result of a convolution, in order.

    ``args`` are those of ``aten.convolution`` or ``aten.convolution_backward``; any other operator
    takes none. In the backward the gradient of the input comes first, then that of the weight, each
    with its own workspace (``cudnn_convolution_backward`` in ATen/native/cudnn/ConvShared.cpp).
    """
    if operation == "aten.convolution":
        data, weight = args[0], args[1]
        transposed, groups = args[6], args[8]
        output = _output_shape(data, weight, args)
        direction: Direction = "backward_data" if transposed else "forward"
        return (_workspace(direction, data, weight, output, groups, target),)
    if operation != "aten.convolution_backward":
        return ()
    gradient, data, weight = args[0], args[1], args[2]
    transposed, groups, mask = args[7], args[9], args[10]
    directions: tuple[Direction, ...] = (
        "forward" if transposed else "backward_data",
        "backward_filter",
    )
    return tuple(
        _workspace(direction, data, weight, gradient.shape, groups, target)
        for direction, wanted in zip(directions, mask, strict=False)
        if wanted
    )


def _workspace(
    direction: Direction,
    data: torch.Tensor,
    weight: torch.Tensor,
    output: Sequence[int],
    groups: int,
    target: Target,
) -> tuple[int, int]:
    half = data.dtype in _HALF
    own = _is_depthwise(data, weight, groups) or _is_channels_last(data)
    if own or not (half or data.dtype == torch.float32):
        return 0, 0
    both = sum(_copy_bytes(shape, data.itemsize) for shape in (weight.shape, data.shape, output))
    if half:
        return (both if target.capability >= (7, 0) else 0), both
    space = weight.shape[2:]
    if target.capability not in _FAST_TF32 or prod(space) == 1:
        return 0, both
    if data.shape[1] <= _IMAGE_CHANNELS:
        return (0 if direction == "forward" or max(space) <= 3 else both), both
    taken = both
    if direction == "forward":
        taken -= _copy_bytes(output, data.itemsize)
    elif direction == "backward_filter" and groups == 1:
        more = _parts(weight.shape, target.multiprocessors) - 1
        taken += more * _copy_bytes(weight.shape, data.itemsize)
    return taken, both


def _parts(weight: Sequence[int], multiprocessors: int) -> int:
    """In how many parts the gradient of a weight is summed, so that they fill the GPU."""
    outputs, *inputs = weight
    blocks = -(-outputs // _TILE) * -(-prod(inputs) // _TILE)
    return max(1, multiprocessors // blocks)


def _copy_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of a channels-last copy: a pixel's channels are padded to 16 bytes."""
    batch, channels, *space = shape
    return batch * -(-channels * itemsize // 16) * 16 * prod(space)


def _is_channels_last(data: torch.Tensor) -> bool:
    return data.dim() > 2 and data.shape[1] > 1 and data.stride(1) == 1


def _is_depthwise(data: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    return groups > 1 and groups == data.shape[1] and weight.shape[0] % groups == 0


def _output_shape(data: torch.Tensor, weight: torch.Tensor, args: Sequence[Any]) -> list[int]:
    stride, padding, dilation, transposed, extra, groups = args[3:9]
    spatial = data.dim() - 2
    steps, pads, spreads, extras = (
        list(value) * spatial if len(value) == 1 else list(value)
        for value in (stride, padding, dilation, extra)
    )
    sizes = zip(data.shape[2:], weight.shape[2:], steps, pads, spreads, extras, strict=False)
    if transposed:
        space = [(n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, k, s, p, d, e in sizes]
        return [data.shape[0], weight.shape[1] * groups, *space]
    space = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in sizes]
    return [data.shape[0], weight.shape[0], *space]
