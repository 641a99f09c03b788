"""What every check looks at: the model's inventory, and what follows from it, computed once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from freezekit._audit.expectation import Expectation
from freezekit._audit.step.record import StepRecord
from freezekit._inventory import Inventory
from freezekit._modes import held_by
from freezekit._wrappers import is_class_of

__all__ = ["AuditContext", "Membership"]


class Membership(NamedTuple):
    """One place at which an optimizer holds a tensor."""

    optimizer: Optimizer
    group: int


@dataclass(frozen=True, eq=False)
class AuditContext:
    """One model at one moment; checks read it and change nothing.

    A check of your own is a function from this to findings:

    >>> from torch import nn
    >>> from freezekit import DEFAULT_CHECKS, Finding, audit
    >>> def no_bias(context):
    ...     '''MY001: a layer has a bias.'''
    ...     biases = [p.fqn for p in context.inventory.parameters if p.fqn.endswith("bias")]
    ...     if biases:
    ...         yield Finding(
    ...             code="MY001",
    ...             severity="note",
    ...             title="there are biases",
    ...             fqns=tuple(biases),
    ...             cause=f"{len(biases)} biases.",
    ...             mend="Build the layers with bias=False.",
    ...         )
    >>> audit(nn.Linear(2, 1), checks=(*DEFAULT_CHECKS, no_bias)).findings[0].fqns
    ('bias',)

    Attributes:
        model: the model; a check must not change or run it.
        inventory: records of all parameters, buffers and modules, in model order.
        optimizers: the optimizers that train it, if any were given.
        expected: what ``expect_trainable`` says, resolved; ``None`` if nothing was said.
        step: what was seen while a step ran; ``None`` in a static audit.
        inputs: what the model's forward gets, for checks that ask the memory estimator.
    """

    model: nn.Module
    inventory: Inventory
    optimizers: tuple[Optimizer, ...] = ()
    expected: Expectation | None = None
    step: StepRecord | None = None
    inputs: Any = None

    @cached_property
    def numbers_are_positions(self) -> bool:
        """Whether all numbered children are named by their positions, so that slices mean them."""
        modules = self.inventory.modules
        entries = self.inventory.entries
        for info in modules:
            for position, index in enumerate(info.numbered):
                if modules[index].raw.rpartition(".")[2] != str(position):
                    return False
            for position, index in enumerate(info.numbered_entries):
                if entries[index].raw.rpartition(".")[2] != str(position):
                    return False
        return True

    # What is trainable

    @cached_property
    def trainable_before(self) -> tuple[int, ...]:
        """How many of the first ``n`` named entries are trainable, for each ``n``."""
        counts = [0]
        for entry in self.inventory.entries:
            flag = self.inventory.parameters[entry.parameter].requires_grad
            counts.append(counts[-1] + flag)
        return tuple(counts)

    @cached_property
    def numel_before(self) -> tuple[int, ...]:
        """Elements of the first ``n`` named entries, for each ``n``; tied ones at their first."""
        counts = [0]
        parameters = self.inventory.parameters
        for entry in self.inventory.entries:
            info = parameters[entry.parameter]
            counts.append(counts[-1] + (info.numel if entry.fqn == info.fqn else 0))
        return tuple(counts)

    def trainable_entries(self, index: int) -> int:
        """How many named parameters in the subtree of ``modules[index]`` are trainable."""
        info = self.inventory.modules[index]
        return self.trainable_before[info.last_entry] - self.trainable_before[info.first_entry]

    def subtree_numel(self, index: int) -> int:
        """Elements in the subtree of ``modules[index]``."""
        info = self.inventory.modules[index]
        return self.numel_before[info.last_entry] - self.numel_before[info.first_entry]

    def own_entries(self, index: int) -> range:
        """Indices of the named entries that are ``modules[index]``'s own: no child's."""
        modules = self.inventory.modules
        info = modules[index]
        last = modules[index + 1].first_entry if index + 1 < info.end else info.last_entry
        return range(info.first_entry, last)

    @cached_property
    def total_numel(self) -> int:
        """Elements of all parameters, each memory once."""
        return sum(info.numel for info in self.inventory.parameters)

    @cached_property
    def frozen_modules(self) -> tuple[int, ...]:
        """Indices of the modules in frozen parts of the model, each module once.

        A module without parameters belongs to the smallest part around it that has any.
        """
        modules = self.inventory.modules
        frozen = [False] * len(modules)
        for index, info in enumerate(modules):
            if info.last_entry > info.first_entry:
                frozen[index] = self.trainable_entries(index) == 0
            elif info.parent >= 0:
                frozen[index] = frozen[info.parent]
        return tuple(i for i, info in enumerate(modules) if frozen[i] and info.repeats < 0)

    @cached_property
    def frozen_set(self) -> frozenset[int]:
        """The frozen modules, to look one up."""
        return frozenset(self.frozen_modules)

    @cached_property
    def in_training(self) -> bool:
        """Whether any module is in train mode, or would be at the next ``model.train()``."""
        return any(info.training for info in self.inventory.modules)

    def is_held(self, index: int) -> bool:
        """Whether :func:`freezekit.freeze` holds ``modules[index]`` in eval."""
        return held_by(self.inventory.module(index)) is not None

    # Looking modules up: a model has many modules, of few classes

    def modules_of(self, *names: str) -> list[int]:
        """Indices of the modules whose class, or a base of it, is called so; each module once."""
        found = [indices for kind, indices in self._by_class.items() if is_class_of(kind, names)]
        return sorted(index for indices in found for index in indices)

    def modules_with(self, matters: Callable[[str], object]) -> list[tuple[int, str]]:
        """Each module with an attribute of its own whose name matters, and that name."""
        found: list[tuple[int, str]] = []
        for names, indices in self._by_attributes.items():
            wanted = [name for name in names if matters(name)]
            if wanted:
                found += [(index, name) for index in indices for name in wanted]
        return sorted(found, key=lambda place: place[0])

    @cached_property
    def _by_class(self) -> dict[type, list[int]]:
        found: dict[type, list[int]] = defaultdict(list)
        for index, info in enumerate(self.inventory.modules):
            if info.repeats < 0:
                found[type(self.inventory.module(index))].append(index)
        return found

    @cached_property
    def _by_attributes(self) -> dict[tuple[str, ...], list[int]]:
        found: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for indices in self._by_class.values():
            for index in indices:
                found[tuple(vars(self.inventory.module(index)))].append(index)
        return found

    # The optimizers

    @cached_property
    def memberships(self) -> dict[int, list[Membership]]:
        """By the id of a tensor, in which groups of which optimizers it is."""
        found: dict[int, list[Membership]] = {}
        for optimizer in self.optimizers:
            for index, group in enumerate(optimizer.param_groups):
                for tensor in group["params"]:
                    found.setdefault(id(tensor), []).append(Membership(optimizer, index))
        return found

    @cached_property
    def parameter_of(self) -> dict[int, int]:
        """By the id of a tensor, the index of its parameter."""
        inventory = self.inventory
        return {
            id(tensor): index
            for index in range(len(inventory.parameters))
            for tensor in inventory.tensors(index)
        }

    def memberships_of(self, parameter: int) -> list[Membership]:
        """Where the optimizers hold ``parameters[parameter]``, under any of its tensors."""
        tensors: list[nn.Parameter] = self.inventory.tensors(parameter)
        return [place for tensor in tensors for place in self.memberships.get(id(tensor), ())]

    def tensors_in_groups(self) -> list[torch.Tensor]:
        """All tensors that the optimizers hold, as often as they do."""
        return [
            tensor
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for tensor in group["params"]
        ]
