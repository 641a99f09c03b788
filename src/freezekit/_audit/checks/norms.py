"""Checks of running statistics and of norms that are frozen by half."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import nn

from freezekit._audit.context import AuditContext
from freezekit._audit.findings import Finding
from freezekit._audit.mends import as_argument, mode_code
from freezekit._format import plural, shorten
from freezekit._inventory import ModuleInfo

__all__ = [
    "batch_statistics",
    "norm_half_frozen",
    "norms_learn_in_frozen",
    "running_stats_move",
    "saved_buffers_in_train",
]


def running_stats_move(context: AuditContext) -> Iterator[Finding]:
    """FK201: running statistics move although everything around them is frozen.

    They are buffers, driven by the training mode and not by ``requires_grad``: each forward in
    train mode, also under ``no_grad``, changes what the frozen part computes. ``eval()`` holds them
    until the next ``model.train()``; :func:`freezekit.freeze` holds them under it. Spectral norm's
    vectors are such buffers too: they make a frozen weight move.
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
            mend=f"Hold them: freezekit.freeze(model, {as_argument(context, fqns)}).",
        )


def saved_buffers_in_train(context: AuditContext) -> Iterator[Finding]:
    """FK202: a frozen part in train mode has saved buffers of which it is unknown if they move.

    ``audit_step`` runs a step and tells.
    """
    fqns, kinds = _frozen_in_train(context, "unknown")
    if fqns:
        yield Finding(
            code="FK202",
            severity="note",
            title="saved buffers in a frozen part that is in train mode",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'frozen module')} ({shorten(kinds)}) in train mode with "
            "floating point buffers: if their forward updates them, the frozen part changes.",
            mend=f"If so, hold them: freezekit.freeze(model, {as_argument(context, fqns)}).",
        )


def batch_statistics(context: AuditContext) -> Iterator[Finding]:
    """FK204: ``track_running_stats=False`` as a freeze: statistics stay, and are not used.

    In train mode such a norm normalises with each batch's own statistics: its outputs are not those
    of the checkpoint. In a norm that learns the statistics grow stale, and evaluation uses them.
    """
    inventory = context.inventory
    groups: dict[tuple[bool, bool], list[ModuleInfo]] = {}
    for index, info in enumerate(inventory.modules):
        if (
            info.repeats < 0
            and info.has_running_stats
            and _statistics(inventory.module(index)) == "batch"
            and not context.is_held(index)
        ):
            groups.setdefault((info.training, index in context.frozen_set), []).append(info)
    for (training, is_frozen), found in groups.items():
        fqns = tuple(info.fqn for info in found)
        kinds = shorten(dict.fromkeys(info.type_name for info in found))
        yield Finding(
            code="FK204",
            severity="warning" if training else "note",
            title="a norm normalises with the batch, not with its statistics"
            if training
            else "a norm will normalise with the batch in train mode",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'module')} ({kinds}) in {'train' if training else 'eval'} "
            "mode, with track_running_stats=False and statistics that are not used"
            + ("." if training else " as soon as model.train() is called."),
            mend=f"Hold them in eval: freezekit.freeze(model, {as_argument(context, fqns)})."
            if is_frozen
            else "Let them follow again: [setattr(model.get_submodule(name), "
            f'"track_running_stats", True) for name in {tuple(info.raw for info in found)!r}].',
        )


def norm_half_frozen(context: AuditContext) -> Iterator[Finding]:
    """FK205: a norm's statistics are held in eval, and its weight and bias learn.

    ``eval()`` does not touch ``requires_grad``: a "frozen" BatchNorm drifts. If it is meant (some
    detectors train so), ignore it.
    """
    inventory = context.inventory
    found = [
        index
        for index, info in enumerate(inventory.modules)
        if info.repeats < 0
        and info.has_running_stats
        and not info.training
        and context.trainable_entries(index)
        and _statistics(inventory.module(index)) == "moves"
    ]
    if not found:
        return
    fqns = tuple(inventory.modules[index].fqn for index in found)
    names = [
        inventory.entries[i].fqn
        for index in found
        for i in context.own_entries(index)
        if inventory.parameters[inventory.entries[i].parameter].requires_grad
    ]
    kinds = shorten(dict.fromkeys(inventory.modules[index].type_name for index in found))
    trains = context.in_training or bool(context.optimizers)
    held = all(context.is_held(index) for index in found)
    thaw = (
        f"freezekit.unfreeze(model, {as_argument(context, fqns)})"
        if held
        else mode_code(context, found, "train")
    )
    yield Finding(
        code="FK205",
        severity="warning" if trains else "note",
        title="a norm is frozen by half: its statistics stand still, its weights learn",
        fqns=fqns,
        cause=f"{plural(len(fqns), 'module')} ({kinds}) in eval mode with "
        f"{plural(len(names), 'trainable tensor')}.",
        mend=f"Freeze the rest: freezekit.freeze(model, {as_argument(context, fqns)}); or let all "
        "of it "
        f"learn: {thaw}.",
    )


def norms_learn_in_frozen(context: AuditContext) -> Iterator[Finding]:
    """FK206: norms learn, and their statistics move, between layers that are frozen.

    Code that skips norms when it freezes leaves them so. Training the norms alone is a method too:
    then it is as it should be.
    """
    inventory = context.inventory
    modules = inventory.modules
    found = []
    for index, info in enumerate(modules):
        if info.repeats >= 0 or not info.has_running_stats or not info.training or info.children:
            continue
        own = context.trainable_entries(index)
        if not own or info.parent < 0 or _statistics(inventory.module(index)) != "moves":
            continue
        around = modules[info.parent]
        others = [
            child
            for child in around.children
            if not modules[child].has_running_stats
            and modules[child].last_entry > modules[child].first_entry
        ]
        if others and all(child in context.frozen_set for child in others):
            found.append(index)
    if found:
        fqns = tuple(modules[index].fqn for index in found)
        yield Finding(
            code="FK206",
            severity="note",
            title="norms learn between frozen layers",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'norm')} trainable and in train mode, with only frozen "
            "layers "
            "beside them: they change what the frozen layers' outputs become.",
            mend=f"If all is to be frozen: freezekit.freeze(model, {as_argument(context, fqns)}).",
        )


# -- what they share ---------------------------------------------------------------------------


def _frozen_in_train(
    context: AuditContext, behaviour: Literal["moves", "unknown"]
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
