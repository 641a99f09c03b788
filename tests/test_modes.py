"""Holding a module in eval under any train(), and putting modes back exactly."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import types
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from freezekit._modes import HeldInEval, held_by, hold, release, restore_modes, save_modes


class Counting(nn.BatchNorm1d):
    """A norm whose class has a train() of its own."""

    def __init__(self) -> None:
        super().__init__(2)
        self.calls: list[bool] = []

    def train(self, mode: bool = True) -> Counting:
        self.calls.append(mode)
        super().train(mode)
        return self


class NormEval(nn.Module):
    """A backbone that puts its norm into eval by hand, as many vision models do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.body = nn.Linear(2, 2)

    def train(self, mode: bool = True) -> NormEval:
        super().train(mode)
        self.norm.eval()
        return self


def held_norm() -> nn.Sequential:
    """A model of which the norm is held."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    hold(model[1])
    return model


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Only reference counting frees things."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# -- holding -----------------------------------------------------------------------------------


def test_a_held_module_is_in_eval_at_once_and_after_every_train() -> None:
    """hold() is eval now, and train() on the model or the module changes nothing about it."""
    model = held_norm()
    assert not model[1].training
    model.train()
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    model[1].train()
    assert not model[1].training
    model.train(mode=True)
    assert not model[1].training


def test_train_still_returns_the_module() -> None:
    """``model = model.train()`` goes on working on a held module."""
    model = held_norm()
    assert model[1].train() is model[1]
    assert model[1].eval() is model[1]
    assert model.train() is model


def test_statistics_of_a_held_module_hold_still() -> None:
    """A forward in train mode neither moves the statistics nor uses the batch's."""
    model = held_norm().train()
    before = copy.deepcopy(model[1].state_dict())
    inputs = torch.randn(8, 2) + 5
    outputs = model[1](inputs)
    assert all(torch.equal(before[key], value) for key, value in model[1].state_dict().items())
    assert torch.equal(outputs, nn.BatchNorm1d(2).eval()(inputs))


def test_children_of_a_held_module_follow_train() -> None:
    """Only the module itself is held, not what is in it."""
    inner = nn.Sequential(nn.Dropout())
    model = nn.Sequential(nn.BatchNorm1d(2), inner)
    hold(model)
    model.eval()
    model.train()
    assert (model.training, model[0].training, inner[0].training) == (False, True, True)


def test_holding_twice_is_holding() -> None:
    """A second hold changes nothing, and one release is enough."""
    model = held_norm()
    holder = held_by(model[1])
    model.eval()
    hold(model[1])
    assert held_by(model[1]) is holder
    release(model[1])
    assert held_by(model[1]) is None
    assert not model[1].training


def test_a_hold_puts_back_what_code_set_by_hand() -> None:
    """Holding again a module whose ``training`` was set past the hold puts it into eval."""
    model = held_norm()
    model[1].training = True
    hold(model[1])
    assert not model[1].training


def test_what_is_not_held_is_said_so() -> None:
    """held_by() is the hold, or None; another ``train`` on the instance is no hold."""
    model = held_norm()
    assert isinstance(held_by(model[1]), HeldInEval)
    assert held_by(model[0]) is None
    model[0].train = lambda mode=True: model[0]  # type: ignore[method-assign]
    assert held_by(model[0]) is None


def test_the_hold_shows_itself() -> None:
    """Whoever looks at ``module.train`` reads who put it there."""
    text = repr(held_norm()[1].train)
    assert text == "<train() held in eval by freezekit; last asked for: True>"


def test_class_keys_and_names_stay() -> None:
    """A hold changes neither the class nor the state dict nor the children."""
    plain, held = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), held_norm()
    assert list(held.state_dict()) == list(plain.state_dict())
    assert [type(module) for module in held.modules()] == [type(m) for m in plain.modules()]
    assert repr(held) == repr(plain)
    held.load_state_dict(plain.state_dict())


# -- releasing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [True, False], ids=["train", "eval"])
def test_a_released_module_has_the_mode_last_asked_for(asked: bool) -> None:
    """After train(False) a release leaves eval, after train(True) it gives train."""
    model = held_norm()
    model.train(not asked)
    model.train(asked)
    release(model[1])
    assert model[1].training is asked
    assert "train" not in model[1].__dict__
    model.train(not asked)
    assert model[1].training is not asked


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_without_a_train_the_mode_before_the_hold_comes_back(mode: bool) -> None:
    """A release right after the hold undoes it."""
    module = nn.BatchNorm1d(2).train(mode)
    hold(module)
    release(module)
    assert module.training is mode


def test_releasing_what_is_not_held_does_nothing() -> None:
    """A release is safe to call."""
    module = nn.BatchNorm1d(2)
    release(module)
    assert module.training
    assert "train" not in module.__dict__


# -- other train() methods ---------------------------------------------------------------------


def test_a_class_with_its_own_train_is_still_asked() -> None:
    """The hold calls the class's train(), then puts the module into eval."""
    module = Counting()
    hold(module)
    nn.Sequential(module).train()
    module.eval()
    assert module.calls == [True, False]
    assert not module.training


def test_a_train_set_on_the_instance_is_still_asked_and_comes_back() -> None:
    """What someone else had set as ``module.train`` runs under the hold and is back after it."""
    module = nn.BatchNorm1d(2)
    calls: list[bool] = []

    def own_train(mode: bool = True) -> nn.Module:
        calls.append(mode)
        return nn.BatchNorm1d.train(module, mode)

    module.train = own_train  # type: ignore[method-assign,assignment]
    hold(module)
    module.train()
    assert calls == [True]
    assert not module.training
    release(module)
    assert module.__dict__["train"] is own_train
    assert module.training


def test_a_parent_that_puts_its_norm_into_eval_goes_with_a_hold() -> None:
    """A model with the ``norm_eval`` habit keeps it, under the hold and after it."""
    model = NormEval()
    hold(model.norm)
    model.train()
    assert (model.body.training, model.norm.training) == (True, False)
    release(model.norm)
    model.train()
    assert not model.norm.training


def test_a_held_parent_with_its_own_train_is_asked() -> None:
    """A module whose class overrides train() can be held itself."""
    model = NormEval()
    hold(model)
    model.train()
    assert (model.training, model.norm.training, model.body.training) == (False, False, True)


# -- copies, pickles, references ---------------------------------------------------------------


def _pickled(model: nn.Module) -> nn.Module:
    other: nn.Module = pickle.loads(pickle.dumps(model))
    return other


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other: nn.Module = torch.load(file, weights_only=False)
    return other


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _pickled, _saved])
def test_a_hold_goes_with_its_copy(duplicate: object) -> None:
    """A copy of the model holds its own norm, and the two do not know of each other."""
    assert callable(duplicate)
    model = held_norm()
    model.eval()
    other = duplicate(model)
    assert other.train() is other
    assert not other[1].training
    assert model[1].training is model[0].training is False
    release(other[1])
    assert other[1].training
    assert held_by(model[1]) is not None
    del model
    assert other.eval().train()[1].training


def test_a_copy_of_a_bound_train_is_bound_to_the_copy() -> None:
    """A method set on the instance is copied with the module, under the hold."""
    module = nn.BatchNorm1d(2)
    module.train = types.MethodType(nn.BatchNorm1d.train, module)  # type: ignore[method-assign]
    hold(module)
    other = copy.deepcopy(module)
    release(other)
    other.train()
    module.eval()
    assert other.__dict__["train"].__self__ is other
    assert other.training


def test_a_shallow_copy_of_what_is_gone_says_so() -> None:
    """copy.copy() shares the hold: without the original, train() says what to do instead."""
    module = nn.BatchNorm1d(2)
    hold(module)
    other = copy.copy(module)
    del module
    gc.collect()
    with pytest.raises(RuntimeError, match=r"shallow copy .* make copies with copy\.deepcopy$"):
        other.train()


@pytest.mark.usefixtures("no_gc")
def test_a_held_model_is_freed_by_reference_counting() -> None:
    """A hold makes no cycle: the model goes when its last name does."""
    model = held_norm()
    gone = weakref.ref(model[1]), weakref.ref(model[1].weight)
    del model
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.usefixtures("no_gc")
def test_a_copied_held_model_is_freed_by_reference_counting() -> None:
    """Neither deepcopy nor pickle makes a cycle of a hold."""
    for duplicate in (copy.deepcopy, _pickled):
        model = duplicate(held_norm())
        gone = weakref.ref(model)
        del model
        assert gone() is None


# -- saving and restoring ----------------------------------------------------------------------


def test_modes_come_back_module_by_module() -> None:
    """Each module's own mode is restored, where one flag for all would flatten them."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(), nn.BatchNorm1d(1))
    model[1].eval()
    saved = save_modes(model.modules())
    model.eval()
    restore_modes(saved)
    assert [module.training for module in model] == [True, False, True]


def test_a_hold_made_in_between_is_gone() -> None:
    """Restoring takes off holds that were not there, with the mode as it was."""
    module = nn.BatchNorm1d(2)
    saved = save_modes([module])
    hold(module)
    restore_modes(saved)
    assert held_by(module) is None
    assert module.training


def test_a_hold_released_in_between_is_back() -> None:
    """Restoring puts holds back, with the mode that had been asked for."""
    module = nn.BatchNorm1d(2)
    hold(module)
    module.train()
    saved = save_modes([module])
    release(module)
    module.eval()
    restore_modes(saved)
    assert held_by(module) is not None
    assert not module.training
    release(module)
    assert module.training


def test_the_mode_asked_for_in_between_is_forgotten() -> None:
    """A held module's pending mode is that of the time of saving."""
    module = nn.BatchNorm1d(2)
    hold(module)
    saved = save_modes([module])
    module.eval()
    restore_modes(saved)
    release(module)
    assert module.training


def test_a_train_set_on_the_instance_comes_back_from_below_a_hold() -> None:
    """Restoring a hold made in between puts the instance's own train() back."""
    module = nn.BatchNorm1d(2)
    own_train = types.MethodType(nn.BatchNorm1d.train, module)
    module.train = own_train  # type: ignore[method-assign]
    saved = save_modes([module])
    hold(module)
    restore_modes(saved)
    assert module.__dict__["train"] is own_train
