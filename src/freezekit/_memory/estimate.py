"""estimate_memory: what a training step takes on a GPU that need not be here."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from freezekit._fold import fold_names
from freezekit._format import format_bytes, format_percent, shorten
from freezekit._inventory import take_inventory
from freezekit._memory.allocator import CachingAllocator
from freezekit._memory.allocator_config import AllocatorConfig
from freezekit._memory.cuda_rules import CudaFunctions, CudaRules
from freezekit._memory.events import CATEGORIES, Category, EventStream
from freezekit._memory.recorder import Recorder
from freezekit._memory.replay import Replayed, replay
from freezekit._memory.shadow import Shadow
from freezekit._memory.sizes import parse_size
from freezekit._memory.steps import Steps, ZeroGrad, run_steps
from freezekit._report import Report
from freezekit._tables import Column, Section, Table
from freezekit.errors import TraceError

__all__ = ["MemoryEstimate", "estimate_memory"]

OptimizerFactory: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]


def _foreach(cls: type[Optimizer], **options: Any) -> OptimizerFactory:
    # CUDA's default is foreach: lists of temporaries as large as all trainable parameters.
    return lambda parameters: cls(parameters, lr=1e-3, foreach=True, **options)  # type: ignore[call-arg]


OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adam": _foreach(torch.optim.Adam),
    "adamw": _foreach(torch.optim.AdamW),
    "adagrad": _foreach(torch.optim.Adagrad),
    "adamax": _foreach(torch.optim.Adamax),
    "rmsprop": _foreach(torch.optim.RMSprop),
    "sgd": _foreach(torch.optim.SGD),
    "sgd_momentum": _foreach(torch.optim.SGD, momentum=0.9),
    # torch.optim.Adafactor goes parameter by parameter by default, on CUDA too.
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3, foreach=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate(Report):
    """What a step takes on a CUDA GPU; all sizes in bytes.

    Attributes:
        model: the model's class.
        mode: ``"train"`` or ``"inference"``.
        optimizer: its name; ``""`` without one.
        peak_allocated: as ``torch.cuda.max_memory_allocated``.
        peak_reserved: as ``torch.cuda.max_memory_reserved``; without the CUDA context.
        breakdown: ``(category, bytes)`` at the moment of the peak; their sum is
            ``peak_allocated``.
        modules: ``(module, bytes)`` of activations, temporaries and workspaces at that moment, the
            largest first; ``""`` for what no module made.
        peak_phase: the phase in which the peak is.
        peak_step: the step in which it is, from 0.
        peak_module: the module that made the allocation at the peak.
        peak_operation: the operator that made it.
        assumptions: what was taken for granted, in words.
    """

    model: str
    mode: Literal["train", "inference"]
    optimizer: str
    peak_allocated: int
    peak_reserved: int
    breakdown: tuple[tuple[Category, int], ...] = field(repr=False)
    modules: tuple[tuple[str, int], ...] = field(repr=False)
    peak_phase: str
    peak_step: int
    peak_module: str
    peak_operation: str
    assumptions: tuple[str, ...] = field(repr=False)

    def fits(self, budget: str | int) -> bool:
        """Whether ``peak_reserved`` is within ``budget``, such as ``"11GiB"`` or bytes.

        The CUDA context (some 300 to 600 MiB) is not part of it: subtract it from the card's size.
        """
        return self.peak_reserved <= parse_size(budget)

    def _sections(self) -> tuple[Section, ...]:
        what = f"training with {self.optimizer}" if self.optimizer else self.mode
        head = (
            f"{self.model}, {what}: peak reserved {format_bytes(self.peak_reserved)}, "
            f"allocated {format_bytes(self.peak_allocated)}"
        )
        rows = tuple(
            (name.replace("_", " "), format_bytes(size), format_percent(size, self.peak_allocated))
            for name, size in self.breakdown
            if size
        )
        table = Table(
            (Column("at the peak"), Column("bytes", "right"), Column("share", "right")),
            rows,
            ("allocated", format_bytes(self.peak_allocated), ""),
        )
        where = f" of {self.peak_module}" if self.peak_module else ""
        when = (
            f"the peak is in the {self.peak_phase}{where}, step {self.peak_step}, "
            f"at {self.peak_operation or 'its beginning'}"
        )
        largest = [f"{name or '(no module)'} {format_bytes(size)}" for name, size in self.modules]
        notes = [when, f"largest parts: {shorten(largest, 5)}"] if largest else [when]
        return (
            Section((head,), table),
            Section(tuple(notes)),
            Section(tuple(f"assumed: {text}" for text in self.assumptions)),
        )


def estimate_memory(  # noqa: PLR0913  (options are keyword-only)
    model: nn.Module,
    inputs: Any,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: str | OptimizerFactory | None = "adamw",
    train: bool = True,
    steps: int = 3,
    zero_grad: ZeroGrad = "start",
    clip: float | None = None,
    accumulate: int = 1,
    allocator: str | AllocatorConfig = "",
    capability: tuple[int, int] = (8, 0),
) -> MemoryEstimate:
    """Tell what training steps of ``model`` take on a CUDA GPU, without one.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))
    >>> estimate = estimate_memory(model, torch.zeros(64, 1024))
    >>> estimate.fits("1GiB"), estimate.peak_phase
    (True, 'optimizer')

    Whole steps run on fake tensors: no data is made, the model is not touched (it may be on any
    device, also on meta). What operators allocate is replayed through a simulation of the CUDA
    caching allocator.

    Args:
        model: any ``nn.Module``; its flags and modes are taken as they are.
        inputs: what its forward gets: a tensor, a tuple of positional or a mapping of keyword
            arguments. Only shapes and dtypes count.
        loss: makes the loss from the output; by default its ``.loss``, else a sum.
        optimizer: a name (``"adamw"``, ``"sgd"``, ...), a function from parameters to an
            optimizer, or ``None``.
        train: whether there are a backward pass and an optimizer step.
        steps: steps to run: the first makes optimizer state, later ones have it from the start.
        zero_grad: where gradients are cleared: ``"start"`` of a step, ``"before_backward"`` or
            ``"end"``.
        clip: the norm that gradients are clipped to.
        accumulate: backward passes for one optimizer step.
        allocator: settings in the syntax of ``PYTORCH_ALLOC_CONF``.
        capability: compute capability of the GPU, which decides about workspaces and kernels.

    Raises:
        TraceError: the forward or backward fails on these inputs; the cause is chained.
        ValueError: an unknown optimizer, or a bad allocator setting.
        UnsupportedModelError: not a module, or a ScriptModule.
    """
    inventory = take_inventory(model)
    config = AllocatorConfig.parse(allocator) if isinstance(allocator, str) else allocator
    learns = train and any(info.requires_grad for info in inventory.parameters)
    factory = _optimizer_factory(optimizer) if learns else None
    name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "optimizer")
    plan = Steps(
        count=steps,
        optimizer=factory,
        loss=loss,
        zero_grad=zero_grad,
        accumulate=accumulate,
        clip=clip if learns else None,
        train=learns,
    )
    recorder = Recorder(CudaRules(capability))
    stream = _trace(recorder, model, inputs, plan, capability)
    replayed = replay(stream, CachingAllocator(config))
    peak = stream.allocations[stream.events[replayed.peak_event].allocation]
    return MemoryEstimate(
        model=inventory.modules[0].type_name,
        mode="train" if learns else "inference",
        optimizer=str(name) if factory is not None else "",
        peak_allocated=replayed.peak_allocated,
        peak_reserved=replayed.peak_reserved,
        breakdown=_breakdown(stream, replayed),
        modules=_modules(stream, replayed),
        peak_phase=peak.phase,
        peak_step=peak.step,
        peak_module=peak.module,
        peak_operation=peak.operation,
        assumptions=_assumptions(recorder, stream, train=train, learns=learns),
    )


def _trace(
    recorder: Recorder, model: nn.Module, inputs: Any, plan: Steps, capability: tuple[int, int]
) -> EventStream:
    shadow = Shadow()
    twin, twin_inputs = shadow.copy(model), shadow.inputs(inputs)
    try:
        # The random state is saved outside the mode, or it would be a fake one.
        with torch.random.fork_rng(devices=()), shadow.mode, CudaFunctions(capability):
            return run_steps(recorder, twin, twin_inputs, plan)
    except Exception as error:
        fqn = recorder.last_module
        raise TraceError(
            f"the step failed in {fqn or 'the model'} ({recorder.last_phase}): "
            f"{type(error).__name__}: {error}",
            fqn,
        ) from error


def _optimizer_factory(optimizer: str | OptimizerFactory | None) -> OptimizerFactory | None:
    if optimizer is None or not isinstance(optimizer, str):
        return optimizer
    if optimizer not in OPTIMIZERS:
        near = difflib.get_close_matches(optimizer.lower(), OPTIMIZERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown optimizer {optimizer!r}{hint} (known: {', '.join(sorted(OPTIMIZERS))}; "
            "or give a function from parameters to an optimizer)"
        )
    return OPTIMIZERS[optimizer]


def _breakdown(stream: EventStream, replayed: Replayed) -> tuple[tuple[Category, int], ...]:
    sums: Counter[Category] = Counter()
    for index, charged in replayed.live_at_peak:
        sums[stream.allocations[index].category] += charged
    return tuple((category, sums[category]) for category in CATEGORIES)


def _modules(stream: EventStream, replayed: Replayed) -> tuple[tuple[str, int], ...]:
    """What the step itself holds at the peak, by module; alike blocks together."""
    sums: Counter[str] = Counter()
    for index, charged in replayed.live_at_peak:
        found = stream.allocations[index]
        if found.category in ("activations", "temporaries", "workspaces"):
            sums[found.module] += charged
    by_shape: dict[str, list[str]] = {}
    for fqn in sums:
        shape = ".".join("#" if part.isdecimal() else part for part in fqn.split("."))
        by_shape.setdefault(shape, []).append(fqn)
    folded = [
        (", ".join(fold_names(fqns)), sum(sums[fqn] for fqn in fqns)) for fqns in by_shape.values()
    ]
    return tuple(sorted(folded, key=lambda row: -row[1]))


def _assumptions(
    recorder: Recorder, stream: EventStream, *, train: bool, learns: bool
) -> tuple[str, ...]:
    found = ["output and loss of a step stay bound until the next step's take their place"]
    if train and not learns:
        found.append("nothing is trainable: this is an inference estimate")
    if recorder.stand_ins:
        found.append(f"{recorder.stand_ins} value(s) that the code reads from tensors: False, or 1")
    if any("convolution" in allocation.operation for allocation in stream.allocations):
        found.append("cuDNN's convolution workspaces are not counted: they depend on its choices")
    found.append("the CUDA context (some 300 to 600 MiB) comes on top")
    return tuple(found)
