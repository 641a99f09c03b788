"""Which parameters patterns select in a model: matching, and the strictness about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from freezekit._collector import collector_paused
from freezekit._format import format_bytes, format_count, plural
from freezekit._inventory import Inventory, take_inventory
from freezekit._matching import Match, Matcher
from freezekit._patterns import ParsedPattern, Patterns, parse_patterns
from freezekit._report import Report
from freezekit._tables import Column, Section, Table
from freezekit.errors import UnmatchedPatternError

__all__ = [
    "BlockCount",
    "PartialTie",
    "PatternMatch",
    "Selected",
    "Selection",
    "resolve",
    "select",
]


# -- what select() returns ---------------------------------------------------------------------


# Patterns that a report lists.
_SHOWN = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternMatch:
    """What one pattern matched.

    Attributes:
        pattern: the pattern, in text.
        parameters: FQNs of the parameter tensors, in model order.
        numel: their elements.
    """

    pattern: str
    parameters: tuple[str, ...] = field(repr=False)
    numel: int


class BlockCount(NamedTuple):
    """How many blocks of a numbered container are selected, wholly or in part."""

    container: str
    whole: int
    partly: int
    total: int


class PartialTie(NamedTuple):
    """One tensor of which some names were written, and others not.

    Attributes:
        written: its names that the patterns cover.
        unwritten: its names that they do not (with ``excluded``: that ``exclude`` covers).
        excluded: whether it was left out, since ``exclude`` covers one of its names.
    """

    written: tuple[str, ...]
    unwritten: tuple[str, ...]
    excluded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection(Report):
    """What patterns would select: the dry run of ``freeze``.

    Attributes:
        model: the model's class.
        matches: per pattern, what it matched.
        excluded: per exclude pattern, what it matched.
        parameters: FQNs of the selected tensors, in model order.
        numel: their elements.
        nbytes: their bytes.
        total_tensors: parameter tensors in the model.
        total_numel: elements in the model.
        blocks: per numbered container (``encoder.layer``), how many blocks are selected.
        partial_ties: tied tensors of which only some names were written.
    """

    model: str
    matches: tuple[PatternMatch, ...] = field(repr=False)
    excluded: tuple[PatternMatch, ...] = field(repr=False)
    parameters: tuple[str, ...] = field(repr=False)
    numel: int
    nbytes: int
    total_tensors: int
    total_numel: int
    blocks: tuple[BlockCount, ...] = field(repr=False)
    partial_ties: tuple[PartialTie, ...] = field(repr=False)

    def _sections(self) -> tuple[Section, ...]:
        head = (
            f"{self.model}: {len(self.parameters):,} of {plural(self.total_tensors, 'tensor')} "
            f"selected, {format_count(self.numel)} of {format_count(self.total_numel)} "
            f"parameters, {format_bytes(self.nbytes)}"
        )
        return (Section((head,), self.match_table()), *self.detail_sections())

    def match_table(self) -> Table:
        """One row per pattern, up to some number: tensors and parameters."""
        rows = [(match.pattern, match) for match in self.matches]
        rows += [(f"not {match.pattern}", match) for match in self.excluded]
        # Names from a file, say: the report's data has them all.
        shown, rest = (rows[:_SHOWN], rows[_SHOWN:]) if len(rows) > _SHOWN + 1 else (rows, [])
        lines = [(name, f"{len(match.parameters):,}", f"{match.numel:,}") for name, match in shown]
        if rest:
            lines.append((f"... and {len(rest):,} more", "", ""))
        return Table(
            (
                Column("pattern", shrink=1),
                Column("tensors", "right"),
                Column("parameters", "right"),
            ),
            tuple(lines),
            ("selected", f"{len(self.parameters):,}", f"{self.numel:,}"),
        )

    def detail_sections(self) -> tuple[Section, ...]:
        """Blocks and ties, where there are any."""
        lines = [
            f"{count.container or 'the model'}: {count.whole} of {count.total} blocks"
            + (f", {count.partly} more in part" if count.partly else "")
            for count in self.blocks
        ]
        for tie in self.partial_ties:
            names = " = ".join((*tie.written, *tie.unwritten))
            lines.append(f"tied: {names}" + (" (excluded)" if tie.excluded else ""))
        return (Section(tuple(lines)),) if lines else ()


def select(model: nn.Module, patterns: Patterns = "*", *, exclude: Patterns = ()) -> Selection:
    """Tell what ``patterns`` match in ``model``; nothing is changed.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> select(model, "*.bias", exclude="2").parameters
    ('0.bias',)

    Args:
        model: any ``nn.Module``; names are looked through DDP, ``torch.compile``, FSDP,
            checkpoint wrappers and peft.
        patterns: one pattern or a collection of them (their union). A dotted name takes a
            module's whole subtree or one parameter and never ``layer.10`` for ``layer.1``;
            ``layer[-2:]`` indexes a container's numbered children; ``*`` and ``?`` cross dots;
            ``re:...`` is matched in full against parameter FQNs; ``type:LayerNorm`` or a class
            takes modules of it; ``callable(fqn, parameter)`` takes what it says.
        exclude: patterns of what to leave out of it.

    Raises:
        PatternError: a pattern is malformed or of a wrong type.
        UnmatchedPatternError: patterns that match nothing, all of them at once, each with the
            nearest names that exist; or ``exclude`` leaves nothing.
        UnsupportedModelError: ``model`` is not a module that freezekit can work on.
    """
    with collector_paused():
        inventory = take_inventory(model)
        return resolve(inventory, patterns, exclude).describe(inventory)


# -- resolving ---------------------------------------------------------------------------------


class Selected(NamedTuple):
    """Patterns resolved against an inventory.

    Attributes:
        parameters: indices of the selected parameters, in model order.
        modules: indices of the modules that the patterns name (with their subtrees).
        excluded_modules: likewise of those that the exclude patterns name.
        patterns: the parsed patterns.
        matches: what each of them covers.
        excludes: the parsed exclude patterns.
        exclude_matches: what each of those covers.
        partial_ties: tensors of which only some names were written.
    """

    parameters: tuple[int, ...]
    modules: frozenset[int] = frozenset()
    excluded_modules: frozenset[int] = frozenset()
    patterns: tuple[ParsedPattern, ...] = ()
    matches: tuple[Match, ...] = ()
    excludes: tuple[ParsedPattern, ...] = ()
    exclude_matches: tuple[Match, ...] = ()
    partial_ties: tuple[PartialTie, ...] = ()

    @property
    def is_everything(self) -> bool:
        """Whether the user plainly said "everything"."""
        return any(pattern.text == "*" for pattern in self.patterns) and not self.excludes

    def describe(self, inventory: Inventory) -> Selection:
        """The selection as a report."""
        chosen = [inventory.parameters[i] for i in self.parameters]
        return Selection(
            model=inventory.modules[0].type_name,
            matches=_describe_matches(inventory, self.patterns, self.matches),
            excluded=_describe_matches(inventory, self.excludes, self.exclude_matches),
            parameters=tuple(info.fqn for info in chosen),
            numel=sum(info.numel for info in chosen),
            nbytes=sum(info.nbytes for info in chosen),
            total_tensors=len(inventory.parameters),
            total_numel=sum(info.numel for info in inventory.parameters),
            blocks=_count_blocks(inventory, set(self.parameters)),
            partial_ties=self.partial_ties,
        )


def resolve(inventory: Inventory, patterns: Patterns, exclude: Patterns = ()) -> Selected:
    """Match patterns against an inventory; see :func:`select` for what is raised."""
    parsed = parse_patterns(patterns)
    excludes = parse_patterns(exclude, allow_empty=True)
    matcher = Matcher(inventory)
    matches = matcher.match_all(parsed, "pattern")
    exclude_matches = matcher.match_all(excludes, "exclude pattern")
    wanted = set().union(*(match.entries for match in matches))
    barred = set().union(*(match.entries for match in exclude_matches))
    entries = inventory.entries
    barred_parameters = {entries[i].parameter for i in barred}
    chosen = {entries[i].parameter for i in wanted} - barred_parameters
    excluded_modules = set[int]().union(*(match.modules for match in exclude_matches))
    modules = set[int]().union(*(match.modules for match in matches)) - excluded_modules
    # A module that is used twice is covered under either name.
    for covered in (excluded_modules, modules):
        covered |= {i for i in (inventory.modules[i].repeats for i in covered) if i >= 0}
    held = (i for i in modules if inventory.modules[i].has_running_stats)
    if not chosen and all(inventory.subtree_parameters(i) for i in held):
        hints = ["all that it matches is excluded"] * len(parsed)
        raise UnmatchedPatternError([p.text for p in parsed], hints, [()] * len(parsed))
    ties: tuple[PartialTie, ...] = ()
    if len(entries) > len(inventory.parameters):
        ties = _partial_ties(inventory, wanted, barred)
    return Selected(
        parameters=tuple(sorted(chosen)),
        modules=frozenset(modules),
        excluded_modules=frozenset(excluded_modules),
        patterns=parsed,
        matches=matches,
        excludes=excludes,
        exclude_matches=exclude_matches,
        partial_ties=ties,
    )


def _partial_ties(
    inventory: Inventory, wanted: set[int], barred: set[int]
) -> tuple[PartialTie, ...]:
    names: dict[int, list[int]] = {}
    for index, entry in enumerate(inventory.entries):
        if inventory.parameters[entry.parameter].aliases:
            names.setdefault(entry.parameter, []).append(index)
    ties = []
    for indices in names.values():
        written = [i for i in indices if i in wanted]
        excluded = [i for i in indices if i in barred]
        if excluded:
            # Wanted under one name, excluded under another: the other name decides.
            kept, other = [i for i in written if i not in barred], excluded
        else:
            kept, other = written, [i for i in indices if i not in wanted]
        if kept and other:
            fqns = [
                tuple(dict.fromkeys(inventory.entries[i].fqn for i in group))
                for group in (kept, other)
            ]
            ties.append(PartialTie(written=fqns[0], unwritten=fqns[1], excluded=bool(excluded)))
    return tuple(ties)


# -- describing --------------------------------------------------------------------------------


def _describe_matches(
    inventory: Inventory, patterns: tuple[ParsedPattern, ...], matches: tuple[Match, ...]
) -> tuple[PatternMatch, ...]:
    described = []
    for pattern, match in zip(patterns, matches, strict=True):
        indices = sorted({inventory.entries[i].parameter for i in match.entries})
        infos = [inventory.parameters[i] for i in indices]
        described.append(
            PatternMatch(
                pattern=pattern.text,
                parameters=tuple(info.fqn for info in infos),
                numel=sum(info.numel for info in infos),
            )
        )
    return tuple(described)


def _count_blocks(inventory: Inventory, chosen: set[int]) -> tuple[BlockCount, ...]:
    """Counts for each outermost container of numbered blocks of which some are selected."""
    counts = []
    index = 0
    while index < len(inventory.modules):
        info = inventory.modules[index]
        blocks = [found for i in info.numbered if (found := inventory.subtree_parameters(i))]
        if len(blocks) < 2:
            index += 1
            continue
        whole = sum(block <= chosen for block in blocks)
        partly = sum(not block <= chosen and not block.isdisjoint(chosen) for block in blocks)
        if whole or partly:
            counts.append(
                BlockCount(container=info.fqn, whole=whole, partly=partly, total=len(blocks))
            )
        # Blocks inside blocks are alike; but a model that is itself a Sequential says little.
        index = info.end if info.fqn else index + 1
    return tuple(counts)
