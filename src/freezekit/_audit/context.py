"""What every check looks at: the model's inventory, and what follows from it, computed once."""

from __future__ import annotations

from functools import cached_property

from torch import nn

from freezekit._inventory import Inventory, take_inventory

__all__ = ["AuditContext"]


class AuditContext:
    """One model at one moment; checks read it and change nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.inventory: Inventory = take_inventory(model)

    @cached_property
    def frozen_modules(self) -> tuple[int, ...]:
        """Indices of the modules in frozen parts of the model, each module once.

        A module without parameters belongs to the smallest part around it that has any.
        """
        modules = self.inventory.modules
        trainable_before = [0]
        for entry in self.inventory.entries:
            flag = self.inventory.parameters[entry.parameter].requires_grad
            trainable_before.append(trainable_before[-1] + flag)
        frozen = [False] * len(modules)
        for index, info in enumerate(modules):
            if info.last_entry > info.first_entry:
                trainable = trainable_before[info.last_entry] - trainable_before[info.first_entry]
                frozen[index] = trainable == 0
            elif info.parent >= 0:
                frozen[index] = frozen[info.parent]
        return tuple(i for i, info in enumerate(modules) if frozen[i] and info.repeats < 0)
