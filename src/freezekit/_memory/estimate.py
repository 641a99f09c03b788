"""estimate_memory: what a training step takes on a GPU that need not be here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from freezekit._inventory import take_inventory
from freezekit._memory.allocator import CachingAllocator
from freezekit._memory.allocator_config import AllocatorConfig
from freezekit._memory.devices import CONTEXT, budget_bytes, target_for
from freezekit._memory.events import EventStream
from freezekit._memory.memory_report import MemoryEstimate, at_peak
from freezekit._memory.nested import tensors_in
from freezekit._memory.optimizers import OptimizerFactory, as_on_cuda, optimizer_factory
from freezekit._memory.replay import Replayed, replay
from freezekit._memory.second_step import ZeroGrad
from freezekit._memory.steps import Steps
from freezekit._memory.trace import Traced, trace
from freezekit.errors import SimulatedOutOfMemoryError

__all__ = ["MemoryEstimate", "check_inputs", "estimate_memory"]

MIB = 1 << 20

# Shares of what cuDNN may take that are tried for the safe figure: which it takes is not known, and
# what is reserved does not rise evenly with it.
_SHARES = (0.5, 1.0, 2.0)


def estimate_memory(  # noqa: PLR0913  (options are keyword-only)
    model: nn.Module,
    inputs: Any = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: str | OptimizerFactory | Optimizer | None = "adamw",
    device: str = "cuda",
    budget: str | int | None = None,
    train: bool = True,
    autocast: torch.dtype | None = None,
    scaler: bool = False,
    accumulate: int = 1,
    clip: float | None = None,
    zero_grad: ZeroGrad = "start",
    lengths: Literal["fixed", "vary"] = "fixed",
    steps: int = 3,
    allocator: str | AllocatorConfig = "",
    capability: tuple[int, int] | None = None,
    torch_version: str = torch.__version__,
    frozen: Iterable[str] = (),
) -> MemoryEstimate:
    """Tell what training steps of ``model`` take on a CUDA GPU, without one.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))
    >>> estimate = estimate_memory(model, torch.zeros(64, 1024))
    >>> estimate.fits("NVIDIA GeForce RTX 2080 Ti"), estimate.peak_phase
    (True, 'optimizer')

    Whole steps run on fake tensors: no data is made, the model is not touched (it may be on any
    device, also on meta). What operators allocate is replayed through a simulation of the CUDA
    caching allocator. Gradient checkpointing, the dtype, frozen parameters, the attention
    implementation and adapters are the model's own. Code that asks for values or for sizes that
    depend on them gets stand-ins, unless they follow of whole numbers (ids, masks) that are given
    with data; where that fails the model runs for real on the CPU.

    Args:
        model: any ``nn.Module``; its flags and modes are taken as they are.
        inputs: what its forward gets: a tensor, a tuple of positional or a mapping of keyword
            arguments. Shapes and dtypes count, so tensors may be on the meta device; ids are better
            given with data where the forward looks for some, such as an image's tokens.
        loss: makes the loss from the output; by default its ``.loss``, else a sum.
        optimizer: a name (``"adamw"``, ``"sgd_momentum"``, ``"adamw_fused"``, ...), a function
            from parameters to an optimizer, an optimizer over the model's parameters (its state
            counts), or ``None``.
        device: the GPU's name, such as ``"NVIDIA A100-SXM4-80GB"``; ``"cuda"`` for the largest of
            its compute capability, by default 8.0.
        budget: memory for all, the CUDA context included: a size such as ``"11GiB"``, bytes, or a
            GPU's name. The allocator is then simulated with that bound.
        train: whether there are a backward pass and an optimizer step.
        autocast: the dtype of ``torch.autocast("cuda", dtype)`` around forward and loss.
        scaler: whether a ``torch.amp.GradScaler`` scales the loss.
        accumulate: backward passes for one optimizer step.
        clip: the norm that gradients are clipped to.
        zero_grad: where gradients are cleared: ``"start"`` of a step, ``"before_backward"`` or
            ``"end"``.
        lengths: ``"vary"`` if batches differ in length and ``inputs`` is the longest: a shorter
            batch before it leaves blocks that it cannot use, which ``safe`` then covers.
        steps: steps to simulate: the first makes optimizer state, later ones begin with it.
        allocator: settings in the syntax of ``PYTORCH_ALLOC_CONF``.
        capability: compute capability, which decides about workspaces and kernels; by default the
            ``device``'s.
        torch_version: of the torch that will run; the size and life of cuBLAS workspaces depend on
            it.
        frozen: FQNs of parameters to take for frozen, whatever the model says.

    Raises:
        TraceError: the forward or backward fails on these inputs; the cause is chained.
        ValueError: no inputs; an unknown optimizer or GPU (with the nearest names), a budget that
            is not a size, a bad allocator setting.
        UnsupportedModelError: not a module, a ScriptModule, or a tensor without storage of its own.
    """
    inventory = take_inventory(model)
    check_inputs(inputs)
    runs_on = target_for(device, capability, _version(torch_version))
    size = None if budget is None else budget_bytes(budget)
    config = AllocatorConfig.parse(allocator) if isinstance(allocator, str) else allocator
    kept_frozen = frozenset(frozen)
    learns = train and any(
        info.requires_grad and info.fqn not in kept_frozen for info in inventory.parameters
    )
    name, factory, live = _resolve(optimizer) if learns else ("", None, None)
    plan = Steps(
        count=steps,
        optimizer=factory,
        loss=loss,
        zero_grad=zero_grad,
        accumulate=accumulate,
        clip=clip if learns else None,
        autocast=autocast,
        scaler=scaler and learns,
        train=learns,
    )
    traced = trace(
        model,
        inputs,
        plan,
        optimizer=live,
        target=runs_on,
        frozen=kept_frozen,
    )
    return _summarize(
        traced,
        model=inventory.modules[0].type_name,
        optimizer=name,
        device=device,
        budget=size,
        config=config,
        lengths=lengths,
        learns=learns,
        wants_to_learn=train,
    )


def _summarize(  # noqa: PLR0913
    traced: Traced,
    *,
    model: str,
    optimizer: str,
    device: str,
    budget: int | None,
    config: AllocatorConfig,
    lengths: str,
    learns: bool,
    wants_to_learn: bool,
) -> MemoryEstimate:
    """Replay a trace, and say what came of it."""
    stream = traced.stream
    capacity = None if budget is None else max(0, budget - CONTEXT[1])
    replayed, lacks = _replay_within(stream, config, capacity)
    # The context may be smaller than the simulation has it: then there is more to reserve. (What
    # does not fit is replayed without a bound.)
    most = None if budget is None or lacks else max(0, budget - CONTEXT[0])
    margins = _margins(stream, config, replayed.peak_reserved, most, lengths)

    return MemoryEstimate(
        model=model,
        mode="train" if learns else "inference",
        optimizer=optimizer,
        device=device,
        peak_allocated=replayed.peak_allocated,
        peak_reserved=replayed.peak_reserved,
        safe=replayed.peak_reserved + sum(size for _, size in margins),
        margins=margins,
        context=CONTEXT,
        budget=budget,
        out_of_memory=lacks,
        assumptions=_assumptions(traced, learns=learns, wants_to_learn=wants_to_learn),
        allocator=config,
        **at_peak(stream, replayed),
    )


def check_inputs(inputs: Any) -> None:
    """Refuse inputs that say nothing about shapes.

    Raises:
        ValueError: there are none, or no tensor is among them.
    """
    if inputs is None or (isinstance(inputs, Mapping | tuple | list) and not inputs):
        raise ValueError(
            "no inputs: what a step takes depends on their shapes; give what the model's forward "
            "gets, such as torch.empty(8, 3, 224, 224, device='meta') or "
            "{'input_ids': torch.zeros(8, 128, dtype=torch.long), 'labels': ...}"
        )
    if next(tensors_in(inputs), None) is None:
        raise ValueError(
            f"no tensor in the inputs ({type(inputs).__name__}): give tensors, as the model's "
            "forward gets them (in a tuple if positional, in a dict if by name)"
        )


def _resolve(
    optimizer: str | OptimizerFactory | Optimizer | None,
) -> tuple[str, OptimizerFactory | None, Optimizer | None]:
    """Its name, what makes it, and the optimizer itself if there is one."""
    if optimizer is None:
        return "", None, None
    if isinstance(optimizer, Optimizer):
        return type(optimizer).__name__, None, optimizer
    if isinstance(optimizer, str):
        name, factory = optimizer, optimizer_factory(optimizer)
    else:
        name, factory = getattr(optimizer, "__name__", "optimizer"), optimizer
    return name, lambda parameters: as_on_cuda(factory(parameters)), None


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    if not (major.isdecimal() and minor.isdecimal()):
        raise ValueError(f"expected a torch version such as '2.6.0', got {text!r}")
    return int(major), int(minor)


def _replay_within(
    stream: EventStream, config: AllocatorConfig, capacity: int | None
) -> tuple[Replayed, str]:
    """The replay under a capacity; if it does not fit, the one without bound and the reason."""
    try:
        return replay(stream, CachingAllocator(config, capacity=capacity)), ""
    except SimulatedOutOfMemoryError as error:
        return replay(stream, CachingAllocator(config)), str(error)


def _margins(
    stream: EventStream,
    config: AllocatorConfig,
    reserved: int,
    most: int | None,
    lengths: str,
) -> tuple[tuple[str, int], ...]:
    """What is added to be safe. Nothing can be reserved beyond ``most``."""
    room = None if most is None else max(0, most - reserved)
    found: list[tuple[str, int]] = []

    def add(what: str, size: int) -> None:
        left = size if room is None else min(size, room - sum(taken for _, taken in found))
        if left > 0:
            found.append((what, left))

    if any(allocation.possible for allocation in stream.allocations):
        peaks = [_reserved(stream, config, most, possible=share) for share in _SHARES]
        add("cuDNN workspaces up to", max(peaks) - reserved)
    if lengths == "vary":
        add("shorter batches before up to", _reserved(_shorter(stream), config, most) - reserved)
    # Small differences in what comes first decide what fits where: equal runs were measured to
    # differ by up to 1 % without a cause that is named above. Libraries took 14 to 54 MiB.
    add("fragmentation and libraries", 64 * MIB + reserved // 100)
    return tuple(found)


def _shorter(stream: EventStream) -> EventStream:
    """With a slightly shorter batch among the others: what it leaves cached is just too small.

    In runs that were measured to take more than equal ones, what they took more is that of a
    shorter second step; before optimizer state is there (in the first) it may be up to twice that.
    """
    steps = 1 + max((event.step for event in stream.events), default=0)
    return stream.scaled({1 if steps > 2 else 0: 0.97})


def _reserved(
    stream: EventStream, config: AllocatorConfig, most: int | None, *, possible: float = 0.0
) -> int:
    """The peak; cuDNN takes smaller workspaces, and caches are emptied, when there is no room."""
    try:
        return replay(
            stream, CachingAllocator(config, capacity=most), possible=possible
        ).peak_reserved
    except SimulatedOutOfMemoryError:
        return most or 0


def _assumptions(traced: Traced, *, learns: bool, wants_to_learn: bool) -> tuple[str, ...]:
    found = ["output and loss of a step stay bound until the next step's take their place"]
    if wants_to_learn and not learns:
        found.append("nothing is trainable: this is an inference estimate")
    if any("convolution" in each.operation for each in traced.stream.allocations):
        found.append(
            "cuDNN takes the kernels that its heuristics prefer (cudnn.benchmark off), with their "
            "usual workspaces"
        )
    found += traced.assumptions
    return tuple(found)
