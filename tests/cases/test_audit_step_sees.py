"""Every case that a step shows: the finding comes, with its names, and its mend makes it go."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everyone writes it
from torch import nn
from torch.utils.checkpoint import checkpoint

import freezekit as fk
from audit_support import apply_mend, codes, find, freeze_by_hand

Step = Callable[[], object]


class Case(NamedTuple):
    """A model and its step as the case leaves them, and what audit_step is to say.

    Attributes:
        model: the model.
        step: its step.
        code: the finding's code.
        fqns: its names.
        cause: words of the cause.
        severity: the finding's severity.
        mend: whether the mend's code ends it as it stands.
    """

    model: nn.Module
    step: Step
    code: str
    fqns: tuple[str, ...]
    cause: str = ""
    severity: str = "error"
    mend: bool = True


def parts(**modules: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(modules)


def names(*modules: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for module in modules for name in ("weight", "bias"))


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


X = torch.ones(2, 3)


# -- no gradient, and why ----------------------------------------------------------------------


def combination_b() -> Case:
    model = parts(backbone=nn.Linear(3, 3), head=nn.Linear(3, 1))

    def step() -> None:
        with torch.no_grad():
            features = model["backbone"](X)
        model["head"](features).sum().backward()

    cause = "2 tensors (12 parameters) marked trainable that cannot receive a gradient, because "
    cause += "backbone runs under torch.no_grad(); DistributedDataParallel would raise"
    return Case(model, step, "FK803", names("backbone"), cause)


class NoGradInside(nn.Module):
    """A model whose own forward switches gradients off."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = self.encoder(x)
        found: torch.Tensor = self.head(features)
        return found


def no_grad_inside() -> Case:
    model = NoGradInside()
    expected = names("encoder.0", "encoder.1")
    return Case(model, lambda: model(X).sum().backward(), "FK803", expected, "because encoder runs")


class Decorated(nn.Module):
    """A frozen-to-be encoder whose forward is decorated, with a token of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(3))
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.token
        for layer in self.layers:
            x = layer(x)
        return x


def decorated_forward() -> Case:
    model = parts(encoder=Decorated(), head=nn.Linear(3, 1))

    def step() -> None:
        model["head"](model["encoder"](X)).sum().backward()

    expected = ("encoder.token", *names("encoder.layers.0", "encoder.layers.1"))
    return Case(model, step, "FK803", expected, "because encoder runs under torch.no_grad()")


class UnusedPrompts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(2))
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x + self.prompts[0])
        return found


def unused_in_a_list() -> Case:
    model = UnusedPrompts()
    cause = "the forward of the model does not use them"
    expected = ("prompts.1",)
    return Case(model, lambda: model(X).sum().backward(), "FK807", expected, cause, "warning")


def b46_reentrant() -> Case:
    model = parts(emb=nn.Embedding(4, 3), block=nn.Linear(3, 3), head=nn.Linear(3, 1))
    freeze_by_hand(model["emb"])

    def step() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hidden = checkpoint(
                model["block"], model["emb"](torch.tensor([1, 2])), use_reentrant=True
            )
        model["head"](hidden).sum().backward()

    cause = "it runs in a checkpoint with use_reentrant=True"
    return Case(model, step, "FK805", names("block"), cause, mend=False)


def b48_inference_mode() -> Case:
    model = parts(backbone=nn.Linear(3, 3), head=nn.Linear(3, 1))

    def step() -> None:
        with torch.inference_mode():
            features = model["backbone"](X)
        model["head"](features).sum().backward()

    cause = "RuntimeError"
    return Case(model, step, "FK801", ("head",), cause, mend=False)


def b48_cloned() -> Case:
    model = parts(backbone=nn.Linear(3, 3), head=nn.Linear(3, 1))

    def step() -> None:
        with torch.inference_mode():
            features = model["backbone"](X)
        model["head"](features.clone()).sum().backward()

    return Case(model, step, "FK804", names("backbone"), "because backbone runs under torch.infer")


def detached() -> Case:
    model = parts(backbone=nn.Linear(3, 3), head=nn.Linear(3, 1))
    cause = "between backbone and head"

    def step() -> None:
        model["head"](model["backbone"](X).detach()).sum().backward()

    return Case(model, step, "FK806", names("backbone"), cause)


def detached_after_an_operation() -> Case:
    model = parts(first=nn.Linear(3, 3), second=nn.Linear(3, 3), head=nn.Linear(3, 1))

    def step() -> None:
        hidden = model["second"](model["first"](X)).relu().detach()
        model["head"](hidden).sum().backward()

    return Case(model, step, "FK806", names("first", "second"), "between second and head")


class DetachesItsOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).detach()  # type: ignore[no-any-return]


def detached_inside() -> Case:
    model = parts(backbone=DetachesItsOutput(), head=nn.Linear(3, 1))

    def step() -> None:
        model["head"](model["backbone"](X)).sum().backward()

    expected = names("backbone.inner")
    return Case(model, step, "FK806", expected, "inside the forward of backbone")


def b54_unreached() -> Case:
    blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
    model = parts(blocks=blocks)

    def step() -> None:
        hidden, kept = X, []
        for block in blocks:
            hidden = block(hidden)
            kept.append(hidden)
        kept[-2].sum().backward()

    cause = "the result of blocks.2 is not used by the loss"
    return Case(model, step, "FK807", names("blocks.2"), cause, "warning")


def unused() -> Case:
    model = parts(body=nn.Linear(3, 3), pooler=nn.Linear(3, 3))

    def step() -> None:
        model["body"](X).sum().backward()

    cause = "pooler was not called in this step"
    return Case(model, step, "FK807", names("pooler"), cause, "warning")


class UnusedParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found


def unused_in_forward() -> Case:
    model = UnusedParameter()
    cause = "the forward of the model does not use them"
    return Case(model, lambda: model(X).sum().backward(), "FK807", ("scale",), cause, "warning")


def b55_hidden_error() -> Case:
    model = parts(body=nn.Linear(3, 1))

    def step() -> None:
        with torch.no_grad():
            loss = model["body"](X).sum()
        loss.requires_grad_(True)
        loss.backward()

    cause = "no output of the model required a gradient"
    return Case(model, step, "FK802", (), cause, mend=False)


def no_backward() -> Case:
    model = parts(body=nn.Linear(3, 1))
    cause = "returned a tensor with a graph, on which backward() was not called"
    return Case(model, lambda: model["body"](X).sum(), "FK802", (), cause, mend=False)


class CachesItsCast(nn.Module):
    """What autocast's cache of weights did: a cast made under no_grad is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.cast: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cast is None:
            self.cast = self.weight.bfloat16()
        return x * self.cast


def b49_autocast() -> Case:
    model = parts(body=CachesItsCast(), head=nn.Linear(3, 1))

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                model["body"](X)
            loss = model["head"](model["body"](X)).float().sum()
        loss.backward()
        model["body"].cast = None  # type: ignore[assignment]

    return Case(model, step, "FK808", ("body.weight",), "within one autocast", mend=False)


# -- gradients ---------------------------------------------------------------------------------


def times_zero() -> Case:
    model = parts(body=nn.Linear(3, 1), extra=nn.Linear(3, 1))

    def step() -> None:
        (model["body"](X).sum() + 0 * model["extra"](X).sum()).backward()

    cause = "2 tensors of 4 with a gradient of zeros"
    return Case(model, step, "FK811", names("extra"), cause, "warning")


def not_finite() -> Case:
    model = parts(body=nn.Linear(3, 1))

    def step() -> None:
        (model["body"](X).sum() * float("inf")).backward()

    return Case(model, step, "FK812", names("body"), "inf or NaN", mend=False)


# -- what moves --------------------------------------------------------------------------------


def b1_statistics() -> Case:
    model = parts(body=nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), head=nn.Linear(3, 1))
    freeze_by_hand(model["body"])

    def step() -> None:
        model["head"](model["body"](torch.randn(4, 3) + 5)).sum().backward()

    expected = tuple(f"body.1.{n}" for n in ("running_mean", "running_var", "num_batches_tracked"))
    return Case(model, step, "FK822", expected, "changed by their forward")


class Counting(nn.Module):
    """A user's own layer with statistics that no list knows, in eval mode too."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total = self.total + x.detach().sum(0)
        return x * self.scale


def own_statistics() -> Case:
    model = parts(body=Counting(), head=nn.Linear(3, 1))

    def step() -> None:
        model["head"](model["body"](X)).sum().backward()

    return Case(model, step, "FK822", ("body.total",), "changed by their forward", mend=False)


def b9_stale() -> Case:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = sgd(model, momentum=0.9, weight_decay=0.1)
    model(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    freeze_by_hand(model[0])

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(X).sum().backward()
        optimizer.step()

    return Case(model, step, "FK821", names("0"), "changed by the step of SGD")


class WritesToItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.weight.mul_(0.5)
        return x * self.weight


def written_in_forward() -> Case:
    model = parts(body=WritesToItself(), head=nn.Linear(3, 1))

    def step() -> None:
        model["head"](model["body"](X)).sum().backward()

    return Case(model, step, "FK821", ("body.weight",), "the forward of body", mend=False)


def b38_unfrozen_later() -> Case:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    freeze_by_hand(model[0])
    optimizer = sgd(model[1])
    model[0].requires_grad_(True)

    def step() -> None:
        model(X).sum().backward()
        optimizer.step()

    cause = "it is in no group of an optimizer that stepped"
    return Case(model, step, "FK831", names("0"), cause, "warning", mend=False)


def rate_zero() -> Case:
    model = nn.Sequential(nn.Linear(3, 1))
    optimizer = sgd(model, lr=0.0)

    def step() -> None:
        model(X).sum().backward()
        optimizer.step()

    return Case(model, step, "FK831", names("0"), "its learning rate is 0", "note", mend=False)


def below_precision() -> Case:
    model = nn.Sequential(nn.Linear(3, 1, dtype=torch.bfloat16))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    optimizer = sgd(model, lr=1e-6)

    def step() -> None:
        model(X.bfloat16()).sum().backward()
        optimizer.step()

    cause = "the update is below the precision of its dtype"
    return Case(model, step, "FK831", names("0"), cause, "warning")


# -- kept, random ------------------------------------------------------------------------------


def b58_stored_with_graph() -> Case:
    model = parts(body=nn.Linear(3, 3), head=nn.Linear(3, 1))
    store: list[torch.Tensor] = []
    model["body"].register_forward_hook(lambda _module, _input, output: store.append(output))

    def step() -> None:
        model["head"](model["body"](X)).sum().backward()

    return Case(model, step, "FK841", ("body",), "in a list", "warning", mend=False)


class AlwaysDrops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.layer(x))  # training=True unless it is told


def functional_dropout() -> Case:
    model = parts(body=AlwaysDrops().eval(), head=nn.Linear(3, 1))
    freeze_by_hand(model["body"])

    def step() -> None:
        model["head"](model["body"](X)).sum().backward()

    cause = "1 frozen module in eval mode drew random numbers"
    return Case(model, step, "FK842", ("body",), cause, "warning", mend=False)


CASES: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in list(globals().values())
    if callable(make) and getattr(make, "__annotations__", {}).get("return") == "Case"
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_shows_it_and_the_mend_mends_it(name: str) -> None:
    """The finding comes with its code, severity, names and cause; its mend ends it."""
    case = CASES[name]()
    report = fk.audit_step(case.model, case.step)
    finding = find(report, case.code)
    assert (finding.severity, finding.fqns) == (case.severity, case.fqns)
    assert case.cause in finding.cause
    assert report.step is not None
    assert report.step.restored
    if case.mend:
        optimizer = next(iter(_optimizers(case.step)), None)
        apply_mend(finding, model=case.model, optimizer=optimizer)
        assert case.code not in codes(fk.audit_step(case.model, case.step))


def _optimizers(step: Step) -> list[torch.optim.Optimizer]:
    cells = getattr(step, "__closure__", None) or ()
    found = [cell.cell_contents for cell in cells]
    return [value for value in found if isinstance(value, torch.optim.Optimizer)]
