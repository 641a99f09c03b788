"""Everything that a step can change, as it was, to be put back exactly.

Tensors are copied (or, frozen ones, hashed) and put back into the same memory; what was
replaced is put back by identity. The random states of torch, Python and numpy (if it is there),
modes, flags and gradients are put back too. What the step owns besides (data iterators, schedulers,
a GradScaler, counters) is the user's.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from freezekit._audit.step.digest import digest, same_bits
from freezekit._inventory import Inventory
from freezekit._modes import restore_modes, save_modes

__all__ = ["SavedState", "SnapshotKind"]

SnapshotKind: TypeAlias = Literal["copy", "hash"]

# The tables in which a module keeps what is registered on it.
_TABLES = ("_parameters", "_buffers", "_modules")


class _SavedTensor:
    """One tensor's values, and the memory that they are in."""

    __slots__ = ("alias", "copy", "digest", "tensor")

    def __init__(self, tensor: torch.Tensor, *, hashed: bool) -> None:
        self.tensor = tensor
        self.alias = tensor.detach()
        self.copy: torch.Tensor | None = None
        self.digest: torch.Tensor | None = None
        if tensor.device.type == "meta":
            return
        if hashed:
            self.digest = digest(self.alias)
        else:
            self.copy = self.alias.clone()

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.itemsize for t in (self.copy, self.digest) if t is not None)

    def has_changed(self) -> bool:
        now = self.tensor.detach()
        if self.copy is not None:
            return not same_bits(now, self.copy)
        return self.digest is not None and not torch.equal(digest(now), self.digest)

    def is_untouched(self) -> bool:
        """Whether the values are as they were, and in the memory in which they were."""
        return _same_memory(self.tensor, self.alias) and not self.has_changed()

    def restore(self) -> bool:
        """Put the values back; whether that was possible."""
        if self.copy is None:
            return self.digest is None
        with torch.no_grad():
            self.alias.copy_(self.copy)
            if not _same_memory(self.tensor, self.alias):
                self.tensor.data = self.alias
        return True


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return one.data_ptr() == other.data_ptr() and one.shape == other.shape
    except RuntimeError:  # a subclass without memory of its own
        return True


class SavedState:
    """A model, its optimizers and the random states at one moment."""

    def __init__(self, model: nn.Module, inventory: Inventory, kind: SnapshotKind) -> None:
        self.inventory = inventory
        self.modules = list(dict.fromkeys(model.modules()))
        self.tables = [
            {table: dict(vars(module)[table]) for table in _TABLES} for module in self.modules
        ]
        self.modes = save_modes(self.modules)
        self.flags = [
            (tensor, tensor.requires_grad)
            for index in range(len(inventory.parameters))
            for tensor in inventory.tensors(index)
        ]
        self.parameters = {
            index: [
                _SavedTensor(t, hashed=kind == "hash" and not t.requires_grad)
                for t in inventory.tensors(index)
            ]
            for index in range(len(inventory.parameters))
        }
        self.buffers = {
            id(buffer): _SavedTensor(buffer, hashed=False)
            for table in self.tables
            for buffer in table["_buffers"].values()
            if buffer is not None
        }
        self.grads = [
            (tensor, tensor.grad, None if tensor.grad is None else tensor.grad.detach().clone())
            for tensor, _ in self.flags
            if tensor.is_leaf
        ]
        self.nested: list[Callable[[], None]] = []
        self.nbytes = sum(
            saved.nbytes for group in self.parameters.values() for saved in group
        ) + sum(saved.nbytes for saved in self.buffers.values())
        self.nbytes += sum(g.numel() * g.itemsize for _, _, g in self.grads if g is not None)
        self.seen_optimizers: set[int] = set()
        self.restore_rng = _random_states()

    def add_optimizer(self, optimizer: Any) -> None:
        """Save an optimizer's groups and state, once."""
        if id(optimizer) in self.seen_optimizers:
            return
        self.seen_optimizers.add(id(optimizer))
        groups = list(optimizer.param_groups)
        contents = [
            {k: (list(v) if isinstance(v, list) else v) for k, v in g.items()} for g in groups
        ]
        tensors = [
            _nested(value)
            for group in contents
            for value in group.values()
            if isinstance(value, torch.Tensor)
        ]
        state = {key: _nested(value) for key, value in optimizer.state.items()}
        self.nbytes += sum(saved.nbytes for saved in (*tensors, *state.values()))
        simple = {
            k: v for k, v in vars(optimizer).items() if isinstance(v, int | float | str | None)
        }

        def restore() -> None:
            vars(optimizer).update(simple)
            optimizer.param_groups[:] = groups
            for group, content in zip(groups, contents, strict=True):
                for key in [key for key in group if key not in content]:
                    del group[key]
                for key, value in content.items():
                    if isinstance(value, list) and isinstance(group.get(key), list):
                        group[key][:] = value
                    else:
                        group[key] = value
            for saved in tensors:
                saved.restore()
            for key in [key for key in optimizer.state if key not in state]:
                del optimizer.state[key]
            for key, saved in state.items():
                optimizer.state[key] = saved.restore()

        self.nested.append(restore)

    # Looking

    @cached_property
    def changed_parameters(self) -> dict[int, list[_SavedTensor]]:
        """Indices of the parameters that have other values when it is first asked."""
        found = {}
        for index, group in self.parameters.items():
            changed = [saved for saved in group if saved.has_changed()]
            if changed:
                found[index] = changed
        return found

    def changed_buffers(self) -> Iterator[tuple[nn.Module, str, _SavedTensor | None]]:
        """Module, name and saved values of the buffers that have other values now."""
        for module, table in zip(self.modules, self.tables, strict=True):
            now = vars(module)["_buffers"]
            for name, before in table["_buffers"].items():
                saved = self.buffers.get(id(before))
                after = now.get(name)
                if saved is None:
                    continue
                if after is not before:
                    if after is None or saved.copy is None or not same_bits(after, saved.copy):
                        yield module, name, saved
                elif saved.has_changed():
                    yield module, name, saved

    # Putting back

    def restore(self) -> bool:
        """Put everything back; whether that was possible for all."""
        for module, table in zip(self.modules, self.tables, strict=True):
            for name, content in table.items():
                _restore_table(vars(module)[name], content)
        for tensor, requires_grad in self.flags:
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad = requires_grad
        complete = self._restore_values()
        self._restore_grads()
        for restore in self.nested:
            restore()
        restore_modes(self.modes)
        self.restore_rng()
        return complete

    def _restore_values(self) -> bool:
        complete = True
        for index, group in self.parameters.items():
            changed = self.changed_parameters.get(index, ())
            for saved in group:
                if saved in changed or not _same_memory(saved.tensor, saved.alias):
                    complete &= saved.restore()
        for saved in self.buffers.values():
            if not saved.is_untouched():
                complete &= saved.restore()
        return complete

    def _restore_grads(self) -> None:
        for tensor, grad, values in self.grads:
            if tensor.grad is not grad:
                tensor.grad = grad
            if grad is not None and values is not None and not same_bits(grad, values):
                with torch.no_grad():
                    grad.copy_(values)


def _restore_table(now: dict[str, Any], before: dict[str, Any]) -> None:
    if list(now) == list(before) and all(now[key] is before[key] for key in before):
        return
    now.clear()
    now.update(before)


# -- nests of state ----------------------------------------------------------------------------


class _Nested:
    """A nest of mappings, lists and tensors, put back into the same containers."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.inner: list[tuple[Any, _Nested]] = []
        self.tensor: _SavedTensor | None = None
        self.nbytes = 0
        if isinstance(value, torch.Tensor):
            self.tensor = _SavedTensor(value, hashed=False)
            self.nbytes = self.tensor.nbytes
        elif isinstance(value, dict):
            self.inner = [(key, _Nested(item)) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            self.inner = [(i, _Nested(item)) for i, item in enumerate(value)]
        self.nbytes += sum(item.nbytes for _, item in self.inner)

    def restore(self) -> Any:
        """The value, as it was."""
        # Of frozen parameters it is as it was, and to compare is cheaper than to copy.
        if self.tensor is not None and not self.tensor.is_untouched():
            self.tensor.restore()
        items = [(key, item.restore()) for key, item in self.inner]
        if isinstance(self.value, dict):
            self.value.clear()
            self.value.update(items)
        elif isinstance(self.value, list):
            self.value[:] = [item for _, item in items]
        return self.value


def _nested(value: Any) -> _Nested:
    return _Nested(value)


# -- random states -----------------------------------------------------------------------------


def _random_states() -> Callable[[], None]:
    """A function that puts all random states back as they are now."""
    python = random.getstate()
    cpu = torch.get_rng_state()
    cuda: Sequence[torch.Tensor] = ()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state_all()
    others = _other_devices()
    # Only if the user's program has it: numpy is not freezekit's to import.
    numpy = sys.modules.get("numpy")
    numbers = numpy.random.get_state() if numpy is not None and hasattr(numpy, "random") else None

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        for set_state, state in others:
            set_state(state)
        if numbers is not None and numpy is not None:
            numpy.random.set_state(numbers)

    return restore


def _other_devices() -> list[tuple[Callable[[torch.Tensor], None], torch.Tensor]]:
    found: list[tuple[Callable[[torch.Tensor], None], torch.Tensor]] = []
    if torch.backends.mps.is_available():
        found.append((torch.mps.set_rng_state, torch.mps.get_rng_state()))
    with contextlib.suppress(AttributeError):
        if torch.xpu.is_available() and torch.xpu.is_initialized():  # type: ignore[no-untyped-call]
            found.append((torch.xpu.set_rng_state, torch.xpu.get_rng_state()))
    return found
