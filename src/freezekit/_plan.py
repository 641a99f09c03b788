"""Plan what changes, check it, then change it.

All checks and warnings come before the first change, so that an error, also a warning turned
into one, leaves the model, its gradients and the optimizer as they were.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from freezekit._format import plural, shorten
from freezekit._freeze_report import Action, FreezeReport
from freezekit._inventory import Inventory, take_inventory
from freezekit._modes import held_by, hold, release
from freezekit._optimizers import (
    OptimizerChange,
    add_to_groups,
    check_group,
    check_optimizer,
    drop_from_groups,
)
from freezekit._patterns import Patterns
from freezekit._selection import PartialTie, Selected, resolve
from freezekit._wrappers import has_compiled_code, reshard
from freezekit.errors import (
    CompiledModelWarning,
    NothingTrainableWarning,
    NumberPrefixWarning,
    PartialTieWarning,
    UninitializedParameterWarning,
    UnsupportedModelError,
    UntrainableParameterError,
)

__all__ = ["NormStats", "Plan", "inventory_to_change"]

NormStats: TypeAlias = Literal["hold", "keep"]

# Actions whose report counts what is frozen; the others count what is made trainable.
_FREEZING = ("freeze", "load_freeze_state")


def inventory_to_change(model: nn.Module) -> Inventory:
    """An inventory of the tensors that stay: flags set on gathered ones would be lost."""
    inventory = take_inventory(model)  # refuses what is no model
    return take_inventory(model) if reshard(model) else inventory


@dataclass(slots=True)
class Plan:
    """What is going to change; indices are those of the inventory."""

    inventory: Inventory
    selected: Selected
    norm_stats: NormStats
    optimizer: Optimizer | None
    group_options: Mapping[str, Any]
    freeze: list[int] = field(default_factory=list)
    thaw: list[int] = field(default_factory=list)
    hold: list[int] = field(default_factory=list)
    release: list[int] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    temporary: bool = False

    @classmethod
    def start(
        cls,
        model: nn.Module,
        patterns: Patterns,
        exclude: Patterns,
        norm_stats: NormStats,
        optimizer: Optimizer | None,
        group_options: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Check the arguments and resolve the patterns; nothing is planned yet."""
        if norm_stats not in ("hold", "keep"):
            raise ValueError(f"norm_stats: expected 'hold' or 'keep', got {norm_stats!r}")
        check_optimizer(optimizer, group_options or {})
        inventory = inventory_to_change(model)
        selected = resolve(inventory, patterns, exclude)
        return cls(inventory, selected, norm_stats, optimizer, group_options or {})

    @classmethod
    def of_flags(cls, inventory: Inventory, flags: Mapping[int, bool]) -> Plan:
        """A plan that gives every parameter its flag, without patterns."""
        frozen = [index for index, trainable in flags.items() if not trainable]
        selected = Selected(tuple(frozen))
        thaw = [index for index, trainable in flags.items() if trainable]
        return cls(inventory, selected, "hold", None, {}, freeze=frozen, thaw=thaw)

    # Parameters

    def trainable_part(self, indices: Iterable[int]) -> list[int]:
        """Those that can require a gradient; the others are noted as skipped.

        Raises:
            UntrainableParameterError: a pattern matched none that can.
        """
        infos = self.inventory.parameters
        entries = self.inventory.entries
        for match in self.selected.matches:
            covered = {entries[i].parameter for i in match.entries}
            if covered and all(infos[i].untrainable for i in covered):
                raise UntrainableParameterError(
                    [(infos[i].fqn, infos[i].untrainable) for i in sorted(covered)]
                )
        indices = list(indices)
        self.skipped = [
            (infos[i].fqn, infos[i].untrainable) for i in indices if infos[i].untrainable
        ]
        return [i for i in indices if not infos[i].untrainable]

    # Modules with running statistics

    def plan_holds(self, *, everywhere: bool = False) -> None:
        """Hold what is frozen by this plan and keeps running statistics."""
        if self.norm_stats == "keep":
            return
        frozen = set(self.freeze)
        after = self._flags_after()
        for index in self._stats_modules():
            own = self.inventory.subtree_parameters(index)
            if any(after[i] for i in own) or index in self.selected.excluded_modules:
                continue
            covered = index in self.selected.modules
            if everywhere:
                wanted = bool(own) or not covered
            else:
                around = own or self.inventory.enclosing_parameters(index)
                wanted = covered or (
                    not around.isdisjoint(frozen) and not any(after[i] for i in around)
                )
            if wanted and held_by(self.inventory.module(index)) is None:
                self.hold.append(index)

    def plan_releases(self, *, everywhere: bool = False) -> None:
        """Release what is named, or has parameters that learn now, or nothing frozen around.

        With ``everywhere`` what is not named is frozen, whatever is around it.
        """
        after = self._flags_after()
        for index in self._stats_modules():
            if held_by(self.inventory.module(index)) is None:
                continue
            own = self.inventory.subtree_parameters(index)
            if own:
                free = any(after[i] for i in own)
            else:
                around = self.inventory.enclosing_parameters(index)
                free = index in self.selected.modules or (
                    not everywhere and all(after[i] for i in around)
                )
            if free:
                self.release.append(index)

    def _stats_modules(self) -> list[int]:
        return [
            index
            for index, info in enumerate(self.inventory.modules)
            if info.has_running_stats and info.repeats < 0
        ]

    def _flags_after(self) -> list[bool]:
        after = [info.requires_grad for info in self.inventory.parameters]
        for index in self.freeze:
            after[index] = False
        for index in self.thaw:
            after[index] = True
        return after

    # Warnings, before anything changes

    def check(self) -> None:
        """Refuse what could fail half-way."""
        for index in self.freeze:
            for tensor in self.inventory.tensors(index):
                fqn = self.inventory.parameters[index].fqn
                if tensor.requires_grad and not tensor.is_leaf:
                    reason = f"the parameter {fqn!r} is computed from other tensors (not a leaf)"
                    raise UnsupportedModelError(f"{reason}: freeze what it is computed from", fqn)
                if self.temporary and tensor.requires_grad and _is_inference(tensor):
                    reason = f"the parameter {fqn!r} was made under torch.inference_mode()"
                    raise UnsupportedModelError(
                        f"{reason}: it could not be made trainable again", fqn
                    )
        if self.optimizer is not None:
            joining = (t for i in self.thaw for t in self.inventory.tensors(i))
            check_group(self.optimizer, joining, self.group_options)

    def warn(self, action: Action, stacklevel: int) -> None:
        """Give all warnings about this plan."""
        for category, message in self._warnings(action):
            warnings.warn(message, category, stacklevel=stacklevel + 1)

    def _warnings(self, action: Action) -> Iterable[tuple[type[Warning], str]]:
        infos = self.inventory.parameters
        after = self._flags_after()
        changes = [i for i, info in enumerate(infos) if after[i] != info.requires_grad]
        for pattern, match in zip(self.selected.patterns, self.selected.matches, strict=True):
            if match.number_prefix:
                yield NumberPrefixWarning, f"pattern {pattern.text!r} {match.number_prefix}"
        for excluded in (False, True):
            ties = [tie for tie in self.selected.partial_ties if tie.excluded is excluded]
            if ties:
                yield PartialTieWarning, _tie_message(ties, action)
        lazy = [
            infos[i].fqn
            for i in self.freeze
            if infos[i].layout == "lazy" and infos[i].requires_grad
        ]
        if lazy and action != "load_freeze_state":
            yield (
                UninitializedParameterWarning,
                f"{shorten(lazy)}: not initialised yet, and frozen as it will be initialised; "
                "run one forward, or load the weights, before freezing",
            )
        if changes and not self.temporary and has_compiled_code(self.inventory.module(0)):
            yield (
                CompiledModelWarning,
                f"requires_grad of {plural(len(changes), 'tensor')} changes in a model that "
                "torch.compile has compiled already: it should be compiled again at its next call; "
                "if what changed does not follow, call torch._dynamo.reset()",
            )
        meant = self.temporary or self.selected.is_everything
        if action == "freeze" and changes and not any(after) and not meant:
            swallowed = {self.inventory.parameters[i].fqn for i in changes}
            by = [
                match.pattern
                for match in self.selected.describe(self.inventory).matches
                if not swallowed.isdisjoint(match.parameters)
            ]
            yield (
                NothingTrainableWarning,
                f"nothing in {self.inventory.modules[0].type_name} is trainable after this: "
                f"{shorten(map(repr, by))} took the last {plural(len(changes), 'tensor')}. "
                "Exclude what is to learn, or write '*' if everything is meant",
            )

    # Carrying it out

    def carry_out(self, action: Action, stacklevel: int = 2) -> FreezeReport:
        """Warn, change the model and the optimizer, and report."""
        self.check()
        self.warn(action, stacklevel + 1)
        # First what the user's own code may refuse: a mode, a group.
        with ExitStack() as undo:
            for index in self.hold:
                hold(self.inventory.module(index))
                undo.callback(release, self.inventory.module(index))
            change = self._apply_to_optimizer()
            undo.pop_all()
        cleared = self._apply()
        return self._report(action, cleared, change)

    def _apply(self) -> list[int]:
        cleared = []
        for index in self.freeze:
            for tensor in self.inventory.tensors(index):
                # The attribute, not the method: it works on uninitialised parameters too.
                if tensor.requires_grad:
                    tensor.requires_grad = False
                if tensor.grad is not None:
                    tensor.grad = None
                    cleared.append(index)
        for index in self.thaw:
            for tensor in self.inventory.tensors(index):
                tensor.requires_grad = True
        for index in self.release:
            release(self.inventory.module(index))
        return sorted(set(cleared))

    def _apply_to_optimizer(self) -> OptimizerChange | None:
        if self.optimizer is None:
            return None
        infos = self.inventory.parameters
        # The inventory was taken before the change.
        thawed = {
            id(t)
            for i in self.thaw
            if not infos[i].requires_grad
            for t in self.inventory.tensors(i)
        }
        added = add_to_groups(
            self.optimizer,
            [(infos[i].fqn, t) for i in self.thaw for t in self.inventory.tensors(i)],
            self.group_options,
            thawed,
        )
        # What comes in may go to a group that is empty: before another one is emptied.
        removed, state_bytes = drop_from_groups(
            self.optimizer, (t for i in self.freeze for t in self.inventory.tensors(i))
        )
        return added._replace(removed=removed, state_bytes=state_bytes)

    def _report(
        self, action: Action, cleared: list[int], change: OptimizerChange | None
    ) -> FreezeReport:
        infos = self.inventory.parameters
        # Read afresh: the report tells what the model is, not what was asked of it.
        trains = [
            any(t.requires_grad for t in self.inventory.tensors(i)) for i in range(len(infos))
        ]
        modules = self.inventory.modules
        done = [infos[i] for i in (self.freeze if action in _FREEZING else self.thaw)]
        return FreezeReport(
            action=action,
            tensors=len(done),
            numel=sum(info.numel for info in done),
            nbytes=sum(info.nbytes for info in done),
            selection=self.selected.describe(self.inventory),
            changed=tuple(
                info.fqn
                for info, now in zip(infos, trains, strict=True)
                if now != info.requires_grad
            ),
            held=tuple(modules[i].fqn for i in self.hold),
            released=tuple(modules[i].fqn for i in self.release),
            cleared=tuple(infos[i].fqn for i in cleared),
            skipped=tuple(self.skipped),
            uninitialized=tuple(
                infos[i].fqn
                for i in sorted({*self.selected.parameters, *self.freeze, *self.thaw})
                if infos[i].layout == "lazy"
            ),
            optimizer=change,
            trainable=sum(info.numel for info, now in zip(infos, trains, strict=True) if now),
            frozen=sum(info.numel for info, now in zip(infos, trains, strict=True) if not now),
        )


def _is_inference(tensor: torch.Tensor) -> bool:
    # An uninitialised parameter may not be asked.
    return not is_lazy(tensor) and tensor.is_inference()


def _tie_message(ties: Sequence[PartialTie], action: Action) -> str:
    """One sentence for all tied tensors of which only some names were written."""
    first, more = ties[0], len(ties) - 1
    one, other = shorten(first.written), shorten(first.unwritten)
    if first.excluded:
        outcome = "frozen" if action == "train_only" else "left as it is"
        text = f"{one} is the same tensor as {other}, which is excluded: it is {outcome}"
    else:
        outcome = "is frozen" if action == "freeze" else "becomes trainable"
        text = f"{other} is the same tensor as {one}, and {outcome} with it"
    return f"{text}; likewise {plural(more, 'more tied tensor')}" if more else text
