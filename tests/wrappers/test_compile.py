"""torch.compile: a hold costs no graph, compiled models stay frozen, and are told from others.

Backends are "eager" and "aot_eager": inductor takes the same graphs, and needs a C++ compiler.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame
from torch._dynamo.testing import CompileCounterWithBackend

import freezekit
from freezekit.errors import CompiledModelWarning
from wrappers.wrappers_support import (
    Net,
    below,
    bits,
    inputs,
    make_net,
    make_optimizer,
    moved,
    train,
)

pytestmark = pytest.mark.usefixtures("compiler")


def compiled(module: nn.Module, backend: Any = "eager", **options: Any) -> nn.Module:
    wrapper: nn.Module = torch.compile(module, backend=backend, **options)  # type: ignore[assignment]
    return wrapper


def compiled_in_place(module: nn.Module, backend: Any = "eager", **options: Any) -> nn.Module:
    module.compile(backend=backend, **options)
    return module


WAYS = {"torch.compile": compiled, "Module.compile": compiled_in_place}

both_ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
each_way = pytest.mark.parametrize(
    ("way", "backend"),
    [(compiled, "aot_eager"), (compiled_in_place, "eager")],
    ids=["torch.compile aot_eager", "Module.compile eager"],
)


def warned(call: Callable[[], object]) -> list[type[Warning]]:
    """The categories of the warnings that a call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [warning.category for warning in caught]


# -- holding still ------------------------------------------------------------------------------


@each_way
def test_compiled_after_the_freeze(way: Callable[..., nn.Module], backend: str) -> None:
    """A frozen model is one graph without a break, trains, and is not compiled again."""
    net = make_net()
    freezekit.freeze(net, "backbone")
    twin = copy.deepcopy(net)
    counter = CompileCounterWithBackend(backend)
    model = way(net, counter, fullgraph=True)
    before = bits(net)
    for _ in range(3):
        train(model, make_optimizer(model), steps=1)
    assert moved(before, net) == below(before, "head")
    assert counter.frame_count == 1
    twin.load_state_dict(net.state_dict())
    batch = inputs()
    torch.testing.assert_close(model(batch), twin.train()(batch))


def test_train_compiles_nothing() -> None:
    """train() and eval() of a wholly frozen model change no mode that its graph depends on."""
    net = make_net()
    freezekit.freeze(net)
    counter = CompileCounterWithBackend("eager")
    model = compiled(net, counter)
    batch = inputs()
    answers = [model.train(mode)(batch) for mode in (True, False, True, True)]
    assert all(torch.equal(answers[0], answer) for answer in answers)
    assert counter.frame_count == 1


def test_frozen_through_the_wrapper() -> None:
    """A model that is compiled first and frozen then holds still as well."""
    net = make_net()
    model = compiled(net)
    report = freezekit.freeze(model, "backbone")
    before = bits(net)
    train(model, make_optimizer(model))
    assert report.held == ("backbone.norm", "backbone.blocks.1")
    assert moved(before, net) == below(before, "head")


@both_ways
def test_copied(way: Callable[..., nn.Module]) -> None:
    """A deep copy of a compiled and frozen model holds still on its own."""
    net = make_net()
    model = way(net)
    freezekit.freeze(model, "backbone")
    made = copy.deepcopy(model)
    freezekit.unfreeze(model)
    before = bits(made)
    train(made, make_optimizer(made))
    changed = {name.removeprefix("_orig_mod.") for name in moved(before, made)}
    assert changed == below(bits(net), "head")


def test_compiled_module_with_statistics() -> None:
    """A norm that is itself compiled is held, and its mode comes back, through the wrapper."""
    norm = nn.BatchNorm1d(4)
    model = compiled(norm)
    assert freezekit.freeze(model).held == ("",)
    before = bits(norm)
    model.train()
    model(inputs())
    assert (model.training, norm.training) == (False, False)
    assert moved(before, norm) == set()
    with pytest.warns(CompiledModelWarning, match="of 2 tensors changes"):
        freezekit.unfreeze(model)
    assert (model.training, norm.training) == (True, True)


# -- unfreezing what is compiled ----------------------------------------------------------------


@each_way
def test_unfrozen_layer_trains_after_a_reset(way: Callable[..., nn.Module], backend: str) -> None:
    """A layer that is unfrozen in a compiled model trains after ``torch._dynamo.reset()``."""
    net = make_net()
    freezekit.freeze(net, "backbone")
    model = way(net, backend)
    train(model, make_optimizer(model))
    before = bits(net)
    with pytest.warns(CompiledModelWarning, match=r"call torch\._dynamo\.reset\(\)"):
        freezekit.unfreeze(model)
    torch._dynamo.reset()
    train(model, make_optimizer(model))
    assert moved(before, net) == before.keys()


@pytest.mark.parametrize("unfreezes", [False, True], ids=["freeze", "unfreeze"])
def test_flags_are_guarded(unfreezes: bool) -> None:
    """This torch compiles again by itself when a flag changes: the warning is for others."""
    net = make_net()
    if unfreezes:
        net.backbone.requires_grad_(requires_grad=False)
    counter = CompileCounterWithBackend("eager")
    model = compiled(net, counter)
    model(inputs()).sum().backward()
    net.zero_grad()
    net.backbone.requires_grad_(requires_grad=unfreezes)
    model(inputs()).sum().backward()
    has_gradient = {name for name, p in net.named_parameters() if p.grad is not None}
    assert bool(below(has_gradient, "backbone")) is unfreezes
    assert counter.frame_count == 2


# -- telling what is compiled -------------------------------------------------------------------


class Block(nn.Module):
    """A block that is compiled on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x).relu()
        return result


class BreaksGraph(nn.Module):
    """Its forward is compiled in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        result: torch.Tensor = self.block(x)
        return result


COMPILED: dict[str, Callable[[], nn.Module]] = {
    "torch.compile": lambda: compiled(Block()),
    "Module.compile": lambda: compiled_in_place(Block()),
    "one block": lambda: nn.Sequential(compiled_in_place(Block()), nn.Linear(4, 2)),
    "compiled DataParallel": lambda: compiled(nn.DataParallel(Block())),
    "graph breaks": lambda: compiled(BreaksGraph()),
    "Sequential": lambda: compiled(nn.Sequential(Block(), nn.Linear(4, 2))),
    "Sequential in place": lambda: compiled_in_place(nn.Sequential(Block(), nn.Linear(4, 2))),
    "a layer of torch": lambda: compiled(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("make", COMPILED.values(), ids=COMPILED)
def test_warns_where_code_is_compiled(make: Callable[[], nn.Module]) -> None:
    """Changing flags of a model that has run compiled gives a warning, and only after it ran."""
    model = make()
    freezekit.freeze(model)
    freezekit.unfreeze(model)
    model(inputs()).sum().backward()
    with pytest.warns(CompiledModelWarning, match="of 2 tensors changes|of 4 tensors changes"):
        freezekit.freeze(model)


QUIET: dict[str, Callable[[nn.Module], object]] = {
    "flags stay": lambda model: freezekit.freeze(model, "backbone"),
    "select": freezekit.select,
    "audit": freezekit.audit,
    "freeze_state": freezekit.freeze_state,
    "load the same state": lambda model: freezekit.load_freeze_state(
        model, freezekit.freeze_state(model)
    ),
}


@both_ways
def test_no_warning_without_a_change(way: Callable[..., nn.Module]) -> None:
    """What changes no flag gives no warning, whatever is compiled."""
    net = make_net()
    freezekit.freeze(net, "backbone")
    model = way(net)
    model(inputs())
    assert {name: warned(partial(call, model)) for name, call in QUIET.items()} == {
        name: [] for name in QUIET
    }


def test_no_warning_for_models_that_are_not_compiled() -> None:
    """A model that is not compiled gives no warning although another one has compiled code."""
    compiled(Block())(inputs())
    assert warned(lambda: freezekit.freeze(make_net(), "backbone")) == []


def test_no_warning_after_a_reset() -> None:
    """After a reset there is no compiled code, and no warning."""
    model = compiled(make_net())
    model(inputs())
    torch._dynamo.reset()
    assert warned(lambda: freezekit.freeze(model, "backbone")) == []


# -- what torch keeps to itself -----------------------------------------------------------------


@pytest.fixture
def code() -> CodeType:
    """The code of Net's forward, of which the compiler keeps compiled versions."""
    return Net.forward.__code__


def test_the_cache_can_be_read(code: CodeType) -> None:
    """A private function of torch still tells which compiled code there is of a forward."""
    assert eval_frame._debug_get_cache_entry_list(code) == []
    compiled(make_net())(inputs())
    assert len(eval_frame._debug_get_cache_entry_list(code)) == 1
    torch._dynamo.reset()
    assert eval_frame._debug_get_cache_entry_list(code) == []


def test_a_module_compiled_in_place_says_so() -> None:
    """A private attribute of torch still keeps what ``Module.compile`` has made."""
    net = make_net()
    assert net._compiled_call_impl is None
    net.compile(backend="eager")
    assert callable(net._compiled_call_impl)


def test_a_compiled_module_is_a_wrapper() -> None:
    """torch.compile still returns an OptimizedModule around the very module."""
    net = make_net()
    model = compiled(net)
    assert isinstance(model, eval_frame.OptimizedModule)
    assert model._orig_mod is net
    assert [name for name, _ in model.named_children()] == ["_orig_mod"]
