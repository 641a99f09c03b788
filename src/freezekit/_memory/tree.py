"""What each module holds, as a tree in which alike blocks are one row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from freezekit._fold import is_number, slice_text, split_runs

__all__ = ["ModuleMemory", "module_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """What a module, or alike blocks together, hold; bytes.

    Attributes:
        name: below the row that it is indented under; ``layer[0:12]`` for numbered children.
        depth: how far it is indented.
        nbytes: of the row and all rows below it.
    """

    name: str
    depth: int
    nbytes: int


@dataclass(slots=True)
class _Node:
    own: int = 0
    children: dict[str, _Node] = field(default_factory=dict)
    total: int = 0

    def add_up(self) -> int:
        self.total = self.own + sum(child.add_up() for child in self.children.values())
        return self.total


def module_memory(
    held: Iterable[tuple[str, int]], *, deepest: int = 3, least_share: float = 0.01
) -> tuple[ModuleMemory, ...]:
    """Rows for ``(module FQN, bytes)`` pairs, the largest first on every level.

    Numbered children (the layers of an encoder) are one row. Rows of less than ``least_share``
    of the whole are left out, rows below depth ``deepest`` are in their parents.
    """
    root = _Node()
    for fqn, nbytes in held:
        node = root
        for part in fqn.split(".") if fqn else ():
            node = node.children.setdefault(part, _Node())
        node.own += nbytes
    _fold(root)
    least = max(1, int(root.add_up() * least_share))
    return tuple(_rows(root, 0, deepest, least))


def _fold(node: _Node) -> None:
    """Join numbered children into one: their sums add up, so do those of their children."""
    numbered = {name: child for name, child in node.children.items() if is_number(name)}
    if len(numbered) > 1:
        joined = _Node()
        for child in numbered.values():
            _join(joined, child)
        rest = {name: child for name, child in node.children.items() if name not in numbered}
        runs = split_runs(sorted(int(name) for name in numbered))
        node.children = {",".join(slice_text(run) for run in runs): joined, **rest}
    for child in node.children.values():
        _fold(child)


def _join(into: _Node, other: _Node) -> None:
    into.own += other.own
    for name, child in other.children.items():
        _join(into.children.setdefault(name, _Node()), child)


def _rows(node: _Node, depth: int, deepest: int, least: int) -> Iterable[ModuleMemory]:
    for name, child in sorted(node.children.items(), key=lambda item: -item[1].total):
        if child.total < least:
            continue
        # A chain of single children is one row.
        while len(child.children) == 1 and child.own == 0:
            ((below, only),) = child.children.items()
            name = name + below if below.startswith("[") else f"{name}.{below}"  # noqa: PLW2901
            child = only  # noqa: PLW2901
        yield ModuleMemory(name=name, depth=depth, nbytes=child.total)
        if depth + 1 < deepest:
            yield from _rows(child, depth + 1, deepest, least)
