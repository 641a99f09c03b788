"""Checks of parameters that are not plain: uninitialised, on no device, empty, packed elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from freezekit._audit.context import AuditContext
from freezekit._audit.findings import Finding
from freezekit._audit.mends import outermost_frozen, raw_names
from freezekit._format import format_bytes, plural, shorten

__all__ = [
    "cast_again_and_again",
    "not_materialised",
    "uncountable",
    "updates_rounded_away",
]

_PACKED = re.compile(r"^(q|packed_)?(weight|zeros|data|scales?)(_packed)?$|packed|^qdata$")
_LOW = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def not_materialised(context: AuditContext) -> Iterator[Finding]:
    """FK601: some parameters are on the meta device, without values, among others that have them.

    A checkpoint lacked them, or ``to_empty`` was not called for them: they cannot be computed with.
    A model that is on the meta device as a whole is a structure to look at, and no finding.
    """
    inventory = context.inventory
    fqns = tuple(
        info.fqn
        for index, info in enumerate(inventory.parameters)
        if inventory.tensors(index)[0].is_meta and info.layout != "sharded"
    )
    if fqns and len(fqns) < len(inventory.parameters):
        yield Finding(
            code="FK601",
            severity="error",
            title="parameters without values",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'tensor')} of {len(inventory.parameters):,} on the meta "
            "device.",
            mend="Load them: model.load_state_dict(state, assign=True) with a state that has them.",
        )


def uncountable(context: AuditContext) -> Iterator[Finding]:
    """FK602: weights that cannot be counted: empty tensors, or integers packed into buffers.

    A partition that is elsewhere leaves an empty tensor, without a note of its size; GPTQ, AWQ and
    others keep weights as packed integers in buffers. Counts are lower bounds.
    """
    inventory = context.inventory
    empty = [
        info.fqn for info in inventory.parameters if info.numel == 0 and info.layout == "dense"
    ]
    packed = [
        info
        for info in inventory.buffers
        if not info.dtype.is_floating_point
        and info.dtype is not torch.bool
        and len(info.shape) > 1
        and _PACKED.search(info.fqn.rpartition(".")[2])
    ]
    if not empty and not packed:
        return
    parts = []
    if empty:
        parts.append(f"{plural(len(empty), 'parameter')} without elements")
    if packed:
        nbytes = format_bytes(sum(info.nbytes for info in packed))
        parts.append(f"{plural(len(packed), 'buffer')} of packed integers ({nbytes})")
    yield Finding(
        code="FK602",
        severity="note",
        title="weights that cannot be counted",
        fqns=(*empty, *(info.fqn for info in packed)),
        cause=f"{' and '.join(parts)}: counts are lower bounds.",
        mend="Count before the model is partitioned or packed.",
    )


def cast_again_and_again(context: AuditContext) -> Iterator[Finding]:
    """FK603: a frozen float32 part runs under autocast, which casts its weights at every use.

    Autocast keeps the cast only of weights that require a gradient. A frozen backbone is cast at
    every forward, and is kept in twice the memory that it needs.
    """
    autocast = _autocast_dtype(context)
    if autocast is None:
        return
    inventory = context.inventory
    found = [
        index
        for index in context.frozen_modules
        if any(
            inventory.parameters[inventory.entries[i].parameter].dtype is torch.float32
            and len(inventory.parameters[inventory.entries[i].parameter].shape) > 1
            for i in context.own_entries(index)
        )
    ]
    outermost = outermost_frozen(context, found)
    numel = sum(context.subtree_numel(index) for index in outermost)
    if found and 2 * numel >= context.total_numel:
        fqns = tuple(inventory.modules[index].fqn for index in outermost)
        name = _LOW[autocast]
        listed = ", ".join(f'"{name}"' for name in raw_names(context, outermost))
        yield Finding(
            code="FK603",
            severity="note",
            title="a frozen part is cast at every forward",
            fqns=fqns,
            cause=f"{numel:,} frozen float32 parameters under autocast to {name}: cast at every "
            "use, "
            f"{format_bytes(2 * numel)} more than they need.",
            mend=f"Cast it once: [model.get_submodule(name).to(torch.{name}) for name in "
            f"({listed},)].",
        )


def _autocast_dtype(context: AuditContext) -> torch.dtype | None:
    if context.step is not None and context.step.autocast is not None:
        return context.step.autocast if context.step.autocast in _LOW else None
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            return dtype if dtype in _LOW else None
    return None


def updates_rounded_away(context: AuditContext) -> Iterator[Finding]:
    """FK604: parameters that learn are kept in 16 bits, where small updates are rounded away.

    bfloat16 has 8 bits of precision: an update below 1/256 of a weight changes nothing. With an
    optimizer that updates the weights themselves, a small learning rate trains little. Told where
    an optimizer is given.
    """
    if not context.optimizers:
        return
    found = [
        info
        for index, info in enumerate(context.inventory.parameters)
        if info.requires_grad and info.dtype in _LOW and context.memberships_of(index)
    ]
    if found:
        kinds = shorten(dict.fromkeys(_LOW[info.dtype] for info in found))
        fqns = tuple(info.fqn for info in found)
        yield Finding(
            code="FK604",
            severity="note",
            title="what learns is kept in 16 bits",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'trainable tensor')} in {kinds}, updated in place: updates "
            "much smaller than the weights are lost.",
            mend="Keep what learns in float32 and use autocast: "
            "[setattr(p, 'data', p.data.float()) for p in model.parameters() if p.requires_grad].",
        )
