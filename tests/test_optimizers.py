"""Letting go of frozen parameters and taking in trainable ones, by identity."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer, lr_scheduler

import freezekit as fk
from freezekit._optimizers import OptimizerChange
from freezekit.errors import OptimizerError
from zoo import StorageTied, TiedLM, snapshot


class TwoLayers(nn.Sequential):
    """Two layers: 4 tensors, 17 parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 3), nn.Linear(3, 2))

    def weight(self, layer: int) -> nn.Parameter:
        """A layer's weight."""
        return self.get_parameter(f"{layer}.weight")


def make_model() -> TwoLayers:
    """A fresh one."""
    return TwoLayers()


def train_step(model: nn.Module, optimizer: Optimizer) -> None:
    """One step on a batch of ones."""
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def change_of(report: fk.FreezeReport) -> OptimizerChange:
    """What the report says of the optimizer."""
    assert report.optimizer is not None
    return report.optimizer


def sizes(optimizer: Optimizer) -> list[int]:
    """How many tensors each group holds."""
    return [len(group["params"]) for group in optimizer.param_groups]


class NoRate(Optimizer):
    """An optimizer without a learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"momentum": 0.5})

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""


# -- letting go --------------------------------------------------------------------------------


def test_frozen_parameters_leave_their_groups_and_state() -> None:
    """freeze(optimizer=) takes them out, and tells how many and how many bytes of state."""
    model = make_model()
    optimizer = AdamW(model.parameters())
    train_step(model, optimizer)
    change = change_of(fk.freeze(model, "0", optimizer=optimizer))
    # Per tensor: two moments of its own size, and a step count of 4 bytes.
    assert change == OptimizerChange(
        optimizer="AdamW", removed=2, state_bytes=2 * 9 * 4 + 2 * 4, present=0
    )
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
        id(model[1].weight),
        id(model[1].bias),
    ]
    assert set(optimizer.state) == set(model[1].parameters())


def test_frozen_parameters_are_not_moved_by_weight_decay_or_momentum() -> None:
    """After freezing between backward and step, a step leaves the weights bit for bit."""
    for optimizer_class in (SGD, AdamW):
        model = make_model()
        optimizer = optimizer_class(model.parameters(), lr=0.1, weight_decay=0.1)
        train_step(model, optimizer)
        model(torch.ones(1, 2)).sum().backward()
        before = copy.deepcopy(model[0].state_dict())
        fk.freeze(model, "0")
        optimizer.step()
        assert all(torch.equal(before[key], value) for key, value in model[0].state_dict().items())


def test_an_emptied_group_stays_and_steps() -> None:
    """Schedulers count groups: an empty one is kept, and step() passes over it."""
    model = make_model()
    optimizer = AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    scheduler = lr_scheduler.LambdaLR(optimizer, [lambda _: 0.5, lambda _: 0.5])
    train_step(model, optimizer)
    fk.freeze(model, "0", optimizer=optimizer)
    assert sizes(optimizer) == [0, 2]
    train_step(model, optimizer)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.0005, 0.0005]


def test_everything_may_leave() -> None:
    """An optimizer may become empty, and take parameters in again."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    fk.freeze(model, optimizer=optimizer)
    assert sizes(optimizer) == [0]
    optimizer.step()
    fk.unfreeze(model, "1", optimizer=optimizer)
    assert sizes(optimizer) == [2]


def test_parameters_that_were_frozen_before_leave_as_well() -> None:
    """What is frozen already and still in a group is taken out."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    model[0].requires_grad_(requires_grad=False)
    change = change_of(fk.freeze(model, "0", optimizer=optimizer))
    assert (change.removed, sizes(optimizer)) == (2, [2])


def test_an_optimizer_of_other_parameters_is_left_alone() -> None:
    """Nothing to take out is nothing done, and said so."""
    model = make_model()
    optimizer = SGD(model[1].parameters(), lr=0.1)
    report = fk.freeze(model, "0", optimizer=optimizer)
    assert change_of(report) == OptimizerChange(optimizer="SGD")
    assert "\nSGD: nothing to change\n" in str(report)


def test_a_tied_tensor_leaves_once() -> None:
    """One tensor under two names is one tensor in the optimizer."""
    model = TiedLM()
    optimizer = SGD(model.parameters(), lr=0.1)
    change = change_of(fk.freeze(model, ["wte", "lm_head"], optimizer=optimizer))
    assert (change.removed, sizes(optimizer)) == (1, [2])


def test_both_tensors_of_a_storage_tie_leave() -> None:
    """Two Parameter objects over one memory are two entries of a group."""
    model = StorageTied()
    optimizer = SGD(model.parameters(), lr=0.1)
    change = change_of(fk.freeze(model, ["encode", "decode"], optimizer=optimizer))
    assert (change.removed, sizes(optimizer)) == (2, [2])


def test_the_lists_themselves_are_edited() -> None:
    """Who holds a group's list sees the change: it is made in place."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    held = optimizer.param_groups[0]["params"]
    fk.freeze(model, "0", optimizer=optimizer)
    fk.unfreeze(model, "0.bias", optimizer=optimizer)
    assert held is optimizer.param_groups[0]["params"]
    assert [id(p) for p in held] == [id(p) for p in (*model[1].parameters(), model[0].bias)]


def test_the_state_dict_goes_round_after_the_change() -> None:
    """An optimizer that let parameters go saves, and loads into one made the same way."""
    model = make_model()
    optimizer = AdamW(model.parameters())
    train_step(model, optimizer)
    fk.freeze(model, "0", optimizer=optimizer)
    other = AdamW(p for p in model.parameters() if p.requires_grad)
    other.load_state_dict(optimizer.state_dict())
    weight = model.weight(1)
    assert torch.equal(other.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg"])


# -- taking in ---------------------------------------------------------------------------------


def test_unfrozen_parameters_join_the_only_group() -> None:
    """With one group and no options, parameters join it."""
    model = make_model()
    fk.freeze(model, "0")
    optimizer = SGD(model[1].parameters(), lr=0.25, momentum=0.9)
    change = change_of(fk.unfreeze(model, "0", optimizer=optimizer))
    assert change == OptimizerChange(optimizer="SGD", added=2, group=0, lr=0.25)
    assert sizes(optimizer) == [4]
    before = model.weight(0).detach().clone()
    train_step(model, optimizer)
    assert not torch.equal(before, model.weight(0))


def test_options_make_a_group_of_their_own() -> None:
    """Options such as lr= belong to a new group; what is not given is the optimizer's default."""
    model = make_model()
    fk.freeze(model, "0")
    optimizer = SGD(model[1].parameters(), lr=0.25, momentum=0.9)
    change = change_of(fk.unfreeze(model, "0", optimizer=optimizer, lr=0.01))
    assert (change.added, change.group, change.lr) == (2, 1, 0.01)
    assert (sizes(optimizer), optimizer.param_groups[1]["momentum"]) == ([2, 2], 0.9)


def test_several_groups_are_not_guessed_among() -> None:
    """With several groups there is no telling which: an error asks for options, nothing changes."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    fk.freeze(model, "0")
    groups = [{"params": model[i].parameters(), "lr": 0.25 * i} for i in (1, 2)]
    optimizer = SGD(groups, lr=0.5)
    before = snapshot(model, optimizer)
    message = r"^SGD has 2 groups \(lr 0\.25, 0\.5\): say how .* optimizer=\.\.\., lr=1e-5\)$"
    with pytest.raises(OptimizerError, match=message):
        fk.unfreeze(model, "0", optimizer=optimizer)
    assert snapshot(model, optimizer) == before
    change = change_of(fk.unfreeze(model, "0", optimizer=optimizer, lr=0.125))
    assert (change.group, change.lr, sizes(optimizer)) == (2, 0.125, [2, 2, 2])


def test_a_group_that_freezing_emptied_is_where_they_come_back_to() -> None:
    """Of several groups, the only empty one takes the parameters in, with its own options."""
    model = make_model()
    groups = [{"params": model[i].parameters(), "lr": lr} for i, lr in ((0, 0.25), (1, 0.75))]
    optimizer = SGD(groups, lr=0.5)
    fk.freeze(model, "0", optimizer=optimizer)
    change = change_of(fk.unfreeze(model, "0", optimizer=optimizer))
    assert (change.group, change.lr, sizes(optimizer)) == (0, 0.25, [2, 2])


def test_train_only_does_not_guess_either() -> None:
    """Where it empties a second group, what comes in is not given the optimizer's defaults.

    Either the parameters find the group that they came from, or an error says so and nothing is
    changed.
    """
    model = make_model()
    groups = [{"params": model[i].parameters(), "lr": lr} for i, lr in ((0, 0.25), (1, 0.75))]
    optimizer = SGD(groups, lr=0.5)
    fk.freeze(model, "1", optimizer=optimizer)
    before = snapshot(model, optimizer)
    try:
        change = change_of(fk.train_only(model, "1", optimizer=optimizer))
    except OptimizerError:
        assert snapshot(model, optimizer) == before
    else:
        assert change.lr == 0.75


def test_with_options_what_was_frozen_leaves_the_group_that_it_is_still_in() -> None:
    """Frozen without optimizer=, parameters are still in their group: options move them."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.25)
    fk.freeze(model, "0")
    change = change_of(fk.unfreeze(model, optimizer=optimizer, lr=0.125))
    assert (change.added, change.present, change.group) == (2, 2, 1)
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == [
        [id(p) for p in model[1].parameters()],
        [id(p) for p in model[0].parameters()],
    ]


def test_a_fused_step_with_momentum_goes_on() -> None:
    """Fused SGD reads momentum of all of a group or of none: newcomers get a group like it."""
    model = make_model()
    fk.freeze(model, "0")
    optimizer = SGD(model[1].parameters(), lr=0.25, momentum=0.9, fused=True)
    train_step(model, optimizer)
    change = change_of(fk.unfreeze(model, "0", optimizer=optimizer))
    assert (change.group, change.lr, sizes(optimizer)) == (1, 0.25, [2, 2])
    train_step(model, optimizer)


def test_parameters_come_in_exactly_once() -> None:
    """Unfreezing again, or what is in a group already, adds nothing."""
    model = make_model()
    fk.freeze(model, "0")
    optimizer = SGD(model[1].parameters(), lr=0.1)
    fk.unfreeze(model, "0.weight", optimizer=optimizer)
    change = change_of(fk.unfreeze(model, optimizer=optimizer))
    assert (change.added, change.present, sizes(optimizer)) == (1, 3, [4])
    line = "\nSGD: 4 tensors in its groups already\n"
    assert line in str(fk.unfreeze(model, optimizer=optimizer))
    change = change_of(fk.unfreeze(model, optimizer=optimizer, lr=0.5))
    assert change == OptimizerChange(optimizer="SGD", present=4)
    assert sizes(optimizer) == [4]


def test_equal_values_are_different_parameters() -> None:
    """Identity decides: a zero bias is not in a group because another zero bias is."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))])
    optimizer = SGD([model[0]], lr=0.1)
    assert change_of(fk.unfreeze(model, optimizer=optimizer)).added == 1


def test_a_tied_tensor_comes_in_once() -> None:
    """One tensor under two names is added once."""
    model = TiedLM()
    model.wte.weight.requires_grad = False
    optimizer = SGD(model.body.parameters(), lr=0.1)
    assert change_of(fk.unfreeze(model, optimizer=optimizer)).added == 1


def test_train_only_lets_go_and_takes_in() -> None:
    """train_only(optimizer=) leaves exactly the trainable parameters in the groups."""
    model = make_model()
    fk.freeze(model, "1")
    optimizer = SGD(model[0].parameters(), lr=0.1)
    change = change_of(fk.train_only(model, "1", optimizer=optimizer))
    assert (change.removed, change.added) == (2, 2)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
        id(p) for p in model[1].parameters()
    ]


# -- named parameters --------------------------------------------------------------------------


def names(optimizer: Optimizer) -> list[list[str]]:
    """The names in each group."""
    return [group["param_names"] for group in optimizer.param_groups]


def test_names_stay_in_step() -> None:
    """An optimizer made of named parameters keeps names and tensors side by side."""
    model = make_model()
    optimizer = AdamW(model.named_parameters())
    fk.freeze(model, ["0.weight", "1.bias"], optimizer=optimizer)
    assert names(optimizer) == [["0.bias", "1.weight"]]
    fk.unfreeze(model, "1.bias", optimizer=optimizer)
    assert names(optimizer) == [["0.bias", "1.weight", "1.bias"]]
    fk.unfreeze(model, "0.weight", optimizer=optimizer, lr=0.5)
    assert names(optimizer) == [["0.bias", "1.weight", "1.bias"], ["0.weight"]]
    by_name = dict(model.named_parameters())
    for group in optimizer.param_groups:
        pairs = zip(group["param_names"], group["params"], strict=True)
        assert all(by_name[name] is tensor for name, tensor in pairs)
    optimizer.load_state_dict(optimizer.state_dict())


# -- schedulers --------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20),
    "linear": lr_scheduler.LinearLR,
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.5),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 1)], [2]
    ),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_schedulers_go_on_after_freeze_and_unfreeze(
    make: Callable[[Optimizer], lr_scheduler.LRScheduler],
) -> None:
    """With one group, the rates after a change are those of a run without it."""
    rates = []
    for change in (False, True):
        model = make_model()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = make(optimizer)
        for step in range(4):
            if change and step == 1:
                fk.freeze(model, "0", optimizer=optimizer)
            if change and step == 3:
                fk.unfreeze(model, "0", optimizer=optimizer)
            train_step(model, optimizer)
            scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates[0] == rates[1]


@pytest.mark.parametrize("name", ["step", "cosine", "linear"])
def test_schedulers_without_a_list_per_group_take_a_new_group(name: str) -> None:
    """Where torch's scheduler computes each group's rate from the group, a new one is scheduled."""
    model = make_model()
    fk.freeze(model, "0")
    optimizer = SGD(model[1].parameters(), lr=0.5)
    scheduler = SCHEDULERS[name](optimizer)
    train_step(model, optimizer)
    scheduler.step()
    fk.unfreeze(model, "0", optimizer=optimizer, lr=0.25)
    train_step(model, optimizer)
    scheduler.step()
    assert optimizer.param_groups[1]["lr"] != 0.25


def test_a_new_group_has_the_rate_that_a_later_scheduler_starts_from() -> None:
    """Under a scheduler every group has an initial_lr; the new one has its own."""
    model = make_model()
    fk.freeze(model, "0")
    optimizer = SGD(model[1].parameters(), lr=0.1)
    lr_scheduler.StepLR(optimizer, 1)
    fk.unfreeze(model, "0", optimizer=optimizer, lr=0.01)
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.1, 0.01]
    lr_scheduler.StepLR(optimizer, 1, last_epoch=3)


def test_without_a_scheduler_no_group_has_an_initial_rate() -> None:
    """What only schedulers set is set only under one."""
    model = make_model()
    fk.freeze(model, "0")
    optimizer = SGD(model[1].parameters(), lr=0.1)
    fk.unfreeze(model, "0", optimizer=optimizer, lr=0.01)
    assert all("initial_lr" not in group for group in optimizer.param_groups)


# -- odd optimizers ----------------------------------------------------------------------------


def test_an_optimizer_without_a_rate_takes_parameters() -> None:
    """A learning rate is reported where there is one."""
    model = make_model()
    fk.freeze(model, "0")
    optimizer = NoRate(model[1].parameters())
    report = fk.unfreeze(model, "0", optimizer=optimizer)
    assert (change_of(report).added, change_of(report).lr) == (2, None)
    assert "NoRate: 2 tensors into group 0" in str(report)


def test_an_optimizer_that_finds_its_own_rate_takes_parameters() -> None:
    """An lr of None, as Adafactor's with relative steps, is no number, and no error."""
    model = make_model()
    fk.freeze(model, "0")
    optimizer = SGD(model[1].parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    report = fk.unfreeze(model, "0", optimizer=optimizer)
    assert (change_of(report).added, change_of(report).lr) == (2, None)


def test_a_rate_in_a_tensor_is_reported_as_a_number() -> None:
    """Capturable optimizers keep lr in a tensor; the report holds no tensor."""
    model = make_model()
    fk.freeze(model, "0")
    optimizer = AdamW(model[1].parameters(), lr=torch.tensor(0.5))
    change = change_of(fk.unfreeze(model, "0", optimizer=optimizer))
    assert type(change.lr) is float
    assert change.lr == 0.5


def test_state_in_lists_and_dictionaries_is_counted() -> None:
    """Bytes of state are those of all tensors in it, however nested; numbers are none."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight(0)] = {
        "history": [torch.zeros(3), (torch.zeros(2),)],
        "inner": {"moment": torch.zeros(1, dtype=torch.float64)},
        "step": 3,
    }
    assert change_of(fk.freeze(model, "0", optimizer=optimizer)).state_bytes == 12 + 8 + 8


class Flat(LBFGS):
    """A subclass keeps the flat list of its base."""


@pytest.mark.parametrize("optimizer_class", [LBFGS, Flat])
@pytest.mark.parametrize("verb", [fk.freeze, fk.unfreeze], ids=["freeze", "unfreeze"])
def test_an_optimizer_with_a_flat_list_is_refused(
    verb: Callable[..., object], optimizer_class: type[LBFGS]
) -> None:
    """LBFGS cannot be edited: the error says what to do, and nothing is changed."""
    model = make_model()
    optimizer = optimizer_class(model.parameters())
    message = (
        rf"^{optimizer_class.__name__} keeps its own flat list of parameters: make a new "
        r"optimizer after freezing instead of passing optimizer=$"
    )
    with pytest.raises(OptimizerError, match=message):
        verb(model, "0", optimizer=optimizer)
    assert all(p.requires_grad for p in model.parameters())
    assert sizes(optimizer) == [4]


@pytest.mark.parametrize("optimizer", ["adam", SGD, lr_scheduler.StepLR], ids=str)
def test_what_is_no_optimizer_is_named(optimizer: object) -> None:
    """A string, a class or a scheduler is an error with its type."""
    message = rf"^optimizer: expected a torch\.optim\.Optimizer, got {type(optimizer).__name__}$"
    with pytest.raises(OptimizerError, match=message):
        fk.freeze(make_model(), "0", optimizer=optimizer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("weigth_decay", r"; did you mean 'weight_decay'\? \(it has "),
        ("LR", r" \(it has "),
        ("exclud", r"; did you mean 'exclude'\? \(it has "),
        ("optimiser", r"; did you mean 'optimizer'\? \(it has "),
        ("momentum", r" \(it has "),
        ("params", r" \(it has |; did you mean "),
        ("param_names", r" \(it has |; did you mean "),
    ],
)
def test_a_misspelt_option_is_an_error(option: str, hint: str) -> None:
    """Torch would keep an unknown option and not heed it: it is refused, with the nearest one."""
    model = make_model()
    fk.freeze(model, "0")
    optimizer = AdamW(model[1].parameters())
    message = f"^AdamW has no group option '{option}'(?:{hint})"
    given: dict[str, Any] = {option: 0.1}
    with pytest.raises(OptimizerError, match=message):
        fk.unfreeze(model, "0", optimizer=optimizer, **given)
    assert not model.weight(0).requires_grad
    assert sizes(optimizer) == [2]


def test_options_without_an_optimizer_are_a_type_error() -> None:
    """A keyword that nobody takes is the error that Python itself would raise."""
    message = r"^unexpected keyword argument\(s\) lr, excludes: options .* need optimizer=\.\.\.$"
    with pytest.raises(TypeError, match=message):
        fk.unfreeze(make_model(), "0", lr=0.1, excludes="1")
