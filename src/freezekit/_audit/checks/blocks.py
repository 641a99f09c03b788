"""The check that sibling blocks are alike in what is trainable, or differ in a way one means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from freezekit._audit.context import AuditContext
from freezekit._audit.findings import Finding
from freezekit._audit.mends import as_argument
from freezekit._fold import is_number, slice_text, split_runs
from freezekit._format import shorten

__all__ = ["blocks_differ", "one_block_differs"]

# More stacks that differ, one inside the other, are one mistake.
_MOST = 10


class _Block(NamedTuple):
    """A numbered block, and how much of it is trainable."""

    number: int
    at: int
    trainable: int
    total: int

    @property
    def is_frozen(self) -> bool:
        return self.trainable == 0

    @property
    def is_mixed(self) -> bool:
        return 0 < self.trainable < self.total


class _Parts(NamedTuple):
    """What is trainable in a block that learns, and what is frozen, by names below it."""

    block: _Block
    trainable: frozenset[str]
    frozen: frozenset[str]


def blocks_differ(context: AuditContext) -> Iterator[Finding]:
    """FK103: sibling blocks differ in what is trainable, in a way that looks like an accident.

    A name that was matched as a prefix takes layer 10 and 11 with layer 1; an entry of a list of
    names matches in some blocks only. Frozen first blocks, trainable last ones, a middle range and
    every n-th block are ways of fine-tuning, and are not reported; neither is anything that
    ``expect_trainable`` confirms.
    """
    return _among_stacks(
        context,
        lambda container, blocks: (
            _prefix_taken(context, container, blocks) or _odd_parts(context, container, blocks)
        ),
    )


def one_block_differs(context: AuditContext) -> Iterator[Finding]:
    """FK108: one block, in the midst of others, is not like them.

    A list of layers, or a loop over them, missed it. If it is meant, ``expect_trainable`` says so.
    """
    return _among_stacks(context, _one_inside)


def _among_stacks(
    context: AuditContext, look: Callable[[str, list[_Block]], Finding | None]
) -> Iterator[Finding]:
    """What is found in containers of blocks of one kind, of which not all are trainable.

    Stacks inside of one that has a finding are not looked at, and a few findings say enough.
    """
    if context.expected is not None:
        return
    inventory = context.inventory
    skip_until = 0
    count = 0
    for index, info in enumerate(inventory.modules):
        if index < skip_until or info.repeats >= 0 or len(info.numbered) < 3:
            continue
        if context.trainable_entries(index) in (0, info.last_entry - info.first_entry):
            skip_until = info.end
            continue
        blocks = _blocks(context, info.numbered)
        if not _are_a_stack(context, blocks):
            continue
        finding = look(info.fqn, blocks)
        if finding is not None:
            yield finding
            skip_until = info.end
            count += 1
        if count == _MOST:
            return


def _blocks(context: AuditContext, numbered: Sequence[int]) -> list[_Block]:
    found = []
    for index in numbered:
        info = context.inventory.modules[index]
        name = info.raw.rpartition(".")[2]
        total = info.last_entry - info.first_entry
        if total and is_number(name):
            found.append(_Block(int(name), index, context.trainable_entries(index), total))
    return found


def _are_a_stack(context: AuditContext, blocks: Sequence[_Block]) -> bool:
    """Whether they are blocks of one kind: most have the class that is commonest."""
    modules = context.inventory.modules
    # The layers of an MLP are no stack of blocks.
    if len(blocks) < (3 if any(modules[block.at].children for block in blocks) else 8):
        return False
    kinds = Counter(modules[block.at].type_name for block in blocks)
    kind, count = kinds.most_common(1)[0]
    if kind == "Sequential":  # stages of a CNN: of one class, and of different sizes
        return len({block.total for block in blocks}) == 1
    return 2 * count > len(blocks)


def _one_inside(container: str, blocks: list[_Block]) -> Finding | None:
    fewer = _parts(blocks)[0]
    numbers = [block.number for block in blocks]
    if len(blocks) < 4 or len(fewer.numbers) != 1 or _takes_prefix(blocks):
        return None
    if fewer.numbers[0] in (min(numbers), max(numbers)):
        return None
    return _not_like_the_others(container, fewer, len(blocks))


class _Odd(NamedTuple):
    """The blocks that are frozen, or those that learn: whichever looks like the accident."""

    numbers: list[int]
    frozen: bool

    @property
    def state(self) -> str:
        return "frozen" if self.frozen else "trainable"

    @property
    def fix(self) -> str:
        return "unfreeze" if self.frozen else "freeze"


def _parts(blocks: list[_Block]) -> list[_Odd]:
    """The frozen blocks, and those that learn; the fewer first."""
    parts = [
        _Odd([block.number for block in blocks if block.is_frozen is frozen], frozen)
        for frozen in (True, False)
    ]
    return sorted(parts, key=lambda part: len(part.numbers))


def _takes_prefix(blocks: list[_Block]) -> tuple[_Odd, list[int]] | None:
    """The frozen blocks, or those that learn, if digits taken as prefixes explain them."""
    numbers = [block.number for block in blocks]
    parts = _parts(blocks)
    if not parts[0].numbers or max(numbers) < 10:
        return None
    for part in parts:
        prefixes = _prefixes(part.numbers, numbers)
        if prefixes:
            return part, prefixes
    return None


def _prefix_taken(context: AuditContext, container: str, blocks: list[_Block]) -> Finding | None:
    found = _takes_prefix(blocks)
    return None if found is None else _taken_by_prefix(context, container, *found, len(blocks))


def _taken_by_prefix(
    context: AuditContext, container: str, part: _Odd, prefixes: list[int], total: int
) -> Finding:
    longer = [number for number in part.numbers if number not in prefixes]
    names = [_name(container, number) for number in longer]
    return Finding(
        code="FK103",
        severity="warning",
        title="blocks differ: a number was taken for a prefix",
        fqns=tuple(names),
        cause=f"In {container or 'the model'}, {len(part.numbers)} of {total} blocks are "
        f"{part.state}: {_listed(part.numbers)}; {_listed(longer)} begin with the digits of "
        f"{_listed(prefixes)}.",
        mend=f"If only {_listed(prefixes)} was meant: freezekit.{part.fix}(model, "
        f"{as_argument(context, names)}).",
    )


def _not_like_the_others(container: str, part: _Odd, total: int) -> Finding:
    name = _name(container, part.numbers[0])
    rest = "trainable" if part.frozen else "frozen"
    return Finding(
        code="FK108",
        severity="warning",
        title="one block is not like the others",
        fqns=(name,),
        cause=f"{name} is {part.state}, and the {total - 1} other blocks of "
        f"{container or 'the model'} are {rest}.",
        mend=f'If it was missed: freezekit.{part.fix}(model, "{name}"); if it is meant, say so: '
        f"audit(model, expect_trainable=...).",
    )


def _prefixes(part: list[int], numbers: list[int]) -> list[int]:
    """The numbers that, taken as prefixes, give just this part; none if it is a plain range."""
    chosen = set(part)
    shortest = [n for n in part if not any(m in chosen for m in _shorter(n))]
    kept = set(shortest)
    closure = [n for n in numbers if n in kept or any(m in kept for m in _shorter(n))]
    if len(closure) != len(part) or set(closure) != chosen:
        return []
    # Blocks 1, 10 and 11; a range that goes on from 9 to 10 is no accident.
    apart = any(kept.isdisjoint(run) for run in _runs(part))
    return shortest if apart else []


def _shorter(number: int) -> Iterator[int]:
    """The numbers that begin this one: 1 and 10 of 103."""
    while number >= 10:
        number //= 10
        yield number


def _runs(numbers: list[int]) -> list[list[int]]:
    """The numbers in runs of neighbours."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _odd_parts(context: AuditContext, container: str, blocks: list[_Block]) -> Finding | None:
    """Blocks that learn, wholly or in part, and do not have the same parts trainable."""
    learning = [block for block in blocks if block.trainable]
    if len(learning) < 3 or not any(block.is_mixed for block in learning):
        return None
    named = [_named(context, block) for block in learning]
    # Only parts that the blocks share: the first block may have one more.
    counts = Counter(name for parts in named for name in parts.trainable)
    usual = frozenset(name for name, count in counts.items() if 2 * count > len(named))
    frozen_somewhere = frozenset[str]().union(*(parts.frozen for parts in named))
    odd = []
    for parts in named:
        missing = {name for name in usual - parts.trainable if _could_have(context, parts, name)}
        extra = (parts.trainable - usual) & frozen_somewhere
        if missing or extra:
            odd.append((parts, sorted(missing), sorted(extra)))
    if not odd:
        return None
    names = [
        f"{_name(container, parts.block.number)}.{part}"
        for parts, missing, extra in odd
        for part in (*missing, *extra)
    ]
    alike = len(named) - len(odd)
    differing = dict.fromkeys(part for _, missing, extra in odd for part in (*missing, *extra))
    lacking = [name for parts, missing, _ in odd for name in missing if name in parts.frozen]
    return Finding(
        code="FK103",
        severity="warning",
        title="blocks differ in the parts that are trainable",
        fqns=tuple(names),
        cause=f"{alike} of {len(named)} blocks that learn in {container or 'the model'} have "
        f"the same parts trainable; {_listed([parts.block.number for parts, _, _ in odd])} "
        f"differ in {shorten(differing)}.",
        mend="Make them alike: "
        + (
            f"freezekit.unfreeze(model, {as_argument(context, _frozen_names(container, odd))})."
            if lacking
            else f"freezekit.freeze(model, {as_argument(context, _extra_names(container, odd))})."
            if any(extra for _, _, extra in odd)
            else "let the adapters' target_modules match in every block."
        ),
    )


def _named(context: AuditContext, block: _Block) -> _Parts:
    inventory = context.inventory
    info = inventory.modules[block.at]
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for entry in inventory.entries[info.first_entry : info.last_entry]:
        flag = inventory.parameters[entry.parameter].requires_grad
        names[flag].add(entry.fqn[len(info.fqn) + 1 :])
    return _Parts(block, frozenset(names[True]), frozenset(names[False]))


def _frozen_names(container: str, odd: list[tuple[_Parts, list[str], list[str]]]) -> list[str]:
    return [
        f"{_name(container, parts.block.number)}.{name}"
        for parts, missing, _ in odd
        for name in missing
        if name in parts.frozen
    ]


def _extra_names(container: str, odd: list[tuple[_Parts, list[str], list[str]]]) -> list[str]:
    return [
        f"{_name(container, parts.block.number)}.{name}"
        for parts, _, extra in odd
        for name in extra
    ]


def _could_have(context: AuditContext, parts: _Parts, name: str) -> bool:
    """Whether the block has this part frozen, or the layer that others have an adapter around."""
    if name in parts.frozen:
        return True
    inventory = context.inventory
    info = inventory.modules[parts.block.at]
    layer = _adapted_layer(name)
    return bool(layer) and any(
        module.fqn == f"{info.fqn}.{layer}"
        for module in inventory.modules[parts.block.at : info.end]
    )


def _adapted_layer(name: str) -> str:
    """The adapted layer of an adapter's parameter, such as ``q`` of ``q.lora_A.default.weight``."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.startswith(("lora_", "ia3_", "vera_", "hada_", "adapter")):
            return ".".join(parts[:position])
    return ""


def _name(container: str, number: int) -> str:
    return f"{container}.{number}" if container else str(number)


def _listed(numbers: Sequence[int]) -> str:
    texts = [
        slice_text(run) if len(run) > 2 else ", ".join(map(str, run))
        for run in split_runs(list(numbers))
    ]
    return f"{'blocks' if len(numbers) > 1 else 'block'} {', '.join(texts)}"
