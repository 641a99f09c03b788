"""The check of where the trainable parameters lie: what is frozen above them is not free."""

from __future__ import annotations

from collections.abc import Iterator

from freezekit._audit.context import AuditContext
from freezekit._audit.findings import Finding
from freezekit._audit.mends import as_argument
from freezekit._fold import fold_names
from freezekit._format import format_bytes, format_count, format_percent, plural, shorten

__all__ = ["frozen_above_trainable"]

# Below this share of the model it is not worth a line.
_SHARE = 0.25


def frozen_above_trainable(context: AuditContext) -> Iterator[Finding]:
    """FK703: a frozen part lies above a trainable one, and costs activations and a backward pass.

    Gradients for what lies below have to pass through it: autograd keeps most of its activations (a
    frozen linear layer saves its input's, a norm or an attention nothing), and its backward pass is
    computed. A frozen part *below* everything that learns costs neither. "Above" is read from the
    order of the modules. With ``audit(model, inputs=batch)`` the memory estimator says how much it
    is.
    """
    inventory = context.inventory
    entries = inventory.entries
    parameters = inventory.parameters
    first = next(
        (i for i, entry in enumerate(entries) if parameters[entry.parameter].requires_grad), None
    )
    if first is None:
        return
    above: dict[int, None] = {}
    for entry in entries[first:]:
        info = parameters[entry.parameter]
        if not info.requires_grad and entry.fqn == info.fqn and info.numel:
            above[entry.parameter] = None
    numel = sum(parameters[index].numel for index in above)
    if numel < _SHARE * max(context.total_numel, 1):
        return
    stop = _end_of_lowest(context, first)
    lowest = list(
        dict.fromkeys(
            parameters[entry.parameter].fqn
            for entry in entries[first:stop]
            if parameters[entry.parameter].requires_grad
        )
    )
    share = format_percent(numel, context.total_numel)
    price = _price(context, first, lowest)
    hint = " freezekit.audit(model, inputs=batch) tells how much memory that is."
    yield Finding(
        code="FK703",
        severity="note",
        title="a frozen part lies above a trainable one, and is not free",
        fqns=tuple(lowest),
        cause=f"{format_count(numel)} frozen parameters ({share}) in "
        f"{plural(len(above), 'tensor')} come "
        f"after the first trainable ones ({shorten(fold_names(lowest))}): gradients pass through "
        f"them, and their activations are kept{price}.",
        mend="It would be free if nothing learned below it: freezekit.freeze(model, "
        f"{as_argument(context, lowest)}); for adapters it is the price." + ("" if price else hint),
    )


def _price(context: AuditContext, first: int, lowest: list[str]) -> str:
    """What the frozen part above costs on a GPU, and what the mend would leave of it."""
    if context.inputs is None:
        return ""
    from freezekit._memory.estimate import estimate_memory  # 0.1 s: for those who ask

    model, inputs = context.model, context.inputs
    # The gradient pass alone: an optimizer's state is not what this is about.
    now = estimate_memory(model, inputs, optimizer=None, steps=1)
    mended = estimate_memory(model, inputs, optimizer=None, steps=1, frozen=lowest)
    inventory = context.inventory
    above = {
        inventory.modules[index].fqn
        for index in context.frozen_modules
        if inventory.modules[index].last_entry > first
    }
    kept = sum(
        each.nbytes
        for each in now.stream.live_at_end("forward", 0)
        if each.category == "activations" and each.module in above
    )
    return (
        f": {format_bytes(kept)} in frozen modules, with these inputs on a GPU (estimated; forward "
        f"and backward peak at {format_bytes(now.peak_allocated)}, with the mend at "
        f"{format_bytes(mended.peak_allocated)})"
    )


def _end_of_lowest(context: AuditContext, first: int) -> int:
    """Where the lowest trainable run ends: at the first frozen entry after it."""
    inventory = context.inventory
    for i in range(first, len(inventory.entries)):
        if not inventory.parameters[inventory.entries[i].parameter].requires_grad:
            return i
    return len(inventory.entries)
