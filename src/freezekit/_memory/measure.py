"""measure_memory: what a step really takes, on the CPU or on a GPU, as the estimate's own type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from freezekit._memory.allocator import CachingAllocator
from freezekit._memory.allocator_config import AllocatorConfig
from freezekit._memory.events import Category, EventStream
from freezekit._memory.memory_report import MemoryEstimate, at_peak
from freezekit._memory.nested import tensors_in
from freezekit._memory.recorder import Recorder
from freezekit._memory.replay import replay
from freezekit._memory.snapshot import stream_of_snapshot
from freezekit._memory.steps import categorize_gradients, followed, note_model

__all__ = ["measure_memory"]


def measure_memory(
    step: Callable[[], Any],
    *,
    model: nn.Module | None = None,
    steps: int = 2,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> MemoryEstimate:
    """Run ``step`` for real and tell what it took: the same value as an estimate.

    >>> import torch
    >>> model = torch.nn.Linear(256, 256)
    >>> def step():
    ...     model.zero_grad()
    ...     model(torch.ones(64, 256)).sum().backward()
    >>> measured = measure_memory(step, model=model)
    >>> dict(measured.breakdown)["parameters"]
    263168

    The step does what it does: parameters move if it has an optimizer. On the CPU every operator's
    results are watched, and what the CUDA allocator would make of them is simulated; on a GPU its
    memory snapshot is read, and the peaks are the device's own.

    Args:
        step: one training step (forward, backward, and, if it likes, the optimizer's step).
        model: its parameters, buffers and modules are told apart in the result.
        steps: how often ``step`` is called.
        device: ``"auto"``: the GPU if the model is on one, else the CPU.

    Raises:
        ValueError: no call at all.
        RuntimeError: ``"cuda"`` without a GPU.
    """
    if steps < 1:
        raise ValueError(f"expected at least one step, got {steps}")
    if device == "auto":
        on_gpu = model is not None and any(p.is_cuda for p in model.parameters())
        device = "cuda" if on_gpu else "cpu"
    if device == "cuda":
        return _measure_cuda(step, model, steps)
    recorder = _LiveRecorder()
    if model is not None:
        note_model(recorder, model)
    with recorder, recorder.optimizers(), ExitStack() as stack:
        if model is not None:
            stack.enter_context(followed(recorder, model))
        for number in range(steps):
            recorder.begin(number)
            step()
            recorder.finish(model)
    return _summarize(recorder.close(), "cpu", model, recorder.optimizer_name)


class _LiveRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Finds the phase by itself: in an optimizer's step, in the autograd engine, or neither."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer_name = ""
        self._in_optimizer = False
        self._seen: dict[int, Optimizer] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._in_optimizer:
            self.phase = "optimizer"
        elif torch._C._current_autograd_node() is not None:
            if self.phase == "forward":
                self.categorize_live_activations(self.step)
            self.phase = "backward"
        else:
            self.phase = "forward"
        return super().__torch_dispatch__(func, types, args, kwargs)

    def begin(self, step: int) -> None:
        self.step, self.phase = step, "forward"

    def finish(self, model: nn.Module | None) -> None:
        """Say what of the step's memory are gradients and optimizer state."""
        categorize_gradients(self, () if model is None else model.parameters())
        for optimizer in self._seen.values():
            for owner, state in optimizer.state.items():
                for tensor in tensors_in(state):
                    self.categorize(tensor, "optimizer_state", like=owner)

    @contextmanager
    def optimizers(self) -> Iterator[None]:
        """Notice every optimizer's steps."""

        def before(optimizer: Optimizer, *_: Any) -> None:
            self._in_optimizer = True
            self._seen[id(optimizer)] = optimizer
            self.optimizer_name = type(optimizer).__name__

        def after(*_: Any) -> None:
            self._in_optimizer = False

        handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _measure_cuda(step: Callable[[], Any], model: nn.Module | None, steps: int) -> MemoryEstimate:
    if not torch.cuda.is_available():
        raise RuntimeError(
            "device='cuda' needs a GPU, and torch sees none; device='cpu' needs none"
        )
    memory = torch.cuda.memory
    index = torch.cuda.current_device()
    torch.cuda.reset_peak_memory_stats(index)
    memory._record_memory_history(max_entries=1_000_000, stacks="python", context=None)
    try:
        for _ in range(steps):
            step()
        torch.cuda.synchronize(index)
        snapshot = memory._snapshot(index)
    finally:
        memory._record_memory_history(enabled=None)
    stream = stream_of_snapshot(snapshot, index, _addresses(model))
    free, total = torch.cuda.mem_get_info(index)
    context = max(0, total - free - torch.cuda.memory_reserved(index))
    return _summarize(
        stream,
        "cuda",
        model,
        "",
        device=torch.cuda.get_device_name(index),
        peaks=(torch.cuda.max_memory_allocated(index), torch.cuda.max_memory_reserved(index)),
        context=(context, context),
    )


def _addresses(model: nn.Module | None) -> dict[int, tuple[Category, str]]:
    found: dict[int, tuple[Category, str]] = {}
    for fqn, module in () if model is None else model.named_modules():
        for parameter in module.parameters(recurse=False):
            found[parameter.untyped_storage().data_ptr()] = ("parameters", fqn)
            if parameter.grad is not None:
                found[parameter.grad.untyped_storage().data_ptr()] = ("gradients", fqn)
        for buffer in module.buffers(recurse=False):
            found[buffer.untyped_storage().data_ptr()] = ("buffers", fqn)
    return found


def _summarize(
    stream: EventStream,
    source: Literal["cpu", "cuda"],
    model: nn.Module | None,
    optimizer: str,
    *,
    device: str = "cpu",
    peaks: tuple[int, int] | None = None,
    context: tuple[int, int] = (0, 0),
) -> MemoryEstimate:
    config = AllocatorConfig()
    replayed = replay(stream, CachingAllocator(config))
    allocated, reserved = peaks or (replayed.peak_allocated, replayed.peak_reserved)

    learns = any(event.phase == "backward" for event in stream.events)
    notes = {
        "cpu": "the CPU's operators: CUDA's dropout, attention and workspaces differ",
        "cuda": "parts are told by the model's tensors; the rest is called temporaries",
    }
    return MemoryEstimate(
        model="step" if model is None else type(model).__name__,
        mode="train" if learns or source == "cuda" else "inference",
        optimizer=optimizer,
        source=source,
        device=device,
        peak_allocated=allocated,
        peak_reserved=reserved,
        safe=reserved,
        margins=(),
        context=context,
        budget=None,
        out_of_memory="",
        assumptions=(notes[source],),
        allocator=config,
        **at_peak(stream, replayed),
    )
