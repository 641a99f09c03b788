"""Group G: counting and reporting what is not a plain tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from freezekit import (
    audit,
    freeze,
    freeze_state,
    frozen,
    load_freeze_state,
    select,
    train_only,
    unfreeze,
)
from freezekit.errors import UninitializedParameterWarning, UntrainableParameterError


def flags(model: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


# -- B64: sharded ------------------------------------------------------------------------------


class Sharded(nn.Module):
    """What ZeRO-3 leaves of a layer on each rank: an empty tensor, and notes about the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, bias=False)
        self.head = nn.Linear(3, 2)
        empty = nn.Parameter(torch.empty(0))
        empty.ds_numel, empty.ds_shape = 12, torch.Size([3, 4])  # type: ignore[attr-defined]
        self.layer.weight = empty


def test_sharded_parameters_count_whole() -> None:
    """A parameter whose elements are on other ranks counts with all of them (B64)."""
    model = Sharded()
    assert sum(parameter.numel() for parameter in model.parameters()) == 8

    report = audit(model)
    assert (report.total, report.trainable, report.parameter_bytes) == (20, 20, 80)
    assert report.sharded == 1
    assert "sharded: 1 tensor, counted whole" in str(report)
    frozen_report = freeze(model, "layer")
    assert (frozen_report.frozen, frozen_report.trainable) == (12, 8)
    assert frozen_report.matches[0].numel == select(model, "layer").numel == 12
    assert flags(model)["layer.weight"] is False
    assert audit(model).frozen == 12


# -- B65: packed -------------------------------------------------------------------------------


class Params4bit(nn.Parameter):
    """Named like the class of bitsandbytes that it stands for."""


class QuantState:
    shape = torch.Size([10, 10])


def quantised(*, with_state: bool = True) -> nn.ModuleDict:
    """A 10x10 weight of four bits per element, and a head."""
    layer = nn.Linear(10, 10, bias=False)
    packed = Params4bit(torch.zeros(50, 1, dtype=torch.uint8), requires_grad=False)
    if with_state:
        packed.quant_state = QuantState()  # type: ignore[attr-defined]
    layer.weight = packed
    return nn.ModuleDict({"layer": layer, "head": nn.Linear(10, 2)})


@pytest.mark.parametrize("with_state", [True, False], ids=["quant_state", "before-quantisation"])
def test_four_bit_weights_count_unpacked(with_state: bool) -> None:
    """4-bit weights count by their elements, and their bytes are those stored (B65)."""
    model = quantised(with_state=with_state)
    assert sum(parameter.numel() for parameter in model.parameters()) == 72

    report = audit(model)
    assert (report.total, report.frozen, report.trainable) == (122, 100, 22)
    assert report.parameter_bytes == 50 + 88
    assert report.packed == 1
    assert "parameters are counted unpacked, bytes as packed" in str(report)
    selection = select(model, "layer")
    assert (selection.numel, selection.nbytes) == (100, 50)
    assert freeze(model, "layer").frozen == 100


def test_shape_of_four_bit_weights_is_that_of_the_layer() -> None:
    """Elements are those of the layer's own shape, not twice the bytes where that differs (B65)."""
    model = quantised()
    odd = torch.Size([9, 11])
    model.get_parameter("layer.weight").quant_state.shape = odd  # type: ignore[attr-defined]
    assert audit(model).frozen == odd.numel() == 99


def test_four_bit_weights_stay_frozen_when_the_rest_is_unfrozen() -> None:
    """Unfreezing leaves packed weights as they are, and lists them (B65)."""
    model = quantised()
    freeze(model)
    report = unfreeze(model)
    assert report.skipped == (("layer.weight", "uint8 tensors have no gradient"),)
    assert report.trainable == 22
    assert "left frozen: layer.weight: uint8 tensors have no gradient" in str(report)


# -- B66: uninitialised ------------------------------------------------------------------------


class Lazy(nn.Module):
    """A lazy layer and norm before a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(4)
        self.norm = nn.LazyBatchNorm1d()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.layer(x)))
        return found


NAMES = ("layer.weight", "layer.bias", "norm.weight", "norm.bias")


def frozen_lazy() -> Lazy:
    model = Lazy()
    with pytest.warns(UninitializedParameterWarning, match=r"layer\.weight.*not initialised yet"):
        freeze(model, ["layer", "norm"])
    return model


def test_lazy_parameters_can_be_frozen() -> None:
    """A lazy parameter takes the flag before it has a value, and keeps it after (B66)."""
    plain = nn.LazyLinear(4)
    with pytest.raises(ValueError, match="uninitialized parameter"):
        plain.weight.numel()
    with pytest.raises(ValueError, match="uninitialized parameter"):
        plain.requires_grad_(False)

    model = Lazy()
    with pytest.warns(UninitializedParameterWarning, match="run one forward, or load the weights"):
        report = freeze(model, ["layer", "norm"])
    assert report.uninitialized == NAMES
    assert (report.held, report.changed) == (("norm",), NAMES)
    assert "the counts are lower bounds" in str(report)
    assert [name for name, flag in flags(model).items() if not flag] == [*NAMES]

    model.train()(torch.randn(6, 3))
    assert [name for name, flag in flags(model).items() if not flag] == [*NAMES]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(2):
        model.train()
        model(torch.randn(6, 3) + 5).pow(2).sum().backward()
        optimizer.step()
    moved = [n for n, value in model.state_dict().items() if not torch.equal(value, before[n])]
    assert moved == ["head.weight", "head.bias"]


def test_audit_shows_uninitialised_parameters() -> None:
    """Parameters without a value are shown as such, and counts are lower bounds (B66)."""
    report = audit(Lazy())
    assert report.uninitialized == NAMES
    assert (report.total, report.trainable, report.tensors) == (10, 10, 6)
    assert "uninitialised: layer.weight, layer.bias, norm.weight and 1 more" in str(report)
    assert "the counts are lower bounds" in str(report)
    assert "uninitialised" in str(audit(nn.LazyLinear(4)))
    assert select(Lazy(), "layer").parameters == ("layer.weight", "layer.bias")


def test_audit_shows_frozen_uninitialised_parameters() -> None:
    """A model with frozen lazy parameters can be audited before its first forward (B66)."""
    report = audit(frozen_lazy())
    assert report.uninitialized == NAMES
    assert (report.total, report.trainable) == (10, 10)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda m: unfreeze(m, ["layer", "norm"]), id="unfreeze"),
        pytest.param(unfreeze, id="unfreeze-all"),
        pytest.param(lambda m: train_only(m, "*"), id="train_only"),
        pytest.param(lambda m: load_freeze_state(m, freeze_state(Lazy())), id="load_freeze_state"),
    ],
)
def test_lazy_parameters_can_be_unfrozen(call: Callable[[nn.Module], object]) -> None:
    """Frozen and unfrozen again before the first forward, a lazy layer trains (B66)."""
    model = frozen_lazy()
    call(model)
    assert all(flags(model).values())
    model.train()(torch.randn(6, 3)).sum().backward()
    assert model.norm.training
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_lazy_parameters_go_through_a_frozen_block() -> None:
    """A model initialised inside a frozen block has its flags back after it (B66)."""
    model = Lazy()
    block = frozen(model)
    with pytest.warns(UninitializedParameterWarning, match=r"layer\.weight"):
        block.__enter__()
    model(torch.randn(6, 3))
    assert not any(flags(model).values())
    block.__exit__(None, None, None)
    assert all(flags(model).values())
    assert model.norm.training


def test_state_of_lazy_parameters_fits_the_initialised_model() -> None:
    """A freeze state goes from a model without values to one with them, and back (B66)."""
    initialised = Lazy()
    initialised(torch.randn(6, 3))
    freeze(initialised, ["layer", "norm"])
    model = Lazy()
    load_freeze_state(model, freeze_state(initialised))
    assert flags(model) == flags(initialised)
    assert freeze_state(model) == freeze_state(initialised)


# -- B68: what can have no gradient ------------------------------------------------------------

INTEGERS = [torch.int8, torch.uint8, torch.int64, torch.bool]
integers = pytest.mark.parametrize("dtype", INTEGERS, ids=str)


class Mixed(nn.Module):
    """Frozen parameters, one of them of integers."""

    def __init__(self, dtype: torch.dtype = torch.int8) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.q = nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)
        self.b = nn.Parameter(torch.zeros(2), requires_grad=False)


@integers
def test_unfreeze_leaves_integers_out(dtype: torch.dtype) -> None:
    """Integers among others are left out and listed; plain code stops half-way there (B68)."""
    plain = Mixed(dtype)
    with pytest.raises(RuntimeError, match="loating point"):
        plain.requires_grad_(True)
    assert flags(plain) == {"a": True, "q": False, "b": False}

    model = Mixed(dtype)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    report = unfreeze(model, optimizer=optimizer)
    assert flags(model) == {"a": True, "q": False, "b": True}
    kind = str(dtype).removeprefix("torch.")
    assert report.skipped == (("q", f"{kind} tensors have no gradient"),)
    assert report.changed == ("a", "b")
    assert len(optimizer.param_groups[0]["params"]) == 3


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda m: unfreeze(m, "q"), id="unfreeze"),
        pytest.param(lambda m: unfreeze(m, ["a", "q"]), id="unfreeze-list"),
        pytest.param(lambda m: train_only(m, "q"), id="train_only"),
        pytest.param(lambda m: train_only(m, ["a", "q"]), id="train_only-list"),
    ],
)
def test_asking_integers_alone_to_learn_is_an_error(call: Callable[[nn.Module], object]) -> None:
    """A pattern that matches integers only can never be meant, and changes nothing (B68)."""
    model = Mixed()
    model.b.requires_grad = True
    with pytest.raises(
        UntrainableParameterError, match=r"(?s)1 parameter.*q - int8 tensors"
    ) as info:
        call(model)
    assert info.value.parameters == (("q", "int8 tensors have no gradient"),)
    assert flags(model) == {"a": False, "q": False, "b": True}


@integers
def test_train_only_and_states_go_around_integers(dtype: torch.dtype) -> None:
    """Freezing, train_only and states work on a model that has integers too (B68)."""
    model = Mixed(dtype)
    report = train_only(model, "*", exclude="a")
    assert flags(model) == {"a": False, "q": False, "b": True}
    assert [name for name, _ in report.skipped] == ["q"]
    state = freeze_state(model)
    assert freeze(model).changed == ("b",)
    assert load_freeze_state(model, state).changed == ("b",)
    with frozen(model):
        assert not any(flags(model).values())
    assert freeze_state(model) == state
    assert audit(model).trainable == 2
