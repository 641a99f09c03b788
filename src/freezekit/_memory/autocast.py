"""What ``torch.autocast("cuda")`` casts, on tensors that are not on a GPU.

Inside ``torch.autocast`` the CPU's lists of operators hold for CPU tensors. They differ from
CUDA's: here the functions of CUDA's lists cast their arguments themselves, and the CPU's lists are
passed by. Whether autocast is on, and to which dtype, is read from torch, so that a model's own
``autocast(enabled=False)`` counts.

Source of the lists: ``AT_FORALL_LOWER_PRECISION_FP``, ``AT_FORALL_FP32``,
``AT_FORALL_FP32_SET_OPT_DTYPE`` and ``AT_FORALL_PROMOTE`` in ATen/autocast_mode.h; of the weight
cache: ``cached_cast`` in ATen/autocast_mode.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

__all__ = ["CudaAutocast"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER_PRECISION = _names("""
    addbmm addmm addmv addr baddbmm bilinear bmm chain_matmul conv1d conv2d conv3d conv_tbc
    conv_transpose1d conv_transpose2d conv_transpose3d einsum gru gru_cell linear lstm lstm_cell
    matmul __matmul__ __rmatmul__ mm multi_dot mv prelu rnn_relu rnn_relu_cell rnn_tanh
    rnn_tanh_cell scaled_dot_product_attention
""")
FLOAT32 = _names("""
    acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity
    cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss kl_div
    l1_loss layer_norm log log10 log1p log2 log_softmax logsumexp margin_ranking_loss mse_loss
    multi_margin_loss multilabel_margin_loss nll_loss norm pdist poisson_nll_loss pow __pow__
    __rpow__ prod reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softmax
    softmin softplus sum tan triplet_margin_loss
""")
PROMOTED = _names("""
    addcdiv addcmul atan2 cross dot grid_sample index_put scatter_add tensordot vdot
""")


class CudaAutocast:
    """Calls functions as autocast on CUDA would; keeps the cast weights until :meth:`clear`."""

    def __init__(self) -> None:
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._passed_by = DispatchKeySet(DispatchKey.AutocastCPU)

    @property
    def active(self) -> bool:
        """Whether the code that runs is inside an enabled autocast."""
        return torch.is_autocast_enabled("cpu")

    def clear(self) -> None:
        """Drop the cast weights, as at the end of the outermost autocast."""
        self._cache.clear()

    def call(
        self, call: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function of this name with its arguments cast."""
        dtype = torch.get_autocast_dtype("cpu")
        with torch._C._ExcludeDispatchKeyGuard(self._passed_by):
            if name in LOWER_PRECISION:
                args, kwargs = self._cast((args, kwargs), dtype)
            elif name in FLOAT32 or (name in PROMOTED and _has_float32((args, kwargs))):
                args, kwargs = self._cast((args, kwargs), torch.float32)
            return call(*args, **kwargs)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            return self._cast_tensor(value, dtype)
        if isinstance(value, dict):
            return {key: self._cast(item, dtype) for key, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._cast(item, dtype) for item in value)
        return value

    def _cast_tensor(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not _may_cast(tensor) or tensor.dtype == dtype:
            return tensor
        # Frozen weights are not kept: they are cast at every use; in inference mode so are all
        # (seen in torch 2.13's casts on the CPU, and in a trace of 2.11's on a GPU).
        kept = (
            not torch.is_inference_mode_enabled()
            and dtype != torch.float32
            and tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and tensor._base is None
        )
        if not kept:
            return tensor.to(dtype)
        found = self._cache.get(id(tensor))
        if found is None:
            found = self._cache[id(tensor)] = (tensor, tensor.to(dtype))
        return found[1]


def _may_cast(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _has_float32(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype == torch.float32
    if isinstance(value, dict):
        return any(_has_float32(item) for item in value.values())
    return isinstance(value, tuple | list) and any(_has_float32(item) for item in value)
