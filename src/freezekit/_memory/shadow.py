"""A shadow of a model and its inputs: the same structure on fake tensors, without a byte of data.

The user's model is read and never touched: the shadow is a deep copy in which every tensor became
a fake one on the CPU (fake CUDA tensors abort a process that has no GPU), wherever the original is:
on the CPU, on a GPU, on the meta device. ``FakeTensorMode`` is torch's own, and private.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from freezekit._memory.known import KnownValues

__all__ = ["Shadow"]

T = TypeVar("T")


class Shadow:
    """Makes fake twins; tensors that share memory have twins that share memory.

    >>> from torch import nn
    >>> shadow = Shadow()
    >>> twin = shadow.copy(nn.Linear(2, 3))
    >>> tuple(twin.weight.shape), type(twin.weight.data).__name__
    ((3, 2), 'FakeTensor')
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.known = KnownValues()
        self._storages: dict[int, torch.Tensor] = {}
        self._memo: dict[int, Any] = {}
        # Whatever is a key by its identity must live as long as the key.
        self._originals: list[Any] = []

    def copy(self, value: T) -> T:
        """A deep copy in which every tensor is fake.

        Tensors that a module keeps outside its parameters and buffers are met by the deep copy.
        """
        if isinstance(value, nn.Module):
            # Parameter.__deepcopy__ asks no function mode: parameters are put in the memo first.
            for tensor in [*value.parameters(), *value.buffers()]:
                self.tensor(tensor)
        with self.mode, _TensorCopies(self.tensor):
            return copy.deepcopy(value, self._memo)

    def let_go(self) -> None:
        """Hold no twin any longer: memory that the twins' code gives up is free then."""
        self._storages.clear()
        self._memo.clear()

    def inputs(self, value: Any) -> Any:
        """Fake twins of the tensors in nested containers; anything else as it is."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, Mapping):
            twins = {key: self.inputs(item) for key, item in value.items()}
            return twins if type(value) is dict else _rebuild(value, twins)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.inputs(item) for item in value))
        if isinstance(value, list | tuple):
            return type(value)(self.inputs(item) for item in value)
        return value

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake twin of one tensor; always the same one for the same tensor."""
        known = self._memo.get(id(tensor))
        if isinstance(known, torch.Tensor):
            return known
        with self.mode:
            twin = self._view(tensor)
            if isinstance(tensor, nn.Parameter):
                twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            elif tensor.requires_grad:
                twin.requires_grad_()
        self.known.tell(twin, tensor)
        self._memo[id(tensor)] = twin
        self._originals.append(tensor)
        return twin

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_quantized:
            # Only its storage counts: there are no fake quantized tensors.
            whole = torch.int32 if tensor.dtype == torch.qint32 else torch.int8
            return torch.empty(tensor.shape, dtype=whole, device="cpu")
        # Inputs may be sparse, or of a subclass with a dispatch of its own.
        plain = type(tensor).__torch_dispatch__ == torch.Tensor.__torch_dispatch__
        if tensor.layout is not torch.strided or not plain:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        storage = tensor.untyped_storage()
        base = self._storages.get(storage._cdata)
        if base is None or base.dtype != tensor.dtype:
            base = torch.empty(
                storage.nbytes() // tensor.itemsize, dtype=tensor.dtype, device="cpu"
            )
            self._storages[storage._cdata] = base
            self._originals.append(storage)
        return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _TensorCopies(TorchFunctionMode):
    """While it is entered, a deep copy of a tensor is its fake twin."""

    def __init__(self, twin: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._twin = twin

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor = args[0]
            with torch._C.DisableTorchFunction():
                return self._twin(tensor)
        return func(*args, **(kwargs or {}))


def _rebuild(value: Mapping[Any, Any], twins: dict[Any, Any]) -> Any:
    """A mapping of the same class, such as a tokenizer's BatchEncoding."""
    rebuilt = copy.copy(value)
    for key, twin in twins.items():
        rebuilt[key] = twin  # type: ignore[index]
    return rebuilt
