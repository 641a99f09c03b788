"""Tensors, modules and names that are out of the ordinary, and models used by threads."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import freezekit
from freezekit.errors import FreezekitError, UntrainableParameterError
from wrappers.wrappers_support import bits, flags, make_net, moved, train


def one_parameter(tensor: torch.Tensor, **buffers: torch.Tensor) -> nn.Module:
    """A module of the tensor, another parameter beside it, and buffers."""
    module = nn.Module()
    module.odd = nn.Parameter(tensor)
    module.plain = nn.Parameter(torch.ones(2))
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module


# -- tensors ------------------------------------------------------------------------------------


class OddTensor(torch.Tensor):
    """A subclass of Tensor, as quantisation and sharding libraries make them."""


def jagged() -> torch.Tensor:
    rows = [torch.ones(2), torch.ones(3)]
    made: torch.Tensor = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return made


TENSORS: dict[str, tuple[Callable[[], torch.Tensor], int, int]] = {
    "float16": (lambda: torch.ones(3, dtype=torch.float16), 3, 6),
    "bfloat16": (lambda: torch.ones(3, dtype=torch.bfloat16), 3, 6),
    "float8": (lambda: torch.ones(3).to(torch.float8_e4m3fn), 3, 3),
    "float64": (lambda: torch.ones(3, dtype=torch.float64), 3, 24),
    "complex": (lambda: torch.ones(3, dtype=torch.complex64), 3, 24),
    "0-dimensional": (lambda: torch.tensor(1.0), 1, 4),
    "empty": (lambda: torch.empty(0, 3), 0, 0),
    "strided": (lambda: torch.ones(4, 6)[:, ::2], 12, 48),
    "channels last": (
        lambda: torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last),
        24,
        96,
    ),
    "sparse": (lambda: torch.eye(3).to_sparse(), 9, 36),
    "jagged": (jagged, 5, 20),
    "subclass": (lambda: torch.ones(3).as_subclass(OddTensor), 3, 12),
    "meta": (lambda: torch.ones(3, device="meta"), 3, 12),
}


@pytest.mark.parametrize(("make", "numel", "nbytes"), TENSORS.values(), ids=TENSORS)
def test_tensor_of_a_kind(make: Callable[[], torch.Tensor], numel: int, nbytes: int) -> None:
    """Parameters of every kind that torch can train freeze, unfreeze and are counted."""
    module = one_parameter(make())
    report = freezekit.freeze(module, "odd")
    assert flags(module) == {"odd": False, "plain": True}
    assert (report.frozen, report.trainable) == (numel, 2)
    assert freezekit.audit(module).parameter_bytes == nbytes + 8
    assert freezekit.unfreeze(module, "odd").changed == ("odd",)
    assert flags(module) == {"odd": True, "plain": True}


@pytest.mark.parametrize(
    "make",
    [lambda: torch.eye(3).to_sparse(), jagged, lambda: torch.ones(3).as_subclass(OddTensor)],
    ids=["sparse", "jagged", "subclass"],
)
def test_buffer_of_a_kind(make: Callable[[], torch.Tensor]) -> None:
    """A buffer of any kind is no trouble for a freeze or an audit."""
    module = one_parameter(torch.ones(3), odd_buffer=make())
    freezekit.freeze(module, "odd")
    assert freezekit.audit(module).frozen == 3


def made_for_inference() -> nn.Sequential:
    with torch.inference_mode():
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def test_made_under_inference_mode() -> None:
    """A parameter made under inference mode freezes; that it cannot learn again is said why."""
    model = made_for_inference()
    freezekit.freeze(model, "0")
    with pytest.raises(UntrainableParameterError, match=r"made under torch\.inference_mode"):
        freezekit.unfreeze(model, "0")


def test_frozen_block_of_a_model_made_under_inference_mode() -> None:
    """A block that could not restore what it freezes refuses to, or restores it exactly."""
    model = nn.Sequential(nn.Linear(2, 2), *made_for_inference())
    before = flags(model)
    with contextlib.suppress(FreezekitError), freezekit.frozen(model):
        pass
    assert flags(model) == before


def test_frozen_inside_inference_mode() -> None:
    """A model that was made outside can be frozen and unfrozen under inference mode."""
    net = make_net()
    with torch.inference_mode():
        freezekit.freeze(net, "backbone")
        freezekit.unfreeze(net)
    assert all(flags(net).values())


# -- modules ------------------------------------------------------------------------------------


class Stack(nn.ModuleList):
    """A ModuleList with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = module(x)
        return x


class Locked(nn.BatchNorm1d):
    """It takes no new attributes once it is made."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.is_locked = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("is_locked") and name not in self.__dict__:
            raise AttributeError(f"no new attribute {name}")
        super().__setattr__(name, value)


class Forwarding(nn.Module):
    """It passes on what it does not have to the module in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(3)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


class Slotted(nn.BatchNorm1d):
    """A module with slots."""

    __slots__ = ("note",)


def pruned(module: nn.Module) -> nn.Module:
    made: nn.Module = prune.l1_unstructured(module, "weight", 0.3)  # type: ignore[no-untyped-call]
    return made


MODULES: dict[str, Callable[[], nn.Module]] = {
    "ModuleList with a forward": lambda: Stack([nn.Linear(3, 3), nn.BatchNorm1d(3)]),
    "no new attributes": lambda: Locked(3),
    "forwards attributes": Forwarding,
    "slots": lambda: Slotted(3),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    "pruned": lambda: pruned(nn.Linear(3, 3)),
    "InstanceNorm": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1)), nn.Conv1d(3, 3, 1), nn.Flatten(), nn.BatchNorm1d(3)
    ),
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_module_of_a_kind(make: Callable[[], nn.Module]) -> None:
    """Modules that do things in their own way hold still, and let go again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), make(), nn.Linear(3, 2))
    freezekit.freeze(model, "1")
    before = bits(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1))
    assert moved(before, model) == {name for name in before if name[0] != "1"}
    freezekit.unfreeze(model, "1")
    assert all(module.training for module in model.train().modules())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1))
    assert any(name.startswith("1.") for name in moved(before, model))


def test_recurrent_layers() -> None:
    """Layers whose weights lie in one flat list freeze one by one, without changing mode."""
    model = nn.Sequential(nn.LSTM(3, 4, num_layers=2, dropout=0.5, bidirectional=True))
    report = freezekit.freeze(model, "0.weight_*_l0*")
    assert len(report.changed) == 4
    assert report.held == ()
    before = bits(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()[0](torch.randn(5, 2, 3))[0].sum().backward()
    optimizer.step()
    assert moved(before, model) == before.keys() - set(report.changed)


class Interleaved(nn.Module):
    """Two parameters whose columns alternate in one memory, without an element in common."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.arange(16.0).reshape(4, 4)
        self.left = nn.Parameter(memory[:, :2])
        self.right = nn.Parameter(memory[:, 2:])


def test_parts_of_one_memory() -> None:
    """Parameters that are disjoint parts of one memory are not tied."""
    model = Interleaved()
    report = freezekit.freeze(model, "left")
    assert flags(model) == {"left": False, "right": True}
    assert (report.frozen, report.trainable) == (8, 8)


# -- names --------------------------------------------------------------------------------------

ODD_NAMES = ["a b", "ünï", "a:b", "-1", "re:x", "type:Linear", "x[0]", "what?", "a*"]


@pytest.fixture
def oddly_named() -> nn.Module:
    """A module of children with names that mean something else in a pattern."""
    model = nn.Module()
    for name in ODD_NAMES:
        model.add_module(name, nn.Linear(1, 1))
    return model


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_name_by_expression(oddly_named: nn.Module, name: str) -> None:
    """A child of any name can be selected by a regular expression, and alone."""
    expected = (f"{name}.weight", f"{name}.bias")
    pattern = rf"re:{re.escape(name)}\..*"
    assert freezekit.select(oddly_named, pattern).parameters == expected
    assert freezekit.freeze(oddly_named, pattern).changed == expected


@pytest.mark.parametrize("name", ODD_NAMES[:4])
def test_odd_name_as_it_is(oddly_named: nn.Module, name: str) -> None:
    """Blanks, accents, colons and dashes in a name need no care."""
    assert freezekit.select(oddly_named, name).parameters == (f"{name}.weight", f"{name}.bias")


def test_odd_names_in_reports_and_states(oddly_named: nn.Module) -> None:
    """Reports show odd names as they are, and a state with them loads."""
    report = freezekit.freeze(oddly_named, r"re:x\[0\]\..*")
    assert "x\\[0\\]" in str(report)
    assert "x[0]" in str(freezekit.audit(oddly_named))
    state = freezekit.freeze_state(oddly_named)
    freezekit.unfreeze(oddly_named)
    freezekit.load_freeze_state(oddly_named, state)
    assert [name for name, flag in flags(oddly_named).items() if not flag] == [
        "x[0].weight",
        "x[0].bias",
    ]


def test_a_thousand_deep() -> None:
    """With room to recurse, a model a thousand modules deep is frozen and audited."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        model = nn.Sequential(nn.Linear(1, 1))
        for _ in range(1_000):
            model = nn.Sequential(model)
        freezekit.freeze(model, f"{'0.' * 1_000}0.weight")
        assert list(flags(model).values()) == [False, True]
        assert freezekit.audit(model).trainable == 1
    finally:
        sys.setrecursionlimit(limit)


# -- threads ------------------------------------------------------------------------------------


def test_threads_with_models_of_their_own() -> None:
    """Threads that freeze models of their own do not disturb each other."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            net = make_net()
            for _ in range(10):
                freezekit.freeze(net, "backbone")
                before = bits(net)
                train(net, torch.optim.SGD(net.parameters(), lr=0.01), steps=1)
                assert not any(name.startswith("backbone") for name in moved(before, net))
                freezekit.unfreeze(net)
        except BaseException as error:  # noqa: BLE001  (a thread's errors are told by the test)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_threads_with_one_block() -> None:
    """One ``frozen`` that several threads are in at once restores when the last one leaves."""
    net = make_net()
    block = freezekit.frozen(net)
    barrier = threading.Barrier(3)

    def work() -> None:
        barrier.wait()
        for _ in range(20):
            with block:
                pass

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(flags(net).values())
    assert all(module.training for module in net.modules())
    assert freezekit.freeze_state(net)["held"] == {}
