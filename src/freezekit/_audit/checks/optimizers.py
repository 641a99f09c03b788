"""Checks of an optimizer that is out of step with the model. Tensors are told by identity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from freezekit._audit.context import AuditContext
from freezekit._audit.findings import Finding
from freezekit._audit.mends import as_argument
from freezekit._fold import fold_names
from freezekit._format import format_bytes, plural, shorten
from freezekit._optimizers import tensor_bytes
from freezekit._tensors import is_gradient_mask, measure

__all__ = [
    "empty_groups",
    "frozen_in_group",
    "frozen_with_gradient",
    "leftover_state",
    "listed_twice",
    "masked_rows_decay",
    "tensors_of_no_module",
    "trainable_in_no_group",
]


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
            mend=f"Clear it: freezekit.freeze(model, {as_argument(context, fqns)}) sets "
            ".grad to None.",
        )


def frozen_in_group(context: AuditContext) -> Iterator[Finding]:
    """FK302: an optimizer holds a frozen parameter.

    Without a gradient it is skipped, and costs nothing but a place and its state: a note. With one,
    also one of zeros that ``zero_grad(set_to_none=False)`` leaves, momentum and weight decay move
    it: an error.
    """
    if not context.optimizers:
        return
    inventory = context.inventory
    moved: dict[int, tuple[str, ...]] = {}
    skipped: list[int] = []
    for index, info in enumerate(inventory.parameters):
        if info.requires_grad:
            continue
        places = context.memberships_of(index)
        if not places:
            continue
        if info.has_grad:
            by: dict[str, None] = {}
            for place in places:
                by.update(dict.fromkeys(_movers(context, index, place.optimizer, place.group)))
            moved[index] = tuple(by)
        else:
            skipped.append(index)
    if moved:
        fqns = tuple(inventory.parameters[index].fqn for index in moved)
        by_what = list(dict.fromkeys(what for found in moved.values() for what in found))
        yield Finding(
            code="FK302",
            severity="error",
            title="the optimizer will move frozen parameters",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'frozen tensor')} in a group and with a .grad: the next "
            "step "
            f"moves them by {_listed(by_what)}.",
            mend=_drop_mend(context, fqns),
        )
    if skipped:
        fqns = tuple(inventory.parameters[index].fqn for index in skipped)
        state = sum(
            tensor_bytes(place.optimizer.state.get(tensor, {}))
            for index in skipped
            for tensor in inventory.tensors(index)
            for place in context.memberships.get(id(tensor), ())
        )
        yield Finding(
            code="FK302",
            severity="note",
            title="the optimizer holds frozen parameters",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'frozen tensor')} in its groups, with "
            f"{format_bytes(state)} of state; without a gradient they are skipped.",
            mend=_drop_mend(context, fqns),
        )


def _movers(context: AuditContext, index: int, optimizer: Any, group: int) -> tuple[str, ...]:
    options: Mapping[str, Any] = optimizer.param_groups[group]
    tensors = context.inventory.tensors(index)
    found = ["its gradient"] if any(_is_nonzero(t.grad) for t in tensors) else []
    state = [optimizer.state.get(tensor) for tensor in tensors]
    if any(_has_momentum(entry) for entry in state):
        found.append("momentum")
    if options.get("weight_decay"):
        found.append(f"weight decay ({float(options['weight_decay']):g})")
    return tuple(found) or ("whatever its update adds to a gradient of zeros",)


def _is_nonzero(grad: torch.Tensor | None) -> bool:
    if grad is None or grad.device.type == "meta":
        return grad is not None
    values = grad.coalesce().values() if grad.is_sparse else grad
    return bool(values.detach().count_nonzero())


def _has_momentum(state: Any) -> bool:
    names = ("momentum_buffer", "exp_avg")
    return isinstance(state, Mapping) and any(state.get(name) is not None for name in names)


def _drop_mend(context: AuditContext, fqns: tuple[str, ...]) -> str:
    argument = as_argument(context, fqns)
    return f"Take them out: freezekit.freeze(model, {argument}, optimizer=optimizer)."


def trainable_in_no_group(context: AuditContext) -> Iterator[Finding]:
    """FK303: a trainable parameter is in no group of the optimizer.

    Unfrozen later and never added, or "frozen" by being left out: no step moves it, while its
    gradient is computed and kept, and piles up, since ``optimizer.zero_grad()`` does not know it.
    """
    if not context.optimizers:
        return
    missing = [
        info
        for index, info in enumerate(context.inventory.parameters)
        if info.requires_grad and not context.memberships_of(index)
    ]
    if missing:
        fqns = tuple(info.fqn for info in missing)
        nbytes = sum(info.nbytes for info in missing)
        with_grad = sum(info.has_grad for info in missing)
        argument = as_argument(context, fqns)
        yield Finding(
            code="FK303",
            severity="warning",
            title="trainable parameters are in no group of the optimizer",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'tensor')} ({sum(info.numel for info in missing):,} "
            "parameters) "
            f"require a gradient and are never updated; {with_grad:,} have one now; their "
            "gradients "
            f"take up to {format_bytes(nbytes)}.",
            mend=f"If they are to learn: freezekit.unfreeze(model, {argument}, "
            "optimizer=optimizer, "
            f"lr=1e-5); if not: freezekit.freeze(model, {argument}).",
        )


def tensors_of_no_module(context: AuditContext) -> Iterator[Finding]:
    """FK304: the optimizer holds tensors that are no parameters of the model.

    ``resize_token_embeddings``, ``load_state_dict(assign=True)``, sharding, converting a norm: each
    makes new parameters, and an optimizer from before goes on training the old ones, which nothing
    uses. If the model has all that it should have in the groups, they may be another module's (a
    loss with weights): a note.
    """
    if not context.optimizers:
        return
    held = {id(tensor): tensor for tensor in context.tensors_in_groups()}
    ghosts = [tensor for key, tensor in held.items() if key not in context.parameter_of]
    if not ghosts:
        return
    inventory = context.inventory
    absent = [
        index
        for index, info in enumerate(inventory.parameters)
        if not context.memberships_of(index)
    ]
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index in absent:
        by_shape.setdefault(inventory.parameters[index].shape, []).append(index)
    twins = []
    for tensor in ghosts:
        candidates = by_shape.get(tuple(tensor.shape))
        if candidates:
            twins.append(candidates.pop(0))
    learning = [index for index in absent if inventory.parameters[index].requires_grad]
    stale = bool(twins or learning) or len(ghosts) == len(held)
    fqns = tuple(inventory.parameters[index].fqn for index in (twins or learning))
    where = f"; the model's own are not in its groups: {shorten(fold_names(fqns))}" if fqns else ""
    yield Finding(
        code="FK304",
        severity="error" if stale else "note",
        title="the optimizer trains tensors that are no parameters of the model",
        fqns=fqns,
        cause=f"{plural(len(ghosts), 'tensor')} of {len(held):,} in its groups "
        f"({format_bytes(sum(measure(tensor)[2] for tensor in ghosts))}) "
        f"{'belongs' if len(ghosts) == 1 else 'belong'} to no module{where}.",
        mend="Make the optimizer after the last change to the model: "
        "optimizer = type(optimizer)([p for p in model.parameters() if p.requires_grad], "
        "lr=optimizer.defaults['lr'])."
        if stale
        else "If another module has them (a loss), nothing is wrong; else make the optimizer anew.",
    )


def listed_twice(context: AuditContext) -> Iterator[Finding]:
    """FK305: an optimizer holds one memory twice, or two optimizers hold it.

    It is updated twice a step.
    """
    if not context.optimizers:
        return
    inventory = context.inventory
    found: dict[int, int] = {}
    for index in range(len(inventory.parameters)):
        places = len(context.memberships_of(index))
        if places > 1:
            found[index] = places
    outside = Counter(
        id(tensor)
        for tensor in context.tensors_in_groups()
        if id(tensor) not in context.parameter_of
    )
    strangers = sum(count > 1 for count in outside.values())
    if found or strangers:
        fqns = tuple(inventory.parameters[index].fqn for index in found)
        most = max([*found.values(), *outside.values()])
        yield Finding(
            code="FK305",
            severity="error",
            title="the optimizer holds a tensor more than once",
            fqns=fqns,
            cause=f"{plural(len(found) + strangers, 'tensor')} listed up to {most} times: each "
            "listing is an update of its own.",
            mend="Make it anew, with each parameter listed once: optimizer = "
            "type(optimizer)([p for p in model.parameters() if p.requires_grad], "
            "lr=optimizer.defaults['lr']).",
        )


def empty_groups(context: AuditContext) -> Iterator[Finding]:
    """FK306: an optimizer has a group without parameters.

    If it has none at all, it moves nothing: an error. One emptied by a freeze stays on purpose,
    since schedulers count groups: a note.
    """
    for optimizer in context.optimizers:
        groups = optimizer.param_groups
        empty = [index for index, group in enumerate(groups) if not group["params"]]
        if not empty:
            continue
        nothing = len(empty) == len(groups)
        which = "all are" if nothing else f"number {', '.join(map(str, empty))} is"
        yield Finding(
            code="FK306",
            severity="error" if nothing else "note",
            title="the optimizer has nothing to train"
            if nothing
            else "a group of the optimizer is empty",
            fqns=(),
            cause=f"{type(optimizer).__name__}: of {plural(len(groups), 'group')} {which} empty.",
            mend='Put parameters into it: freezekit.unfreeze(model, "...", optimizer=optimizer).'
            if nothing
            else "Nothing needs to be done; unfreezing can fill it again.",
        )


def leftover_state(context: AuditContext) -> Iterator[Finding]:
    """FK307: an optimizer keeps state of tensors that are in none of its groups.

    It takes memory, goes into checkpoints, and makes loading them fail.
    """
    for optimizer in context.optimizers:
        held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        left = [key for key in optimizer.state if id(key) not in held and optimizer.state[key]]
        if left:
            nbytes = sum(tensor_bytes(optimizer.state[key]) for key in left)
            indices = [context.parameter_of.get(id(key)) for key in left]
            fqns = tuple(context.inventory.parameters[i].fqn for i in indices if i is not None)
            yield Finding(
                code="FK307",
                severity="warning",
                title="the optimizer keeps state of what it no longer trains",
                fqns=fqns,
                cause=f"{type(optimizer).__name__}: {format_bytes(nbytes)} of state of "
                f"{plural(len(left), 'tensor')} in none of its groups.",
                mend="Drop it: held = "
                "{id(p) for g in optimizer.param_groups for p in g['params']}; "
                "[optimizer.state.pop(p) for p in list(optimizer.state) if id(p) not in held].",
            )


def masked_rows_decay(context: AuditContext) -> Iterator[Finding]:
    """FK308: rows are frozen by a mask on the gradient, and weight decay or momentum moves them.

    A gradient hook that zeroes rows freezes them for plain SGD alone: decoupled weight decay does
    not look at gradients, and momentum from before the mask goes on.
    """
    if not context.optimizers:
        return
    inventory = context.inventory
    found: dict[int, str] = {}
    for index, info in enumerate(inventory.parameters):
        if not info.requires_grad:
            continue
        hooked = [t for t in inventory.tensors(index) if is_gradient_mask(t)]
        for tensor in hooked:
            for place in context.memberships.get(id(tensor), ()):
                decay = place.optimizer.param_groups[place.group].get("weight_decay")
                if decay:
                    found[index] = f"weight decay ({float(decay):g})"
                elif _has_momentum(place.optimizer.state.get(tensor)):
                    found.setdefault(index, "momentum")
    if found:
        fqns = tuple(inventory.parameters[index].fqn for index in found)
        yield Finding(
            code="FK308",
            severity="warning",
            title="rows frozen by a gradient mask are moved by the optimizer",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'tensor')} with a hook that masks the gradient, in a group "
            f"with {_listed(list(dict.fromkeys(found.values())))}, which moves rows without a "
            "gradient.",
            mend="Put them into a group without weight decay: [group.update(weight_decay=0) for "
            "group "
            "in optimizer.param_groups]; or write the rows back after each step.",
        )


def _listed(words: list[str]) -> str:
    return " and ".join(words) if len(words) < 3 else f"{', '.join(words[:-1])} and {words[-1]}"
