"""Memory that CUDA's libraries take from the allocator beside an operator's results.

Each rule is a small unit with its reason and source. :class:`CudaRules` is asked before and after
every operator of a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from freezekit._memory.convolutions import convolution_workspaces
from freezekit._memory.devices import A100, Capability, Target
from freezekit._memory.nested import tensors_in
from freezekit._memory.recorder import Recorder
from freezekit._memory.reductions import reduction_workspace

__all__ = ["CudaRules", "cublas_workspace"]

MIB = 1 << 20
Arguments = Sequence[Any]

_PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"})
_HALF = (torch.float16, torch.bfloat16)


def cublas_workspace(capability: Capability, torch_version: tuple[int, int]) -> tuple[int, bool]:
    """Bytes of a cuBLAS workspace, and whether it is kept.

    8.125 MiB (2 x 4096 KiB + 8 x 16 KiB); 32 MiB on Hopper, from torch 2.12 on Blackwell too. Up to
    2.13 it is taken at a thread's first product and kept for good, then for each product alone.
    Source: ATen/cuda/CublasHandlePool.cpp (of 1.13, 2.0, 2.13, and #175344, #194311).
    """
    if torch_version < (2, 0):
        return 0, True
    large = capability[0] == 9 or (capability[0] >= 10 and torch_version >= (2, 12))
    return (32 * MIB if large else 8_519_680), torch_version <= (2, 13)


class CudaRules:
    """Workspaces, temporaries and statistics of CUDA's kernels.

    Args:
        target: the GPU and the torch that will run.
    """

    def __init__(self, target: Target = A100) -> None:
        self._cublas, self._cublas_kept = cublas_workspace(target.capability, target.torch_version)
        self._handles: set[bool] = set()
        self._target = target

    def before(self, recorder: Recorder, operation: str) -> None:
        """cuBLAS: a workspace at a thread's first product.

        The autograd engine runs the backward pass in a thread of its own, with its own handle.
        """
        if operation not in _PRODUCTS or not self._cublas or not self._cublas_kept:
            return
        thread = recorder.phase == "backward"
        if thread not in self._handles:
            self._handles.add(thread)
            recorder.permanent(self._cublas, "cublas workspace")

    def workspaces(self, operation: str, args: Arguments) -> Sequence[tuple[int, int]]:
        """cuDNN: what convolutions take while they run, and may take by another choice."""
        return convolution_workspaces(operation, args, self._target)

    def after(self, recorder: Recorder, operation: str, args: Arguments, result: Any) -> None:
        """What an operator had beside its results while it ran."""
        if operation in _PRODUCTS and self._cublas and not self._cublas_kept:
            recorder.transient(self._cublas, "cublas workspace")
        elif operation in NORMS:
            _float_statistics(recorder, args, result)
        elif operation in TEMPORARIES:
            recorder.transients(TEMPORARIES[operation](args), operation, "temporaries")
        else:
            sizes = reduction_workspace(operation, args, self._target.threads)
            recorder.transients(sizes, f"{operation} workspace", "workspaces")


NORMS = frozenset({"aten.native_layer_norm", "aten.native_group_norm"})


def _float_statistics(recorder: Recorder, args: Arguments, result: Any) -> None:
    """CUDA keeps mean and rstd of half-precision rows in fp32; a CPU may keep them as they are.

    Source: ``layer_norm_cuda`` in ATen/native/cuda/layer_norm_kernel.cu (its ``acc_type``).
    """
    if args[0].dtype in _HALF:
        for statistic in list(tensors_in(result))[1:]:
            recorder.resize(statistic, statistic.numel() * 4)


def flash_backward(args: Arguments) -> list[int]:
    """fp32 accumulator of dq and the softmax's row sums; with grouped heads dk and dv expanded.

    Lengths are rounded up to 128, heads to 32. Source: ``mha_bwd`` in flash_attn/flash_api.cpp.
    """
    query, key = args[1], args[2]
    batch, heads, length, head = query.shape
    rounded = -(-length // 128) * 128
    temporaries = [
        batch * heads * rounded * 4,
        batch * rounded * heads * (-(-head // 32) * 32) * 4,
    ]
    if key.shape[1] != heads:
        expanded = batch * key.shape[2] * heads * head * key.element_size()
        temporaries += [expanded, expanded]
    return temporaries


def efficient_backward(args: Arguments) -> list[int]:
    """Row sums (delta), and fp32 accumulators of the gradients in half precision.

    Source: ``_efficient_attention_backward`` in ATen/native/transformers/cuda.
    """
    query, key = args[1], args[2]
    batch, heads, length = query.shape[:3]
    temporaries = [batch * heads * (-(-length // 32) * 32) * 4]
    if query.dtype in _HALF:
        temporaries.append(4 * (query.numel() + 2 * key.numel()))
    return temporaries


def embedding_backward(args: Arguments) -> list[int]:
    """More than 3,072 indices are sorted: their order, counts, and fp32 sums of the segments.

    A segment has at most 10 rows; here each index is taken for a segment of its own.
    Source: ``embedding_dense_backward_cuda`` in ATen/native/cuda/Embedding.cu.
    """
    gradient, indices = args[0], args[1]
    count = indices.numel()
    if count <= 3072:
        return []
    return [*[count * 8] * 4, count * gradient.shape[-1] * 4]


def index_put(args: Arguments) -> list[int]:
    """Values that are summed where indices meet: indices and their order are sorted.

    Source: ``index_put_with_sort_kernel`` in ATen/native/cuda/Indexing.cu.
    """
    if len(args) < 4 or not args[3]:
        return []
    count = max((index.numel() for index in args[1] if index is not None), default=0)
    return [*[count * 8] * 5, 1]


# What each has at the same time, in order of allocation.
TEMPORARIES: Mapping[str, Callable[[Arguments], list[int]]] = {
    "aten._scaled_dot_product_flash_attention_backward": flash_backward,
    "aten._scaled_dot_product_efficient_attention_backward": efficient_backward,
    "aten.embedding_dense_backward": embedding_backward,
    "aten.index_put": index_put,
}
