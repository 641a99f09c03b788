"""Checks of weights that are computed from others: weight norm, spectral norm, parametrisations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from freezekit._audit.context import AuditContext
from freezekit._audit.findings import Finding
from freezekit._audit.mends import as_argument
from freezekit._format import plural

__all__ = ["computed_weight_looks_frozen", "computed_weight_moves"]

# What the old weight_norm, spectral_norm and pruning put in a weight's place.
_SUFFIXES = ("_g", "_v", "_orig")


class _Computed(NamedTuple):
    """A weight that is computed from parameters: where, what it is called, and from which."""

    module: int
    name: str
    sources: tuple[int, ...]


def computed_weight_moves(context: AuditContext) -> Iterator[Finding]:
    """FK209: a frozen layer's weight is computed from parameters that learn.

    ``weight_norm`` and ``spectral_norm`` put new parameters (``weight_g``, ``weight_v``,
    ``weight_orig``; ``parametrizations.weight.original0``) in the place of ``weight``. They are
    trainable, also where the layer was frozen before, and a pattern that ends in ``weight`` misses
    them: the bias stands still and the weight moves.
    """
    inventory = context.inventory
    found: dict[int, None] = {}
    where: dict[int, None] = {}
    for computed in _computed_weights(context):
        flags = {i: inventory.parameters[i].requires_grad for i in computed.sources}
        others = [
            inventory.parameters[inventory.entries[i].parameter].requires_grad
            for i in context.own_entries(computed.module)
            if inventory.entries[i].parameter not in flags
        ]
        half = len(set(flags.values())) == 2
        if any(flags.values()) and (half or (others and not any(others))):
            found.update(dict.fromkeys(i for i, flag in flags.items() if flag))
            where[computed.module] = None
    if found:
        fqns = tuple(inventory.parameters[index].fqn for index in found)
        yield Finding(
            code="FK209",
            severity="warning",
            title="the weight of a frozen layer is computed from parameters that learn",
            fqns=fqns,
            cause=f"{plural(len(where), 'layer')} with other parameters frozen, and "
            f"{plural(len(fqns), 'trainable tensor')} from which the weight is computed.",
            mend=f"Freeze them too: freezekit.freeze(model, {as_argument(context, fqns)}).",
        )


def computed_weight_looks_frozen(context: AuditContext) -> Iterator[Finding]:
    """FK210: a computed weight says ``requires_grad=False`` while what it comes from learns.

    The old ``spectral_norm`` and ``weight_norm`` keep the last computed ``weight`` as a plain
    tensor on the module: its flag tells nothing. Look at the parameters. Told only where part of
    the model is frozen.
    """
    inventory = context.inventory
    if not any(not info.requires_grad for info in inventory.parameters):
        return
    fqns = []
    for computed in _computed_weights(context):
        tensor = vars(inventory.module(computed.module)).get(computed.name)
        learns = any(inventory.parameters[index].requires_grad for index in computed.sources)
        if isinstance(tensor, torch.Tensor) and learns and not tensor.requires_grad:
            fqn = inventory.modules[computed.module].fqn
            fqns.append(f"{fqn}.{computed.name}" if fqn else computed.name)
    if fqns:
        yield Finding(
            code="FK210",
            severity="note",
            title="a computed weight looks frozen and is not",
            fqns=tuple(fqns),
            cause=f"{plural(len(fqns), 'tensor')} with requires_grad=False that the next forward "
            "computes anew from trainable parameters.",
            mend="If they are to stand still, freeze the layers: freezekit.freeze(model, "
            f"{as_argument(context, [name.rpartition('.')[0] for name in fqns])}).",
        )


def _computed_weights(context: AuditContext) -> Iterator[_Computed]:
    inventory = context.inventory
    for info in inventory.modules:
        named = info.raw.endswith("parametrizations") and info.parent >= 0 and info.repeats < 0
        if named and parametrize.is_parametrized(inventory.module(info.parent)):
            yield from _parametrised(context, info.parent)
    suffixed: dict[int, dict[str, int]] = {}
    for entry in inventory.entries:
        if entry.raw.endswith(_SUFFIXES):
            owner = inventory.parameters[entry.parameter].owner
            suffixed.setdefault(owner, {})[entry.raw.rpartition(".")[2]] = entry.parameter
    for index, own in suffixed.items():
        attributes = vars(inventory.module(index))
        for name, parameter in own.items():
            if name.endswith("_g") and f"{name[:-2]}_v" in own:
                yield _Computed(index, name[:-2], (parameter, own[f"{name[:-2]}_v"]))
            elif name.endswith("_orig") and isinstance(attributes.get(name[:-5]), torch.Tensor):
                yield _Computed(index, name[:-5], (parameter,))


def _parametrised(context: AuditContext, index: int) -> Iterator[_Computed]:
    inventory = context.inventory
    modules = inventory.modules
    for child in modules[index].children:
        if modules[child].raw.rpartition(".")[2] != "parametrizations":
            continue
        for listed in modules[child].children:
            sources = tuple(inventory.entries[i].parameter for i in context.own_entries(listed))
            if sources and isinstance(inventory.module(listed), nn.Module):
                yield _Computed(index, modules[listed].raw.rpartition(".")[2], sources)
