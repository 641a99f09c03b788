"""The freeze as plain JSON: what is trainable, what is held; for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, cast

from torch import nn

from freezekit._collector import collector_paused
from freezekit._freeze_report import FreezeReport
from freezekit._inventory import Inventory, take_inventory
from freezekit._modes import held_by
from freezekit._plan import Plan, inventory_to_change
from freezekit.errors import FreezeStateError

__all__ = ["FreezeState", "check_state", "freeze_state", "load_freeze_state"]

_SCHEMA = "freezekit.FreezeState/1"


class FreezeState(TypedDict):
    """Plain JSON: goes into a checkpoint, also one that is read with ``weights_only=True``.

    Keys:
        schema: ``"freezekit.FreezeState/1"``.
        trainable: FQNs (all names of tied tensors) that require a gradient.
        frozen: FQNs that do not.
        held: FQN of each module held in eval -> the mode that was last asked for.
    """

    schema: str
    trainable: list[str]
    frozen: list[str]
    held: dict[str, bool]


def freeze_state(model: nn.Module) -> FreezeState:
    """The model's freeze as plain JSON values; the model is not changed.

    >>> from torch import nn
    >>> model = nn.Linear(2, 1)
    >>> model.bias.requires_grad = False
    >>> freeze_state(model)["frozen"]
    ['bias']

    A ``state_dict`` does not carry the freeze: put this beside it, and load it with
    :func:`load_freeze_state`. Names are those of the unwrapped model, so it also loads into one
    that is wrapped otherwise.

    Raises:
        UnsupportedModelError: not a module that freezekit can work on.
    """
    with collector_paused():
        inventory = take_inventory(model)
    names: dict[bool, list[str]] = {True: [], False: []}
    for entry in inventory.entries:
        names[inventory.parameters[entry.parameter].requires_grad].append(entry.fqn)
    held = {}
    for index, info in enumerate(inventory.modules):
        holder = held_by(inventory.module(index))
        if holder is not None and info.repeats < 0:
            held[info.fqn] = holder.requested
    return FreezeState(schema=_SCHEMA, trainable=names[True], frozen=names[False], held=held)


def load_freeze_state(model: nn.Module, state: FreezeState | Mapping[str, Any]) -> FreezeReport:
    """Make the model's flags and held modes, in place, those of ``state``.

    >>> from torch import nn
    >>> one, other = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> one.bias.requires_grad = False
    >>> load_freeze_state(other, freeze_state(one)).changed
    ('bias',)

    What gets frozen has its ``.grad`` cleared, as by :func:`freeze`.

    Args:
        model: a model with the same parameter names, changed in place.
        state: what :func:`freeze_state` returned, maybe read back from JSON.

    Raises:
        FreezeStateError: not a freeze state; names differ (all differences are listed); or two
            names of one tensor disagree. Nothing is changed then.
    """
    checked = check_state(state)
    with collector_paused():
        inventory = inventory_to_change(model)
    flags = _match_flags(inventory, checked)
    modules = _match_modules(inventory, checked["held"])
    plan = Plan.of_flags(inventory, flags)
    for index, info in enumerate(inventory.modules):
        is_held = held_by(inventory.module(index)) is not None
        if index in modules and not is_held:
            plan.hold.append(index)
        elif is_held and index not in modules and info.repeats < 0:
            plan.release.append(index)
    report = plan.carry_out("load_freeze_state")
    for index, requested in modules.items():
        holder = held_by(inventory.module(index))
        if holder is not None:
            holder.requested = requested
    return report


def check_state(state: object) -> FreezeState:
    """The state, if it is one that `freeze_state` could have returned; else FreezeStateError."""
    if not isinstance(state, Mapping) or "schema" not in state:
        kind = type(state).__name__
        raise FreezeStateError(f"expected what freeze_state() returns, got a {kind} without schema")
    if state["schema"] != _SCHEMA:
        raise FreezeStateError(f"expected the schema {_SCHEMA!r}, got {state['schema']!r}")
    for key in ("trainable", "frozen"):
        names = state.get(key)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise FreezeStateError(f"{key!r}: expected a list of names, got {names!r:.80}")
    held = state.get("held")
    if not isinstance(held, Mapping) or not all(
        isinstance(name, str) and isinstance(mode, bool) for name, mode in held.items()
    ):
        raise FreezeStateError(f"'held': expected names with true or false, got {held!r:.80}")
    both = set(state["trainable"]) & set(state["frozen"])
    if both:
        raise FreezeStateError(f"{min(both)!r} is both trainable and frozen in the state")
    return cast(FreezeState, state)


def _match_flags(inventory: Inventory, state: FreezeState) -> dict[int, bool]:
    wanted = dict.fromkeys(state["trainable"], True) | dict.fromkeys(state["frozen"], False)
    known = {entry.fqn for entry in inventory.entries}
    missing = [name for name in wanted if name not in known]
    unexpected = [entry.fqn for entry in inventory.entries if entry.fqn not in wanted]
    if missing or unexpected:
        raise FreezeStateError("the state is of a model with other parameters", missing, unexpected)
    flags: dict[int, bool] = {}
    for entry in inventory.entries:
        flag = wanted[entry.fqn]
        info = inventory.parameters[entry.parameter]
        if flags.setdefault(entry.parameter, flag) != flag:
            names = ", ".join((info.fqn, *info.aliases))
            raise FreezeStateError(f"one tensor under the names {names}, and the state disagrees")
        if flag and info.untrainable:
            raise FreezeStateError(f"{info.fqn!r} cannot be trainable: {info.untrainable}")
    return flags


def _match_modules(inventory: Inventory, held: Mapping[str, bool]) -> dict[int, bool]:
    # A wrapper shares its name with what it wraps; the one with the statistics is meant.
    found = {
        index: held[info.fqn]
        for index, info in enumerate(inventory.modules)
        if info.fqn in held and info.repeats < 0 and info.has_running_stats
    }
    missing = sorted(set(held) - {inventory.modules[index].fqn for index in found})
    if missing:
        raise FreezeStateError(
            "the state holds modules with running statistics that this model has not", missing
        )
    return found
