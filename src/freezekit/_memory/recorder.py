"""Record what operators allocate, on real or on fake tensors, as an event stream.

A dispatch mode sees the result of every operator below autograd; a storage that was not seen
before is an allocation, and a finalizer on it is the free. That is all that is watched: memory that
an operator takes and returns inside one call is not seen here.
"""

from __future__ import annotations

import bisect
import functools
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from freezekit._memory.answers import Answers
from freezekit._memory.events import Allocation, Category, Event, EventStream, Phase
from freezekit._memory.in_place import computed_in_place
from freezekit._memory.known import KnownValues, NothingKnown
from freezekit._memory.nested import map_tensors, tensors_in

__all__ = ["Recorder"]

_DEVICE_OF = torch.ops.prim.device.default
_VALUE_OF = torch.ops.aten._local_scalar_dense.default


@functools.cache
def _name_of(operator: Any) -> str:
    return str(operator.overloadpacket)


class DeviceRules(Protocol):
    """What a device does beyond what an operator's results show."""

    def before(self, recorder: Recorder, operation: str) -> None:
        """Called before an operator runs."""

    def workspaces(self, operation: str, args: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Bytes taken, and bytes that may be taken beside, while each result is computed."""

    def after(self, recorder: Recorder, operation: str, args: Sequence[Any], result: Any) -> None:
        """Called when its results are noted."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches allocations while it is entered; :meth:`stream` is what it saw.

    The module that is being run is told by :meth:`enter_module` and :meth:`leave_module`; in the
    backward pass it follows from the autograd node's sequence number.
    """

    def __init__(
        self,
        device_rules: DeviceRules | None = None,
        known: KnownValues | None = None,
        *,
        checks_hold: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_rules = device_rules
        self.answers = Answers(self._find, known or NothingKnown(), checks_hold=checks_hold)
        self.phase: Phase = "setup"
        self.step = -1
        self._allocations: list[Allocation] = []
        self._events: list[Event] = []
        self._live: dict[int, int] = {}
        self._makers: dict[int, int] = {}
        self._meta_twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._closed = False
        self._modules: list[str] = []
        self.failed_module = ""
        self._raised_before = sys.exception()
        self.last_phase: Phase = "setup"
        self._ranges: list[tuple[int, str]] = [(0, "")]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled while a mode is entered; the guard costs a tenth of a trace.
        return False

    # -- seeing

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, and note the storages that it made."""
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):
            # Asked more often than anything else: the answer without a second dispatch.
            return args[0].fake_device
        if func is _VALUE_OF and isinstance(args[0], FakeTensor):
            return self.answers.value(args[0])
        if torch.is_inference_mode_enabled() and (parts := self._in_parts(func, args, kwargs)):
            return parts[0]
        operation = _name_of(func)
        if self.device_rules is not None:
            self.device_rules.before(self, operation)
        if _has_plain_meta(args) or (kwargs and _has_plain_meta(kwargs.values())):
            # A loss, say, holds targets without data, beside outputs that are fake on the CPU.
            args, kwargs = map_tensors((args, kwargs), self._off_meta)
        in_place = self.phase == "backward" and computed_in_place(func, args, self._made_by)
        result = self.answers.run(func, args, kwargs or {})
        if in_place:
            self._move(args[0], result)
        self._note_results(operation, args, result)
        self.answers.follow(func, operation, args, kwargs or {}, result)
        return result

    def _in_parts(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> tuple[Any, ...]:
        """The result of an operator that is made of others, which are seen one by one; or nothing.

        Else autograd's dispatch takes them apart before; in inference mode nobody does.
        """
        with self:
            result = func.decompose(*args, **(kwargs or {}))
        return () if result is NotImplemented else (result,)

    def _off_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        """For a tensor on the meta device a fake twin on the CPU, always the same one."""
        if not _is_plain_meta(tensor):
            return tensor
        if id(tensor) not in self._meta_twins:
            # (The tensor is kept, or its id could become another's.)
            twin = torch.empty_like(tensor, device="cpu")
            self._meta_twins[id(tensor)] = tensor, twin
            self.note(twin, "inputs")
        return self._meta_twins[id(tensor)][1]

    def _note_results(self, operation: str, args: tuple[Any, ...], result: Any) -> None:
        rules = self.device_rules
        beside = iter(() if rules is None else rules.workspaces(operation, args))
        for tensor in tensors_in(result):
            self.note(tensor, "temporaries", operation)
            taken, possible = next(beside, (0, 0))
            if taken or possible:
                self.transient(taken, f"{operation} workspace", possible=possible)
        if rules is not None:
            rules.after(self, operation, args, result)

    def note(
        self,
        tensor: torch.Tensor,
        category: Category,
        operation: str = "",
        module: str | None = None,
    ) -> None:
        """Note a tensor's storage, unless it is known."""
        if not isinstance(tensor, FakeTensor) and tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = self._add(storage.nbytes(), category, operation, module)
        self._watch(storage, key)

    def _watch(self, storage: torch.UntypedStorage, key: int) -> None:
        # The storage object lives as long as its memory; the hook does not keep it alive.
        finalizer = weakref.finalize(storage, self._note_free, key)
        finalizer.atexit = False

    def _move(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """From now on the memory of ``tensor`` is that of ``result``."""
        index = self._live.pop(tensor.untyped_storage()._cdata, None)
        if index is not None:
            storage = result.untyped_storage()
            self._live[storage._cdata] = index
            self._watch(storage, storage._cdata)

    def _made_by(self, tensor: torch.Tensor) -> int | None:
        """Number of the autograd node during which a tensor's memory was allocated."""
        index = self._find(tensor)
        return None if index is None else self._makers.get(index)

    def _add(
        self,
        nbytes: int,
        category: Category,
        operation: str,
        module: str | None = None,
        possible: int = 0,
    ) -> int:
        index = len(self._allocations)
        module = self.current_module() if module is None else module
        if self.phase == "backward" and (node := torch._C._current_autograd_node()) is not None:
            self._makers[index] = node._sequence_nr()
        self._allocations.append(
            Allocation(nbytes, category, module, operation, self.phase, self.step, possible)
        )
        self._events.append(Event(index, is_alloc=True, phase=self.phase, step=self.step))
        return index

    def _note_free(self, key: int) -> None:
        index = self._live.pop(key, None)
        if index is not None and not self._closed:
            self._end(index)

    def _end(self, index: int) -> None:
        self._events.append(Event(index, is_alloc=False, phase=self.phase, step=self.step))

    def categorize(
        self, tensor: torch.Tensor, category: Category, *, like: torch.Tensor | None = None
    ) -> None:
        """Say what a known tensor's memory is for; it belongs to the module of ``like``."""
        index = self._find(tensor)
        if index is None:
            return
        owner = None if like is None else self._find(like)
        found = self._allocations[index]
        module = found.module if owner is None else self._allocations[owner].module
        self._allocations[index] = found._replace(category=category, module=module)

    def _find(self, tensor: torch.Tensor) -> int | None:
        return self._live.get(tensor.untyped_storage()._cdata)

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
        self._mark()

    def leave_module(self) -> None:
        """The innermost module's forward ends, maybe by an error: the first is where it was."""
        fqn = self._modules.pop()
        if not self.failed_module and sys.exception() is not self._raised_before:
            self.failed_module = fqn
        self._mark()

    def _mark(self) -> None:
        # Autograd numbers its nodes in order: from here on they belong to the current module.
        number = torch._C._autograd._get_sequence_nr()
        self._ranges.append((number, self._modules[-1] if self._modules else ""))

    def _module_of_node(self, number: int) -> str:
        after = bisect.bisect_right(self._ranges, number, key=lambda found: found[0])
        return self._ranges[after - 1][1]

    # -- when

    @property
    def position(self) -> int:
        """How many events were seen so far."""
        return len(self._events)

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

    def transient(
        self,
        nbytes: int,
        operation: str,
        category: Category = "workspaces",
        *,
        possible: int = 0,
    ) -> None:
        """Note memory that is taken and returned at once, or may be."""
        self._end(self._add(nbytes, category, operation, possible=possible))

    def transients(self, sizes: Sequence[int], operation: str, category: Category) -> None:
        """Note memory that is taken together and returned at once, the last first."""
        indices = [self._add(nbytes, category, operation) for nbytes in sizes]
        for index in reversed(indices):
            self._end(index)

    def resize(self, tensor: torch.Tensor, nbytes: int) -> None:
        """Say how large a known tensor's memory is on the device."""
        index = self._find(tensor)
        if index is not None:
            self._allocations[index] = self._allocations[index]._replace(nbytes=nbytes)

    def close(self) -> EventStream:
        """What was seen; what is freed from now on (the model itself) is not part of it."""
        self._closed = True
        return EventStream(tuple(self._allocations), tuple(self._events))


def _has_plain_meta(values: Iterable[Any]) -> bool:
    """Asked of every operator's arguments, so without going through ``tensors_in``."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            continue
        if kind in (tuple, list):
            if _has_plain_meta(value):
                return True
        elif isinstance(value, torch.Tensor) and _is_plain_meta(value):
            return True
    return False


def _is_plain_meta(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.is_meta
