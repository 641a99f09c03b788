"""The checks of a step that was run and watched."""

from __future__ import annotations

import math
from collections.abc import Iterator

from freezekit._audit.checks import DEFAULT_CHECKS, Check
from freezekit._audit.checks.modes import drop_rate, makes_features
from freezekit._audit.context import AuditContext
from freezekit._audit.findings import Finding
from freezekit._audit.mends import as_argument, mode_code
from freezekit._audit.step import missing, values
from freezekit._format import plural, shorten

__all__ = ["DEFAULT_STEP_CHECKS"]


def step_failed(context: AuditContext) -> Iterator[Finding]:
    """FK801: the step raised an error.

    All that was seen until then is reported too; often it is the cause.
    """
    step = context.step
    if step is None or step.error is None:
        return
    error = step.error
    message = " ".join(str(error).split())
    running = step.raised_in
    where = f" in {_name(context, running)}" if running is not None else ""
    yield Finding(
        code="FK801",
        severity="error",
        title="the step raised an error",
        fqns=(context.inventory.modules[running].fqn,) if running is not None else (),
        cause=f"{type(error).__name__}{where}: {message[:300]}"
        f"{'...' if len(message) > 300 else ''}",
        mend=_mend_for(message),
    )


_KNOWN_ERRORS = (
    (
        "inference tensors cannot be",
        "Make the features under torch.no_grad() instead of torch.inference_mode(), or clone them "
        "outside: features.clone().",
    ),
    (
        "does not require grad",
        "The loss depends on nothing that is trainable: unfreeze what is to learn, such as "
        'freezekit.unfreeze(model, "head"), and compute it with gradients on.',
    ),
    (
        "finished reduction",
        "DistributedDataParallel waits for gradients that do not come: freeze what learns nothing "
        "before wrapping, or build it with find_unused_parameters=True.",
    ),
    (
        "cudnn rnn backward",
        "Leave the recurrent layer in train mode, with its dropout set to 0.",
    ),
    (
        "second time",
        "A graph from an earlier step is used again: detach what is carried over.",
    ),
    (
        "modified by an inplace operation",
        "Something changes a tensor that the backward pass needs: clone it before, such as "
        "features.clone() before a layer with inplace=True.",
    ),
)


def _mend_for(message: str) -> str:
    lowered = message.lower()
    for part, mend in _KNOWN_ERRORS:
        if part in lowered:
            return mend
    return "Run the step by itself, with the traceback; audit_step calls it once, as step()."


def no_gradient_at_all(context: AuditContext) -> Iterator[Finding]:
    """FK802: no gradient arrived at any parameter.

    The step made no backward pass, or the loss is cut off from everything that is trainable. A loss
    that was made to require a gradient by ``loss.requires_grad_()`` runs ``backward()`` and trains
    nothing.
    """
    step = context.step
    if step is None or step.gradients or step.error is not None:
        return
    trainable = sum(info.requires_grad for info in context.inventory.parameters)
    if not trainable:
        return
    outer = [call for call in step.calls if call.parent is None]
    if step.returned_graph:
        cause = "the step returned a tensor with a graph, on which backward() was not called"
        mend = "Call loss.backward() in the step."
    elif any(call.output_requires for call in outer):
        cause = "the model's output required a gradient, and none came back"
        mend = (
            "Call loss.backward() in the step, and compute the loss from the output itself, not "
            "from .detach(), .item(), .numpy() or a new tensor of it."
        )
    elif not step.calls:
        cause = "no module of this model was called"
        mend = "Run the model that is audited in the step."
    else:
        cause = "no output of the model required a gradient"
        mend = "Run what is to learn with gradients on, outside of torch.no_grad()."
    yield Finding(
        code="FK802",
        severity="error",
        title="no gradient arrived at any parameter",
        fqns=(),
        cause=f"{plural(trainable, 'tensor')} trainable, and {cause}.",
        mend=mend,
    )


def random_in_frozen(context: AuditContext) -> Iterator[Finding]:
    """FK842: a frozen part drew random numbers: two passes over one input differ.

    In eval mode nothing should; a functional dropout that is not told the mode
    (``F.dropout(x)``) does. Its features cannot be cached or repeated.
    """
    step = context.step
    if step is None:
        return
    modules = context.inventory.modules
    found = []
    for index, training in step.random.items():
        known = training and any(
            drop_rate(context.inventory.module(i)) > 0 and modules[i].training
            for i in range(index, modules[index].end)
        )
        if not known:  # else FK203 says so, and which module it is
            found.append((index, training))
    if found:
        fqns = tuple(modules[index].fqn for index, _ in found)
        modes = shorten(dict.fromkeys("train" if training else "eval" for _, training in found))
        yield Finding(
            code="FK842",
            severity="warning" if makes_features(context, [i for i, _ in found]) else "note",
            title="a frozen part is random: two passes differ",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'frozen module')} in {modes} mode drew random numbers in "
            "its "
            "forward, through no dropout module.",
            mend="Tell functional dropout the mode: F.dropout(x, p, training=self.training); then "
            f"{mode_code(context, [index for index, _ in found], 'eval')}.",
        )


def graph_kept(context: AuditContext) -> Iterator[Finding]:
    """FK841: a tensor that the step computed was stored with its graph, and outlives the step.

    A hook that keeps features for later, a list of losses, a running sum of them: each keeps the
    graph that made it, and what that holds, until it lets go; memory grows from step to step. One
    that a variable or an attribute holds until the next step takes its place is a note.
    """
    step = context.step
    if step is None or not step.kept:
        return
    modules = context.inventory.modules
    indices = dict.fromkeys(kept.module for kept in step.kept if kept.module >= 0)
    fqns = tuple(modules[index].fqn for index in indices)
    holders = dict.fromkeys(kept.holder for kept in step.kept if kept.holder)
    held = f", in a {shorten(holders)}" if holders else ""
    shapes = shorten(dict.fromkeys(f"[{','.join(map(str, kept.shape))}]" for kept in step.kept))
    of = f", outputs of {plural(len(fqns), 'module')}" if fqns else ""
    yield Finding(
        code="FK841",
        severity="warning" if holders else "note",
        title="a tensor is kept with its graph after the step",
        fqns=fqns,
        cause=f"{plural(len(step.kept), 'tensor')} ({shapes}) still alive with a graph{of}{held}.",
        mend="Store it without: output.detach(), or loss.item(); and take hooks off when they have "
        "done their work.",
    )


def gradient_not_finite(context: AuditContext) -> Iterator[Finding]:
    """FK812: a gradient has infinite values or NaN.

    The next optimizer step makes the weights so too. With a GradScaler the first steps may
    overflow, and are skipped.
    """
    step = context.step
    if step is None:
        return
    found = [
        index
        for index, seen in sorted(step.gradients.items())
        if any(not math.isfinite(value) for value in seen.values())
    ]
    if found:
        fqns = tuple(context.inventory.parameters[index].fqn for index in found)
        yield Finding(
            code="FK812",
            severity="error",
            title="gradients are not finite",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'tensor')} of {len(step.gradients):,} with a gradient that "
            "has "
            f"inf or NaN; the first: {fqns[0]}.",
            mend="Find the operation: with torch.autograd.detect_anomaly(): step(); a smaller "
            "learning "
            "rate, or float32 for what overflows.",
        )


def gradient_zero(context: AuditContext) -> Iterator[Finding]:
    """FK811: a gradient arrived, and all of it is exactly zero.

    The output is multiplied by zero, or goes through something that is dead. Behind a weight that
    was initialised with zeros and learns itself (LoRA's B, the last norm of a residual block) the
    first step's gradient is zero by design: a note.
    """
    step = context.step
    if step is None:
        return
    found = [
        index
        for index, seen in sorted(step.gradients.items())
        if seen.largest and all(value == 0 for value in seen.values())
    ]
    found = _not_by_cancelling(context, found)
    if not found:
        return
    zeros = values.zero_initialised(context, set(found))
    fqns = tuple(context.inventory.parameters[index].fqn for index in found)
    behind = shorten(context.inventory.parameters[index].fqn for index in zeros)
    yield Finding(
        code="FK811",
        severity="note" if zeros else "warning",
        title="gradients are exactly zero",
        fqns=fqns,
        cause=f"{plural(len(fqns), 'tensor')} of {len(step.gradients):,} with a gradient of zeros"
        + (
            f"; {plural(len(zeros), 'weight')} initialised with zeros, which learns ({behind}), "
            "may be "
            "why."
            if zeros
            else ": their output is multiplied by zero, or masked, on its way to the loss."
        ),
        mend="Nothing for the first step; audit a later one."
        if zeros
        else "Take the factor away, or, if they are not to learn, freeze them: "
        "freezekit.freeze(model, "
        f"{as_argument(context, fqns)}).",
    )


def _not_by_cancelling(context: AuditContext, found: list[int]) -> list[int]:
    """Those of which no other parameter of the same module has a gradient that is not zero.

    If its weight has one, the output is not multiplied by zero: a bias's terms cancelled out.
    """
    step = context.step
    alive = {
        context.inventory.parameters[index].owner
        for index, seen in (step.gradients.items() if step is not None else ())
        if index not in found and any(value != 0 for value in seen.values())
    }
    return [index for index in found if context.inventory.parameters[index].owner not in alive]


DEFAULT_STEP_CHECKS: tuple[Check, ...] = (
    *DEFAULT_CHECKS,
    step_failed,
    no_gradient_at_all,
    missing.under_no_grad,
    missing.under_inference_mode,
    missing.in_reentrant_checkpoint,
    missing.cut_off,
    missing.not_in_the_loss,
    missing.lost_by_autocast,
    gradient_zero,
    gradient_not_finite,
    values.frozen_values_changed,
    values.frozen_buffers_changed,
    values.not_moved,
    graph_kept,
    random_in_frozen,
)


def _name(context: AuditContext, index: int) -> str:
    return context.inventory.modules[index].fqn or "the model"
