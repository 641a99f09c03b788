"""Functions that CUDA computes by other operators than the CPU, replaced while a trace runs.

Each replacement is a small unit with its reason and source.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from freezekit._memory.answers import DATA_FUNCTIONS, Answers, DataFunctions
from freezekit._memory.autocast import CudaAutocast
from freezekit._memory.cudnn_rnn import RNN_KINDS, cudnn_rnn
from freezekit._memory.devices import Capability

__all__ = ["CudaFunctions", "attention_backend"]

# Python functions whose body calls functions that are replaced. The backward pass does: it runs
# checkpointed forwards again.
_REENTERED = frozenset({"backward", "multi_head_attention_forward", "gumbel_softmax"})


class CudaFunctions(DataFunctions):
    """While it is entered, functions that CUDA computes by other operators call those.

    Args:
        capability: the GPU's compute capability.
        real: the tensors hold data; operators that only CUDA has are left as they are.
        answers: tell what code asks of a fake tensor's data outside of operators.
    """

    def __init__(
        self,
        capability: Capability = (8, 0),
        *,
        real: bool = False,
        answers: Answers | None = None,
    ) -> None:
        super().__init__(answers)
        self._capability = capability
        self.autocast = CudaAutocast()
        self.notes: set[str] = set()
        self._rules: dict[str, Callable[..., Any]] = {"dropout": fused_dropout}
        if not real:
            self._rules["scaled_dot_product_attention"] = self._attention
            for kind in RNN_KINDS:
                self._rules[kind] = self._rnn(kind)

    def call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what CUDA calls."""
        if name in DATA_FUNCTIONS:
            return super().call(func, name, args, kwargs)
        if name in _REENTERED:
            with self:
                return _unchecked(func)(*args, **kwargs)
        rule = self._rules.get(name)
        called = func if rule is None or not _is_torchs(func) else rule
        if self.autocast.active:
            return self.autocast.call(called, name, args, kwargs)
        return called(*args, **kwargs)

    def _attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return fused_attention(self._capability, *args, **kwargs)

    def _rnn(self, kind: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.notes.add(
                "cuDNN's reserve for recurrent layers: its gates and one more value a cell"
            )
            return cudnn_rnn(kind, *args)

        return call


def _is_torchs(func: Any) -> bool:
    # In-place dropout, a model's own function of the same name, a tensor method: not ours.
    module = getattr(func, "__module__", None) or ""
    return module in {"torch.nn.functional", "torch._C._nn", "torch"} or func in _BUILTINS


_BUILTINS = frozenset(
    {functional.scaled_dot_product_attention, *(getattr(torch, kind) for kind in RNN_KINDS)}
)


@cache
def _unchecked(func: types.FunctionType) -> types.FunctionType:
    """The function, not asking again whether a mode is entered: what it calls asks."""

    def no(*_: Any) -> bool:
        return False

    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**func.__globals__, **dict.fromkeys(checks, no)}
    twin = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__)
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin


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
    """``"flash"``, ``"cudnn"``, ``"efficient"`` or ``"math"``: what CUDA takes for attention.

    Flash needs half precision, no mask, heads of at most 256, and compute capability 8.0; on 9.0
    and 10.0 cuDNN comes before it, with or without a mask, for heads of at most 128 (it keeps what
    flash keeps); memory-efficient attention takes the rest, fp32 too. All need batch, heads, length
    and head size as four dimensions, and the efficient kernel rows of whole 16 bytes; anything else
    is plain products with the matrix of weights kept.
    Source: ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.dim() != 4 or not (half or query.dtype == torch.float32):
        return "math"
    head = query.shape[-1]
    if half and capability in ((9, 0), (10, 0)) and head <= 128 and head % 8 == 0:
        return "cudnn"
    if half and attn_mask is None and head <= 256 and capability >= (8, 0):
        return "flash"
    tensor_cores = half or capability >= (8, 0)
    return "math" if tensor_cores and head * query.itemsize % 16 else "efficient"


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
    backend = attention_backend(query, attn_mask, capability)
    if backend == "math":
        math: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )[0]
        return math
    if backend == "flash" or (backend == "cudnn" and attn_mask is None):
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
