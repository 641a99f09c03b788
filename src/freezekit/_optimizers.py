"""Which groups of an optimizer hold which parameters; letting go of some and taking in others.

Parameters are told apart by identity, never by value: two zero biases are two parameters.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from freezekit.errors import OptimizerError

__all__ = ["OptimizerChange", "add_to_groups", "check_optimizer", "drop_from_groups"]

# They keep flat or per-rank copies of their parameter list, which an edit would leave stale.
_FIXED_PARAMETERS = frozenset({"LBFGS", "ZeroRedundancyOptimizer"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerChange:
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
    known = set(optimizer.defaults).union(*optimizer.param_groups) - {"params", "param_names"}
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
    removed = 0
    for group in optimizer.param_groups:
        stay = [i for i, p in enumerate(group["params"]) if id(p) not in leaving]
        removed += len(group["params"]) - len(stay)
        # In place: optimizers and schedulers may hold the list itself.
        for key in ("params", "param_names"):
            if key in group:
                group[key][:] = [group[key][i] for i in stay]
    dropped = [optimizer.state.pop(t) for t in leaving.values() if t in optimizer.state]
    return removed, sum(_tensor_bytes(state) for state in dropped)


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.itemsize
    if isinstance(value, Mapping):
        return sum(map(_tensor_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_tensor_bytes, value))
    return 0


def add_to_groups(
    optimizer: Optimizer,
    named: Sequence[tuple[str, nn.Parameter]],
    options: Mapping[str, Any],
) -> OptimizerChange:
    """Put parameters into a group, each exactly once.

    With ``options`` they get a group of their own. Without, they join the optimizer's group if
    it has only one, so that a scheduler goes on unchanged, else a new group with its defaults.
    """
    present = {id(p) for group in optimizer.param_groups for p in group["params"]}
    new = [(name, p) for name, p in named if id(p) not in present]
    kind = type(optimizer).__name__
    if not new:
        return OptimizerChange(optimizer=kind, present=len(named))
    with_names = "param_names" in optimizer.param_groups[0]
    if len(optimizer.param_groups) == 1 and not options:
        index = 0
        optimizer.param_groups[0]["params"].extend(p for _, p in new)
        if with_names:
            optimizer.param_groups[0]["param_names"].extend(name for name, _ in new)
    else:
        index = len(optimizer.param_groups)
        has_schedule = any("initial_lr" in group for group in optimizer.param_groups)
        optimizer.add_param_group(
            {"params": list(new) if with_names else [p for _, p in new], **options}
        )
        group = optimizer.param_groups[index]
        if has_schedule:
            # A scheduler made later over all groups reads the rate that it starts from here.
            group.setdefault("initial_lr", group["lr"])
    return OptimizerChange(
        optimizer=kind,
        added=len(new),
        group=index,
        lr=float(optimizer.param_groups[index]["lr"]),
        present=len(named) - len(new),
    )
