"""Every case that an audit can see: the finding comes, with its names, and its mend makes it go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import freezekit as fk
from audit_support import apply_mend, codes, find, freeze_by_hand


class Case(NamedTuple):
    """A model as the case leaves it, and what audit is to say of it.

    Attributes:
        model: the model.
        code: the finding's code.
        fqns: its names.
        optimizer: the optimizer, if the case has one.
        options: further arguments of audit.
        severity: the finding's severity.
    """

    model: nn.Module
    code: str
    fqns: tuple[str, ...]
    optimizer: Optimizer | None = None
    options: dict[str, Any] = {}  # noqa: RUF012  # never changed
    severity: str = "error"


def net(backbone: nn.Module, head: nn.Module | None = None) -> nn.ModuleDict:
    """A frozen backbone and a head that learns."""
    freeze_by_hand(backbone)
    return nn.ModuleDict({"backbone": backbone, "head": head or nn.Linear(3, 1)})


def sgd(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


# -- A: still changes --------------------------------------------------------------------------


def b1_statistics() -> Case:
    model = net(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    return Case(model, "FK201", ("backbone.1",))


def b1_spectral() -> Case:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    model = net(layer)
    return Case(model, "FK201", ("backbone.parametrizations.weight.0",))


def b2_half_frozen() -> Case:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model[1].eval()
    return Case(model, "FK205", ("1",), severity="warning")


def b4_track_running_stats() -> Case:
    norm = nn.BatchNorm1d(3)
    norm.track_running_stats = False
    return Case(net(nn.Sequential(norm)), "FK204", ("backbone.0",), severity="warning")


def b5_train_again() -> Case:
    backbone = nn.Sequential(nn.Linear(3, 3), nn.Dropout()).eval()
    return Case(net(backbone).train(), "FK203", ("backbone.1",), severity="warning")


def b9_stale_momentum() -> Case:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = sgd(model, momentum=0.9, weight_decay=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    freeze_by_hand(model[0])
    return Case(model, "FK302", ("0.weight", "0.bias"), optimizer)


def b9_gradient() -> Case:
    case = b9_stale_momentum()
    return case._replace(code="FK301", optimizer=None, severity="warning")


def b10_between_backward_and_step() -> Case:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    freeze_by_hand(model[0])
    return Case(model, "FK302", ("0.weight", "0.bias"), optimizer)


# -- B: never happened -------------------------------------------------------------------------


def b15_require_grad() -> Case:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in model[0].parameters():
        parameter.require_grad = False  # type: ignore[attr-defined]
    return Case(model, "FK105", ("0.weight", "0.bias"))


def b15_other_spelling() -> Case:
    model = nn.Linear(2, 2)
    model.weight.requires_grads = False  # type: ignore[attr-defined]
    return Case(model, "FK105", ("weight",))


def b15_trainable() -> Case:
    model = nn.Linear(2, 2)
    model.bias.trainable = False  # type: ignore[attr-defined]
    return Case(model, "FK105", ("bias",))


def b16_on_a_module() -> Case:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad = False  # type: ignore[assignment]
    return Case(model, "FK106", ("0",))


def b16_on_the_model() -> Case:
    model = nn.Linear(2, 2)
    model.requires_grad = False  # type: ignore[assignment]
    return Case(model, "FK106", ("",))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(2, 2) for _ in range(3))


class Stack(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer() for _ in range(count))


def b19_prefix() -> Case:
    model = Stack(12)
    for name, parameter in model.named_parameters():
        if any(name.startswith(f"layer.{i}") for i in range(2)):
            parameter.requires_grad = False
    return Case(model, "FK103", ("layer.10", "layer.11"), severity="warning")


def b19_linears() -> Case:
    model = nn.ModuleDict({"layer": nn.ModuleList([nn.Linear(2, 2) for _ in range(12)])})
    for name, parameter in model.named_parameters():
        if any(name.startswith(f"layer.{i}") for i in range(2)):
            parameter.requires_grad = False
    return Case(model, "FK103", ("layer.10", "layer.11"), severity="warning")


def b19_one_prefix() -> Case:
    model = Stack(24)
    freeze_by_hand(model)
    for name, parameter in model.named_parameters():
        if name.startswith("layer.2"):
            parameter.requires_grad = True
    expected = ("layer.20", "layer.21", "layer.22", "layer.23")
    return Case(model, "FK103", expected, severity="warning")


def b22_one_missed() -> Case:
    model = Stack(12)
    for index, layer in enumerate(model.layer):
        if index != 5:
            freeze_by_hand(layer)
    return Case(model, "FK108", ("layer.5",), severity="warning")


def b22_some_layers() -> Case:
    model = Stack(30)
    freeze_by_hand(model)
    for index, layer in enumerate(model.layer):
        for name in ("q", "k", "v") if index < 25 else ("q", "k"):
            layer.get_submodule(name).requires_grad_(True)
    expected = tuple(f"layer.{i}.v.{p}" for i in range(25, 30) for p in ("bias", "weight"))
    return Case(model, "FK103", expected, severity="warning")


def b25_switched_back() -> Case:
    model = net(nn.Linear(3, 3))
    for parameter in model.parameters():
        parameter.requires_grad = True
    expected = ("backbone.weight", "backbone.bias")
    return Case(model, "FK102", expected, options={"expect_trainable": "head"})


def b27_adapters_frozen() -> Case:
    model = nn.ModuleDict(
        {"base": nn.Linear(4, 4), "lora_A": nn.Linear(4, 2), "lora_B": nn.Linear(2, 4)}
    )
    freeze_by_hand(model)
    names = tuple(f"{n}.{p}" for n in ("lora_A", "lora_B") for p in ("weight", "bias"))
    return Case(model, "FK701", names)


def b27_expected() -> Case:
    case = b27_adapters_frozen()
    return case._replace(code="FK102", options={"expect_trainable": "lora_*"})


def b28_norms_left() -> Case:
    backbone = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    model = nn.ModuleDict({"backbone": backbone, "head": nn.Linear(4, 1)})
    freeze_by_hand(backbone[0])
    return Case(model, "FK206", ("backbone.1",), severity="note")


def b75_head_frozen() -> Case:
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    freeze_by_hand(model["head"])
    return Case(
        model, "FK102", ("head.weight", "head.bias"), options={"expect_trainable": ["body", "head"]}
    )


# -- C: replaced -------------------------------------------------------------------------------


def b31_resized() -> Case:
    model = nn.ModuleDict({"emb": nn.Embedding(4, 2), "head": nn.Linear(2, 1)})
    freeze_by_hand(model["emb"])
    state = fk.freeze_state(model)
    model["emb"] = nn.Embedding(6, 2)
    return Case(model, "FK102", ("emb.weight",), options={"expect_trainable": state})


def b32_registered_anew() -> Case:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    freeze_by_hand(model[0])
    state = fk.freeze_state(model)
    layer = model.get_submodule("0")
    layer.register_parameter("weight", nn.Parameter(layer.get_parameter("weight").detach()[:1]))
    return Case(model, "FK102", ("0.weight",), options={"expect_trainable": state})


def b33_assigned() -> Case:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    model.load_state_dict(model.state_dict(), assign=True)
    return Case(model, "FK304", ("weight", "bias"), optimizer)


def b36_ghost() -> Case:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    model.weight = nn.Parameter(model.weight.detach().clone())
    return Case(model, "FK304", ("weight",), optimizer)


def b36_resized_ghost() -> Case:
    model = nn.ModuleDict({"emb": nn.Embedding(4, 2), "head": nn.Linear(2, 1)})
    optimizer = sgd(model)
    model["emb"] = nn.Embedding(6, 2)
    return Case(model, "FK304", ("emb.weight",), optimizer)


# -- D: the optimizer --------------------------------------------------------------------------


def b38_unfrozen_later() -> Case:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    freeze_by_hand(model[0])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model[0].requires_grad_(True)
    return Case(model, "FK303", ("0.weight", "0.bias"), optimizer, severity="warning")


def b42_by_value() -> Case:
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(3)) for name in "ab"})
    optimizer = torch.optim.SGD([model["a"]], lr=0.1)
    return Case(model, "FK303", ("b",), optimizer, severity="warning")


def b44_nothing() -> Case:
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    freeze_by_hand(model)
    return Case(model, "FK101", ())


def b45_left_out() -> Case:
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    optimizer = torch.optim.SGD(model["head"].parameters(), lr=0.1)
    return Case(model, "FK303", ("body.weight", "body.bias"), optimizer, severity="warning")


# -- E to H ------------------------------------------------------------------------------------


def b56_recurrent() -> Case:
    model = nn.ModuleDict({"first": nn.Linear(3, 3), "rnn": nn.LSTM(3, 4), "head": nn.Linear(4, 1)})
    freeze_by_hand(model["rnn"])
    model["rnn"].eval()
    return Case(model, "FK208", ("rnn",), severity="note")


def b62_tied_head() -> Case:
    emb, body = nn.Embedding(5, 4), nn.Linear(4, 4)
    model = nn.ModuleDict(
        {
            "backbone": nn.ModuleDict({"emb": emb, "body": body}),
            "head": nn.Linear(4, 5, bias=False),
        }
    )
    model["head"].weight = emb.weight
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(name.startswith("head"))
    names = ("backbone.emb.weight", "head.weight")
    return Case(model, "FK402", names, severity="warning")


def b65_buffers() -> Case:
    model = nn.Linear(2, 2)
    model.register_buffer("qweight", torch.zeros(2, 2, dtype=torch.int32))
    return Case(model, "FK602", ("qweight",), severity="note")


def b64_partitioned() -> Case:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.empty(0))
    return Case(model, "FK602", ("weight",), severity="note")


CASES: dict[str, Callable[[], Case]] = {
    name.replace("_", "-", 1): make
    for name, make in list(globals().items())
    if name[0] == "b" and name[1:2].isdigit()
}
HAND = {  # mended by hand: what to do is a sentence, not code
    "b64-partitioned",
    "b65-buffers",
    "b44-nothing",
}


def look(case: Case) -> fk.AuditReport:
    return fk.audit(case.model, optimizer=case.optimizer, **case.options)


@pytest.mark.parametrize("name", CASES)
def test_audit_finds_it_and_the_mend_mends_it(name: str) -> None:
    """The finding comes with its code, severity and names; its mend, run as it stands, ends it."""
    case = CASES[name]()
    finding = find(look(case), case.code)
    assert (finding.severity, finding.fqns) == (case.severity, case.fqns)
    assert finding.cause.endswith(".")
    assert finding.mend.endswith(".")
    if name in HAND:
        return
    scope = apply_mend(finding, model=case.model, optimizer=case.optimizer)
    mended = case._replace(model=scope["model"], optimizer=scope["optimizer"])
    assert case.code not in codes(look(mended)), finding.mend
