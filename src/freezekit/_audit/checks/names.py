"""Checks of what looks like a freeze and is none: near misses of ``requires_grad``."""

from __future__ import annotations

import difflib
import dis
from collections.abc import Iterator
from functools import lru_cache
from types import FunctionType
from typing import Any

from torch import nn

from freezekit._audit.context import AuditContext
from freezekit._audit.findings import Finding
from freezekit._audit.mends import as_argument
from freezekit._format import plural, shorten
from freezekit._inventory import ModuleInfo

__all__ = ["method_overwritten", "near_miss_on_module", "near_miss_on_parameter"]

# Attribute -> whether True means that it is trainable.
_MEANINGS = {
    "trainable": True,
    "is_trainable": True,
    "learnable": True,
    "frozen": False,
    "is_frozen": False,
    "freeze": False,
    "freezed": False,
    "frozed": False,
}
_METHODS = ("train", "eval", "requires_grad_")


def near_miss_on_parameter(context: AuditContext) -> Iterator[Finding]:
    """FK105: an attribute beside ``requires_grad`` was set on a parameter, and does nothing.

    ``parameter.require_grad = False`` makes a new attribute, without an error: the parameter goes
    on learning.
    """
    found: dict[str, list[int]] = {}
    values: dict[str, Any] = {}
    for index, info in enumerate(context.inventory.parameters):
        for tensor in context.inventory.tensors(index):
            for name, value in (getattr(tensor, "__dict__", None) or {}).items():
                meant = _meant_by(name, value)
                if meant is not None and meant != info.requires_grad:
                    found.setdefault(name, []).append(index)
                    values[name] = value
    for name, indices in found.items():
        fqns = tuple(context.inventory.parameters[index].fqn for index in indices)
        wanted = _meant_by(name, values[name])
        yield Finding(
            code="FK105",
            severity="error",
            title=f"{name} is not requires_grad",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'tensor')} with .{name} = {values[name]!r}, which PyTorch "
            "does "
            f"not know, and requires_grad = {not wanted}.",
            mend=_mend(context, fqns, trainable=bool(wanted)),
        )


def near_miss_on_module(context: AuditContext) -> Iterator[Finding]:
    """FK106: ``module.requires_grad = False`` was set, and the parameters do not follow.

    A module has no such attribute: it is made anew, without an error.
    ``module.requires_grad_(False)``, with an underscore, is the method. Attributes of a model's own
    that are called ``trainable`` or ``frozen`` and say the opposite of all its parameters are
    reported too, as a warning. So are those that the module's class goes by: where the feature
    encoders of Wav2Vec2 and Hubert have ``_requires_grad = True``, they ask for a gradient of what
    goes in, and a graph is kept of all that is frozen in them.
    """
    inventory = context.inventory
    found: dict[tuple[str, str], list[int]] = {}
    for index, name in context.modules_with(lambda name: _direction(name) is not None):
        info, value = inventory.modules[index], vars(inventory.module(index))[name]
        meant = _meant_by(name, value) if type(value) is bool else None
        if meant is None or info.last_entry == info.first_entry:
            continue
        trainable = context.trainable_entries(index)
        all_of_it = info.last_entry - info.first_entry
        disagrees = trainable == 0 if meant else trainable > 0
        if name in _MEANINGS:
            disagrees = trainable == (0 if meant else all_of_it)
        if disagrees:
            found.setdefault((name, repr(value)), []).append(index)
    for (name, value), indices in found.items():
        fqns = tuple(inventory.modules[index].fqn for index in indices)
        trainable = _meant_by(name, value == "True") is True
        state = "frozen" if trainable else "trainable"
        classes = {type(inventory.module(index)) for index in indices}
        read = all(_reads(cls, name) for cls in classes)
        yield Finding(
            code="FK106",
            severity="warning" if read or name in _MEANINGS else "error",
            title=f"{name} of a module " + ("says otherwise" if read else "does nothing"),
            fqns=fqns,
            cause=f"{plural(len(fqns), 'module')} with .{name} = {value}, which "
            + ("the code of its class goes by; " if read else "PyTorch does not know; ")
            + f"parameters in it are {state}.",
            mend=_mend(context, fqns, trainable=trainable, own=name if read else ""),
        )


def _reads(cls: type[nn.Module], name: str) -> bool:
    """Whether a method of a module's own classes reads an attribute of that name."""
    methods = (
        member
        for base in cls.__mro__
        if base.__module__ != nn.Module.__module__
        for member in vars(base).values()
        if isinstance(member, FunctionType)
    )
    return any(
        instruction.opname.startswith("LOAD_ATTR") and instruction.argval == name
        for method in methods
        for instruction in dis.get_instructions(method)
    )


def method_overwritten(context: AuditContext) -> Iterator[Finding]:
    """FK107: a method such as ``train`` or ``eval`` was overwritten by a value.

    ``model.eval = True`` changes no mode, and makes the next ``model.eval()`` fail.
    """
    inventory = context.inventory
    by_method: dict[str, list[ModuleInfo]] = {}
    for index, method in context.modules_with(_METHODS.__contains__):
        if not callable(vars(inventory.module(index))[method]):
            by_method.setdefault(method, []).append(inventory.modules[index])
    for method, found in by_method.items():
        yield Finding(
            code="FK107",
            severity="error",
            title=f"{method} was overwritten by a value",
            fqns=tuple(info.fqn for info in found),
            cause=f"{plural(len(found), 'module')} with a .{method} that is not a method: "
            f"nothing was switched, and the next .{method}() raises.",
            mend="Write a call, not an assignment, and take the value away: "
            f'[vars(model.get_submodule(name)).pop("{method}") for name in '
            f"{tuple(info.raw for info in found)!r}].",
        )


@lru_cache(maxsize=4096)
def _direction(name: str) -> bool | None:
    """Whether True would mean trainable (True) or frozen (False); None for any other attribute."""
    lowered = name.lower().strip("_")
    if lowered in _MEANINGS:
        return _MEANINGS[lowered]
    compact = lowered.replace("_", "")
    if lowered == "requires_grad" or len(compact) < 7 or "grad" not in compact:
        return True if lowered == "requires_grad" else None
    near = difflib.SequenceMatcher(None, compact, "requiresgrad").ratio()
    return True if near >= 0.72 else None


def _meant_by(name: str, value: Any) -> bool | None:
    """What setting an attribute to this value was to do: train (True), freeze, or nothing."""
    if type(value) is not bool and not (type(value) is int and value in (0, 1)):
        return None
    direction = _direction(name)
    return None if direction is None else bool(value) == direction


def _mend(context: AuditContext, fqns: tuple[str, ...], *, trainable: bool, own: str = "") -> str:
    """``own`` is an attribute that the model's own code goes by."""
    verb = "unfreeze" if trainable else "freeze"
    call = f"freezekit.{verb}(model, {as_argument(context, fqns)})"
    if own:
        return f"Make both say the same: set {own} = {not trainable} on {shorten(fqns)}; or {call}."
    return f"Set the flag itself: {call}; or take the attribute away ({shorten(fqns)})."
