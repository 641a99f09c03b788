"""What was seen while a step ran: plain values, by the indices of the inventory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

__all__ = ["Call", "Change", "Gradient", "KeptGraph", "StepRecord", "StepSummary"]


class StepSummary(NamedTuple):
    """A step in figures.

    Attributes:
        seconds: how long the user's step took.
        watched_seconds: how long all of ``audit_step`` took around it, checks aside.
        snapshot: ``"copy"`` or ``"hash"``.
        snapshot_bytes: what was copied, to be put back.
        gradients: parameter tensors that received a gradient.
        optimizer_steps: steps of optimizers.
        restored: whether everything is as it was before the step.
    """

    seconds: float
    watched_seconds: float
    snapshot: str
    snapshot_bytes: int
    gradients: int
    optimizer_steps: int
    restored: bool


class Call:
    """One call of a module.

    Attributes:
        module: index of the module's record.
        order: number of the call.
        parent: the call from within which it was made, if any.
        grad: whether gradients were recorded when it was entered.
        inference: whether it ran under ``torch.inference_mode``.
        reentrant: whether it ran in the forward pass of a reentrant checkpoint.
        training: the module's mode.
        inputs_require: whether an input required a gradient.
        cut_inputs: whether it got floating point tensors that require none, made inside the model.
        output_requires: whether an output required a gradient.
        grad_arrived: whether a gradient came back to one of its outputs.
        detached_into: the call that got an output of this one without its graph.
        autocast: whether autocast was on.
        input_width: last size of the first floating point input.
        output_width: last size of the first output that required a gradient.
    """

    __slots__ = (
        "autocast",
        "cut_inputs",
        "detached_into",
        "grad",
        "grad_arrived",
        "inference",
        "input_width",
        "inputs_require",
        "module",
        "order",
        "output_requires",
        "output_width",
        "parent",
        "reentrant",
        "training",
    )

    def __init__(self, module: int, order: int, parent: Call | None, *, training: bool) -> None:
        self.module = module
        self.order = order
        self.parent = parent
        self.training = training
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.reentrant = False
        self.inputs_require = False
        self.cut_inputs = False
        self.output_requires = False
        self.grad_arrived = False
        self.detached_into: Call | None = None
        self.autocast = False
        self.input_width = self.output_width = -1

    @property
    def boundary(self) -> Call:
        """The outermost call around this one that ran with gradients off, as this one did."""
        call = self
        while call.parent is not None and not call.parent.grad:
            call = call.parent
        return call


@dataclass(slots=True)
class Gradient:
    """Gradients that a parameter received: how often, and their largest magnitudes."""

    times: int = 0
    largest: list[torch.Tensor] = field(default_factory=list)

    def values(self) -> list[float]:
        """The magnitudes as numbers; a device is waited for here."""
        return [float(value) for value in self.largest]


class Change(NamedTuple):
    """A parameter or buffer that has other values after the step.

    Attributes:
        fqn: its name.
        parameter: index of the parameter; -1 for a buffer.
        owner: index of the module that holds it.
        by: ``"optimizer"``, ``"forward"`` or ``"step"`` (the step's own code).
        restored: whether it could be put back.
    """

    fqn: str
    parameter: int
    owner: int
    by: str
    restored: bool


class KeptGraph(NamedTuple):
    """A tensor of the step that is still alive, with its graph, after it.

    Attributes:
        module: index of the module whose output it is; -1 if it is none's.
        shape: its shape.
        holder: the kind of container that holds it; ``""`` for a variable or an attribute.
    """

    module: int
    shape: tuple[int, ...]
    holder: str


@dataclass(slots=True, eq=False)
class StepRecord:
    """Everything that was seen; complete once the step is over.

    Attributes:
        calls: the calls of modules, in order.
        gradients: by parameter index.
        learned: indices of parameters that were trainable at some moment of the step.
        changes: parameters and buffers that have other values after it.
        moved: indices of all parameters with other values after it.
        kept: tensors that are alive after it with their graph.
        random: frozen modules that drew random numbers, and whether in train mode.
        error: what the step raised.
        raised_in: index of the innermost module in whose forward it was raised, if in any.
        returned_graph: whether it returned a tensor with a graph.
        autocast: the dtype that autocast cast to, if it was on.
        optimizers: the optimizers that stepped, whether they were given or not.
    """

    seconds: float = 0.0
    watched_seconds: float = 0.0
    snapshot: str = "copy"
    snapshot_bytes: int = 0
    restored: bool = True
    calls: list[Call] = field(default_factory=list)
    gradients: dict[int, Gradient] = field(default_factory=dict)
    learned: set[int] = field(default_factory=set)
    changes: list[Change] = field(default_factory=list)
    moved: set[int] = field(default_factory=set)
    kept: list[KeptGraph] = field(default_factory=list)
    random: dict[int, bool] = field(default_factory=dict)
    error: Exception | None = None
    raised_in: int | None = None
    returned_graph: bool = False
    autocast: torch.dtype | None = None
    optimizers: list[Any] = field(default_factory=list)
    optimizer_steps: int = 0

    def summary(self) -> StepSummary:
        """The step in figures."""
        return StepSummary(
            seconds=self.seconds,
            watched_seconds=self.watched_seconds,
            snapshot=self.snapshot,
            snapshot_bytes=self.snapshot_bytes,
            gradients=len(self.gradients),
            optimizer_steps=self.optimizer_steps,
            restored=self.restored,
        )
