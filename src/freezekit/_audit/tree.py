"""The module tree as rows, folded to what differs.

Blocks that are alike are one row (``layer[0:12]``), a chain of single children is one row
(``encoder.layer``), and below the second level only what is partly trainable is opened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from freezekit._fold import is_number, slice_text, split_runs
from freezekit._format import format_dtype, format_tensor
from freezekit._inventory import Inventory
from freezekit._modes import held_by

__all__ = ["ModuleRow", "module_rows"]

_NO_MODE: frozenset[bool] = frozenset()
_ONE_MODE = {True: frozenset({True}), False: frozenset({False})}

# Uniform parts are opened down to this depth: below the root its children's children.
_OPEN_DEPTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One row of the tree: a module, alike blocks together, or a parameter of an opened module.

    Figures are those of the whole row (of all ``count`` blocks); the rows below an opened one
    add up to it.

    Attributes:
        name: its name below the row that it is indented under.
        depth: how far it is indented.
        type_name: its class; for a parameter its dtype and shape, such as ``f32[2,3]``.
        count: how many blocks alike it stands for.
        tensors: parameter tensors, each memory counted where it is met first.
        numel: their elements.
        trainable: those of them that require a gradient.
        nbytes: their bytes.
        dtypes: their dtypes, short.
        mode: ``"train"``, ``"eval"`` or ``"mixed"``, of what is not held; ``""`` for parameters.
        held: modules in it that are held in eval.
        opened: whether rows below it show what it consists of.
        tied_to: the first name of the tensor, if all that it has was met before.
    """

    name: str
    depth: int
    type_name: str
    count: int
    tensors: int
    numel: int
    trainable: int
    nbytes: int
    dtypes: tuple[str, ...]
    mode: str
    held: int
    opened: bool
    tied_to: str


class _Node:
    """A module's subtree, summed up."""

    # Models have very many: without slots, and with a container for each of them, the garbage
    # collector would take longer over the nodes than the sums take.
    __slots__ = (
        "children",
        "dtypes",
        "held",
        "index",
        "modes",
        "name",
        "names",
        "nbytes",
        "numel",
        "own",
        "signature",
        "tensors",
        "trainable",
        "trainable_tensors",
    )

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.tensors = self.numel = self.nbytes = self.names = 0
        self.trainable = self.trainable_tensors = 0
        self.dtypes: tuple[str, ...] = ()
        self.modes: frozenset[bool] = _NO_MODE
        self.held = 0
        self.signature = 0
        self.own = range(0)
        self.children: tuple[_Node, ...] = ()

    @property
    def is_mixed(self) -> bool:
        """Whether part of it is trainable and part is not."""
        return 0 < self.trainable_tensors < self.tensors


def module_rows(inventory: Inventory) -> tuple[ModuleRow, ...]:
    """The rows of the tree, in model order."""
    return tuple(_Tree(inventory).rows())


class _Tree:
    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.signatures: dict[Any, int] = {}
        self.nodes: list[_Node] = [
            _Node(index, info.raw.rpartition(".")[2])
            for index, info in enumerate(inventory.modules)
        ]
        self.own_entries()
        # Children come after their parent: backwards, each is complete before it is added.
        for index in range(len(self.nodes) - 1, -1, -1):
            self.sum_up(index)

    def own_entries(self) -> None:
        """Give every module the named entries that are its own: no child's."""
        inventory = self.inventory
        for index, info in enumerate(inventory.modules):
            stop = inventory.modules[index + 1].first_entry if index + 1 < info.end else None
            last = info.last_entry if stop is None else stop
            self.nodes[index].own = range(info.first_entry, last)

    def sum_up(self, index: int) -> None:
        node = self.nodes[index]
        info = self.inventory.modules[index]
        module = self.inventory.module(index)
        own = [self.add_entry(node, i) for i in node.own]
        if info.repeats < 0:
            if held_by(module) is not None:
                node.held += 1
            else:
                node.modes = _ONE_MODE[info.training]
        inner = []
        for child_index in info.children:
            child = self.nodes[child_index]
            inner.append((child.name, child.signature))
            self.add_child(node, child)
        shown = [self.nodes[i] for i in info.children]
        node.children = tuple(child for child in shown if child.names or child.held)
        key = (info.type_name, info.training, info.repeats >= 0, tuple(own), tuple(inner))
        node.signature = self.signatures.setdefault(key, len(self.signatures))

    def add_entry(self, node: _Node, entry_index: int) -> tuple[Any, ...]:
        entry = self.inventory.entries[entry_index]
        info = self.inventory.parameters[entry.parameter]
        node.names += 1
        name = entry.fqn.rpartition(".")[2]
        if entry.fqn != info.fqn:
            return name, info.fqn
        node.tensors += 1
        node.numel += info.numel
        node.nbytes += info.nbytes
        dtype = format_dtype(info.dtype)
        if dtype not in node.dtypes:
            node.dtypes = (*node.dtypes, dtype)
        if info.requires_grad:
            node.trainable += info.numel
            node.trainable_tensors += 1
        return name, info.shape, info.dtype, info.requires_grad, info.layout, info.aliases

    def add_child(self, node: _Node, child: _Node) -> None:
        node.tensors += child.tensors
        node.numel += child.numel
        node.nbytes += child.nbytes
        node.names += child.names
        node.trainable += child.trainable
        node.trainable_tensors += child.trainable_tensors
        node.dtypes = _union(node.dtypes, child.dtypes)
        if child.modes is not node.modes:
            node.modes |= child.modes
        node.held += child.held

    # Rows

    def rows(self) -> Iterator[ModuleRow]:
        root = self.nodes[0]
        while len(root.children) == 1 and self.is_wrapped(root.children[0]):
            root = root.children[0]
        if held_by(self.inventory.module(root.index)) is not None:
            yield self.own_hold(root)
        yield from self.rows_below(root, 0, times=1)

    def own_hold(self, root: _Node) -> ModuleRow:
        """A row for the model's own hold, which no row of its parts can show."""
        info = self.inventory.modules[root.index]
        return ModuleRow(
            name="(itself)",
            depth=0,
            type_name=info.type_name,
            count=1,
            tensors=0,
            numel=0,
            trainable=0,
            nbytes=0,
            dtypes=(),
            mode="",
            held=1,
            opened=False,
            tied_to="",
        )

    def is_wrapped(self, node: _Node) -> bool:
        """Whether the module goes by the name of the one around it: a wrapper's inside."""
        info = self.inventory.modules[node.index]
        return info.fqn == self.inventory.modules[info.parent].fqn

    def rows_below(self, node: _Node, depth: int, times: int) -> Iterator[ModuleRow]:
        yield from self.parameter_rows(node, depth, times)
        for group, name in _group_alike(node.children):
            yield from self.rows_of(group, name, depth, times)

    def rows_of(self, group: list[_Node], name: str, depth: int, times: int) -> Iterator[ModuleRow]:
        outer, outer_count = group[0], len(group) * times
        first, count = outer, outer_count
        # A chain of single children reads as one dotted name.
        while first.children and not first.own:
            alike = _group_alike(first.children)
            if len(alike) > 1:
                break
            inner, inner_name = alike[0]
            if len(group) > 1 and len(inner) > 1:
                break
            name = name + inner_name if inner_name.startswith("[") else f"{name}.{inner_name}"
            group, first = (inner if len(inner) > 1 else [inner[0]] * len(group)), inner[0]
            count = len(group) * times
        shallow = depth + 1 < _OPEN_DEPTH and len(group) == 1 and bool(first.children)
        opened = first.is_mixed or shallow
        row = self.row_of(first, name, depth, count, opened=opened)
        if first is not outer:
            held = outer.held * outer_count
            row = dataclasses.replace(row, mode=_mode_text(outer.modes), held=held)
        yield row
        if opened:
            yield from self.rows_below(first, depth + 1, count)

    def row_of(self, node: _Node, name: str, depth: int, count: int, *, opened: bool) -> ModuleRow:
        tied_to = ""
        if node.names and not node.tensors:
            info = self.inventory.modules[node.index]
            entry = self.inventory.entries[info.first_entry]
            tied_to = self.inventory.parameters[entry.parameter].fqn
        return ModuleRow(
            name=name,
            depth=depth,
            type_name=self.inventory.modules[node.index].type_name,
            count=count,
            tensors=node.tensors * count,
            numel=node.numel * count,
            trainable=node.trainable * count,
            nbytes=node.nbytes * count,
            dtypes=node.dtypes,
            mode=_mode_text(node.modes),
            held=node.held * count,
            opened=opened,
            tied_to=tied_to,
        )

    def parameter_rows(self, node: _Node, depth: int, times: int) -> Iterator[ModuleRow]:
        """Rows for the parameters that an opened module has itself, such as a class token."""
        groups: dict[tuple[Any, ...], list[tuple[str, int]]] = {}
        for index in node.own:
            entry = self.inventory.entries[index]
            info = self.inventory.parameters[entry.parameter]
            name = entry.fqn.rpartition(".")[2]
            tied = entry.fqn != info.fqn
            key: tuple[Any, ...] = (name,)
            if is_number(name) and not tied:
                key = (None, info.shape, info.dtype, info.requires_grad, info.layout)
            groups.setdefault(key, []).append((name, entry.parameter))
        for members in groups.values():
            yield self.parameter_row(node, members, depth, times)

    def parameter_row(
        self, node: _Node, members: list[tuple[str, int]], depth: int, times: int
    ) -> ModuleRow:
        names = [name for name, _ in members]
        info = self.inventory.parameters[members[0][1]]
        fqn = self.inventory.modules[node.index].fqn
        tied = info.fqn != (f"{fqn}.{names[0]}" if fqn else names[0])
        count = times * len(members)
        kept = 0 if tied else count
        runs = split_runs([int(name) for name in names]) if len(names) > 1 else []
        text = format_tensor(info.dtype, info.shape)
        return ModuleRow(
            name=",".join(slice_text(run) for run in runs) or names[0],
            depth=depth,
            type_name="uninitialised" if info.layout == "lazy" else text,
            count=count,
            tensors=kept,
            numel=info.numel * kept,
            trainable=info.numel * kept if info.requires_grad else 0,
            nbytes=info.nbytes * kept,
            dtypes=(format_dtype(info.dtype),),
            mode="",
            held=0,
            opened=False,
            tied_to=info.fqn if tied else "",
        )


def _mode_text(modes: frozenset[bool]) -> str:
    if len(modes) > 1:
        return "mixed"
    return "".join("train" if training else "eval" for training in modes)


def _union(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    if one == other or not other:
        return one
    return tuple(dict.fromkeys((*one, *other)))


def _group_alike(children: Sequence[_Node]) -> list[tuple[list[_Node], str]]:
    """Children in order, numbered ones that are alike together, each group with its name."""
    alike: dict[int, list[_Node]] = {}
    for child in children:
        if is_number(child.name):
            alike.setdefault(child.signature, []).append(child)
    groups: dict[int, tuple[list[_Node], str]] = {}
    for members in alike.values():
        by_number = {int(child.name): child for child in members}
        for run in split_runs(list(by_number)):
            name = slice_text(run) if len(run) > 1 else str(run[0])
            groups[by_number[run[0]].index] = ([by_number[number] for number in run], name)
    for child in children:
        if not is_number(child.name):
            groups[child.index] = ([child], child.name)
    return [groups[index] for index in sorted(groups)]
