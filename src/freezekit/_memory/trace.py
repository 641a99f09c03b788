"""From a model and its inputs to the event stream of its training steps on a CUDA GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.distributions import Distribution
from torch.optim import Optimizer

from freezekit._collector import collector_of_new_objects
from freezekit._memory.as_real import as_real
from freezekit._memory.cuda_functions import CudaFunctions
from freezekit._memory.cuda_rules import CudaRules
from freezekit._memory.devices import A100, Target
from freezekit._memory.events import EventStream
from freezekit._memory.nested import tensors_in
from freezekit._memory.optimizers import as_on_cuda
from freezekit._memory.recorder import Recorder
from freezekit._memory.shadow import Shadow
from freezekit._memory.steps import Steps, run_first_step, run_steps
from freezekit._wrappers import eager
from freezekit.errors import TraceError, UnsupportedModelError

__all__ = ["Traced", "trace"]

# What a fake run cannot do, and a real one can.
_NEEDS_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A stream, and what had to be assumed for it, in words."""

    stream: EventStream
    assumptions: tuple[str, ...]


def trace(
    model: nn.Module,
    inputs: Any,
    plan: Steps,
    *,
    optimizer: Optimizer | None = None,
    target: Target = A100,
    frozen: frozenset[str] = frozenset(),
) -> Traced:
    """Run the plan's steps on fake twins of the model and its inputs.

    Args:
        model: any module; it is not touched.
        inputs: what its forward gets.
        plan: the loop.
        optimizer: a live optimizer over the model's parameters, whose twin takes the steps.
        target: the GPU and the torch that will run.
        frozen: FQNs of parameters that are taken for frozen, whatever they are.

    Raises:
        TraceError: forward, loss or backward fails on these inputs.
        UnsupportedModelError: a tensor whose memory cannot be told.
    """
    compiled, model = eager(model)
    _check_tensors(model)
    # (The compiler is not imported for models that do not use it.)
    stance = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with collector_of_new_objects(), stance:
        traced = _attempt(model, inputs, plan, optimizer, target, frozen)
    if compiled:
        note = "compiled code is estimated as the eager module inside it"
        traced = replace(traced, assumptions=(note, *traced.assumptions))
    return traced


def _attempt(
    model: nn.Module,
    inputs: Any,
    plan: Steps,
    optimizer: Optimizer | None,
    target: Target,
    frozen: frozenset[str],
) -> Traced:
    def fake(*, checks_hold: bool) -> Traced:
        return _in_first_way(
            plan,
            lambda way: _trace_fake(
                way, model, inputs, plan, optimizer, target, frozen, checks_hold=checks_hold
            ),
        )

    try:
        return fake(checks_hold=False)
    except TraceError as error:
        failure = error
    if failure.assumed:
        # What failed may be a check: if not (boxes >= 0).all(): raise ...
        with suppress(TraceError):
            return fake(checks_hold=True)
    tensors = [*model.parameters(), *model.buffers(), *tensors_in(inputs)]
    may_need_data = failure.assumed or isinstance(failure.__cause__, _NEEDS_DATA)
    on_meta = any(tensor.is_meta for tensor in tensors)
    if may_need_data and on_meta:
        failure.add_note(
            "code that asks for data had been given stand-ins before: give inputs that are whole "
            "numbers (ids, masks) with their data instead of on meta"
        )
    if on_meta or not may_need_data:
        raise failure
    reason = str(failure.__cause__).split("\n")[0] or type(failure.__cause__).__name__
    traced = _in_first_way(plan, lambda way: _trace_real(way, model, inputs, plan, target, frozen))
    note = f"run for real on the CPU: a trace without data fails ({reason})"
    return replace(traced, assumptions=(*traced.assumptions, note))


# Runs a plan as run_steps does, with its arguments; None: not in this way.
_Way: TypeAlias = Callable[..., EventStream | None]


def _one_step(
    recorder: Recorder,
    model: nn.Module,
    inputs: Any,
    plan: Steps,
    *,
    after_forward: Callable[[], None],
) -> EventStream | None:
    """The first step alone, from which the second follows; all others are like that."""
    first = run_first_step(recorder, model, inputs, plan, after_forward=after_forward)
    stream = first.two_steps()
    if stream is None or plan.count == 2:
        return stream
    return stream.repeated(plan.count - 2)


def _two_steps(
    recorder: Recorder,
    model: nn.Module,
    inputs: Any,
    plan: Steps,
    *,
    after_forward: Callable[[], None],
) -> EventStream | None:
    """The first makes optimizer state; all others are like the second."""
    short = replace(plan, count=2)
    stream = run_steps(recorder, model, inputs, short, after_forward=after_forward)
    return stream.repeated(plan.count - 2)


def _in_first_way(plan: Steps, run: Callable[[_Way], Traced | None]) -> Traced:
    """Run a plan in the fastest way that does; the last always does."""
    faster: tuple[_Way, ...] = (_one_step, _two_steps)
    ways = (*faster[: max(0, plan.count - 1)], run_steps)
    return next(traced for way in ways if (traced := run(way)) is not None)


def _trace_fake(
    way: _Way,
    model: nn.Module,
    inputs: Any,
    plan: Steps,
    optimizer: Optimizer | None,
    target: Target,
    frozen: frozenset[str],
    *,
    checks_hold: bool,
) -> Traced | None:
    shadow = Shadow()
    twin, twin_inputs = shadow.copy(model), shadow.inputs(inputs)
    _freeze(twin, frozen)
    if optimizer is not None:
        twin_optimizer = as_on_cuda(shadow.copy(optimizer))
        plan = replace(plan, optimizer=lambda _: twin_optimizer)
    shadow.let_go()
    recorder = Recorder(CudaRules(target), shadow.known, checks_hold=checks_hold)
    functions = CudaFunctions(target.capability, answers=recorder.answers)
    # The random state is saved outside the mode, or it would be a fake one.
    with (
        _failures(recorder),
        as_real(shadow.known),
        torch.random.fork_rng(devices=()),
        shadow.mode,
        functions,
    ):
        stream = way(recorder, twin, twin_inputs, plan, after_forward=functions.autocast.clear)
    if stream is None:
        return None
    return Traced(stream=stream, assumptions=_assumed(recorder, functions))


def _trace_real(
    way: _Way,
    model: nn.Module,
    inputs: Any,
    plan: Steps,
    target: Target,
    frozen: frozenset[str],
) -> Traced | None:
    twin, twin_inputs = copy.deepcopy((model, inputs))
    twin = twin.to("cpu")
    _freeze(twin, frozen)
    functions = CudaFunctions(target.capability, real=True)
    recorder = Recorder(CudaRules(target))
    with _failures(recorder), torch.random.fork_rng(devices=()), functions:
        stream = way(
            recorder, twin, _to_cpu(twin_inputs), plan, after_forward=functions.autocast.clear
        )
    if stream is None:
        return None
    return Traced(stream=stream, assumptions=_assumed(recorder, functions))


@contextmanager
def _failures(recorder: Recorder) -> Iterator[None]:
    """What fails inside is a TraceError with the module and the phase."""
    default_dtype = torch.get_default_dtype()
    validates = Distribution._validate_args
    # Distributions check their arguments' values, and take a stand-in's no for a wrong one.
    Distribution.set_default_validate_args(value=False)
    try:
        yield
    except Exception as error:
        fqn = recorder.failed_module
        raise TraceError(
            f"the step failed in {fqn or 'the model'} ({recorder.last_phase}): "
            f"{type(error).__name__}: {error}",
            fqn,
            assumed=recorder.answers.assumed,
        ) from error
    finally:
        torch.set_default_dtype(default_dtype)
        Distribution.set_default_validate_args(value=validates)


def _assumed(recorder: Recorder, functions: CudaFunctions) -> tuple[str, ...]:
    found = sorted(functions.notes)
    answers = recorder.answers
    if answers.checks_hold:
        found.append("what the code asks of all elements is taken to be true: else it fails")
    if answers.values:
        found.append(
            f"{answers.values} value(s) that the code reads from tensors: "
            "False, 1, or an array of 0"
        )
    if answers.sizes:
        found.append(
            f"{answers.sizes} result(s) whose size depends on data: as large as can be, "
            "or an expert's even share"
        )
    return tuple(found)


def _freeze(model: nn.Module, frozen: frozenset[str]) -> None:
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        if fqn in frozen:
            parameter.requires_grad = False


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_to_cpu(item) for item in value)
    return value


def _check_tensors(model: nn.Module) -> None:
    """Refuse what has no storage of its own; memory of it could only be guessed."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for fqn, tensor in named:
            what = _unsupported(tensor)
            if what:
                raise UnsupportedModelError(
                    f"the {kind} {fqn!r} is {what}: what it takes on a GPU cannot be told; "
                    "estimate the model with plain tensors (before it is sharded or converted)"
                )


def _unsupported(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"a sparse tensor ({tensor.layout})"
    if nn.parameter.is_lazy(tensor):
        return "not initialized yet (run the model once, or give its layers their sizes)"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(tensor).__name__}, which has no storage of its own"
    return ""
