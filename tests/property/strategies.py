"""Random small models, and patterns that match something in them.

Trees mix what freezing stumbles over: norms with and without parameters, lists of parameters,
integers, scalars, modules used twice, tied tensors, tensors over one memory, parts without
parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn

__all__ = [
    "entries_of",
    "frozen_models",
    "law",
    "model_and_patterns",
    "models",
    "modules_of",
    "patterns_of",
    "trainable_names",
    "unique_numel",
]

# The same examples in every run: a law that fails tomorrow fails today.
law = settings(max_examples=40, deadline=None, derandomize=True, database=None)


# -- oracles: what torch itself says -----------------------------------------------------------


def modules_of(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module at every place, by its dotted name."""
    yield prefix, model
    for name, child in model._modules.items():
        if child is not None:
            yield from modules_of(child, f"{prefix}.{name}" if prefix else name)


def entries_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter under every name."""
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, module in modules_of(model)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }


def unique_numel(model: nn.Module) -> int:
    """Elements of all parameters, each storage once."""
    storages = {p.untyped_storage().data_ptr(): p.numel() for p in entries_of(model).values()}
    return sum(storages.values())


def trainable_names(model: nn.Module) -> set[str]:
    """Every name of what requires a gradient."""
    return {name for name, parameter in entries_of(model).items() if parameter.requires_grad}


# -- models ------------------------------------------------------------------------------------


class Block(nn.Module):
    """Children under names, and maybe a parameter of its own."""

    def __init__(self, children: dict[str, nn.Module], own: int | None) -> None:
        super().__init__()
        if own is not None:
            self.scale = nn.Parameter(torch.ones(own))
        for name, child in children.items():
            self.add_module(name, child)


class Table(nn.Module):
    """An integer parameter beside its scale."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(()))


class Scaled(nn.Module):
    """Saved statistics above a child, without a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(2))
        self.inner = nn.Linear(1, 2)


LEAVES: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Linear(1, 2),
    lambda: nn.Linear(2, 2, bias=False),
    lambda: nn.LayerNorm(2),
    lambda: nn.BatchNorm1d(2),
    lambda: nn.BatchNorm1d(2, affine=False),
    lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
    lambda: nn.Embedding(2, 2),
    lambda: nn.Dropout(0.5),
    lambda: nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(3)),
    lambda: nn.MultiheadAttention(2, 1),
    Table,
    Scaled,
)
NAMES = ("layer", "norm", "head", "a", "a1", "weight_", "layer1")


@st.composite
def _trees(draw: st.DrawFn, depth: int, made: list[nn.Module]) -> nn.Module:
    """A module; ``made`` are the finished ones, which may come again."""
    kinds = ["leaf"] if depth == 0 else ["leaf", "leaf", "list", "sequential", "block"]
    kind = draw(st.sampled_from([*kinds, "again"] if made else kinds))
    if kind == "again":
        return draw(st.sampled_from(made))
    if kind == "leaf":
        module = draw(st.sampled_from(LEAVES))()
    else:
        count = draw(st.integers(1, 3))
        children = [draw(_trees(depth - 1, made)) for _ in range(count)]
        if kind == "list":
            module = nn.ModuleList(children)
        elif kind == "sequential":
            module = nn.Sequential(*children)
        else:
            names = draw(st.permutations(NAMES))[:count]
            own = draw(st.sampled_from([None, None, 1, 2]))
            module = Block(dict(zip(names, children, strict=True)), own)
    made.append(module)
    return module


def _tie(model: nn.Module, one: str, other: str, *, by_storage: bool) -> None:
    """Make the parameter called ``other`` that of ``one``, or another one over its memory."""
    parameters = entries_of(model)
    parent, _, name = other.rpartition(".")
    tensor = parameters[one]
    owner = dict(modules_of(model))[parent]
    owner._parameters[name] = nn.Parameter(tensor.data) if by_storage else tensor


@st.composite
def models(draw: st.DrawFn, *, storage_ties: bool = True) -> nn.Module:
    """A model in which everything that can learn does, all in train mode.

    ``storage_ties`` allows two Parameter objects over one memory. torch's own deepcopy and pickle
    part those, so that a copy is another model.
    """
    made: list[nn.Module] = []
    children = [draw(_trees(2, made)) for _ in range(draw(st.integers(1, 3)))]
    # Something that always can learn: a model without parameters is another test's.
    names = ("backbone", "neck", "head")[: len(children)]
    model = Block(dict(zip(names, children, strict=True)), own=2)
    if draw(st.booleans()):
        alike = [
            (one, other)
            for one, a in entries_of(model).items()
            for other, b in entries_of(model).items()
            if one < other and a is not b and a.shape == b.shape and a.dtype == b.dtype
            if a.is_floating_point()
        ]
        if alike:
            by_storage = storage_ties and draw(st.booleans())
            _tie(model, *draw(st.sampled_from(alike)), by_storage=by_storage)
    return model


@st.composite
def frozen_models(draw: st.DrawFn, *, storage_ties: bool = True) -> nn.Module:
    """A model with flags, modes and gradients all over the place."""
    model = draw(models(storage_ties=storage_ties))
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad = draw(st.booleans())
            if draw(st.booleans()):
                parameter.grad = torch.ones_like(parameter)
    for module in model.modules():
        module.training = draw(st.booleans())
    return model


# -- patterns ----------------------------------------------------------------------------------


def patterns_of(model: nn.Module) -> st.SearchStrategy[Any]:
    """One pattern of any kind that matches at least one parameter that can learn."""
    names = [name for name, p in entries_of(model).items() if p.is_floating_point()]
    modules = sorted({name[:at] for name in names for at in range(len(name)) if name[at] == "."})
    classes = sorted(
        {
            type(module)
            for prefix, module in modules_of(model)
            if any(name.startswith(f"{prefix}.") for name in names)
        },
        key=lambda cls: cls.__name__,
    )
    kinds: list[st.SearchStrategy[Any]] = [
        st.sampled_from(names),
        st.sampled_from(names).map(lambda name: f"re:{re.escape(name)}"),
        st.sampled_from(names).map(lambda name: "*" + name[len(name) // 2 :]),
        st.sampled_from(names).map(lambda name: name[: len(name) // 2 + 1] + "*"),
        st.sampled_from(names).map(lambda name: name[:-1] + "?"),
        st.sets(st.sampled_from(names), min_size=1).map(
            lambda chosen: lambda fqn, parameter: fqn in chosen
        ),
        st.just("*"),
    ]
    if modules:
        kinds.append(st.sampled_from(modules))
    if classes:
        kinds.append(st.sampled_from(classes))
        kinds.append(st.sampled_from(classes).map(lambda cls: f"type:{cls.__name__}"))
    return st.one_of(kinds)


@st.composite
def model_and_patterns(
    draw: st.DrawFn, of: st.SearchStrategy[nn.Module] | None = None
) -> tuple[nn.Module, list[Any]]:
    """A model (by default one of ``frozen_models``), and one to three patterns that match in it."""
    model = draw(frozen_models() if of is None else of)
    return model, draw(st.lists(patterns_of(model), min_size=1, max_size=3))
