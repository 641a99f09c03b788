"""Checks of tensors that go by several names."""

from __future__ import annotations

from collections.abc import Iterator

from freezekit._audit.context import AuditContext
from freezekit._audit.findings import Finding
from freezekit._audit.mends import as_argument
from freezekit._format import shorten

__all__ = ["tied_across_freeze", "tied_flags_disagree"]


def tied_flags_disagree(context: AuditContext) -> Iterator[Finding]:
    """FK401: one memory is known under a frozen and a trainable name.

    Two Parameter objects over the same memory have a flag each: what trains one moves the other.
    """
    inventory = context.inventory
    for index, info in enumerate(inventory.parameters):
        if not info.aliases:
            continue
        tensors = inventory.tensors(index)
        if len({tensor.requires_grad for tensor in tensors}) < 2:
            continue
        names = (info.fqn, *info.aliases)
        yield Finding(
            code="FK401",
            severity="error",
            title="tied under a frozen and a trainable name",
            fqns=names,
            cause=f"{', '.join(names)} share their memory, and some require a gradient and some "
            "do not: training moves them all.",
            mend=f"Freeze them together: freezekit.freeze(model, {as_argument(context, names)}) "
            "takes all names; or give each a copy of its own.",
        )


def tied_across_freeze(context: AuditContext) -> Iterator[Finding]:
    """FK402: a tied tensor learns, and one of its names lies in a part that is otherwise frozen.

    Training a language model's head trains its embedding, since they are one tensor; the frozen
    backbone below gets other inputs than it was trained with. ``named_parameters`` lists the first
    name alone.
    """
    if context.expected is not None:
        return
    inventory = context.inventory
    modules = inventory.modules
    owners: dict[int, list[tuple[str, int]]] = {}
    for index in range(len(modules)):
        for i in context.own_entries(index):
            entry = inventory.entries[i]
            if inventory.parameters[entry.parameter].aliases:
                owners.setdefault(entry.parameter, []).append((entry.fqn, index))
    for parameter, places in owners.items():
        info = inventory.parameters[parameter]
        if not info.requires_grad:
            continue
        inside: list[str] = []
        outside: list[str] = []
        for fqn, owner in places:
            (inside if _is_in_frozen(context, owner, parameter) else outside).append(fqn)
        if inside and outside:
            names = (info.fqn, *info.aliases)
            yield Finding(
                code="FK402",
                severity="warning",
                title="a tied tensor learns inside a frozen part",
                fqns=names,
                cause=f"{shorten(outside)} is the same tensor as {shorten(inside)} "
                f"({info.numel:,} parameters), which lies among frozen parameters.",
                mend=f"Freeze it: freezekit.freeze(model, {as_argument(context, names)}); or give "
                f"{outside[0]} a copy of its own; or say that it is meant: "
                "audit(model, expect_trainable=...).",
            )


def _is_in_frozen(context: AuditContext, owner: int, parameter: int) -> bool:
    """Whether the nearest part around the tensor that has other parameters has only frozen ones."""
    inventory = context.inventory
    index = owner
    while index >= 0:
        info = inventory.modules[index]
        names = inventory.entries[info.first_entry : info.last_entry]
        ours = sum(entry.parameter == parameter for entry in names)
        if len(names) > ours:
            trainable = context.trainable_entries(index)
            # The root is no part of the model; it holds all names.
            return trainable == ours and info.parent >= 0
        index = info.parent
    return False
