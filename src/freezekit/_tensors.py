"""What there is to say of one tensor, and which tensors share memory."""

from __future__ import annotations

import dis
import math
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["Layout", "is_gradient_mask", "measure", "shared_memory", "why_untrainable"]

Layout: TypeAlias = Literal["dense", "lazy", "sharded", "packed"]


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
    groups: list[dict[int, torch.Tensor]] = []
    for index, tensor in found:
        touched = [g for g in groups if any(_overlap(other, tensor) for other in g.values())]
        joined = {index: tensor}
        for group in touched:
            groups.remove(group)
            joined |= group
        groups.append(joined)
    for group in groups:
        if len(group) > 1:
            leader.update(dict.fromkeys(group, min(group)))


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share an element: exact for blocks of rows; else, in doubt, they do."""
    first, second = (one, other) if one.data_ptr() <= other.data_ptr() else (other, one)
    distance = second.data_ptr() - first.data_ptr()
    if _extent(first) <= distance:
        return False
    if first.is_contiguous():
        return True  # the second one's first element lies in it
    block, other_block = _block(first), _block(second)
    if block is None or other_block is None:
        return True
    (rows, width, pitch), (others, breadth, other_pitch) = block, other_block
    if others > 1 and pitch != other_pitch:
        return True
    down, right = divmod(distance, pitch)
    # Below the last row, or right of all columns; unless the second one goes on in the next row.
    return (down < rows and right < width) or (down + 1 < rows and right + breadth > pitch)


def _block(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """A block of rows: how many, bytes of one, bytes from one to the next; None if it is none."""
    if tensor.is_contiguous():
        return 1, tensor.nbytes, tensor.nbytes
    if tensor.dim() < 2 or not tensor[0].is_contiguous() or tensor.stride(0) == 0:
        return None
    return tensor.shape[0], tensor[0].nbytes, tensor.stride(0) * tensor.itemsize


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
    kind = type(tensor)
    is_plain = kind is nn.Parameter  # most are; there may be a hundred thousand
    if not is_plain and is_lazy(tensor):
        return (), 0, 0, "lazy"
    ds_numel = getattr(tensor, "ds_numel", None)
    if ds_numel is not None:
        # DeepSpeed's ZeRO-3 leaves an empty tensor behind and notes what it stands for.
        shape = tuple(getattr(tensor, "ds_shape", (ds_numel,)))
        return shape, int(ds_numel), int(ds_numel) * tensor.dtype.itemsize, "sharded"
    shape, numel = tuple(tensor.shape), tensor.numel()
    nbytes = numel * tensor.dtype.itemsize
    if not is_plain and kind.__name__ == "Params4bit":
        # bitsandbytes packs two 4-bit weights into a byte.
        unpacked = getattr(getattr(tensor, "quant_state", None), "shape", None)
        logical = (2 * nbytes,) if unpacked is None else tuple(unpacked)
        return logical, math.prod(logical), nbytes, "packed"
    if not is_plain and hasattr(kind, "device_mesh"):
        return shape, numel, nbytes, "sharded"
    if tensor.layout is torch.strided and not tensor.is_contiguous() and 0 in tensor.stride():
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


# -- hooks on a tensor's gradient ----------------------------------------------------------------

_MASKING = frozenset(
    {"index_fill", "index_fill_", "masked_fill", "masked_fill_", "where", "zero_", "zeros_like"}
)


def is_gradient_mask(tensor: torch.Tensor) -> bool:
    """Whether a hook on the tensor's gradient looks as if it masked part of it.

    The hook is read, not called: it has a tensor at hand (a mask), assigns to parts, or fills.
    """
    # Private, since nothing public lists a tensor's hooks.
    hooks = getattr(tensor, "_backward_hooks", None) or {}
    after = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
    return any(_masks(hook) for hook in (*hooks.values(), *after.values()))


def _masks(hook: object) -> bool:
    owner = getattr(hook, "__self__", None)
    inner = getattr(hook, "func", hook)
    function = getattr(inner, "__func__", inner)
    if not hasattr(function, "__code__") and callable(function):
        owner, function = function, type(function).__call__
    at_hand = [
        *getattr(hook, "args", ()),
        *getattr(hook, "keywords", {}).values(),
        *(getattr(function, "__defaults__", None) or ()),
        *(vars(owner).values() if hasattr(owner, "__dict__") else ()),
    ]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            at_hand.append(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
    code = getattr(function, "__code__", None)
    if code is not None:  # a script's mask is a global variable
        variables = getattr(function, "__globals__", {})
        at_hand += [variables[name] for name in code.co_names if name in variables]
    if any(isinstance(value, torch.Tensor) and value.dim() > 0 for value in at_hand):
        return True
    if code is None:
        return False
    # An assignment to a slice has an instruction of its own since Python 3.12.
    stores = any(
        found.opname in ("STORE_SUBSCR", "STORE_SLICE") for found in dis.get_instructions(code)
    )
    return stores or not _MASKING.isdisjoint(code.co_names)
