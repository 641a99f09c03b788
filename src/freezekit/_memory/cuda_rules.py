"""What CUDA does differently from the CPU: each rule a small unit with its reason and source.

Functions that CUDA computes by other operators are replaced while a trace runs
(:class:`CudaFunctions`); memory that CUDA's libraries take from the allocator beside an operator's
results is added by :class:`CudaRules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from freezekit._memory.recorder import Recorder

__all__ = ["CudaFunctions", "CudaRules", "attention_backend"]

MIB = 1 << 20
Capability = tuple[int, int]


# -- functions ---------------------------------------------------------------------------------


class CudaFunctions(TorchFunctionMode):
    """While it is entered, functions that CUDA computes by other operators call those."""

    def __init__(self, capability: Capability = (8, 0)) -> None:
        super().__init__()
        self._capability = capability
        self._rules: dict[Any, Callable[..., Any]] = {
            functional.dropout: fused_dropout,
            functional.scaled_dot_product_attention: self.attention,
        }

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call what CUDA calls."""
        return self._rules.get(func, func)(*args, **(kwargs or {}))

    def attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``scaled_dot_product_attention`` for this GPU."""
        return fused_attention(self._capability, *args, **kwargs)


def fused_dropout(
    input: torch.Tensor,  # noqa: A002  (torch's own name)
    p: float = 0.5,
    training: bool = True,  # noqa: FBT001, FBT002
    inplace: bool = False,  # noqa: FBT001, FBT002
) -> torch.Tensor:
    """CUDA's fused dropout keeps a mask of one byte an element; the CPU a float mask.

    Source: ``is_fused_kernel_acceptable`` in ATen/native/Dropout.cpp. In place it is not fused.
    """
    if not training or not 0 < p < 1 or inplace or input.numel() == 0:
        with torch._C.DisableTorchFunction():
            return functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, train=True)[0]


def attention_backend(
    query: torch.Tensor, attn_mask: torch.Tensor | None, capability: Capability
) -> str:
    """``"flash"`` or ``"efficient"``: which fused attention CUDA takes.

    Flash needs half precision, no mask, heads of at most 256, and compute capability 8.0;
    memory-efficient attention takes the rest. (On 9.0 and 10.0 cuDNN may come before flash: it
    keeps what flash keeps.) Source: ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and attn_mask is None and query.shape[-1] <= 256 and capability >= (8, 0):
        return "flash"
    return "efficient"


def fused_attention(  # noqa: PLR0913, PLR0917  (torch's own signature)
    capability: Capability,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> torch.Tensor:
    """Fused attention keeps q, k, v, the output and a log-sum-exp, and no matrix of weights."""
    if attention_backend(query, attn_mask, capability) == "flash":
        flash: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, return_debug_mask=False, scale=scale
        )[0]
        return flash
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        # The efficient kernel has no grouped heads: they are repeated.
        repeat = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(repeat, -3) for t in (key, value))
    grads = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    efficient: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, _bias(attn_mask, query, key), grads, dropout_p, is_causal, scale=scale
    )[0]
    return efficient


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The kernel's bias: a boolean mask becomes floats, rows are padded to 16 elements."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        floats = torch.zeros_like(mask, dtype=query.dtype)
        mask = floats.masked_fill_(mask.logical_not(), float("-inf"))
    length = mask.shape[-1]
    if length % 16:
        mask = functional.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(*query.shape[:-1], key.shape[-2])


# -- workspaces --------------------------------------------------------------------------------

_PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"})


class CudaRules:
    """Workspaces that CUDA's libraries take from the allocator."""

    def __init__(self, capability: Capability = (8, 0)) -> None:
        # 2 x 4096 KiB + 8 x 16 KiB; 32 MiB on Hopper and later (torch 2.0 to 2.13).
        # Source: ATen/cuda/CublasHandlePool.cpp.
        self._cublas = 32 * MIB if capability >= (9, 0) else 8_519_680
        self._handles: set[bool] = set()

    def before(self, recorder: Recorder, operation: str) -> None:
        """cuBLAS: one workspace at a thread's first product, kept for good.

        The autograd engine runs the backward pass in a thread of its own, with its own handle.
        """
        if operation not in _PRODUCTS:
            return
        thread = recorder.phase == "backward"
        if thread not in self._handles:
            self._handles.add(thread)
            recorder.permanent(self._cublas, "cublas workspace")
