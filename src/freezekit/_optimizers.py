"""Which groups of an optimizer hold which parameters; letting go of some and taking in others.

Parameters are told apart by identity, never by value: two zero biases are two parameters.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from freezekit.errors import OptimizerError

__all__ = [
    "OptimizerChange",
    "add_to_groups",
    "check_group",
    "check_optimizer",
    "drop_from_groups",
    "tensor_bytes",
]

# Of a group, in parallel.
_LISTS = frozenset({"params", "param_names"})

# They keep flat or per-rank copies of their parameter list, which an edit would leave stale.
_FIXED_PARAMETERS = frozenset({"LBFGS", "ZeroRedundancyOptimizer"})


class OptimizerChange(NamedTuple):
    """What happened to an optimizer's groups.

    Attributes:
        optimizer: its class.
        removed: tensors that left its groups.
        state_bytes: bytes of their state that were dropped.
        added: tensors that came in.
        group: index of the group that they came into; ``None`` if none came in.
        lr: that group's learning rate.
        present: tensors that were to come in and were in a group already.
    """

    optimizer: str
    removed: int = 0
    state_bytes: int = 0
    added: int = 0
    group: int | None = None
    lr: float | None = None
    present: int = 0


def check_optimizer(optimizer: object, options: Mapping[str, Any]) -> None:
    """Refuse what cannot be edited, before anything is.

    Raises:
        OptimizerError: not an optimizer, one whose parameters are fixed, or an unknown option.
        TypeError: group options without an optimizer.
    """
    if optimizer is None:
        if options:
            names = ", ".join(options)
            raise TypeError(
                f"unexpected keyword argument(s) {names}: options of an optimizer group need "
                "optimizer=..."
            )
        return
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise OptimizerError(f"optimizer: expected a torch.optim.Optimizer, got {kind}")
    for base in type(optimizer).__mro__:
        if base.__name__ in _FIXED_PARAMETERS:
            raise OptimizerError(
                f"{type(optimizer).__name__} keeps its own flat list of parameters: "
                "make a new optimizer after freezing instead of passing optimizer="
            )
    known = set(optimizer.defaults).union(*optimizer.param_groups) - _LISTS
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, [*sorted(known), "exclude", "optimizer"], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OptimizerError(
                f"{type(optimizer).__name__} has no group option {name!r}{hint} "
                f"(it has {', '.join(sorted(known))})"
            )


def drop_from_groups(optimizer: Optimizer, tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Take tensors out of their groups and drop their state.

    A group that becomes empty stays: learning rate schedulers count groups.

    Returns:
        How many tensors left, and the bytes of state that went with them.
    """
    leaving = {id(tensor): tensor for tensor in tensors}
    removed = _leave_groups(optimizer, leaving.keys())
    dropped = [optimizer.state.pop(t) for t in leaving.values() if t in optimizer.state]
    return removed, sum(tensor_bytes(state) for state in dropped)


def _leave_groups(optimizer: Optimizer, leaving: Collection[int]) -> int:
    removed = 0
    for group in optimizer.param_groups:
        stay = [i for i, p in enumerate(group["params"]) if id(p) not in leaving]
        removed += len(group["params"]) - len(stay)
        # In place: optimizers and schedulers may hold the list itself.
        for key in _LISTS & group.keys():
            group[key][:] = [group[key][i] for i in stay]
    return removed


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a nest of mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.itemsize
    if isinstance(value, Mapping):
        return sum(map(tensor_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(tensor_bytes, value))
    return 0


def check_group(
    optimizer: Optimizer, tensors: Iterable[torch.Tensor], options: Mapping[str, Any]
) -> None:
    """Refuse to guess the group that parameters are to join, before anything is changed.

    Raises:
        OptimizerError: there are several groups, and neither options nor an empty group tell.
    """
    present = _members(optimizer)
    if options or all(id(tensor) in present for tensor in tensors):
        return
    if _home_group(optimizer) is None:
        rates = ", ".join(f"{group.get('lr', '?')}" for group in optimizer.param_groups)
        raise OptimizerError(
            f"{type(optimizer).__name__} has {len(optimizer.param_groups)} groups (lr {rates}): "
            "say how the parameters are to learn, such as unfreeze(..., optimizer=..., lr=1e-5)"
        )


def add_to_groups(
    optimizer: Optimizer,
    named: Sequence[tuple[str, nn.Parameter]],
    options: Mapping[str, Any],
    thawed: Collection[int],
) -> OptimizerChange:
    """Put parameters into a group, each exactly once.

    With ``options`` they get a group of their own. Without, those that are in none join the only
    group, or the only empty one. What was trainable all along stays where it is.

    Args:
        optimizer: changed in place.
        named: FQNs and parameters.
        options: the options of a new group.
        thawed: ids of those that were frozen: with ``options`` they leave a group that they are
            still in. Their state stays.
    """
    kind = type(optimizer).__name__
    present = _members(optimizer)
    moves = set(thawed) if options else set()
    joining = [(name, p) for name, p in named if id(p) not in present or id(p) in moves]
    if not joining:
        return OptimizerChange(optimizer=kind, present=len(named))
    index = None if options else _home_group(optimizer)
    if index is None or _needs_own_group(optimizer, index):
        alike = {} if index is None else _options_of(optimizer.param_groups[index])
        before = [
            {key: list(group[key]) for key in _LISTS & group.keys()}
            for group in optimizer.param_groups
        ]
        _leave_groups(optimizer, {id(p) for _, p in joining})
        try:
            index = _add_group(optimizer, joining, {**alike, **options})
        except BaseException:
            for group, lists in zip(optimizer.param_groups, before, strict=False):
                for key, values in lists.items():
                    group[key][:] = values
            raise
    else:
        group = optimizer.param_groups[index]
        group["params"].extend(p for _, p in joining)
        if "param_names" in group:
            group["param_names"].extend(name for name, _ in joining)
    rate = optimizer.param_groups[index].get("lr")
    return OptimizerChange(
        optimizer=kind,
        added=len(joining),
        group=index,
        lr=None if rate is None else float(rate),
        present=len(named) - len(joining),
    )


def _members(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _home_group(optimizer: Optimizer) -> int | None:
    """The only group, or the only empty one (freezing emptied it)."""
    groups = optimizer.param_groups
    candidates = [i for i, g in enumerate(groups) if len(groups) == 1 or not g["params"]]
    return candidates[0] if len(candidates) == 1 else None


def _needs_own_group(optimizer: Optimizer, index: int) -> bool:
    """Whether torch cannot mix parameters with and without state in this group.

    A fused SGD step reads the momentum of all parameters of a group, or of none.
    """
    group = optimizer.param_groups[index]
    has_state = any(p in optimizer.state for p in group["params"])
    return bool(group.get("fused") and group.get("momentum") and has_state)


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _LISTS}


def _add_group(
    optimizer: Optimizer, named: Sequence[tuple[str, nn.Parameter]], options: Mapping[str, Any]
) -> int:
    groups = optimizer.param_groups
    has_schedule = any("initial_lr" in group for group in groups)
    with_names = "param_names" in groups[0]
    optimizer.add_param_group(
        {"params": list(named) if with_names else [p for _, p in named], **options}
    )
    group = groups[-1]
    if has_schedule and "lr" in group and "initial_lr" not in group:
        # A scheduler that is made later reads the rate that it starts from here.
        rate = group["lr"]
        group["initial_lr"] = rate.clone() if isinstance(rate, torch.Tensor) else rate
    return len(groups) - 1
