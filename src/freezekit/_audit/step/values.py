"""Checks of what moved in the step, and of what did not."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from freezekit._audit.context import AuditContext
from freezekit._audit.findings import Finding
from freezekit._audit.mends import as_argument
from freezekit._audit.step.record import Change
from freezekit._format import plural, shorten

__all__ = ["frozen_buffers_changed", "frozen_values_changed", "not_moved", "zero_initialised"]


def frozen_values_changed(context: AuditContext) -> Iterator[Finding]:
    """FK821: frozen parameters have other values after the step.

    By the optimizer: a gradient from before the freeze, momentum, weight decay, or the same memory
    under a trainable name. By a forward: a layer that writes to its weights. By the step's own
    code, as a moving average does on purpose: a note.
    """
    step = context.step
    if step is None:
        return
    by_cause: dict[str, list[Change]] = {}
    for change in step.changes:
        if change.parameter >= 0 and change.parameter not in step.learned:
            by_cause.setdefault(change.by, []).append(change)
    for by, changes in by_cause.items():
        fqns = tuple(change.fqn for change in changes)
        lost = sum(not change.restored for change in changes) if step.snapshot == "hash" else 0
        argument = as_argument(context, fqns)
        yield Finding(
            code="FK821",
            severity="note" if by == "step" else "error",
            title="frozen parameters changed",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'frozen tensor')} changed by {_doer(context, by, changes)}"
            + (f"; {lost:,} could not be put back (snapshot='hash')." if lost else "."),
            mend={
                "optimizer": f"Take them out: freezekit.freeze(model, {argument}, "
                "optimizer=optimizer).",
                "forward": "Put the module that writes to them into eval mode, or take the "
                "writing out "
                "of its forward.",
                "step": "If a moving average is meant, nothing; else find the in-place operation.",
            }[by],
        )


def _doer(context: AuditContext, by: str, changes: list[Change]) -> str:
    step = context.step
    if by == "optimizer" and step is not None:
        kinds = shorten(dict.fromkeys(type(found).__name__ for found in step.optimizers))
        return f"the step of {kinds}"
    if by == "forward":
        owners = dict.fromkeys(context.inventory.modules[change.owner].fqn for change in changes)
        return f"the forward of {shorten(owners)}"
    return "the step's own code, outside of forward and optimizer"


def frozen_buffers_changed(context: AuditContext) -> Iterator[Finding]:
    """FK822: saved buffers of a frozen part have other values after the step.

    Running statistics, codebooks, observers: the frozen part computes something else from now on.
    Changed by the step's own code, outside of every forward, as a moving average copies them: a
    note.
    """
    step = context.step
    if step is None:
        return
    by_cause: dict[str, list[Change]] = {}
    for change in step.changes:
        if change.parameter < 0 and change.owner in context.frozen_set:
            by_cause.setdefault(change.by, []).append(change)
    for by, changes in by_cause.items():
        fqns = tuple(change.fqn for change in changes)
        owners = list(dict.fromkeys(context.inventory.modules[c.owner].fqn for c in changes))
        yield Finding(
            code="FK822",
            severity="note" if by == "step" else "error",
            title="buffers of a frozen part changed",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'buffer')} of {plural(len(owners), 'frozen module')} "
            "changed by "
            + (
                "the step's own code."
                if by == "step"
                else "their forward, in train mode or out of it."
            ),
            mend=f"Hold the modules: freezekit.freeze(model, {as_argument(context, owners)}).",
        )


def not_moved(context: AuditContext) -> Iterator[Finding]:
    """FK831: an optimizer stepped, and a parameter with a gradient did not move.

    Its learning rate is 0 (a warm-up begins so: a note), it is in no group, or the update is too
    small for the precision that the weight is kept in.
    """
    step = context.step
    if step is None or not step.optimizer_steps or step.error is not None:
        return
    groups: dict[str, list[int]] = {}
    for index, seen in sorted(step.gradients.items()):
        if index in step.moved or not any(value > 0 for value in seen.values()):
            continue
        groups.setdefault(_why_not(context, index), []).append(index)
    mends = {
        "its learning rate is 0": "If no warm-up is meant, give the group a rate: "
        "optimizer.param_groups[0]['lr'] = 1e-4.",
        "it is in no group of an optimizer that stepped": "Put them in: freezekit.unfreeze(model, "
        "{argument}, optimizer=optimizer, lr=1e-5).",
        "the update is below the precision of its dtype": "Keep them in float32: "
        "[setattr(p, 'data', p.data.float()) for p in model.parameters() if p.requires_grad].",
        "the optimizer's update was zero": "Look at the groups' options.",
    }
    for why, indices in groups.items():
        fqns = tuple(context.inventory.parameters[index].fqn for index in indices)
        yield Finding(
            code="FK831",
            severity="note" if "rate" in why else "warning",
            title="parameters with a gradient did not move",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'tensor')} with a gradient unchanged after the optimizer's "
            "step: "
            f"{why}.",
            mend=mends[why].format(argument=as_argument(context, fqns)),
        )


def _why_not(context: AuditContext, index: int) -> str:
    places = context.memberships_of(index)
    if not places:
        return "it is in no group of an optimizer that stepped"
    rates = [place.optimizer.param_groups[place.group].get("lr", 1.0) for place in places]
    if all(float(rate) == 0 for rate in rates):
        return "its learning rate is 0"
    if context.inventory.parameters[index].dtype in (torch.bfloat16, torch.float16):
        return "the update is below the precision of its dtype"
    return "the optimizer's update was zero"


def zero_initialised(context: AuditContext, without: set[int]) -> list[int]:
    """Parameters that are all zeros and receive a gradient that is not: what hides those behind."""
    step = context.step
    if step is None:
        return []
    found = []
    for index, seen in step.gradients.items():
        if index in without or not any(value > 0 for value in seen.values()):
            continue
        info = context.inventory.parameters[index]
        tensor = context.inventory.tensors(index)[0]
        is_weight = len(info.shape) > 1 or info.fqn.rpartition(".")[2] != "bias"
        if is_weight and tensor.device.type != "meta" and not tensor.detach().count_nonzero():
            found.append(index)
    return found
