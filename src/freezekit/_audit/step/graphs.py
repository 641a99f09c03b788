"""Tensors that a step made with a graph and that outlive it: a graph kept between steps.

Only the youngest objects are looked through, just before each of the garbage collector's runs ages
them: what is older was there before the step. (All objects of a process are half a million or more,
and to look at each takes a tenth of a second.)
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch

from freezekit._audit.context import AuditContext
from freezekit._audit.step.record import KeptGraph
from freezekit._audit.step.tensors import has_graph

__all__ = ["NewGraphs"]

# Of this many kept tensors it is looked up what holds them: each takes a walk over the heap.
_LOOKED_AT = 3


class NewGraphs:
    """Notes, while it is entered, the tensors with a graph that come into being."""

    def __init__(self) -> None:
        self._old: dict[int, weakref.ref[torch.Tensor]] = {}
        self._young: dict[int, weakref.ref[torch.Tensor]] = {}

    def __enter__(self) -> Self:
        self._old = _young_graphs()
        gc.callbacks.append(self._before_collection)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        gc.callbacks.remove(self._before_collection)
        self._young |= _young_graphs()

    def _before_collection(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._young |= _young_graphs()

    def _alive(self) -> list[torch.Tensor]:
        """Those noted that still are, in order; an id alone may be another tensor's by now."""
        alive = [tensor for ref in self._young.values() if (tensor := ref()) is not None]
        old = {id(tensor) for ref in self._old.values() if (tensor := ref()) is not None}
        return [tensor for tensor in alive if id(tensor) not in old and has_graph(tensor)]

    def kept(
        self, context: AuditContext, outputs: Iterable[tuple[weakref.ref[torch.Tensor], int]]
    ) -> list[KeptGraph]:
        """What is still alive, with what holds it; ``outputs``: which module made which."""
        if not self._alive():
            return []
        gc.collect()
        made_by = {id(tensor): index for ref, index in outputs if (tensor := ref()) is not None}
        # A weight that is computed anew at each forward (weight_norm) is an attribute of its
        # module.
        modules = context.inventory.modules
        attributes = {
            id(value)
            for index in range(len(modules))
            for value in vars(context.inventory.module(index)).values()
        }
        found: list[KeptGraph] = []
        tensors = self._alive()
        for tensor in tensors:
            index = made_by.get(id(tensor), -1)
            if index < 0 and id(tensor) in attributes:
                continue
            holder = _holder(tensor, tensors) if len(found) < _LOOKED_AT else ""
            found.append(KeptGraph(index, tuple(tensor.shape), holder))
        return found


def _young_graphs() -> dict[int, weakref.ref[torch.Tensor]]:
    """The youngest of the process's tensors with a graph, by id."""
    found = [thing for thing in gc.get_objects(generation=0) if type(thing) is torch.Tensor]
    return {id(tensor): weakref.ref(tensor) for tensor in found if has_graph(tensor)}


def _holder(tensor: torch.Tensor, ours: list[torch.Tensor]) -> str:
    """The kind of container that holds a tensor; ``""`` for a variable or an attribute."""
    for referrer in gc.get_referrers(tensor):
        kind = type(referrer).__name__
        if kind in {"list", "set", "deque"} and referrer is not ours:
            return kind
        if type(referrer) is dict and "__name__" not in referrer and not _is_attributes(referrer):
            return kind
    return ""


def _is_attributes(mapping: dict[str, Any]) -> bool:
    """Whether a dictionary holds an object's attributes."""
    for owner in gc.get_referrers(mapping):
        try:
            if object.__getattribute__(owner, "__dict__") is mapping:
                return True
        except AttributeError:
            continue
    return False
