"""frozen: freeze for a block or a call, and restore exactly."""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import torch
from torch import nn
from torch.optim import SGD

import freezekit as fk
from freezekit._modes import held_by
from freezekit.errors import PartialTieWarning, UnmatchedPatternError
from zoo import IntegerTable, NormZoo, StorageTied, TiedLM, snapshot


class BoomError(Exception):
    """Goes wrong inside a block."""


def make_model() -> nn.Sequential:
    """A layer, a norm, dropout in eval, a head."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(), nn.Linear(2, 1))
    model[2].eval()
    model[3].bias.requires_grad = False
    return model


def step(model: nn.Module) -> None:
    """Fill gradients."""
    model(torch.ones(4, 2)).sum().backward()


# -- restoring ---------------------------------------------------------------------------------


def test_the_block_is_frozen_and_then_all_is_as_it_was() -> None:
    """Inside nothing learns; afterwards each flag and each mode is as it was on entry."""
    model = make_model()
    before = snapshot(model)
    with fk.frozen(model) as report:
        assert (report.trainable, report.held) == (0, ("1",))
        assert not any(p.requires_grad for p in model.parameters())
        assert not model.train()[1].training
    assert snapshot(model) == before


def test_only_what_is_named_is_frozen() -> None:
    """Patterns and exclude say what; norm_stats="keep" leaves norms alone."""
    model = make_model()
    with fk.frozen(model, ["0", "1"], exclude="0.bias", norm_stats="keep") as report:
        assert report.changed == ("0.weight", "1.weight", "1.bias")
        assert report.held == ()
        assert model[3].weight.requires_grad


def test_a_block_may_freeze_everything() -> None:
    """For the length of a block nothing need be trainable: that is no mistake to warn about."""
    model = make_model()
    with fk.frozen(model, ["0", "1", "3"]) as report:
        assert report.trainable == 0


@pytest.mark.parametrize("error", [BoomError, KeyboardInterrupt, StopIteration])
def test_all_is_restored_after_an_exception(error: type[BaseException]) -> None:
    """An exception goes through, and leaves the model as it was."""
    model = make_model()
    before = snapshot(model)

    def go_wrong() -> None:
        with fk.frozen(model):
            model.eval()
            raise error("inside")

    with pytest.raises(error, match="inside"):
        go_wrong()
    assert snapshot(model) == before


def test_what_the_block_does_to_flags_and_modes_is_undone() -> None:
    """Whatever happens inside: train, eval, unfreeze, freeze; it is as on entry afterwards."""
    model = make_model()
    before = snapshot(model)
    with fk.frozen(model, "0"):
        model.eval()
        fk.unfreeze(model)
        fk.freeze(model, "1")
        model[0].weight.requires_grad = True
        model[2].train()
    assert snapshot(model) == before


def test_a_module_that_was_held_before_is_held_after() -> None:
    """A hold that the block took off is back, with the mode that was pending."""
    model = NormZoo()
    fk.freeze(model, "bn1d")
    before = snapshot(model)
    with fk.frozen(model, ["bn2d", "layer_norm"]):
        fk.unfreeze(model, "bn1d")
        model.eval()
    assert snapshot(model) == before
    assert held_by(model.bn1d) is not None
    fk.unfreeze(model, "bn1d")
    assert model.bn1d.training


def test_both_tensors_of_a_storage_tie_are_restored() -> None:
    """Two tensors over one memory have a flag and a gradient each."""
    model = StorageTied()
    model.decode.weight.requires_grad = False
    model.encode.weight.grad = torch.ones(3, 2)
    before = snapshot(model)
    with fk.frozen(model):
        assert not model.encode.weight.requires_grad
    assert snapshot(model) == before


def test_integer_parameters_are_no_trouble() -> None:
    """What cannot learn is frozen before, inside and after."""
    model = IntegerTable()
    before = snapshot(model)
    with fk.frozen(model):
        pass
    assert snapshot(model) == before


# -- gradients ---------------------------------------------------------------------------------


def test_gradients_are_put_aside_and_back() -> None:
    """Inside, frozen parameters have no gradient; afterwards they have their own again."""
    model = make_model()
    step(model)
    before = snapshot(model)
    with fk.frozen(model):
        assert all(parameter.grad is None for parameter in model.parameters())
    assert snapshot(model) == before


def test_no_optimizer_moves_what_is_frozen_inside() -> None:
    """A step inside the block, with momentum and weight decay, leaves frozen weights alone."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    step(model)
    optimizer.step()
    before = copy.deepcopy(model[0].state_dict())
    with fk.frozen(model, "0"):
        step(model)
        optimizer.step()
        assert all(torch.equal(before[k], v) for k, v in model[0].state_dict().items())
    optimizer.step()
    assert not torch.equal(before["weight"], model.get_parameter("0.weight"))


def test_gradients_of_what_still_learns_are_the_blocks_own() -> None:
    """A gradient that the block clears stays cleared: only frozen parameters get theirs back."""
    model = make_model()
    step(model)
    with fk.frozen(model, "0"):
        model.zero_grad()
    assert model[0].weight.grad is not None
    assert model[3].weight.grad is None


def test_gradients_that_the_block_makes_stay() -> None:
    """What learns inside keeps the gradient that it got inside."""
    model = make_model()
    step(model)
    with fk.frozen(model, "0"):
        model[3].weight.grad = torch.full((1, 2), 7.0)
    assert torch.equal(model[3].weight.grad, torch.full((1, 2), 7.0))


def test_a_gradient_made_inside_for_a_frozen_parameter_wins() -> None:
    """Where the block unfroze and trained, the newer gradient is kept."""
    model = make_model()
    step(model)
    with fk.frozen(model, "0"):
        fk.unfreeze(model, "0")
        model[0].weight.grad = torch.full((2, 2), 7.0)
    assert torch.equal(model[0].weight.grad, torch.full((2, 2), 7.0))


def test_a_gradient_that_does_not_fit_any_more_is_dropped() -> None:
    """A parameter that changed its dtype inside does not get a gradient of the old one."""
    model = make_model()
    step(model)
    with fk.frozen(model, "0"):
        model.to(torch.float64)
    assert model[0].weight.grad is None
    assert model[0].weight.requires_grad


# -- nesting, entering again -------------------------------------------------------------------


def test_blocks_nest() -> None:
    """The inner block restores the outer one's state, the outer one the first."""
    model = make_model()
    before = snapshot(model)
    with fk.frozen(model, "0"):
        inside = snapshot(model)
        with fk.frozen(model, "1"):
            assert not model[1].weight.requires_grad
        assert snapshot(model) == inside
    assert snapshot(model) == before


def test_one_object_may_be_entered_again() -> None:
    """A frozen() is used twice, also within itself."""
    model = make_model()
    before = snapshot(model)
    block = fk.frozen(model, "0")
    with block:
        inside = snapshot(model)
        with block:
            pass
        assert snapshot(model) == inside
    assert snapshot(model) == before
    with block as report:
        assert report.changed == ("0.weight", "0.bias")
    assert snapshot(model) == before


def test_it_reads_the_model_on_entry() -> None:
    """What was changed between making and entering the block is respected."""
    model = make_model()
    block = fk.frozen(model)
    model[0].weight.requires_grad = False
    with block:
        pass
    assert not model[0].weight.requires_grad


# -- decorating --------------------------------------------------------------------------------


def test_a_decorated_function_runs_frozen() -> None:
    """Each call is a block; name, docstring and result are the function's own."""
    model = make_model()
    before = snapshot(model)

    @fk.frozen(model)
    def features(scale: float, *, shift: float = 0.0) -> tuple[bool, float]:
        """Tell whether anything learns."""
        return any(p.requires_grad for p in model.parameters()), scale + shift

    assert features(1.0, shift=2.0) == (False, 3.0)
    assert features(1.0) == (False, 1.0)
    assert (features.__name__, features.__doc__) == ("features", "Tell whether anything learns.")
    assert snapshot(model) == before


def test_a_decorated_function_that_raises_restores() -> None:
    """An exception of the function's goes through."""
    model = make_model()
    before = snapshot(model)

    @fk.frozen(model)
    def fail() -> None:
        raise BoomError("in the call")

    with pytest.raises(BoomError, match="in the call"):
        fail()
    assert snapshot(model) == before


def test_a_decorated_function_may_call_itself() -> None:
    """Recursion nests blocks."""
    model = make_model()
    before = snapshot(model)

    @fk.frozen(model)
    def count(n: int) -> int:
        assert not model[0].weight.requires_grad
        return n + count(n - 1) if n else 0

    assert count(4) == 10
    assert snapshot(model) == before


def generator() -> Iterator[int]:
    """Run after the call has returned."""
    yield 1


async def coroutine() -> int:
    """Run after the call has returned."""
    await asyncio.sleep(0)
    return 1


async def async_generator() -> AsyncIterator[int]:
    """Run after the call has returned."""
    yield 1


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(generator, id="generator"),
        pytest.param(coroutine, id="coroutine"),
        pytest.param(async_generator, id="async-generator"),
        pytest.param(functools.partial(generator), id="partial"),
    ],
)
def test_what_runs_later_is_not_decorated(function: Callable[[], object]) -> None:
    """A generator's body runs after the block is over: refused, with what to do instead."""
    message = (
        r"^frozen\(\) cannot decorate .*: its body runs after the call has returned; use "
        r"`with frozen\(\.\.\.\)` inside it$"
    )
    with pytest.raises(TypeError, match=message):
        fk.frozen(make_model())(function)


# -- errors on entry ---------------------------------------------------------------------------


def test_an_error_on_entry_leaves_the_model_alone() -> None:
    """A bad pattern is told on entry, and the body does not run."""
    model = make_model()
    before = snapshot(model)
    block = fk.frozen(model, "9")
    with pytest.raises(UnmatchedPatternError, match="no index 9"), block:
        pytest.fail("the body ran")
    assert snapshot(model) == before


def test_a_warning_turned_into_an_error_leaves_the_model_alone() -> None:
    """Under warnings-as-errors a partial tie is an error before anything is frozen."""
    model = TiedLM()
    before = snapshot(model)
    with pytest.raises(PartialTieWarning, match="is the same tensor as"), fk.frozen(model, "wte"):
        pytest.fail("the body ran")
    assert snapshot(model) == before
    with fk.frozen(model, "body"):
        pass
    assert snapshot(model) == before
