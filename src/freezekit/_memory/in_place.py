"""Which results of a backward pass are computed into an argument's memory.

Where tensors are plain, autograd's engine adds a gradient to one that is already there in place,
and the formulas of some operators fill their zeros in place. For tensors of a subclass (a fake
tensor is one), and under any dispatch mode, they call the operator that returns a new tensor
instead. A watched backward pass so allocates what one that nobody watches does not.

Sources: ``InputBuffer::add`` (torch/csrc/autograd/input_buffer.cpp), the uses of
``areAnyTensorSubclassLike`` in FunctionsManual.cpp and TensorAdvancedIndexing.cpp.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["computed_in_place"]

# What a tensor and its memory are counted with while a dispatch mode holds it, and nothing but the
# engine (or a formula's variable) does. There is no public count; a test notices a change.
_SOLE = (4, 2)
_ADD = torch.ops.aten.add.Tensor
# Formulas that make zeros and fill them.
_FILLS = frozenset(
    {
        torch.ops.aten.scatter.src,
        torch.ops.aten.scatter.value,
        torch.ops.aten.scatter_add.default,
        torch.ops.aten.index_add.default,
        torch.ops.aten.index_put.default,
        torch.ops.aten.masked_scatter.default,
    }
)
# Nodes that add two results of their own, and one that goes on with its first.
_ADDS_ITSELF = frozenset({"VarMeanBackward0", "StdMeanBackward0"})
_CHAINS = "BinaryCrossEntropyWithLogitsBackward0"
_CHAINED = frozenset({torch.ops.aten.sub.Tensor, torch.ops.aten.mul.Tensor})


def computed_in_place(
    func: Any, args: Sequence[Any], made_by: Callable[[torch.Tensor], int | None]
) -> bool:
    """Whether the result takes the memory of ``args[0]`` where nobody watches.

    Args:
        func: the operator, called from ``__torch_dispatch__``, which calls this.
        args: its arguments.
        made_by: the number of the autograd node in which a tensor's memory was allocated.
    """
    if not (func is _ADD or func in _FILLS or func in _CHAINED) or torch.is_grad_enabled():
        return False
    node: Any = torch._C._current_autograd_node()
    if node is None or not _from_engine():
        return False
    if func is _ADD:
        return node.name() not in _ADDS_ITSELF and _same_kind(*args[:2]) and _is_sole(args[0])
    if func in _CHAINED and node.name() != _CHAINS:
        return False
    return bool(made_by(args[0]) == node._sequence_nr())


def _from_engine() -> bool:
    """Whether C++ called the operator, and no Python code of a backward pass."""
    # This, computed_in_place, __torch_dispatch__, and who called it.
    return sys._getframe(3).f_code.co_name == "_engine_run_backward"


def _same_kind(into: Any, added: Any) -> bool:
    return (
        isinstance(added, torch.Tensor) and into.dtype == added.dtype and into.shape == added.shape
    )


def _is_sole(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    counts = tensor._use_count(), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return counts == _SOLE and _is_dense(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in whatever order, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
