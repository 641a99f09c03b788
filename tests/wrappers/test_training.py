"""Freezing in the middle of training: every optimizer of torch, scalers, schedules, toggles."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR
from transformers import get_linear_schedule_with_warmup

import freezekit
from freezekit.errors import OptimizerError
from wrappers.wrappers_support import below, bits, inputs, make_net, moved, numbers

OPTIMIZERS: dict[str, type[Optimizer]] = {
    name: found
    for name, found in vars(torch.optim).items()
    if inspect.isclass(found) and issubclass(found, Optimizer) and found is not Optimizer
}
EDITABLE = {name: kind for name, kind in OPTIMIZERS.items() if name != "LBFGS"}

every_optimizer = pytest.mark.parametrize("kind", EDITABLE.values(), ids=EDITABLE)


class Trainer:
    """Three layers of plain matrices, which every optimizer of torch can train."""

    def __init__(self, kind: type[Optimizer], **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        accepted = inspect.signature(kind).parameters
        common = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9}
        self.optimizer = kind(
            self.model.parameters(),
            **{name: value for name, value in common.items() if name in accepted} | options,
        )

    def closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(inputs()).pow(2).mean()
        torch.autograd.backward(loss)
        if isinstance(self.optimizer, torch.optim.SparseAdam):
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to_sparse()
        return loss

    def train(self, steps: int = 2) -> set[str]:
        """Train, and tell which layers moved."""
        before = bits(self.model)
        for _ in range(steps):
            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.optimizer.step(self.closure)  # type: ignore[no-untyped-call]
            else:
                self.closure()
                self.optimizer.step()
        return moved(before, self.model)

    def held_tensors(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


ALL = {"0.weight", "1.weight", "2.weight"}


# -- optimizers ---------------------------------------------------------------------------------


@every_optimizer
def test_frozen_and_unfrozen_between_steps(kind: type[Optimizer]) -> None:
    """A layer stops at once, its state goes, it comes back once, and its state is made anew."""
    trainer = Trainer(kind)
    model, optimizer = trainer.model, trainer.optimizer
    assert trainer.train() == ALL
    freezekit.freeze(model, "0", optimizer=optimizer)
    assert model[0].weight not in optimizer.state
    assert trainer.train() == ALL - {"0.weight"}
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert trainer.train() == ALL - {"0.weight"}
    freezekit.unfreeze(model, "0", optimizer=optimizer)
    assert trainer.train() == ALL
    assert sorted(numbers(trainer.held_tensors())) == sorted(numbers(model.parameters()))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert trainer.train() == ALL


@every_optimizer
def test_group_of_its_own(kind: type[Optimizer]) -> None:
    """With options, what is unfrozen gets a group of its own, with them, and trains in it."""
    trainer = Trainer(kind)
    trainer.train()
    freezekit.freeze(trainer.model, "0", optimizer=trainer.optimizer)
    change = freezekit.unfreeze(trainer.model, "0", optimizer=trainer.optimizer, lr=0.003).optimizer
    assert change is not None
    assert (change.group, change.lr, change.added) == (1, 0.003, 1)
    assert trainer.train() == ALL
    twin = Trainer(kind)
    freezekit.freeze(twin.model, "0", optimizer=twin.optimizer)
    freezekit.unfreeze(twin.model, "0", optimizer=twin.optimizer, lr=0.5)
    twin.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    assert twin.optimizer.param_groups[1]["lr"] == 0.003
    assert twin.train() == ALL


@every_optimizer
def test_frozen_without_the_optimizer(kind: type[Optimizer]) -> None:
    """A layer stops although its optimizer still has it, its momentum and its weight decay."""
    trainer = Trainer(kind)
    trainer.train()
    freezekit.freeze(trainer.model, "0")
    assert trainer.train() == ALL - {"0.weight"}
    freezekit.unfreeze(trainer.model, "0")
    assert trainer.train() == ALL


@every_optimizer
def test_frozen_between_backward_and_step(kind: type[Optimizer]) -> None:
    """A layer that is frozen after backward does not take the step any more."""
    trainer = Trainer(kind)
    trainer.train()
    trainer.closure()
    freezekit.freeze(trainer.model, "0")
    before = bits(trainer.model)
    trainer.optimizer.step()
    assert moved(before, trainer.model) == ALL - {"0.weight"}


@pytest.mark.parametrize("option", ["foreach", "fused", "maximize"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_implementations(kind: type[Optimizer], option: str) -> None:
    """What an optimizer caches about its parameters does not outlive a freeze."""
    trainer = Trainer(kind, **{option: True})
    trainer.train()
    freezekit.freeze(trainer.model, "0", optimizer=trainer.optimizer)
    assert trainer.train() == ALL - {"0.weight"}
    freezekit.unfreeze(trainer.model, "0", optimizer=trainer.optimizer)
    assert trainer.train() == ALL


def test_lbfgs_is_refused() -> None:
    """LBFGS keeps flat copies of all parameters: it is refused, and nothing is changed."""
    trainer = Trainer(torch.optim.LBFGS)
    trainer.train()
    with pytest.raises(OptimizerError, match="LBFGS keeps its own flat list of parameters"):
        freezekit.freeze(trainer.model, "0", optimizer=trainer.optimizer)
    assert all(parameter.requires_grad for parameter in trainer.model.parameters())


def test_gradient_scaler() -> None:
    """A gradient scaler on the CPU goes on through freeze and unfreeze."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def train() -> set[str]:
        before = bits(net.train())
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = net(inputs()).pow(2).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return moved(before, net)

    everything = bits(net).keys()
    assert train() == everything
    freezekit.freeze(net, "backbone", optimizer=optimizer)
    assert train() == below(everything, "head")
    freezekit.unfreeze(net, "backbone", optimizer=optimizer)
    assert train() == everything


def test_frozen_between_unscale_and_step() -> None:
    """What is frozen after the scaler has looked at its gradient takes no step."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(inputs()).pow(2).mean()).backward()
    scaler.unscale_(optimizer)
    freezekit.freeze(net, "backbone")
    before = bits(net)
    scaler.step(optimizer)
    scaler.update()
    assert moved(before, net) == {
        name for name, _ in net.named_parameters() if name.startswith("head")
    }


# -- schedules ----------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5]),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "WarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "LinearLR": lr_scheduler.LinearLR,
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 20),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.9),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.001, 0.1),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 20)],
        [3],
    ),
    "SWALR": lambda optimizer: SWALR(optimizer, 0.05),
    "linear with warmup": lambda optimizer: get_linear_schedule_with_warmup(optimizer, 2, 30),
}

# They keep a list with one entry per group of their own, which add_param_group does not know of.
PER_GROUP = {
    "WarmRestarts",
    "LambdaLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "CyclicLR",
    "SWALR",
    "linear with warmup",
}


def train_on(trainer: Trainer, schedule: Any) -> list[float]:
    """Some steps on a schedule, and the rates of all groups after them."""
    for _ in range(3):
        trainer.train(1)
        schedule.step()
    return [float(group["lr"]) for group in trainer.optimizer.param_groups]


@pytest.mark.parametrize("make_schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_schedule_goes_on(make_schedule: Callable[[Optimizer], Any]) -> None:
    """Freezing and unfreezing leave a schedule at the rates that it would have had anyway."""
    trainer, twin = Trainer(torch.optim.SGD), Trainer(torch.optim.SGD)
    schedule, undisturbed = make_schedule(trainer.optimizer), make_schedule(twin.optimizer)
    rates = [train_on(trainer, schedule)]
    freezekit.freeze(trainer.model, "0", optimizer=trainer.optimizer)
    rates.append(train_on(trainer, schedule))
    freezekit.unfreeze(trainer.model, "0", optimizer=trainer.optimizer)
    rates.append(train_on(trainer, schedule))
    assert rates == [train_on(twin, undisturbed) for _ in range(3)]


@pytest.mark.parametrize("make_schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_schedule_without_parameters(make_schedule: Callable[[Optimizer], Any]) -> None:
    """A group that a freeze has emptied stays, and its schedule with it."""
    torch.manual_seed(0)
    trainer = Trainer(torch.optim.SGD)
    optimizer = torch.optim.SGD(
        [{"params": trainer.model[0].parameters()}, {"params": trainer.model[1:].parameters()}],
        lr=0.1,
        momentum=0.9,
    )
    trainer.optimizer = optimizer
    schedule = make_schedule(optimizer)
    freezekit.freeze(trainer.model, "0", optimizer=optimizer)
    first, second = train_on(trainer, schedule)
    assert optimizer.param_groups[0]["params"] == []
    assert first == second


GROWING = {name: make for name, make in SCHEDULES.items() if name not in PER_GROUP}


@pytest.mark.parametrize("make_schedule", GROWING.values(), ids=GROWING)
def test_schedule_takes_a_new_group(make_schedule: Callable[[Optimizer], Any]) -> None:
    """A group that an unfreeze adds follows the schedule, where that has no list of groups."""
    trainer = Trainer(torch.optim.SGD)
    schedule = make_schedule(trainer.optimizer)
    train_on(trainer, schedule)
    freezekit.freeze(trainer.model, "0", optimizer=trainer.optimizer)
    freezekit.unfreeze(trainer.model, "0", optimizer=trainer.optimizer, lr=0.004)
    rates = train_on(trainer, schedule)
    assert rates[1] not in (0, 0.004, rates[0])
    assert trainer.train() == ALL


# -- toggling -----------------------------------------------------------------------------------


def test_frozen_discriminator() -> None:
    """Two models that train in turns, one frozen for the other's step, both learn and hold."""
    generator, discriminator = make_net(), make_net()
    discriminator.backbone.linear = nn.Linear(2, 6)
    optimizers = [
        torch.optim.Adam(generator.parameters(), lr=0.01),
        torch.optim.Adam(discriminator.parameters(), lr=0.01),
    ]
    for _ in range(3):
        before = bits(discriminator)
        with freezekit.frozen(discriminator):
            optimizers[0].zero_grad()
            discriminator(generator(inputs())).mean().backward()
            optimizers[0].step()
        assert moved(before, discriminator) == set()
        before = bits(generator)
        with freezekit.frozen(generator):
            optimizers[1].zero_grad()
            discriminator(generator(inputs())).pow(2).mean().backward()
            optimizers[1].step()
        assert moved(before, generator) == set()
        assert all(module.training for module in discriminator.modules())
    assert all(parameter.requires_grad for parameter in generator.parameters())


def test_optimizer_step_in_backward() -> None:
    """Optimizers that step in backward, one per parameter, step what is not frozen."""
    net = make_net()
    optimizers: dict[torch.Tensor, Optimizer] = {
        p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()
    }

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    freezekit.freeze(net, "backbone")
    before = bits(net.train())
    net(inputs()).pow(2).mean().backward()
    assert moved(before, net) == below(before, "head")
    freezekit.unfreeze(net)
    net(inputs()).pow(2).mean().backward()
    # A bias right before a norm has no gradient but what rounding makes of 0.
    assert moved(before, net) >= {name for name in before if not name.endswith("bias")}
