"""Watching a step: hooks on modules, gradients and optimizers, all taken off again."""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from freezekit import _wrappers
from freezekit._audit.context import AuditContext
from freezekit._audit.step.record import Call, Gradient, StepRecord
from freezekit._audit.step.state import SavedState
from freezekit._audit.step.tensors import has_graph, storage_of, tensors_in

__all__ = ["Watcher"]

_CHECKPOINT = "checkpoint.py"


class Watcher:
    """Writes a record while the block runs; the model's own hooks are left as they are.

    Modules inside of what is compiled or scripted are not looked into: a hook would make the
    compiler start anew.
    """

    def __init__(self, context: AuditContext, saved: SavedState, record: StepRecord) -> None:
        self.context = context
        self.saved = saved
        self.record = record
        self.stack: list[Call] = []
        self.made: dict[int, tuple[weakref.ref[torch.UntypedStorage], Call]] = {}
        self.given: set[int] = set()
        self.outputs: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self.versions: dict[Call, tuple[int, ...]] = {}
        self.draws: dict[Call, Any] = {}
        self.before_optimizer: dict[int, int] = {}
        self.moved_by: dict[int, set[str]] = {}
        self.raised: tuple[BaseException | None, int] = (sys.exc_info()[1], -1)
        self.hooks = ExitStack()
        frozen = context.frozen_set
        modules = context.inventory.modules
        self.outermost_frozen = {i for i in frozen if modules[i].parent not in frozen}

    def __enter__(self) -> Self:
        try:
            self._hook_modules()
            self._hook_parameters()
            for register, hook in (
                (register_optimizer_step_pre_hook, self.before_step),
                (register_optimizer_step_post_hook, self.after_step),
            ):
                self.hooks.callback(register(hook).remove)
        except BaseException:
            self.hooks.close()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.hooks.close()
        self.made.clear()
        self.versions.clear()
        self.draws.clear()

    # Modules

    def _hook_modules(self) -> None:
        inventory = self.context.inventory
        index = 0
        while index < len(inventory.modules):
            info = inventory.modules[index]
            module = inventory.module(index)
            opaque = isinstance(module, torch.jit.ScriptModule) or _wrappers.is_compiled(module)
            if info.repeats < 0 and not isinstance(module, torch.jit.ScriptModule):
                self._hook_module(module, index)
            index = info.end if opaque else index + 1

    def _hook_module(self, module: nn.Module, index: int) -> None:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.enter_call(module, index, args, kwargs)

        def leave(module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            self.leave_call(module, index, output)

        before = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        self.hooks.callback(before.remove)
        after = module.register_forward_hook(leave, with_kwargs=True, always_call=True)
        self.hooks.callback(after.remove)

    def enter_call(self, module: nn.Module, index: int, args: Any, kwargs: Any) -> None:
        """A module is called."""
        parent = self.stack[-1] if self.stack else None
        calls = self.record.calls
        call = Call(index, len(calls), parent, training=module.training)
        if not call.grad:
            inherits = parent is not None and not parent.grad
            call.reentrant = parent.reentrant if inherits and parent else _in_checkpoint()
        self._note_inputs(call, args, kwargs)
        self._note_autocast(call)
        calls.append(call)
        self.stack.append(call)
        self.versions[call] = _versions(module)
        if index in self.outermost_frozen:
            self.draws[call] = _random_state()

    def _note_inputs(self, call: Call, args: Any, kwargs: Any) -> None:
        floating = False
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad:
                call.inputs_require = True
                continue
            if not tensor.is_floating_point():
                continue
            storage = storage_of(tensor)
            if storage is None:
                continue
            key = storage.data_ptr()
            if call.input_width < 0 and tensor.dim():
                call.input_width = tensor.shape[-1]
            found = self.made.get(key)
            # The same storage object: an address may have been used again.
            if found is not None and found[0]() is storage:
                if found[1].detached_into is None and call.grad:
                    found[1].detached_into = call
            elif key not in self.given:
                floating = True
            if call.parent is None:
                self.given.add(key)
        call.cut_inputs = floating and not call.inputs_require

    def _note_autocast(self, call: Call) -> None:
        for device in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device):
                call.autocast = True
                self.record.autocast = torch.get_autocast_dtype(device)

    def leave_call(self, module: nn.Module, index: int, output: Any) -> None:
        """A module returns, or raises."""
        call = self.stack[-1] if self.stack else None
        if call is None or call.module != index:
            return
        self.stack.pop()
        raised = sys.exc_info()[1]
        if output is None and raised is not None and raised is not self.raised[0]:
            self.raised = (raised, index)  # the innermost module comes first
        if self.versions.pop(call) != _versions(module):
            self.moved_by.setdefault(index, set()).add("forward")
        state = self.draws.pop(call, None)
        if state is not None and not _is_same(state, _random_state()):
            self.record.random.setdefault(index, call.training)
        self._note_outputs(call, index, output)

    def _note_outputs(self, call: Call, index: int, output: Any) -> None:
        for tensor in tensors_in(output):
            if not tensor.requires_grad:
                continue
            if not call.output_requires and tensor.dim():
                call.output_width = tensor.shape[-1]
            call.output_requires = True
            storage = storage_of(tensor)
            if storage is not None:
                self.made[storage.data_ptr()] = (weakref.ref(storage), call)
            if has_graph(tensor):
                tensor.register_hook(_mark(call))  # type: ignore[no-untyped-call]
                if tensor.dim():
                    self.outputs.append((weakref.ref(tensor), index))

    # Gradients

    def _hook_parameters(self) -> None:
        inventory = self.context.inventory
        for index, info in enumerate(inventory.parameters):
            if not info.requires_grad:
                continue
            self.record.learned.add(index)
            for tensor in inventory.tensors(index):
                if tensor.is_leaf and tensor.requires_grad:
                    note = self._accumulator(index)
                    handle = tensor.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
                    self.hooks.callback(handle.remove)

    def _accumulator(self, index: int) -> Callable[[torch.Tensor], None]:
        def note(tensor: torch.Tensor) -> None:
            self.note_gradient(index, tensor.grad)

        return note

    def note_gradient(self, index: int, grad: torch.Tensor | None) -> None:
        """A parameter has a gradient."""
        if grad is None:
            return
        seen = self.record.gradients.setdefault(index, Gradient())
        seen.times += 1
        values = grad.detach()
        if values.is_sparse:
            values = values.coalesce().values()
        if values.numel() and values.device.type != "meta":
            # Kept where it is: asking for the number would make a device wait.
            seen.largest.append(torch.linalg.vector_norm(values, float("inf")))

    # Optimizers

    def before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """An optimizer is about to step."""
        self.saved.add_optimizer(optimizer)
        if not any(known is optimizer for known in self.record.optimizers):
            self.record.optimizers.append(optimizer)
        self.record.optimizer_steps += 1
        self.note_flags(gradients=True)
        self.before_optimizer = self._parameter_versions()

    def after_step(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """An optimizer has stepped."""
        for index, version in self._parameter_versions().items():
            if version != self.before_optimizer.get(index, version):
                self.record.moved.add(index)

    def note_flags(self, *, gradients: bool) -> None:
        """Which parameters are trainable now, and which have a gradient without a hook's notice."""
        inventory = self.context.inventory
        for index in range(len(inventory.parameters)):
            for tensor in inventory.tensors(index):
                if tensor.requires_grad:
                    self.record.learned.add(index)
                    if gradients and index not in self.record.gradients and tensor.is_leaf:
                        self.note_gradient(index, tensor.grad)

    def _parameter_versions(self) -> dict[int, int]:
        inventory = self.context.inventory
        return {
            index: _version(inventory.tensors(index)[0])
            for index in range(len(inventory.parameters))
        }


def _mark(call: Call) -> Callable[[torch.Tensor], None]:
    def arrived(_grad: torch.Tensor) -> None:
        call.grad_arrived = True

    return arrived


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _versions(module: nn.Module) -> tuple[int, ...]:
    """Identities and versions of the module's own parameters and buffers."""
    found = []
    for table in ("_parameters", "_buffers"):
        for tensor in vars(module)[table].values():
            if tensor is not None:
                found += [id(tensor), _version(tensor)]
    return tuple(found)


def _random_state() -> list[Any]:
    """The random states that a forward may draw from."""
    state: list[Any] = [torch.get_rng_state(), random.getstate()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state += [generator.get_state() for generator in torch.cuda.default_generators]
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        _, key, *rest = numpy.random.get_state()
        state += [key.tobytes(), rest]
    return state


def _is_same(before: list[Any], after: list[Any]) -> bool:
    return all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for one, other in zip(before, after, strict=False)
    )


def _in_checkpoint() -> bool:
    """Whether torch's reentrant checkpoint is what switched gradients off.

    Nothing public tells; the frames above do: its autograd function runs the forward.
    """
    frame = sys._getframe(2)
    for _ in range(60):
        code = frame.f_code
        if code.co_name == "forward" and code.co_filename.endswith(_CHECKPOINT):
            return True
        back = frame.f_back
        if back is None:
            return False
        frame = back
    return False
