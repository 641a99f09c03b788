"""The checks: each a small function from the context to findings.

A check's docstring says what it finds and why it matters; its code never changes meaning.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias

from torch import nn

from freezekit._audit.context import AuditContext
from freezekit._audit.findings import Finding
from freezekit._fold import fold_names, is_number
from freezekit._format import plural, shorten
from freezekit._selection import resolve
from freezekit.errors import FreezekitError

__all__ = ["DEFAULT_CHECKS", "Check", "code_of"]

Check: TypeAlias = Callable[[AuditContext], Iterator[Finding]]


def nothing_trainable(context: AuditContext) -> Iterator[Finding]:
    """FK101: no parameter requires a gradient, so that no step can change anything."""
    parameters = context.inventory.parameters
    if any(info.requires_grad for info in parameters):
        return
    total = sum(info.numel for info in parameters)
    last = parameters[-1].fqn.rpartition(".")[0] if parameters else ""
    yield Finding(
        code="FK101",
        severity="error",
        title="nothing is trainable",
        fqns=(),
        cause=f"All {total:,} parameters ({plural(len(parameters), 'tensor')}) are frozen."
        if parameters
        else "The model has no parameters.",
        mend=f'Unfreeze what is to learn, such as freezekit.unfreeze(model, "{last or "*"}").'
        if parameters
        else "Give it parameters, or audit the model that has them.",
    )


def running_stats_move(context: AuditContext) -> Iterator[Finding]:
    """FK201: running statistics move although everything around them is frozen.

    They are buffers, driven by the training mode and not by ``requires_grad``: each forward in
    train mode, also under ``no_grad``, changes what the frozen part computes.
    """
    fqns, kinds = _frozen_in_train(context, "moves")
    if fqns:
        yield Finding(
            code="FK201",
            severity="error",
            title="running statistics move in a frozen part",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'module')} ({shorten(kinds)}) in train mode, with all "
            "parameters frozen: each forward changes their running statistics.",
            mend=f"Hold them: freezekit.freeze(model, {_as_argument(context, fqns)}).",
        )


def saved_buffers_in_train(context: AuditContext) -> Iterator[Finding]:
    """FK202: a frozen part in train mode has saved buffers of which it is unknown if they move."""
    fqns, kinds = _frozen_in_train(context, "unknown")
    if fqns:
        yield Finding(
            code="FK202",
            severity="note",
            title="saved buffers in a frozen part that is in train mode",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'frozen module')} ({shorten(kinds)}) in train mode with "
            "floating point buffers: if their forward updates them, the frozen part changes.",
            mend=f"If so, hold them: freezekit.freeze(model, {_as_argument(context, fqns)}).",
        )


def batch_statistics(context: AuditContext) -> Iterator[Finding]:
    """FK204: ``track_running_stats=False`` as a freeze: statistics stay, and are not used.

    In train mode such a norm normalises with each batch's own statistics: its outputs are not
    those of the checkpoint.
    """
    fqns, kinds = _frozen_in_train(context, "batch")
    if fqns:
        yield Finding(
            code="FK204",
            severity="warning",
            title="a frozen norm normalises with the batch, not with its statistics",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'module')} ({shorten(kinds)}) in train mode, with "
            "track_running_stats=False and statistics that are not used.",
            mend=f"Hold them in eval: freezekit.freeze(model, {_as_argument(context, fqns)}).",
        )


def active_dropout(context: AuditContext) -> Iterator[Finding]:
    """FK203: dropout, or another random layer, is active in a frozen part.

    Its outputs differ from pass to pass: features are noisy, and cannot be cached or repeated.
    """
    found: dict[int, float] = {}
    inventory = context.inventory
    for index in context.frozen_modules:
        module = inventory.module(index)
        rate = _drop_rate(module) if module.training else 0.0
        if rate > 0:
            found[index] = rate
    if not found:
        return
    kinds = shorten(f"p={rate:g}" for rate in dict.fromkeys(found.values()))
    outermost = _outermost_frozen(context, found)
    largest = max(_subtree_numel(context, index) for index in outermost)
    whole = sum(info.numel for info in inventory.parameters)
    yield Finding(
        code="FK203",
        # In a frozen backbone it spoils the features; between layers that learn (adapters,
        # gradual unfreezing) it is the usual regularisation.
        severity="warning" if 2 * largest >= whole else "note",
        title="dropout is active in a frozen part",
        fqns=tuple(inventory.modules[index].fqn for index in found),
        cause=f"{plural(len(found), 'random module')} ({kinds}) in train mode, with all "
        "parameters around frozen: two passes over one input differ.",
        mend="Put the frozen part into eval mode after each model.train(): "
        f"{_eval_code(context, outermost)}.",
    )


def frozen_with_gradient(context: AuditContext) -> Iterator[Finding]:
    """FK301: a frozen parameter still has a ``.grad``.

    Optimizers look at ``grad is None``, not at ``requires_grad``: the leftover gradient, or
    momentum and weight decay alone, still move the weight, and gradient clipping counts it.
    """
    fqns = tuple(
        info.fqn
        for info in context.inventory.parameters
        if info.has_grad and not info.requires_grad
    )
    if fqns:
        yield Finding(
            code="FK301",
            severity="warning",
            title="frozen parameters still have a gradient",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'tensor')} with requires_grad=False and a .grad: an "
            "optimizer that holds them still moves them.",
            mend=f"Clear it: freezekit.freeze(model, {_as_argument(context, fqns)}) sets "
            ".grad to None.",
        )


def tied_flags_disagree(context: AuditContext) -> Iterator[Finding]:
    """FK401: one memory is known under a frozen and a trainable name.

    Two Parameter objects over the same memory have a flag each: what trains one moves the other.
    """
    inventory = context.inventory
    for index, info in enumerate(inventory.parameters):
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
            mend=f"Freeze them together: freezekit.freeze(model, {_as_argument(context, names)}) "
            "takes all names; or give each a copy of its own.",
        )


DEFAULT_CHECKS: tuple[Check, ...] = (
    nothing_trainable,
    running_stats_move,
    saved_buffers_in_train,
    active_dropout,
    batch_statistics,
    frozen_with_gradient,
    tied_flags_disagree,
)


def code_of(check: Check) -> str:
    """The code that a check's docstring begins with; ``""`` if it has none."""
    return (check.__doc__ or "").partition(":")[0]


# -- what checks share -------------------------------------------------------------------------


def _frozen_in_train(
    context: AuditContext, behaviour: Literal["moves", "unknown", "batch"]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """FQNs and classes of frozen modules with saved statistics that are in train mode."""
    inventory = context.inventory
    found = [
        inventory.modules[index]
        for index in context.frozen_modules
        if inventory.modules[index].has_running_stats
        and inventory.modules[index].training
        and _statistics(inventory.module(index)) == behaviour
    ]
    return tuple(i.fqn for i in found), tuple(dict.fromkeys(i.type_name for i in found))


def _statistics(module: nn.Module) -> Literal["moves", "unknown", "batch"]:
    """What train mode does to a module's statistics, by what they are called."""
    if getattr(module, "track_running_stats", None) is False:
        return "batch"
    names = [name for name, _ in module.named_buffers(recurse=False)]
    # A FrozenBatchNorm has running statistics too, and nothing that says how they move.
    tracks = "num_batches_tracked" in names or hasattr(module, "momentum")
    surely = any(
        (name.startswith("running_") and tracks) or name.endswith(("_u", "_v")) for name in names
    )
    return "moves" if surely else "unknown"


def _drop_rate(module: nn.Module) -> float:
    """The rate at which a module drops at random in train mode; 0 if it does not."""
    kind = type(module).__name__
    if isinstance(module, nn.RNNBase):
        rate: Any = module.dropout if module.num_layers > 1 else 0.0
    elif isinstance(module, nn.MultiheadAttention):
        rate = module.dropout
    elif isinstance(module, nn.RReLU):
        rate = module.upper - module.lower
    elif "Drop" in kind or "StochasticDepth" in kind:
        rate = getattr(module, "p", getattr(module, "drop_prob", 0.0))
    else:
        return 0.0
    return float(rate) if isinstance(rate, int | float) else 0.0


def _outermost_frozen(context: AuditContext, indices: Iterable[int]) -> tuple[int, ...]:
    """The outermost frozen module around each of these modules."""
    modules = context.inventory.modules
    frozen = set(context.frozen_modules)
    found: dict[int, None] = {}
    for index in indices:
        while modules[index].parent in frozen:
            index = modules[index].parent  # noqa: PLW2901
        found[index] = None
    return tuple(found)


def _subtree_numel(context: AuditContext, index: int) -> int:
    inventory = context.inventory
    return sum(inventory.parameters[i].numel for i in inventory.subtree_parameters(index))


def _eval_code(context: AuditContext, indices: Iterable[int]) -> str:
    """Code that puts these modules into eval mode."""
    outermost = [context.inventory.modules[index].fqn for index in indices]
    if "" in outermost:
        return "model.eval()"
    folded = fold_names(outermost)
    written = [_as_attribute(name) for name in folded]
    if len(folded) <= 3 and all(written):
        return "; ".join(f"{name}.eval()" for name in written)
    listed = ", ".join(f'"{name}"' for name in outermost)
    return f"[model.get_submodule(name).eval() for name in ({listed},)]"


def _as_attribute(name: str) -> str:
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


def _as_argument(context: AuditContext, fqns: tuple[str, ...]) -> str:
    """The FQNs as a ``patterns`` argument: folded, where that selects the same."""
    if "" in fqns:
        return '"*"'
    names = fold_names(fqns)
    try:
        resolve(context.inventory, names)
    except FreezekitError:  # a number in a name need not be a position
        names = fqns
    if len(names) == 1:
        return f'"{names[0]}"'
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
