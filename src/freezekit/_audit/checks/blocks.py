"""The check that sibling blocks are alike in what is trainable, or differ in a way one means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from freezekit._audit.context import AuditContext
from freezekit._audit.findings import Finding
from freezekit._audit.mends import as_argument
from freezekit._fold import is_number, slice_text, split_runs
from freezekit._format import shorten

__all__ = ["blocks_differ", "one_block_differs"]


class _Block(NamedTuple):
    """A numbered block: what is trainable in it, by name below it."""

    number: int
    at: int
    trainable: frozenset[str]
    frozen: frozenset[str]

    @property
    def kind(self) -> str:
        if self.trainable and self.frozen:
            return "mixed"
        return "trainable" if self.trainable else "frozen"


def blocks_differ(context: AuditContext) -> Iterator[Finding]:
    """FK103: sibling blocks differ in what is trainable, in a way that looks like an accident.

    A name that was matched as a prefix takes layer 10 and 11 with layer 1; an entry of a list of
    names matches in some blocks only. Frozen first blocks, trainable last ones, a middle range and
    every n-th block are ways of fine-tuning, and are not reported; neither is anything that
    ``expect_trainable`` confirms.
    """
    return (finding for finding in _differences(context) if finding.code == "FK103")


def one_block_differs(context: AuditContext) -> Iterator[Finding]:
    """FK108: one block, in the midst of others, is not like them.

    A list of layers, or a loop over them, missed it. If it is meant, ``expect_trainable`` says so.
    """
    return (finding for finding in _differences(context) if finding.code == "FK108")


def _differences(context: AuditContext) -> Iterator[Finding]:
    if context.expected is not None:
        return
    inventory = context.inventory
    skip_until = 0
    for index, info in enumerate(inventory.modules):
        if index < skip_until or info.repeats >= 0 or len(info.numbered) < 3:
            continue
        if context.trainable_entries(index) in (0, info.last_entry - info.first_entry):
            skip_until = info.end
            continue
        blocks = _blocks(context, info.numbered)
        if len(blocks) < 3 or not _are_alike(context, blocks):
            continue
        finding = _odd_numbers(context, info.fqn, blocks) or _odd_parts(context, info.fqn, blocks)
        if finding is not None:
            yield finding
            skip_until = info.end


def _blocks(context: AuditContext, numbered: Sequence[int]) -> list[_Block]:
    inventory = context.inventory
    found = []
    for index in numbered:
        info = inventory.modules[index]
        name = info.raw.rpartition(".")[2]
        if info.last_entry == info.first_entry or not is_number(name):
            continue
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for entry in inventory.entries[info.first_entry : info.last_entry]:
            flag = inventory.parameters[entry.parameter].requires_grad
            names[flag].add(entry.fqn[len(info.fqn) + 1 :])
        found.append(
            _Block(
                number=int(name),
                at=index,
                trainable=frozenset(names[True]),
                frozen=frozenset(names[False]),
            )
        )
    return found


def _are_alike(context: AuditContext, blocks: Sequence[_Block]) -> bool:
    """Whether they are blocks of one kind: most have the class that is commonest."""
    kinds = Counter(context.inventory.modules[block.at].type_name for block in blocks)
    kind, count = kinds.most_common(1)[0]
    if kind == "Sequential":  # stages of a CNN: of one class, and of different sizes
        return len({len(block.trainable) + len(block.frozen) for block in blocks}) == 1
    return 2 * count > len(blocks)


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


def _odd_numbers(context: AuditContext, container: str, blocks: list[_Block]) -> Finding | None:
    """Whole blocks of which a prefix, or one left out, decided."""
    parts = [
        _Odd([block.number for block in blocks if (block.kind == "frozen") is frozen], frozen)
        for frozen in (True, False)
    ]
    parts.sort(key=lambda part: len(part.numbers))
    if not parts[0].numbers:
        return None
    numbers = sorted(block.number for block in blocks)
    for part in parts:
        prefixes = _prefixes(part.numbers, numbers)
        if prefixes:
            return _taken_by_prefix(context, container, part, prefixes, len(blocks))
    fewer = parts[0]
    runs = split_runs([numbers.index(number) for number in fewer.numbers])
    inside = numbers[0] not in fewer.numbers and numbers[-1] not in fewer.numbers
    # Two layers of an MLP are no stack of blocks.
    leaf = not context.inventory.modules[blocks[0].at].children
    if len(runs) == len(fewer.numbers) == 1 and inside and len(blocks) >= (8 if leaf else 4):
        return _not_like_the_others(container, fewer, len(blocks))
    return None


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
    shortest = [
        n for n in part if not any(m and m != n and str(n).startswith(str(m)) for m in part)
    ]
    closure = [n for n in numbers if any(str(n).startswith(str(m)) for m in shortest)]
    if sorted(closure) != sorted(part):
        return []
    # Blocks 1, 10 and 11; a range that goes on from 9 to 10 is no accident.
    apart = any(not set(run) & set(shortest) for run in _runs(part))
    return shortest if apart else []


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
    mixed = [block for block in blocks if block.trainable]
    if len(mixed) < 3:
        return None
    # Only parts that the blocks share: the first block may have one more.
    counts = Counter(name for block in mixed for name in block.trainable)
    usual = frozenset(name for name, count in counts.items() if 2 * count > len(mixed))
    odd = []
    for block in mixed:
        missing = {name for name in usual - block.trainable if _could_have(context, block, name)}
        extra = {
            name for name in block.trainable - usual if any(name in other.frozen for other in mixed)
        }
        if missing or extra:
            odd.append((block, sorted(missing), sorted(extra)))
    if not odd:
        return None
    names = [
        f"{_name(container, block.number)}.{part}"
        for block, missing, extra in odd
        for part in (*missing, *extra)
    ]
    alike = len(mixed) - len(odd)
    parts = list(dict.fromkeys(part for _, missing, extra in odd for part in (*missing, *extra)))
    lacking = [name for block, missing, _ in odd for name in missing if name in block.frozen]
    return Finding(
        code="FK103",
        severity="warning",
        title="blocks differ in the parts that are trainable",
        fqns=tuple(names),
        cause=f"{alike} of {len(mixed)} blocks that learn in {container or 'the model'} have "
        f"the same parts trainable; {_listed([block.number for block, _, _ in odd])} "
        f"differ in {shorten(parts)}.",
        mend="Make them alike: "
        + (
            f"freezekit.unfreeze(model, {as_argument(context, _frozen_names(container, odd))})."
            if lacking
            else f"freezekit.freeze(model, {as_argument(context, _extra_names(container, odd))})."
            if any(extra for _, _, extra in odd)
            else "let the adapters' target_modules match in every block, or leave the others out."
        ),
    )


def _frozen_names(container: str, odd: list[tuple[_Block, list[str], list[str]]]) -> list[str]:
    return [
        f"{_name(container, block.number)}.{name}"
        for block, missing, _ in odd
        for name in missing
        if name in block.frozen
    ]


def _extra_names(container: str, odd: list[tuple[_Block, list[str], list[str]]]) -> list[str]:
    return [f"{_name(container, block.number)}.{name}" for block, _, extra in odd for name in extra]


def _could_have(context: AuditContext, block: _Block, name: str) -> bool:
    """Whether the block has this part frozen, or the layer that others have an adapter around."""
    if name in block.frozen:
        return True
    inventory = context.inventory
    info = inventory.modules[block.at]
    layer = _adapted_layer(name)
    return bool(layer) and any(
        module.fqn == f"{info.fqn}.{layer}" for module in inventory.modules[block.at : info.end]
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
