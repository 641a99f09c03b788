"""Code for the mends of findings: names as patterns, as attributes, as calls that work."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Sequence

from freezekit._audit.context import AuditContext
from freezekit._fold import fold_names, is_number
from freezekit._selection import resolve
from freezekit.errors import FreezekitError

__all__ = [
    "as_argument",
    "as_attribute",
    "eval_code",
    "mode_code",
    "outermost_frozen",
    "raw_names",
    "where_text",
]


# More names than this are no code to be read.
_MOST = 40


def as_argument(context: AuditContext, fqns: Sequence[str]) -> str:
    """The FQNs as a ``patterns`` argument: whole modules, folded, where that selects the same.

    Of very many that do not fold it is ``finding.fqns``: the finding has them.
    """
    fqns = _whole_modules(context, fqns)
    if "" in fqns:
        return '"*"'
    names: Sequence[str] = fold_names(fqns)
    if len(names) > _MOST:
        return "finding.fqns"
    if not context.numbers_are_positions and any("[" in name for name in names):
        try:
            resolve(context.inventory, tuple(names))
        except FreezekitError:  # a number in a name need not be a position
            names = fqns
    if len(names) == 1:
        return f'"{names[0]}"'
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def where_text(context: AuditContext, fqns: Sequence[str]) -> tuple[str, ...]:
    """The FQNs for a reader: whole modules, folded; the model's class for the model itself."""
    kind = context.inventory.modules[0].type_name
    names = fold_names(_whole_modules(context, fqns))
    return tuple(name or f"{kind} (all of it)" for name in names)


def _whole_modules(context: AuditContext, fqns: Sequence[str]) -> Sequence[str]:
    """The names, with a module's in the place of all of its parameters'."""
    inventory = context.inventory
    wanted = set(fqns)
    listed = [entry.fqn in wanted for entry in inventory.entries]
    if not any(listed):
        return fqns
    before = [0]
    for is_listed in listed:
        before.append(before[-1] + is_listed)
    found: dict[str, None] = {}
    covered: set[str] = set()
    index = 0
    while index < len(inventory.modules):
        info = inventory.modules[index]
        size = info.last_entry - info.first_entry
        if size > 1 and before[info.last_entry] - before[info.first_entry] == size:
            found[info.fqn] = None
            covered |= {e.fqn for e in inventory.entries[info.first_entry : info.last_entry]}
            index = info.end
        else:
            index += 1
    # In the order of the names, as far as they are left.
    return [*found, *(name for name in fqns if name not in covered)]


def outermost_frozen(context: AuditContext, indices: Iterable[int]) -> tuple[int, ...]:
    """The outermost frozen module around each of these modules."""
    modules = context.inventory.modules
    found: dict[int, None] = {}
    for index in indices:
        while modules[index].parent in context.frozen_set:
            index = modules[index].parent  # noqa: PLW2901
        found[index] = None
    return tuple(found)


def eval_code(context: AuditContext, indices: Iterable[int]) -> str:
    """Code that puts these modules into eval mode."""
    return mode_code(context, indices, "eval")


def raw_names(context: AuditContext, indices: Iterable[int]) -> tuple[str, ...]:
    """The modules' names as ``model.get_submodule`` has them, a wrapper's components included."""
    return tuple(context.inventory.modules[index].raw for index in indices)


def mode_code(context: AuditContext, indices: Iterable[int], mode: str) -> str:
    """Code that calls ``.eval()`` or ``.train()`` on these modules."""
    outermost = raw_names(context, indices)
    if "" in outermost:
        return f"model.{mode}()"
    folded = fold_names(outermost)
    written = [as_attribute(name) for name in folded]
    if len(folded) <= 3 and all(written):
        return "; ".join(f"{name}.{mode}()" for name in written)
    listed = ", ".join(f'"{name}"' for name in outermost)
    return f"[model.get_submodule(name).{mode}() for name in ({listed},)]"


def as_attribute(name: str) -> str:
    """``layers.0.norm`` as Python reads it, ``model.layers[0].norm``; ``""`` if it cannot.

    A slice can only come last: a slice of a ModuleList is one, with an ``eval()`` of its own.
    """
    path = "model"
    head, bracket, slice_ = name.partition("[")
    if bracket and not slice_.endswith("]"):
        return ""
    for part in head.split(".") if head else ():
        if is_number(part):
            path += f"[{part}]"
        elif part.isidentifier() and not keyword.iskeyword(part):
            path += f".{part}"
        else:
            return ""
    return path + bracket + slice_
