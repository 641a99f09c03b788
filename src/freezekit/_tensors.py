"""What there is to say of one tensor, and which tensors share memory."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["Layout", "measure", "shared_memory", "why_untrainable"]

Layout: TypeAlias = Literal["dense", "lazy", "sharded", "packed"]

# Up to here it is looked at element by element whether two views overlap.
_FEW_ELEMENTS = 4096


def shared_memory(tensors: list[nn.Parameter]) -> dict[int, int]:
    """Which tensors share memory with an earlier one: their index -> the earliest one's.

    One memory is one parameter, also under two Parameter objects: what trains one moves the
    other. Tensors without an address (meta, fake, lazy) are told apart by identity alone.
    """
    spans = []
    for index, tensor in enumerate(tensors):
        if type(tensor) is not nn.Parameter or tensor.layout is not torch.strided:
            continue  # a subclass (DTensor, quantised, lazy) may have no address of its own
        try:
            start = tensor.data_ptr()
        except RuntimeError:  # a fake tensor's data pointer may not be asked for
            continue
        if start:
            spans.append((tensor.get_device(), start, start + _extent(tensor), index))
    spans.sort()
    leader: dict[int, int] = {}
    run: list[int] = []
    run_device, reach = None, 0
    for device, start, stop, index in [*spans, (None, 0, 0, -1)]:
        if device == run_device and start < reach:
            run.append(index)
            reach = max(reach, stop)
            continue
        if len(run) > 1:
            _join_overlapping([(i, tensors[i]) for i in sorted(run)], leader)
        run, run_device, reach = [index], device, stop
    return leader


def _join_overlapping(found: list[tuple[int, torch.Tensor]], leader: dict[int, int]) -> None:
    """Note, for tensors whose spans overlap, which of them really share an element."""
    first = {index: index for index, _ in found}
    for position, (index, tensor) in enumerate(found):
        for earlier, other in found[:position]:
            if first[earlier] != first[index] and _overlap(other, tensor):
                # One that overlaps two joins them, and all that each was joined with.
                joined = {first[earlier], first[index]}
                first.update((i, min(joined)) for i, old in first.items() if old in joined)
    leader.update((index, to) for index, to in first.items() if index != to)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors with overlapping spans share an element; in doubt, they do.

    Blocks of columns of one matrix (a fused projection taken apart) lie between each other.
    """
    if max(one.numel(), other.numel()) <= _FEW_ELEMENTS:
        return not _addresses(one).isdisjoint(_addresses(other))
    if one.stride() != other.stride() or one.itemsize != other.itemsize:
        return True
    distance = abs(other.data_ptr() - one.data_ptr()) // one.itemsize
    first = one if one.data_ptr() <= other.data_ptr() else other
    for stride, length in sorted(zip(first.stride(), first.shape, strict=True), reverse=True):
        if stride == 0:
            return True
        steps, distance = divmod(distance, stride)
        if steps >= length:
            return False
    return distance == 0


def _addresses(tensor: torch.Tensor) -> set[int]:
    """The address of every byte of a small tensor."""
    found = {tensor.data_ptr() + byte for byte in range(tensor.itemsize)}
    for stride, length in zip(tensor.stride(), tensor.shape, strict=True):
        step = stride * tensor.itemsize
        found = {address + step * i for address in found for i in range(length)}
    return found


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if tensor.numel() == 0:
        return 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((length - 1) * stride for length, stride in sizes)) * tensor.itemsize


def measure(tensor: torch.Tensor) -> tuple[tuple[int, ...], int, int, Layout]:
    """Logical shape, elements, bytes, and how the tensor is kept."""
    dtype = tensor.dtype
    kind = type(tensor)
    if kind is not nn.Parameter and is_lazy(tensor):
        return (), 0, 0, "lazy"
    ds_numel = getattr(tensor, "ds_numel", None)
    if ds_numel is not None:
        # DeepSpeed's ZeRO-3 leaves an empty tensor behind and notes what it stands for.
        shape = tuple(getattr(tensor, "ds_shape", (ds_numel,)))
        return shape, int(ds_numel), int(ds_numel) * dtype.itemsize, "sharded"
    shape, numel = tuple(tensor.shape), tensor.numel()
    nbytes = numel * dtype.itemsize
    if kind.__name__ == "Params4bit":
        # bitsandbytes packs two 4-bit weights into a byte.
        unpacked = getattr(getattr(tensor, "quant_state", None), "shape", None)
        logical = (2 * nbytes,) if unpacked is None else tuple(unpacked)
        return logical, math.prod(logical), nbytes, "packed"
    if hasattr(kind, "device_mesh"):
        return shape, numel, nbytes, "sharded"
    if tensor.layout is torch.strided and 0 in tensor.stride():
        nbytes = min(nbytes, _extent(tensor))  # an expanded tensor repeats its memory
    return shape, numel, nbytes, "dense"


def why_untrainable(tensor: torch.Tensor) -> str:
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return f"{str(tensor.dtype).removeprefix('torch.')} tensors have no gradient"
    if not tensor.is_leaf:
        return "it is computed from other tensors (not a leaf)"
    if not is_lazy(tensor) and tensor.is_inference():
        return "it was made under torch.inference_mode(): clone it outside"
    return ""
