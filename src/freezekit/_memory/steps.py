"""Whole training steps, as a user's loop makes them, under a recorder.

The same function drives fake and real tensors, so that a fake trace and a real run can be compared
event by event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from freezekit._memory.events import EventStream
from freezekit._memory.nested import tensors_in
from freezekit._memory.recorder import Recorder
from freezekit._memory.second_step import FirstStep, ZeroGrad

__all__ = [
    "Steps",
    "categorize_gradients",
    "followed",
    "note_model",
    "run_first_step",
    "run_steps",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How the loop goes.

    Attributes:
        count: steps to run; from the second on, optimizer state is there.
        optimizer: makes the optimizer from the parameters; ``None``: no optimizer step.
        loss: makes the loss from the model's output; ``None``: its ``.loss``, else a sum.
        zero_grad: where in the step gradients are cleared.
        accumulate: backward passes for one optimizer step.
        clip: the norm to which gradients are clipped.
        autocast: the dtype of ``torch.autocast``, around forward and loss.
        scaler: whether the loss is scaled, as by ``torch.amp.GradScaler``.
        train: whether there is a backward pass at all.
    """

    count: int = 2
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    zero_grad: ZeroGrad = "start"
    accumulate: int = 1
    clip: float | None = None
    autocast: torch.dtype | None = None
    scaler: bool = False
    train: bool = True


def run_steps(
    recorder: Recorder,
    model: nn.Module,
    inputs: Any,
    steps: Steps,
    *,
    after_forward: Callable[[], None] = lambda: None,
) -> EventStream:
    """Run ``steps`` over ``model``, and return what ``recorder`` saw.

    ``inputs`` is one tensor, a tuple of positional arguments, or a mapping of keyword arguments.
    The model is trained: hand in a copy. ``after_forward`` is called where an autocast around a
    forward pass would end.
    """
    with _looping(recorder, model, inputs, steps, after_forward) as loop:
        for step in range(steps.count):
            loop.forward_backward(step)
            loop.optimize(step)
            if steps.zero_grad == "end":
                loop.zero_grad(step)
        loop.forget()
    return recorder.close()


def run_first_step(
    recorder: Recorder,
    model: nn.Module,
    inputs: Any,
    steps: Steps,
    *,
    after_forward: Callable[[], None] = lambda: None,
) -> FirstStep:
    """Run one step, and of the second what differs from it: the optimizer's, and the clearing."""
    with _looping(recorder, model, inputs, steps, after_forward) as loop:
        begin = recorder.position
        marks = loop.forward_backward(0)
        trained = recorder.position
        loop.optimize(0)
        optimized = recorder.position
        loop.optimize(1)
        again = recorder.position
        loop.zero_grad(0 if steps.zero_grad == "end" else 1)
        cleared = recorder.position
        with recorder.during("forward", 1):
            loop.outputs = None
            unbound = recorder.position
            loop.loss = None
    return FirstStep(
        stream=recorder.close(),
        zero_grad=steps.zero_grad,
        begin=begin,
        returned=marks[0],
        bound=marks[1],
        backward=marks[2],
        trained=trained,
        optimized=optimized,
        again=again,
        cleared=cleared,
        unbound=unbound,
    )


def note_model(recorder: Recorder, model: nn.Module, fqn: str = "") -> None:
    """Note parameters and buffers with the modules that own them.

    In the order in which ``Module.to`` moves them: children first. Where blocks land decides what
    fits between them later.
    """
    for name, child in model.named_children():
        note_model(recorder, child, f"{fqn}.{name}" if fqn else name)
    for parameter in model.parameters(recurse=False):
        recorder.note(parameter, "parameters", module=fqn)
    for buffer in model.buffers(recurse=False):
        recorder.note(buffer, "buffers", module=fqn)


@contextmanager
def _looping(
    recorder: Recorder,
    model: nn.Module,
    inputs: Any,
    steps: Steps,
    after_forward: Callable[[], None],
) -> Iterator[_Loop]:
    note_model(recorder, model)
    for tensor in tensors_in(inputs):
        recorder.note(tensor, "inputs")
    with recorder, followed(recorder, model):
        yield _Loop(recorder, model, inputs, steps, after_forward)


class _Loop:
    """A user's loop, in parts.

    As there the names stay bound: the last step's output and loss are alive until the new ones take
    their place.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        inputs: Any,
        steps: Steps,
        after_forward: Callable[[], None],
    ) -> None:
        self.recorder, self.model, self.inputs, self.steps = recorder, model, inputs, steps
        self.after_forward = after_forward
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        makes_one = steps.optimizer if self.trainable else None
        self.optimizer = None if makes_one is None else makes_one(self.trainable)
        if self.optimizer is not None:
            _categorize_state(recorder, self.optimizer)
        self.scale = torch.full((), 65536.0) if steps.scaler else None
        self.outputs: Any = None
        self.loss: torch.Tensor | None = None

    def forward_backward(self, step: int) -> tuple[int, int, int]:
        """All passes of a step.

        Returns:
            Where in the stream the first forward has returned, where its loss is bound, and where
            its backward begins.
        """
        marks = [self._pass(step, part) for part in range(self.steps.accumulate)]
        return marks[0]

    def _pass(self, step: int, part: int) -> tuple[int, int, int]:
        recorder, steps = self.recorder, self.steps
        if part == 0 and steps.zero_grad == "start":
            self.zero_grad(step)
        with recorder.during("forward", step):
            with _autocast(steps):
                self.outputs = _forward(self.model, self.inputs, train=steps.train)
                returned = recorder.position
                self.loss = _loss(self.outputs, steps) if steps.train else None
                bound = recorder.position
            self.after_forward()
        recorder.categorize_live_activations(step)
        backward = recorder.position
        if part == 0 and steps.zero_grad == "before_backward":
            self.zero_grad(step)
        if self.loss is not None and self.loss.requires_grad:
            with recorder.during("backward", step):
                scaled = self.loss if self.scale is None else self.loss * self.scale
                scaled.backward()  # type: ignore[no-untyped-call]
                del scaled
            categorize_gradients(recorder, self.trainable)
        return returned, bound, backward

    def optimize(self, step: int) -> None:
        """Clip and step."""
        recorder, clip = self.recorder, self.steps.clip
        if clip is not None:
            with recorder.during("clip", step):
                # Where there are device rules the device is CUDA, whose default is foreach.
                foreach = None if recorder.device_rules is None else True
                nn.utils.clip_grad_norm_(self.trainable, clip, foreach=foreach)
        if self.optimizer is not None:
            with recorder.during("optimizer", step):
                self.optimizer.step()
            _categorize_state(recorder, self.optimizer)

    def zero_grad(self, step: int) -> None:
        """Let go of the gradients."""
        with self.recorder.during("zero_grad", step):
            for parameter in self.trainable:
                parameter.grad = None

    def forget(self) -> None:
        """Unbind what the loop holds."""
        self.outputs = None
        self.loss = None


def _autocast(steps: Steps) -> AbstractContextManager[Any]:
    return nullcontext() if steps.autocast is None else torch.autocast("cpu", steps.autocast)


def _forward(model: nn.Module, inputs: Any, *, train: bool) -> Any:
    with torch.set_grad_enabled(train):
        if isinstance(inputs, Mapping):
            return model(**inputs)
        if isinstance(inputs, tuple | list):
            return model(*inputs)
        return model(inputs)


def _loss(outputs: Any, steps: Steps) -> torch.Tensor:
    if steps.loss is not None:
        return steps.loss(outputs)
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    first = next(
        (t for t in tensors_in(outputs) if t.is_floating_point() and t.requires_grad), None
    )
    if first is None:
        first = next(t for t in tensors_in(outputs) if t.is_floating_point())
    return first.sum()


def categorize_gradients(recorder: Recorder, parameters: Iterable[nn.Parameter]) -> None:
    """Say what of the live memory are gradients, each its parameter's module's."""
    for parameter in parameters:
        for tensor in tensors_in(parameter.grad):
            recorder.categorize(tensor, "gradients", like=parameter)


def _categorize_state(recorder: Recorder, optimizer: Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for tensor in tensors_in(state):
            recorder.note(tensor, "optimizer_state", "optimizer")
            recorder.categorize(tensor, "optimizer_state", like=parameter)


@contextmanager
def followed(recorder: Recorder, model: nn.Module) -> Iterator[None]:
    """Tell the recorder which module is running."""
    handles = []
    for fqn, module in model.named_modules():
        handles.append(
            module.register_forward_pre_hook(lambda *_, fqn=fqn: recorder.enter_module(fqn))
        )
        handles.append(
            module.register_forward_hook(lambda *_: recorder.leave_module(), always_call=True)
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
