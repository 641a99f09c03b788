"""Group D: the optimizer out of step with the freeze."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler

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
from freezekit.errors import (
    AuditFailedError,
    NothingTrainableWarning,
    OptimizerError,
    UnmatchedPatternError,
)


class Net(nn.Module):
    """A body and a head, both with a bias that begins as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 1)
        nn.init.zeros_(self.body.bias)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.tanh(self.body(x)))
        return found


def step(net: Net, optimizer: Optimizer) -> list[str]:
    """A training step; returns the names of all that moved."""
    before = {name: value.detach().clone() for name, value in net.state_dict().items()}
    optimizer.zero_grad()
    (net(torch.randn(4, 3)) - 1).pow(2).mean().backward()
    optimizer.step()
    return [n for n, value in net.state_dict().items() if not torch.equal(value, before[n])]


def trainable(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def groups_of(optimizer: Optimizer, parameter: torch.Tensor) -> list[dict[str, Any]]:
    """The groups that hold a parameter, each as often as it does."""
    return [g for g in optimizer.param_groups for p in g["params"] if p is parameter]


BODY, HEAD = ["body.weight", "body.bias"], ["head.weight", "head.bias"]


# -- B38: unfrozen later -----------------------------------------------------------------------


def optimizers() -> list[Any]:
    """Optimizers in each of their implementations, momentum and decay switched on."""
    made = []
    for name, options, ways in (
        ("SGD", {"momentum": 0.9, "weight_decay": 0.1}, ("foreach", "fused")),
        ("AdamW", {"weight_decay": 0.1}, ("foreach", "fused")),
        ("Adagrad", {}, ("foreach", "fused")),
        ("Adamax", {}, ("foreach",)),
        ("RMSprop", {"momentum": 0.9}, ("foreach",)),
        ("Rprop", {}, ("foreach",)),
        ("ASGD", {}, ("foreach",)),
        ("Adafactor", {}, ("foreach",)),
    ):
        single = dict.fromkeys(ways, False)
        made.append(pytest.param(name, options | single, id=f"{name}-single"))
        made += [pytest.param(name, options | {way: True}, id=f"{name}-{way}") for way in ways]
    return made


def make(name: str, parameters: Any, options: dict[str, Any]) -> Optimizer:
    optimizer: Optimizer = getattr(torch.optim, name)(parameters, lr=0.1, **options)
    return optimizer


@pytest.mark.parametrize(("name", "options"), optimizers())
@pytest.mark.parametrize("group", [{}, {"lr": 0.01}], ids=["same-group", "own-group"])
@pytest.mark.parametrize("begin", ["left-out", "taken-out"])
def test_what_is_unfrozen_is_trained(
    name: str, options: dict[str, Any], group: dict[str, Any], begin: str
) -> None:
    """A layer unfrozen after some steps learns, once it is in a group exactly once (B38)."""
    net = Net()
    optimizer = make(name, net.parameters(), options)
    if begin == "taken-out":
        step(net, optimizer)
        freeze(net, "body", optimizer=optimizer)
    else:
        freeze(net, "body")
        optimizer = make(name, trainable(net), options)
    for _ in range(2):
        assert step(net, optimizer) == HEAD

    net.body.requires_grad_(True)  # all that plain code does
    assert step(net, optimizer) == HEAD
    net.body.requires_grad_(False)

    change = unfreeze(net, "body", optimizer=optimizer, **group).optimizer
    assert change is not None
    assert (change.added, change.present) == (2, 0)
    assert step(net, optimizer) == BODY + HEAD
    again = unfreeze(net, optimizer=optimizer, **group).optimizer
    assert again is not None
    assert (again.added, again.present) == (0, 4)
    for parameter in net.parameters():
        assert len(groups_of(optimizer, parameter)) == 1
    assert step(net, optimizer) == BODY + HEAD


def test_unfrozen_parameters_get_the_options_asked_for() -> None:
    """The new group has the options given, and the optimizer's defaults for the rest (B38)."""
    net = Net()
    freeze(net, "body")
    optimizer = torch.optim.AdamW(trainable(net), lr=0.1, weight_decay=0.5)
    change = unfreeze(net, "body", optimizer=optimizer, lr=1e-3, betas=(0.5, 0.9)).optimizer
    assert change is not None
    assert (change.group, change.lr) == (1, 1e-3)
    (group,) = groups_of(optimizer, net.body.bias)
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-3, (0.5, 0.9), 0.5)
    (other,) = groups_of(optimizer, net.head.bias)
    assert other["lr"] == 0.1


def test_options_reach_parameters_that_are_in_the_optimizer_already() -> None:
    """What never left the optimizer is put into a group with the options given too (B38)."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    freeze(net, "body")
    step(net, optimizer)
    unfreeze(net, "body", optimizer=optimizer, lr=1e-3)
    assert [group["lr"] for group in groups_of(optimizer, net.body.weight)] == [1e-3]
    assert [group["lr"] for group in groups_of(optimizer, net.head.weight)] == [0.1]


def test_layer_comes_back_at_the_rate_it_had() -> None:
    """Freezing and unfreezing a layer with a rate of its own gives it that rate back (B38)."""
    net = Net()
    optimizer = torch.optim.SGD(
        [
            {"params": net.body.parameters(), "lr": 1e-5},
            {"params": net.head.parameters(), "lr": 0.1},
        ]
    )
    freeze(net, "body", optimizer=optimizer)
    unfreeze(net, "body", optimizer=optimizer)
    assert [group["lr"] for group in groups_of(optimizer, net.body.weight)] == [1e-5]


def test_train_only_moves_parameters_both_ways() -> None:
    """train_only takes out of the optimizer what it freezes, and puts in what it frees (B38)."""
    net = Net()
    freeze(net, "body")
    optimizer = torch.optim.SGD(trainable(net), lr=0.1, momentum=0.9)
    step(net, optimizer)
    change = train_only(net, "body", optimizer=optimizer).optimizer
    assert change is not None
    assert (change.removed, change.added, change.state_bytes) == (2, 2, 16)
    assert step(net, optimizer) == BODY


def test_named_parameters_keep_their_names() -> None:
    """An optimizer made from named parameters has each name beside its parameter (B38)."""
    net = Net()
    optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)
    freeze(net, "body.weight", optimizer=optimizer)
    (group,) = optimizer.param_groups
    assert group["param_names"] == ["body.bias", *HEAD]
    unfreeze(net, "body.weight", optimizer=optimizer)
    assert group["param_names"] == ["body.bias", *HEAD, "body.weight"]
    freeze(net, "head", optimizer=optimizer)
    unfreeze(net, "head", optimizer=optimizer, lr=0.01)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for name, parameter in zip(names, held, strict=True):
        assert net.get_parameter(name) is parameter
    assert step(net, optimizer) == BODY + HEAD


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lrr": 0.1}, OptimizerError, r"SGD has no group option 'lrr'; did you mean 'lr'\?"),
        ({"betas": (0.9, 0.9)}, OptimizerError, "SGD has no group option 'betas'"),
        ({"params": []}, OptimizerError, "SGD has no group option 'params'"),
        ({"optimizer": None, "lr": 0.1}, TypeError, "lr: options of an optimizer group need"),
        ({"optimizer": "sgd"}, OptimizerError, r"expected a torch\.optim\.Optimizer, got str"),
    ],
    ids=["misspelt", "another-optimizer's", "params", "no-optimizer", "not-an-optimizer"],
)
def test_wrong_options_change_nothing(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """An option that the optimizer has not is refused before anything is changed (B38)."""
    net = Net()
    freeze(net, "body")
    optimizer = torch.optim.SGD(trainable(net), lr=0.1)
    state, groups = freeze_state(net), copy.copy(optimizer.param_groups)
    with pytest.raises(error, match=message):
        unfreeze(net, "body", **{"optimizer": optimizer, **options})
    assert freeze_state(net) == state
    assert optimizer.param_groups == groups


class PlainDescent(Optimizer):
    """An optimizer of a user's own, whose groups have no learning rate."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad)


def test_optimizer_needs_no_learning_rate() -> None:
    """An optimizer without a learning rate lets go and takes in like any other (B38)."""
    net = Net()
    optimizer = PlainDescent(net.parameters())
    freeze(net, "body", optimizer=optimizer)
    assert step(net, optimizer) == HEAD
    change = unfreeze(net, "body", optimizer=optimizer).optimizer
    assert change is not None
    assert (change.added, change.group, change.lr) == (2, 0, None)
    assert step(net, optimizer) == BODY + HEAD


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 1, gamma=0.5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, gamma=0.5),
    "LinearLR": lambda o: schedulers.LinearLR(o, start_factor=0.5),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=9),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, T_max=9),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.5**epoch),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.5),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.5, total_steps=9),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, base_lr=0.05, max_lr=0.5),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=9),
}
# They keep a list of their own with a value per group: a group that comes later is in none.
PER_GROUP = {
    *("LambdaLR", "MultiplicativeLR", "OneCycleLR", "CyclicLR"),
    "CosineAnnealingWarmRestarts",
}


def scheduled(name: str) -> tuple[Net, Optimizer, Callable[[], list[str]]]:
    """A model with a frozen body after an epoch, and a function for one epoch more."""
    net = Net()
    freeze(net, "body")
    optimizer = torch.optim.SGD(trainable(net), lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)

    def epoch() -> list[str]:
        moved = step(net, optimizer)
        if isinstance(scheduler, schedulers.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
        return moved

    epoch()
    return net, optimizer, epoch


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_goes_on_over_the_same_group(name: str) -> None:
    """What joins the optimizer's one group follows any scheduler that is there (B38)."""
    net, optimizer, epoch = scheduled(name)
    _, reference, reference_epoch = scheduled(name)
    unfreeze(net, "body", optimizer=optimizer)
    for _ in range(2):
        assert epoch() == BODY + HEAD
        reference_epoch()
    assert [group["lr"] for group in optimizer.param_groups] == [reference.param_groups[0]["lr"]]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_group_left_empty_does_not_disturb_a_scheduler(name: str) -> None:
    """Freezing everything out of a scheduled optimizer leaves its groups countable (B38)."""
    net, optimizer, epoch = scheduled(name)
    freeze(net, optimizer=optimizer)
    net.requires_grad_(True)  # only so that there is something to call backward on
    for _ in range(2):
        assert epoch() == []


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name not in PER_GROUP])
def test_scheduler_takes_in_a_new_group(name: str) -> None:
    """A new group follows a scheduler that looks at the groups, at a rate of its own (B38)."""
    net, optimizer, epoch = scheduled(name)
    unfreeze(net, "body", optimizer=optimizer, lr=0.01)
    assert epoch() == BODY + HEAD
    epoch()
    (rate,) = [group["lr"] for group in groups_of(optimizer, net.body.weight)]
    assert 0 < rate < 0.02


def test_scheduler_made_anew_begins_at_the_new_rate() -> None:
    """The new group has an initial_lr, so that a scheduler can be made that goes on (B38)."""
    net, optimizer, _ = scheduled("LambdaLR")
    unfreeze(net, "body", optimizer=optimizer, lr=0.01)
    anew = schedulers.LambdaLR(optimizer, lambda epoch: 0.5**epoch, last_epoch=0)
    assert anew.get_last_lr() == [0.05, 0.005]


def test_initial_rate_is_not_the_rate_that_is_scheduled() -> None:
    """A rate that is a tensor is changed in place, and the initial one stays what it was (B38)."""
    net = Net()
    freeze(net, "body")
    optimizer = torch.optim.Adam(trainable(net), lr=torch.tensor(0.5), foreach=False)
    scheduler = schedulers.ExponentialLR(optimizer, gamma=0.5)
    unfreeze(net, "body", optimizer=optimizer, lr=torch.tensor(0.25))
    step(net, optimizer)
    scheduler.step()
    rates = [(float(g["initial_lr"]), float(g["lr"])) for g in optimizer.param_groups]
    assert rates == [(0.5, 0.25), (0.25, 0.125)]


# -- B40, B41: resuming ------------------------------------------------------------------------


def test_optimizer_state_fits_when_the_freeze_is_restored_first() -> None:
    """With the freeze of the checkpoint in force, its optimizer state loads again (B40)."""
    net = Net()
    saved = torch.optim.Adam(net.parameters()).state_dict()
    freeze(net, "body.bias")
    with pytest.raises(ValueError, match="parameter group"):
        torch.optim.Adam(trainable(net)).load_state_dict(saved)

    optimizer = torch.optim.Adam(trainable(net), lr=0.1)
    step(net, optimizer)
    checkpoint = copy.deepcopy((net.state_dict(), freeze_state(net), optimizer.state_dict()))
    step(net, optimizer)

    resumed = Net()
    freeze(resumed, "head.bias")  # the script's setup has changed since
    resumed.load_state_dict(checkpoint[0])
    load_freeze_state(resumed, checkpoint[1])
    again = torch.optim.Adam(trainable(resumed), lr=0.1)
    again.load_state_dict(checkpoint[2])
    torch.manual_seed(3)
    step(net, optimizer)
    torch.manual_seed(3)
    assert step(resumed, again) == ["body.weight", *HEAD]


@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
def test_optimizer_that_let_go_saves_and_loads(named: bool) -> None:
    """An optimizer that parameters were taken out of saves a state that fits its like (B40)."""
    net = Net()

    def made() -> Optimizer:
        parameters = net.named_parameters() if named else net.parameters()
        return torch.optim.Adam(parameters, lr=0.1)

    optimizer = made()
    step(net, optimizer)
    freeze(net, "body", optimizer=optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    assert sorted(saved["state"]) == [0, 1]
    anew = made()
    with pytest.raises(ValueError, match="parameter group"):
        anew.load_state_dict(saved)
    freeze(net, "body", optimizer=anew)
    anew.load_state_dict(saved)
    for parameter in net.head.parameters():
        one, other = optimizer.state[parameter], anew.state[parameter]
        assert all(torch.equal(one[key], other[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_resume_does_not_freeze_again() -> None:
    """The state of the checkpoint undoes a setup that freezes at every start (B41)."""

    def setup() -> Net:
        net = Net()
        freeze(net, "body")
        return net

    def hook(net: Net, epoch: int) -> None:
        if epoch == 2:
            unfreeze(net, "body")

    net = setup()
    for epoch in range(3):
        hook(net, epoch)
    checkpoint = freeze_state(net)

    resumed = setup()
    for epoch in range(3, 5):
        hook(resumed, epoch)
    assert not resumed.body.weight.requires_grad
    assert load_freeze_state(resumed, checkpoint).changed == tuple(BODY)
    assert step(resumed, torch.optim.SGD(trainable(resumed), lr=0.1)) == BODY + HEAD


# -- B42: identity -----------------------------------------------------------------------------


def test_parameters_of_equal_values_are_told_apart() -> None:
    """Two biases of zeros are two parameters, on the way in and on the way out (B42)."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(3))
            self.b = nn.Parameter(torch.zeros(3))

    pair = Pair()
    freeze(pair, "b")
    optimizer = torch.optim.SGD([pair.a], lr=0.1)
    held = [q for group in optimizer.param_groups for q in group["params"]]
    assert any(torch.equal(q, pair.b) for q in held)  # by value, it would be there already

    unfreeze(pair, "b", optimizer=optimizer)
    assert len(groups_of(optimizer, pair.b)) == len(groups_of(optimizer, pair.a)) == 1
    freeze(pair, "a", optimizer=optimizer)
    assert groups_of(optimizer, pair.a) == []
    assert len(groups_of(optimizer, pair.b)) == 1


def test_other_models_in_the_optimizer_stay() -> None:
    """An optimizer over two models lets go of the one that is frozen, not of its like (B42)."""
    net = Net()
    twin = copy.deepcopy(net)
    optimizer = torch.optim.SGD([*net.parameters(), *twin.parameters()], lr=0.1)
    freeze(twin, optimizer=optimizer)
    left = optimizer.param_groups[0]["params"]
    assert all(one is other for one, other in zip(left, net.parameters(), strict=True))


# -- B44: nothing left -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "named"),
    [
        pytest.param(["body", "head"], r"'body', 'head' took the last 4 tensors", id="names"),
        pytest.param("*weight", r"'\*weight' took the last 2 tensors", id="the-rest"),
        pytest.param("re:.*", r"'re:\.\*' took", id="regex"),
        pytest.param(nn.Linear, r"'type:Linear' took", id="class"),
    ],
)
def test_pattern_that_leaves_nothing_is_named(patterns: Any, named: str) -> None:
    """Patterns that swallow the head too give a warning with their names (B44)."""
    net = Net()
    if patterns == "*weight":
        freeze(net, "*bias")
    with pytest.warns(NothingTrainableWarning, match=named):
        freeze(net, patterns)
    assert trainable(net) == []
    with pytest.raises(ValueError, match="empty parameter list"):
        torch.optim.SGD(trainable(net), lr=0.1)
    with pytest.raises(AuditFailedError, match="FK101 error: nothing is trainable"):
        audit(net).raise_for()


def test_warning_can_be_made_an_error() -> None:
    """Turned into an error, the warning comes before anything is changed (B44)."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step(net, optimizer)
    grads = [p.grad for p in net.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error", NothingTrainableWarning)
        with pytest.raises(NothingTrainableWarning, match="nothing in Net is trainable"):
            freeze(net, ["body", "head"], optimizer=optimizer)
    assert len(trainable(net)) == 4
    assert all(p.grad is grad for p, grad in zip(net.parameters(), grads, strict=True))
    assert len(optimizer.param_groups[0]["params"]) == 4


def test_everything_may_be_frozen_on_purpose() -> None:
    """Everything, said plainly, is frozen without a warning; and again, and in a block (B44)."""
    net = Net()
    with frozen(net):
        assert trainable(net) == []
    assert freeze(net).trainable == 0
    assert freeze(net, "*").changed == ()


def test_train_only_of_nothing_is_an_error() -> None:
    """train_only that would leave nothing trainable is refused (B44)."""
    net = Net()
    with pytest.raises(UnmatchedPatternError, match="all that it matches is excluded"):
        train_only(net, "head", exclude="head")
    assert len(trainable(net)) == 4


# -- B45: frozen by leaving it out -------------------------------------------------------------


def test_frozen_backbone_piles_up_no_gradients() -> None:
    """Left out of the optimizer, a backbone still fills its .grad; frozen, it does not (B45)."""
    net = Net()
    optimizer = torch.optim.SGD(net.head.parameters(), lr=0.1)
    for _ in range(2):
        assert step(net, optimizer) == HEAD
    assert net.get_parameter("body.weight").grad is not None
    assert audit(net).trainable == audit(net).total

    assert freeze(net, "body").cleared == tuple(BODY)
    for _ in range(2):
        assert step(net, optimizer) == HEAD
    assert net.get_parameter("body.weight").grad is None
    assert audit(net).trainable == select(net, "head").numel
