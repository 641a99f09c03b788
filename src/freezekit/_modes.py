"""Training modes: holding a module in eval under any ``train()``, and restoring modes exactly.

``nn.Module.train`` recurses through ``child.train(mode)``, so an instance attribute ``train``
that puts its own module back into eval holds it, and ``module.training`` tells the truth at
once. A forward pre-hook would leave ``training`` reading True until the next forward; a change of
class, or a wrapper, would change ``type(module)`` or the keys of the state dict.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn

__all__ = ["HeldInEval", "Modes", "held_by", "hold", "release", "restore_modes", "save_modes"]


class HeldInEval:
    """Stands in for the ``train`` method of a module that is held in eval.

    Its module's children still follow ``train(mode)``. It keeps the mode that was asked for
    last, so that a release gives the module the mode it would have had without the hold. It
    deep-copies and pickles with its module, and refers to it weakly: a held model is still freed
    as soon as its last reference goes. (A shallow ``copy.copy`` of a module shares all of its
    attributes, this one too.)
    """

    __slots__ = ("_module", "requested", "shadowed")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.requested = module.training
        # A `train` that someone else had set on the instance still runs, and comes back.
        self.shadowed: Callable[..., Any] | None = module.__dict__.get("train")

    def __call__(self, mode: bool = True, *args: Any, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002
        module = self._module()
        if module is None:
            raise RuntimeError(
                "this module is a shallow copy (copy.copy) of one that freezekit held in eval and "
                "that is gone; make copies with copy.deepcopy"
            )
        self.requested = mode
        if self.shadowed is None and type(module).train is nn.Module.train:
            # As nn.Module.train does, but at no moment in train mode: another thread may run it.
            for child in module.children():
                child.train(mode)
            module.training = False  # also after code that set it by hand
            return module
        try:
            if self.shadowed is not None:
                return self.shadowed(mode, *args, **kwargs)
            return type(module).train(module, mode, *args, **kwargs)
        finally:
            module.training = False

    def __repr__(self) -> str:
        return f"<train() held in eval by freezekit; last asked for: {self.requested}>"

    def __getstate__(self) -> dict[str, Any]:
        return {
            "module": self._module(),
            "requested": self.requested,
            "shadowed": self.shadowed,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._module = weakref.ref(state["module"])
        self.requested = state["requested"]
        self.shadowed = state["shadowed"]


def held_by(module: nn.Module) -> HeldInEval | None:
    """The module's hold, if it is held in eval."""
    found = module.__dict__.get("train")
    return found if isinstance(found, HeldInEval) else None


def hold(module: nn.Module) -> None:
    """Put ``module`` (not its children) into eval and hold it there. Holding twice is holding."""
    holder = held_by(module) or HeldInEval(module)
    module.training = False
    module.__dict__["train"] = holder


def release(module: nn.Module) -> None:
    """Let go of ``module``: it gets the mode that was last asked for."""
    holder = held_by(module)
    if holder is None:
        return
    _set_train(module, holder.shadowed)
    module.training = holder.requested


def _set_train(module: nn.Module, train: Callable[..., Any] | None) -> None:
    if train is None:
        module.__dict__.pop("train", None)
    else:
        module.__dict__["train"] = train


class Modes(NamedTuple):
    """One module's mode and hold as they were."""

    module: nn.Module
    training: bool
    holder: HeldInEval | None
    requested: bool


def save_modes(modules: Iterable[nn.Module]) -> list[Modes]:
    """Each module's own mode and hold, for :func:`restore_modes`."""
    saved = []
    for module in modules:
        holder = held_by(module)
        requested = holder.requested if holder is not None else module.training
        saved.append(Modes(module, module.training, holder, requested))
    return saved


def restore_modes(saved: Iterable[Modes]) -> None:
    """Put every module's own mode and hold back as they were, module by module."""
    for module, training, holder, requested in saved:
        if holder is not None:
            module.__dict__["train"] = holder
            holder.requested = requested
        elif (present := held_by(module)) is not None:
            _set_train(module, present.shadowed)
        module.training = training
