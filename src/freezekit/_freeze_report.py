"""What freeze, unfreeze and train_only return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from freezekit._fold import fold_names
from freezekit._format import format_bytes, format_count, format_percent, plural, shorten
from freezekit._optimizers import OptimizerChange
from freezekit._report import Report
from freezekit._selection import PatternMatch, Selection
from freezekit._tables import Section

__all__ = ["Action", "FreezeReport"]

Action: TypeAlias = Literal["freeze", "unfreeze", "train_only", "load_freeze_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeReport(Report):
    """What a call changed, and what is trainable after it.

    Attributes:
        action: the function that was called.
        tensors: tensors that it froze, or made trainable; already so or not.
        numel: their elements.
        nbytes: their bytes.
        selection: what the patterns matched.
        changed: FQNs of the tensors whose ``requires_grad`` changed.
        held: FQNs of modules with running statistics that are newly held in eval.
        released: FQNs of such modules that got their mode back.
        cleared: FQNs of tensors whose ``.grad`` was cleared.
        skipped: ``(FQN, why)`` of matched tensors that cannot be made trainable.
        uninitialized: FQNs of matched lazy parameters; counts are lower bounds then.
        optimizer: what happened to the optimizer, if one was given.
        trainable: trainable parameters (elements) in the model now.
        frozen: frozen parameters (elements) in the model now.
    """

    action: Action
    tensors: int
    numel: int
    nbytes: int
    selection: Selection
    changed: tuple[str, ...] = field(repr=False)
    held: tuple[str, ...] = field(repr=False)
    released: tuple[str, ...] = field(repr=False)
    cleared: tuple[str, ...] = field(repr=False)
    skipped: tuple[tuple[str, str], ...] = field(repr=False)
    uninitialized: tuple[str, ...] = field(repr=False)
    optimizer: OptimizerChange | None
    trainable: int
    frozen: int

    @property
    def matches(self) -> tuple[PatternMatch, ...]:
        """Per pattern, what it matched."""
        return self.selection.matches

    @property
    def total(self) -> int:
        """All parameters (elements) of the model."""
        return self.trainable + self.frozen

    def _sections(self) -> tuple[Section, ...]:
        verb = {"freeze": "froze", "unfreeze": "unfroze", "train_only": "trains only"}
        chosen = self.selection
        head = (
            f"{chosen.model}: {verb.get(self.action, 'loaded')} "
            f"{plural(self.tensors, 'tensor')}, {format_count(self.numel)} parameters "
            f"({format_bytes(self.nbytes)}); {len(self.changed):,} changed"
        )
        table = chosen.match_table() if chosen.matches else None
        return (
            Section((head,), table),
            *chosen.detail_sections(),
            Section((*self._change_lines(), self._total_line())),
        )

    def _change_lines(self) -> list[str]:
        lines = []
        if self.held:
            lines.append(
                f"held in eval: {plural(len(self.held), 'module')} with running statistics "
                f"({shorten(fold_names(self.held))})"
            )
        if self.released:
            lines.append(
                f"released: {plural(len(self.released), 'module')} with running statistics "
                f"({shorten(fold_names(self.released))})"
            )
        if self.cleared:
            lines.append(f"gradients cleared: {plural(len(self.cleared), 'tensor')}")
        for fqn, why in self.skipped:
            lines.append(f"left frozen: {fqn}: {why}")
        if self.uninitialized:
            lines.append(
                f"uninitialised: {shorten(self.uninitialized)}; the counts are lower bounds"
            )
        if self.optimizer is not None:
            lines.append(_optimizer_line(self.optimizer))
        return lines

    def _total_line(self) -> str:
        share = format_percent(self.trainable, self.total)
        return (
            f"now trainable: {self.trainable:,} of {self.total:,} parameters ({share}); "
            f"frozen: {self.frozen:,}"
        )


def _optimizer_line(change: OptimizerChange) -> str:
    parts = []
    if change.removed:
        parts.append(
            f"{plural(change.removed, 'tensor')} left its groups, "
            f"{format_bytes(change.state_bytes)} of state dropped"
        )
    if change.added:
        rate = "" if change.lr is None else f" (lr {change.lr:g})"
        parts.append(f"{plural(change.added, 'tensor')} into group {change.group}{rate}")
    if change.present:
        parts.append(f"{plural(change.present, 'tensor')} in its groups already")
    return f"{change.optimizer}: {'; '.join(parts) or 'nothing to change'}"
