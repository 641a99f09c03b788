"""Record what operators allocate, on real or on fake tensors, as an event stream.

A dispatch mode sees the result of every operator below autograd; a storage that was not seen
before is an allocation, and a finalizer on it is the free. That is all that is watched: memory that
an operator takes and returns inside one call is not seen here.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

from freezekit._memory.events import Allocation, Category, Event, EventStream, Phase

__all__ = ["Recorder", "tensors_in"]


class DeviceRules(Protocol):
    """What a device does beyond what an operator's results show."""

    def before(self, recorder: Recorder, operation: str) -> None:
        """Called before an operator runs."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches allocations while it is entered; :meth:`stream` is what it saw.

    The module that is being run is told by :meth:`enter_module` and :meth:`leave_module`; in the
    backward pass it follows from the autograd node's sequence number.
    """

    def __init__(self, device_rules: DeviceRules | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_rules = device_rules
        self.phase: Phase = "setup"
        self.step = -1
        self._allocations: list[Allocation] = []
        self._events: list[Event] = []
        self._live: dict[int, int] = {}
        self._closed = False
        self.stand_ins = 0
        self._modules: list[str] = []
        self.last_module = ""
        self.last_phase: Phase = "setup"
        self._ranges: list[tuple[int, str]] = [(0, "")]

    # -- seeing

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, and note the storages that it made."""
        operation = str(func.overloadpacket)
        if self.device_rules is not None:
            self.device_rules.before(self, operation)
        try:
            result = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            # Code that asks a tensor for its value: False for a question (a mask is not all
            # padding, nothing is to be skipped), else 1.
            if operation != "aten._local_scalar_dense":
                raise
            self.stand_ins += 1
            return _stand_in(args[0].dtype)
        for tensor in tensors_in(result):
            self.note(tensor, "temporaries", operation)
        return result

    def note(self, tensor: torch.Tensor, category: Category, operation: str = "") -> None:
        """Note a tensor's storage, unless it is known."""
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = self._add(storage.nbytes(), category, operation)
        # The storage object lives as long as its memory; the hook does not keep it alive.
        finalizer = weakref.finalize(storage, self._note_free, key)
        finalizer.atexit = False

    def _add(self, nbytes: int, category: Category, operation: str) -> int:
        index = len(self._allocations)
        module = self.current_module()
        self._allocations.append(
            Allocation(nbytes, category, module, operation, self.phase, self.step)
        )
        self._events.append(Event(index, is_alloc=True, phase=self.phase, step=self.step))
        return index

    def _note_free(self, key: int) -> None:
        index = self._live.pop(key, None)
        if index is not None and not self._closed:
            self._events.append(Event(index, is_alloc=False, phase=self.phase, step=self.step))

    def categorize(self, tensor: torch.Tensor, category: Category) -> None:
        """Say what a known tensor's memory is for."""
        index = self._live.get(tensor.untyped_storage()._cdata)
        if index is not None:
            self._allocations[index] = self._allocations[index]._replace(category=category)

    def categorize_live_activations(self, step: int) -> None:
        """What the forward pass left behind, and nothing else claims, is kept for backward."""
        for index in self._live.values():
            found = self._allocations[index]
            if found.category == "temporaries" and found.phase == "forward" and found.step == step:
                self._allocations[index] = found._replace(category="activations")

    # -- where

    def current_module(self) -> str:
        """FQN of the module whose forward or backward is running."""
        if self.phase == "backward":
            node: Any = torch._C._current_autograd_node()
            return "" if node is None else self._module_of_node(node._sequence_nr())
        return self._modules[-1] if self._modules else ""

    def enter_module(self, fqn: str) -> None:
        """A module's forward begins."""
        self._modules.append(fqn)
        self.last_module = fqn
        self._mark()

    def leave_module(self) -> None:
        """The innermost module's forward ends."""
        self._modules.pop()
        self._mark()

    def _mark(self) -> None:
        # Autograd numbers its nodes in order: from here on they belong to the current module.
        number = torch._C._autograd._get_sequence_nr()
        self._ranges.append((number, self._modules[-1] if self._modules else ""))

    def _module_of_node(self, number: int) -> str:
        after = bisect.bisect_right(self._ranges, number, key=lambda found: found[0])
        return self._ranges[after - 1][1]

    # -- when

    @contextmanager
    def during(self, phase: Phase, step: int) -> Iterator[None]:
        """Events in this block belong to this phase of this step."""
        before = self.phase, self.step
        self.phase, self.step = phase, step
        self.last_phase = phase
        try:
            yield
        finally:
            self.phase, self.step = before

    def permanent(self, nbytes: int, operation: str, category: Category = "workspaces") -> None:
        """Note memory that is taken and never returned."""
        self._add(nbytes, category, operation)

    def close(self) -> EventStream:
        """What was seen; what is freed from now on (the model itself) is not part of it."""
        self._closed = True
        return EventStream(tuple(self._allocations), tuple(self._events))


def _stand_in(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclass-like outputs."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))
