"""The checks: each a small function from the context to findings.

A check's docstring says what it finds and why it matters; its code never changes meaning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from torch import nn

from freezekit._audit.context import AuditContext
from freezekit._audit.findings import Finding
from freezekit._fold import fold_names
from freezekit._format import plural, shorten

__all__ = ["DEFAULT_CHECKS", "Check"]

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
    inventory = context.inventory
    moving: dict[str, list[int]] = {"error": [], "note": []}
    for index in context.frozen_modules:
        info = inventory.modules[index]
        normalizes_by_batch = getattr(inventory.module(index), "track_running_stats", None) is False
        if info.has_running_stats and info.training and not normalizes_by_batch:
            moving["error" if _surely_moves(inventory.module(index)) else "note"].append(index)
    if moving["error"]:
        fqns = tuple(inventory.modules[i].fqn for i in moving["error"])
        kinds = dict.fromkeys(inventory.modules[i].type_name for i in moving["error"])
        yield Finding(
            code="FK201",
            severity="error",
            title="running statistics move in a frozen part",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'module')} ({shorten(kinds)}) in train mode, with all "
            "parameters frozen: each forward changes their running statistics.",
            mend=f"Hold them: freezekit.freeze(model, {_as_argument(fqns)}).",
        )
    if moving["note"]:
        fqns = tuple(inventory.modules[i].fqn for i in moving["note"])
        yield Finding(
            code="FK202",
            severity="note",
            title="saved buffers in a frozen part that is in train mode",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'frozen module')} in train mode with floating point "
            "buffers: if their forward updates them, the frozen part changes.",
            mend=f"If so, hold them: freezekit.freeze(model, {_as_argument(fqns)}).",
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
    yield Finding(
        code="FK203",
        severity="warning",
        title="dropout is active in a frozen part",
        fqns=tuple(inventory.modules[index].fqn for index in found),
        cause=f"{plural(len(found), 'random module')} ({kinds}) in train mode, with all "
        "parameters around frozen: two passes over one input differ.",
        mend="Put the frozen part into eval mode after each model.train(): "
        f"{_eval_code(context, found)}.",
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
            mend=f"Clear it: freezekit.freeze(model, {_as_argument(fqns)}) sets .grad to None.",
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
            mend=f'Freeze them together: freezekit.freeze(model, "{info.fqn}") takes all names; '
            "or give each a copy of its own.",
        )


DEFAULT_CHECKS: tuple[Check, ...] = (
    nothing_trainable,
    running_stats_move,
    active_dropout,
    frozen_with_gradient,
    tied_flags_disagree,
)


# -- what checks share -------------------------------------------------------------------------


def _surely_moves(module: nn.Module) -> bool:
    """Whether the buffers are statistics that move in train mode, by what they are called."""
    names = [name for name, _ in module.named_buffers(recurse=False)]
    return any(
        name.startswith("running_") or name == "num_batches_tracked" or name.endswith(("_u", "_v"))
        for name in names
    )


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


def _eval_code(context: AuditContext, indices: Iterable[int]) -> str:
    """Code that puts the outermost frozen part around each of these modules into eval mode."""
    modules = context.inventory.modules
    frozen = set(context.frozen_modules)
    outermost: dict[str, None] = {}
    for index in indices:
        while modules[index].parent in frozen:
            index = modules[index].parent  # noqa: PLW2901
        outermost[modules[index].fqn] = None
    if "" in outermost:
        return "model.eval()"
    folded = fold_names(outermost)
    if len(folded) <= 2 and all("]." not in name for name in folded):
        # A slice of a ModuleList is one, with an eval() of its own.
        return "; ".join(f"{_as_attribute('model.' + name)}.eval()" for name in folded)
    return f"model.get_submodule(name).eval() for each of {shorten(folded)}"


def _as_attribute(name: str) -> str:
    """``model.layers.0.norm`` as Python reads it: ``model.layers[0].norm``."""
    return re.sub(r"\.(\d+)(?=\.|\[|$)", r"[\1]", name)


def _as_argument(fqns: tuple[str, ...]) -> str:
    """The FQNs as a ``patterns`` argument, short enough to read."""
    folded = fold_names(fqns)
    if len(folded) == 1:
        return f'"{folded[0]}"'
    shown = ", ".join(f'"{name}"' for name in folded[:3])
    return f"[{shown}{', ...' if len(folded) > 3 else ''}]"
