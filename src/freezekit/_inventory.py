"""The one walk over a model: what parameters, buffers and modules it has, as plain records.

Everything else in freezekit works on these records. They are taken afresh at every call and never
kept: the model is the only truth. This is the one module that touches ``nn.Module``'s own tables
(``_parameters``, ``_buffers``, ``_modules``, ``_non_persistent_buffers_set``): the public
iterators hide the second name of a module that is used twice by one parent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from freezekit._tensors import Layout, measure, shared_memory, why_untrainable
from freezekit._wrappers import is_transparent
from freezekit.errors import UnsupportedModelError

__all__ = ["BufferInfo", "Inventory", "ModuleInfo", "NamedEntry", "ParameterInfo", "take_inventory"]

_STATISTIC = re.compile(r"running|moving|(^|_)(ema|avg|average)(_|$)|_[uv]$")


class ParameterInfo(NamedTuple):
    """One parameter tensor, under every name that it has.

    Attributes:
        fqn: its first name in model order, wrappers looked through.
        aliases: its other names (tied parameters), in model order.
        shape: its logical shape: unsharded, unpacked; ``()`` while uninitialised.
        dtype: as stored.
        numel: elements of the logical shape; 0 while uninitialised.
        nbytes: bytes of the whole tensor as stored (4-bit weights: the packed bytes).
        requires_grad: whether it is trainable.
        has_grad: whether it has a ``.grad``.
        owner: index of the module that holds it under ``fqn``.
        layout: ``"dense"``; ``"lazy"`` (uninitialised); ``"sharded"`` (DTensor, ZeRO-3: the
            figures are those of the whole); ``"packed"`` (4-bit).
        untrainable: why it cannot require a gradient; ``""`` if it can.
    """

    fqn: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    numel: int
    nbytes: int
    requires_grad: bool
    has_grad: bool
    owner: int
    layout: Layout
    untrainable: str


class BufferInfo(NamedTuple):
    """One buffer under its first name.

    Attributes:
        fqn: its first name.
        shape: its shape.
        dtype: as stored.
        nbytes: its bytes.
        owner: index of the module that holds it.
        saved: whether it is part of the state dict.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    owner: int
    saved: bool


class NamedEntry(NamedTuple):
    """A parameter at one of its names; ``raw`` is the name as ``named_parameters`` has it."""

    fqn: str
    raw: str
    parameter: int


class ModuleInfo:
    """One module at one place in the tree; complete once the walk is over.

    Attributes:
        fqn: its name, wrappers looked through (a wrapper and what it wraps share one).
        raw: its name as ``named_modules`` has it.
        type_name: its class.
        parent: index of its parent's record; -1 for the root.
        repeats: index of the record at which the same module was met first, or -1.
        training: its own mode.
        has_running_stats: whether it keeps running statistics, told by its buffers.
        first_entry: the subtree's named entries are ``entries[first_entry:last_entry]``.
        end: the subtree's modules are ``modules[index:end]``.
        children: indices of its children, in order.
        numbered: indices of those that are named by numbers, in order.
        numbered_entries: likewise entries of its own parameters (of a ParameterList).
    """

    __slots__ = (
        "children",
        "end",
        "first_entry",
        "fqn",
        "has_running_stats",
        "last_entry",
        "numbered",
        "numbered_entries",
        "parent",
        "raw",
        "repeats",
        "training",
        "type_name",
    )

    def __init__(
        self, fqn: str, raw: str, type_name: str, parent: int, repeats: int, *, training: bool
    ) -> None:
        self.fqn = fqn
        self.raw = raw
        self.type_name = type_name
        self.parent = parent
        self.repeats = repeats
        self.training = training
        self.has_running_stats = False
        self.first_entry = self.last_entry = self.end = 0
        self.children: tuple[int, ...] = ()
        self.numbered: tuple[int, ...] = ()
        self.numbered_entries: tuple[int, ...] = ()


class Inventory:
    """What the walk found: plain records, and by their index the tensors and modules themselves."""

    __slots__ = (
        "_live_modules",
        "_tensors",
        "_twins",
        "buffers",
        "entries",
        "modules",
        "parameters",
    )

    def __init__(
        self,
        parameters: list[ParameterInfo],
        buffers: list[BufferInfo],
        modules: list[ModuleInfo],
        entries: list[NamedEntry],
        tensors: list[nn.Parameter],
        twins: dict[int, list[nn.Parameter]],
        live_modules: list[nn.Module],
    ) -> None:
        self.parameters = parameters
        self.buffers = buffers
        self.modules = modules
        self.entries = entries
        self._tensors = tensors
        self._twins = twins
        self._live_modules = live_modules

    def tensors(self, index: int) -> list[nn.Parameter]:
        """The tensor objects of ``parameters[index]``: one, or several over the same memory."""
        return [self._tensors[index], *self._twins.get(index, ())]

    def module(self, index: int) -> nn.Module:
        """The module of ``modules[index]``."""
        return self._live_modules[index]

    def subtree_parameters(self, index: int) -> set[int]:
        """Indices of the parameters in the subtree of ``modules[index]``."""
        info = self.modules[index]
        return {entry.parameter for entry in self.entries[info.first_entry : info.last_entry]}

    def enclosing_parameters(self, index: int) -> set[int]:
        """Parameters of the smallest subtree around ``modules[index]`` that has any.

        A module without parameters (BatchNorm with ``affine=False``, a parametrisation, dropout)
        belongs to what surrounds it.
        """
        while index >= 0:
            info = self.modules[index]
            if info.last_entry > info.first_entry:
                return self.subtree_parameters(index)
            index = info.parent
        return set()


def take_inventory(model: nn.Module) -> Inventory:
    """Walk ``model`` once and return what it has; the model is not changed.

    Raises:
        UnsupportedModelError: not an ``nn.Module`` instance, a ScriptModule, or a module that
            contains itself.
    """
    _check_model(model)
    walk = _Walk()
    walk.visit(model, "", "", -1)
    return walk.close()


def _check_model(model: object) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        reason = (
            f"{type(model).__name__} is a TorchScript module: its modes are compiled in. "
            "Work on the eager module, then script it"
        )
    elif isinstance(model, nn.Module):
        return
    elif isinstance(model, type) and issubclass(model, nn.Module):
        reason = f"expected a module, got the class {model.__name__}: make an instance of it"
    else:
        reason = f"expected a torch.nn.Module, got {type(model).__name__}"
        if isinstance(getattr(model, "model", None), nn.Module):
            reason += "; its attribute .model is one: pass that"
        elif isinstance(model, Iterator):
            reason += ": pass the model itself, not model.parameters()"
    raise UnsupportedModelError(reason)


# -- the walk ----------------------------------------------------------------------------------


class _Walk:
    def __init__(self) -> None:
        self.modules: list[ModuleInfo] = []
        self.live_modules: list[nn.Module] = []
        self.first_visit: dict[int, int] = {}
        self.path: set[int] = set()
        self.entries: list[NamedEntry] = []
        self.tensors: list[nn.Parameter] = []
        self.owners: list[int] = []
        self.tensor_index: dict[int, int] = {}
        self.buffers: list[BufferInfo] = []
        self.seen_buffers: set[int] = set()
        self.twins: dict[int, list[nn.Parameter]] = {}

    def visit(self, module: nn.Module, fqn: str, raw: str, parent: int) -> int:
        key = id(module)
        if key in self.path:
            kind = type(module).__name__
            raise UnsupportedModelError(f"the module {fqn!r} ({kind}) contains itself", fqn)
        self.path.add(key)
        index = len(self.modules)
        first = self.first_visit.setdefault(key, index)
        repeats = -1 if first == index else first
        kind = type(module).__name__
        info = ModuleInfo(fqn, raw, kind, parent, repeats, training=module.training)
        info.first_entry = len(self.entries)
        self.modules.append(info)
        self.live_modules.append(module)
        self.note_parameters(module, info, index)
        self.note_buffers(module, info, index)
        if module._modules:
            self.visit_children(module, info, index)
        info.last_entry = len(self.entries)
        info.end = len(self.modules)
        self.path.remove(key)
        return index

    def visit_children(self, module: nn.Module, info: ModuleInfo, index: int) -> None:
        children, numbered = [], []
        for name, child in module._modules.items():
            if child is None:
                continue
            fqn = info.fqn if is_transparent(module, name) else _join(info.fqn, name)
            child_index = self.visit(child, fqn, _join(info.raw, name), index)
            children.append(child_index)
            if name.isdecimal():
                numbered.append(child_index)
        info.children, info.numbered = tuple(children), tuple(numbered)

    def note_parameters(self, module: nn.Module, info: ModuleInfo, owner: int) -> None:
        numbered = []
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            index = self.tensor_index.setdefault(id(parameter), len(self.tensors))
            if index == len(self.tensors):
                self.tensors.append(parameter)
                self.owners.append(owner)
            if name.isdecimal():
                numbered.append(len(self.entries))
            fqn, raw = _join(info.fqn, name), _join(info.raw, name)
            self.entries.append(NamedEntry(fqn, raw, index))
        info.numbered_entries = tuple(numbered)

    def note_buffers(self, module: nn.Module, info: ModuleInfo, owner: int) -> None:
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            # Statistics are what a module learns by itself and saves: a floating point buffer
            # that is part of the state dict. Tables that follow from the configuration (rotary
            # frequencies, position ids) are not saved, or are integers. A module with children
            # may save a constant, and its mode decides more than about that (whether activations
            # are recomputed, what a model returns), as that of an RNN does (cuDNN has no backward
            # in eval): there the name has to tell. Masks are pruning's.
            saved = name not in module._non_persistent_buffers_set
            learned = saved and (buffer.dtype.is_floating_point or buffer.dtype.is_complex)
            plain = not module._modules and not isinstance(module, nn.RNNBase)
            if learned and (_STATISTIC.search(name) or (plain and not name.endswith("mask"))):
                info.has_running_stats = True
            if id(buffer) not in self.seen_buffers:
                self.seen_buffers.add(id(buffer))
                size = measure(buffer)
                fqn = _join(info.fqn, name)
                self.buffers.append(BufferInfo(fqn, size[0], buffer.dtype, size[2], owner, saved))

    def close(self) -> Inventory:
        leader = shared_memory(self.tensors)
        if leader:
            self.merge(leader)
        aliases: dict[int, list[str]] = {}
        first_name: list[str] = [""] * len(self.tensors)
        for fqn, _, index in self.entries:
            if not first_name[index]:
                first_name[index] = fqn
            else:
                aliases.setdefault(index, []).append(fqn)
        parameters = [
            _describe(
                [tensor, *self.twins.get(index, ())],
                first_name[index],
                tuple(aliases.get(index, ())),
                self.owners[index],
            )
            for index, tensor in enumerate(self.tensors)
        ]
        return Inventory(
            parameters,
            self.buffers,
            self.modules,
            self.entries,
            self.tensors,
            self.twins,
            self.live_modules,
        )

    def merge(self, leader: dict[int, int]) -> None:
        """Make one parameter of the tensors that share memory."""
        number: list[int] = []
        kept: list[int] = []
        for index in range(len(self.tensors)):
            first = leader.get(index, index)
            if first == index:
                number.append(len(kept))
                kept.append(index)
            else:
                number.append(number[first])
                self.twins.setdefault(number[first], []).append(self.tensors[index])
        self.tensors = [self.tensors[index] for index in kept]
        self.owners = [self.owners[index] for index in kept]
        self.entries = [NamedEntry(fqn, raw, number[index]) for fqn, raw, index in self.entries]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _describe(
    tensors: list[nn.Parameter], fqn: str, aliases: tuple[str, ...], owner: int
) -> ParameterInfo:
    tensor = tensors[0]
    requires_grad, has_grad = tensor.requires_grad, tensor.is_leaf and tensor.grad is not None
    if len(tensors) > 1:  # several views of one memory: the widest one stands for all
        tensor = max(tensors, key=lambda t: t.nbytes)
        requires_grad = any(t.requires_grad for t in tensors)
        has_grad = any(t.is_leaf and t.grad is not None for t in tensors)
    shape, numel, nbytes, layout = measure(tensor)
    return ParameterInfo(
        fqn,
        aliases,
        shape,
        tensor.dtype,
        numel,
        nbytes,
        requires_grad,
        has_grad,
        owner,
        layout,
        "" if tensor.requires_grad and tensor.is_leaf else why_untrainable(tensor),
    )
