"""Casting a frozen backbone once, instead of at every use as autocast does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from freezekit._features.trees import map_tensors

__all__ = ["cast_inputs", "cast_weights"]


def cast_weights(backbone: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating point parameters and buffers in place; rotary frequencies stay exact.

    ``inv_freq`` in half precision puts positions in the wrong place; models keep it in float32
    and cast what they compute from it.
    """
    kept = [
        (module, name, buffer)
        for module in backbone.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if "inv_freq" in name
    ]
    backbone.to(dtype)
    for module, name, buffer in kept:
        setattr(module, name, buffer)


def cast_inputs(inputs: Any, dtype: torch.dtype) -> Any:
    """Floating point tensors in ``dtype``; token ids and masks of integers as they are."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(inputs, cast)
