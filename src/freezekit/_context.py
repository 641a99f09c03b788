"""frozen: freeze for the length of a block or a call, and restore exactly."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ContextDecorator, ExitStack
from types import TracebackType
from typing import TypeVar

import torch
from torch import nn

from freezekit._freeze_report import FreezeReport
from freezekit._modes import restore_modes, save_modes
from freezekit._patterns import Patterns
from freezekit._plan import NormStats, Plan
from freezekit._wrappers import reshard

__all__ = ["frozen"]

F = TypeVar("F", bound=Callable[..., object])


class frozen(ContextDecorator):  # noqa: N801  (used as a function, like torch.no_grad)
    """Freeze for a ``with`` block or a decorated call; restore everything exactly after it.

    >>> from torch import nn
    >>> discriminator = nn.Linear(2, 1)
    >>> with frozen(discriminator) as report:
    ...     report.trainable, discriminator.weight.requires_grad
    (0, False)
    >>> discriminator.weight.requires_grad
    True

    On leaving, also by an exception, each parameter's flag and each module's mode are as they
    were on entry, whatever happened inside; gradients of what was frozen, put aside on entry so
    that no optimizer could apply them, are back. Nests, and may be entered again.

    Args:
        model: any ``nn.Module``, changed in place for the length of the block.
        patterns: what to freeze; see :func:`select`. Everything by default.
        exclude: what to leave as it is, of what ``patterns`` match.
        norm_stats: as for :func:`freeze`.

    Raises:
        PatternError, UnmatchedPatternError, UnsupportedModelError: as :func:`freeze`, on entry.
        TypeError: used to decorate a generator or coroutine function, whose body would run
            after the block is over.
    """

    def __init__(
        self,
        model: nn.Module,
        patterns: Patterns = "*",
        *,
        exclude: Patterns = (),
        norm_stats: NormStats = "hold",
    ) -> None:
        self._model = model
        self._patterns = patterns
        self._exclude = exclude
        self._norm_stats = norm_stats
        self._exits: list[ExitStack] = []

    def __enter__(self) -> FreezeReport:
        plan = Plan.start(self._model, self._patterns, self._exclude, self._norm_stats, None)
        plan.temporary = True
        plan.freeze = list(plan.selected.parameters)
        plan.plan_holds()
        with ExitStack() as stack:
            stack.callback(_restorer(plan))
            report = plan.carry_out("freeze")
            self._exits.append(stack.pop_all())
        return report

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exits.pop().close()

    def __call__(self, func: F) -> F:
        if (
            inspect.isgeneratorfunction(func)
            or inspect.iscoroutinefunction(func)
            or inspect.isasyncgenfunction(func)
        ):
            name = getattr(func, "__qualname__", repr(func))
            raise TypeError(
                f"frozen() cannot decorate {name}: its body runs after the call has returned; "
                "use `with frozen(...)` inside it"
            )
        return super().__call__(func)


def _restorer(plan: Plan) -> Callable[[], None]:
    """A function that puts flags and modes, and the gradients put aside, back as they are now."""
    inventory = plan.inventory
    flags = [
        (tensor, tensor.requires_grad)
        for index in range(len(inventory.parameters))
        for tensor in inventory.tensors(index)
    ]
    grads = [(t, t.grad) for i in plan.freeze for t in inventory.tensors(i) if t.is_leaf]
    modes = save_modes(inventory.module(i) for i in range(len(inventory.modules)))

    def restore() -> None:
        # What was gathered inside the block carries the block's flags.
        reshard(inventory.module(0))
        for tensor, requires_grad in flags:
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad = requires_grad
        for tensor, grad in grads:
            if grad is not None and tensor.grad is None and _fits(grad, tensor):
                tensor.grad = grad
        restore_modes(modes)

    return restore


def _fits(grad: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a gradient put aside still belongs to its tensor (``.to()`` may have moved it)."""
    return (grad.shape, grad.dtype, grad.device) == (tensor.shape, tensor.dtype, tensor.device)
