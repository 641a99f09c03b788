"""Group C: the Parameter object was replaced."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from freezekit import (
    FreezeState,
    audit,
    freeze,
    freeze_state,
    load_freeze_state,
    train_only,
    unfreeze,
)
from freezekit.errors import FreezeStateError


class Net(nn.Module):
    """Everything that a freeze is about: an embedding, a norm with statistics, a head."""

    def __init__(self, words: int = 4) -> None:
        super().__init__()
        self.emb = nn.Embedding(words, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.emb(x)))
        return found


WORDS = torch.tensor([0, 1, 2, 1])
FROZEN = ["emb.weight", "norm.weight", "norm.bias"]
STATISTICS = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def frozen_net() -> Net:
    net = Net()
    freeze(net, ["emb", "norm"])
    return net


def train(model: nn.Module, optimizer: Optimizer | None = None) -> list[str]:
    """Two steps in train mode; returns the names of all that moved."""
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        model(WORDS).pow(2).sum().backward()
        optimizer.step()
    return [n for n, value in model.state_dict().items() if not torch.equal(value, before[n])]


def flags(model: nn.Module) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in model.named_parameters()}


# -- B31, B32: replaced by other code ----------------------------------------------------------


def resize_embedding(net: Net) -> None:
    new = nn.Embedding(6, 3)
    with torch.no_grad():
        new.weight[:4] = net.emb.weight
    net.emb = new


def shard_by_hand(net: Net) -> None:
    """What tensor parallelism does: another Parameter of the same name."""
    net.norm.register_parameter("weight", nn.Parameter(net.norm.weight.detach().clone()))


def swap_norm(net: Net) -> None:
    """What conversions to another norm do: the hold goes with the old module."""
    new = nn.BatchNorm1d(3)
    new.load_state_dict(net.norm.state_dict())
    net.norm = new


@pytest.mark.parametrize(
    ("replace", "thawed", "held"),
    [
        pytest.param(resize_embedding, ("emb.weight",), (), id="B31-resized-embedding"),
        pytest.param(shard_by_hand, ("norm.weight",), (), id="B32-registered-anew"),
        pytest.param(swap_norm, ("norm.weight", "norm.bias"), ("norm",), id="B31-other-module"),
    ],
)
def test_replaced_parameter_is_seen_and_frozen_again(
    replace: Callable[[Net], None], thawed: tuple[str, ...], held: tuple[str, ...]
) -> None:
    """A replaced parameter is trainable; the state from before names and freezes it (B31, B32)."""
    net = frozen_net()
    state = freeze_state(net)
    replace(net)
    assert [name for name, flag in flags(net).items() if flag and name in FROZEN] == [*thawed]
    assert set(state["frozen"]) - set(freeze_state(net)["frozen"]) == {*thawed}
    assert audit(net).trainable > 4

    report = load_freeze_state(net, state)
    assert (report.changed, report.held) == (thawed, held)
    assert freeze_state(net) == state
    assert train(net) == ["head.weight", "head.bias"]


def test_resizing_embeddings_of_a_transformer_keeps_the_freeze() -> None:
    """A tied embedding frozen before resize_token_embeddings is frozen after it (B31)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=7, n_embd=4, n_layer=1, n_head=1, n_positions=8))
    freeze(model, ["transformer.wte", "lm_head"])
    state = freeze_state(model)
    assert state["frozen"] == ["transformer.wte.weight", "lm_head.weight"]
    model.resize_token_embeddings(9)
    load_freeze_state(model, state)
    weight = model.get_input_embeddings().weight
    assert weight.shape == (9, 4)
    before = weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    ids = torch.tensor([[1, 2, 8]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert torch.equal(model.lm_head.weight, before)


def compiled(model: nn.Module) -> nn.Module:
    torch.compiler.reset()  # code compiled for another instance of the class would count
    module = torch.compile(model, backend="eager")
    assert isinstance(module, nn.Module)
    return module


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "AveragedModel": AveragedModel,
    "compile": compiled,
    "compile-in-DataParallel": lambda model: nn.DataParallel(compiled(model)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_state_goes_through_wrappers(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """The state from before wrapping fits the wrapped model, and the other way round (B32)."""
    net = frozen_net()
    state = freeze_state(net)
    wrapped = wrap(Net())
    assert list(dict(wrapped.named_parameters())) != list(dict(net.named_parameters()))
    report = load_freeze_state(wrapped, state)
    assert (list(report.changed), report.held) == (FROZEN, ("norm",))
    assert freeze_state(wrapped) == state
    assert all(not name.endswith(tuple(FROZEN + STATISTICS)) for name in train(wrapped))
    bare = Net()
    load_freeze_state(bare, freeze_state(wrapped))
    assert freeze_state(bare) == state


# -- B33, B36: what the optimizer holds --------------------------------------------------------


def test_loading_by_assignment_keeps_the_freeze() -> None:
    """load_state_dict(assign=True) makes new parameters, and the freeze is theirs too (B33)."""
    net = frozen_net()
    state, old, values = freeze_state(net), net.emb.weight, copy.deepcopy(net.state_dict())
    net.load_state_dict(values, assign=True)
    assert net.emb.weight is not old
    assert freeze_state(net) == state
    assert train(net) == ["head.weight", "head.bias"]
    net.load_state_dict(copy.deepcopy(net.state_dict()))
    assert freeze_state(net) == state


def replace_all(net: Net) -> None:
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)


def replace_head(net: Net) -> None:
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())
    net.head.bias = nn.Parameter(net.head.bias.detach().clone())


@pytest.mark.parametrize(
    "replace",
    [pytest.param(replace_all, id="B33-assign"), pytest.param(replace_head, id="B36-by-hand")],
)
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda net, opt: unfreeze(net, "head", optimizer=opt), id="unfreeze"),
        pytest.param(lambda net, opt: train_only(net, "head", optimizer=opt), id="train_only"),
    ],
)
def test_optimizer_takes_in_what_the_model_has_now(
    replace: Callable[[Net], None], call: Callable[[Net, Optimizer], Any]
) -> None:
    """Parameters are told apart by identity: the ones of now come in for ghosts (B33, B36)."""
    net = frozen_net()
    optimizer = torch.optim.SGD(net.head.parameters(), lr=0.1)
    replace(net)
    assert train(net, optimizer) == []

    report = call(net, optimizer)
    assert report.optimizer is not None
    assert (report.optimizer.added, report.optimizer.present) == (2, 0)
    assert train(net, optimizer) == ["head.weight", "head.bias"]


def test_freezing_lets_no_ghost_go() -> None:
    """Freezing takes the model's own tensors out, and leaves what only looks like them (B36)."""
    net = Net()
    ghosts = [nn.Parameter(p.detach().clone()) for p in net.parameters()]
    optimizer = torch.optim.SGD([*ghosts, *net.parameters()], lr=0.1)
    change = freeze(net, optimizer=optimizer).optimizer
    assert change is not None
    assert change.removed == 5
    left = optimizer.param_groups[0]["params"]
    assert all(one is other for one, other in zip(left, ghosts, strict=True))


# -- B35: checkpoints --------------------------------------------------------------------------


def through_json(state: FreezeState) -> FreezeState:
    read: FreezeState = json.loads(json.dumps(state))
    return read


def through_checkpoint(state: FreezeState) -> FreezeState:
    file = io.BytesIO()
    torch.save({"freeze": state}, file)
    file.seek(0)
    read: FreezeState = torch.load(file, weights_only=True)["freeze"]
    return read


@pytest.mark.parametrize("carry", [through_json, through_checkpoint], ids=["json", "checkpoint"])
def test_checkpoint_carries_the_freeze(carry: Callable[[FreezeState], FreezeState]) -> None:
    """A state_dict carries no flags and no holds; the freeze state beside it does (B35)."""
    net = frozen_net()
    resumed = Net()
    resumed.load_state_dict(net.state_dict())
    assert all(flags(resumed).values())

    load_freeze_state(resumed, carry(freeze_state(net)))
    assert flags(resumed) == flags(net)
    assert freeze_state(resumed) == freeze_state(net)
    assert train(resumed) == ["head.weight", "head.bias"]


def test_loading_a_state_unfreezes_too() -> None:
    """A state is the whole freeze: what it does not freeze or hold becomes free (B35)."""
    net = frozen_net()
    report = load_freeze_state(net, freeze_state(Net()))
    assert (list(report.changed), report.released) == (FROZEN, ("norm",))
    assert all(flags(net).values())
    assert {*FROZEN, *STATISTICS} <= {*train(net)}


def test_mode_asked_for_goes_with_the_state() -> None:
    """A norm held while its model trains is in train mode when released after resuming (B35)."""
    net = frozen_net().train()
    resumed = Net().eval()
    load_freeze_state(resumed, freeze_state(net))
    assert not resumed.norm.training
    unfreeze(resumed, "norm")
    assert resumed.norm.training


class Renamed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = self.head
        del self.head


def without(state: FreezeState, key: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda _: freeze_state(Renamed()),
            r"(?s)other parameters.*only in the state \(2\): classifier.weight, classifier.bias"
            r".*only in the model \(2\): head.weight, head.bias",
            id="other-names",
        ),
        pytest.param(lambda s: without(s, "schema"), "expected what freeze_state", id="no-schema"),
        pytest.param(lambda s: {**s, "schema": "x/2"}, "freezekit.FreezeState/1", id="schema"),
        pytest.param(lambda s: without(s, "held"), "'held': expected names", id="no-held"),
        pytest.param(lambda s: {**s, "frozen": None}, "'frozen': expected a list", id="no-list"),
        pytest.param(
            lambda s: {**s, "held": {"emb": True}},
            "running statistics.*has not",
            id="hold-elsewhere",
        ),
        pytest.param(
            lambda s: {**s, "frozen": s["trainable"], "trainable": [*s["frozen"], *s["trainable"]]},
            "both trainable and frozen",
            id="contradiction",
        ),
        pytest.param(
            lambda _: Net().state_dict(), "got a OrderedDict without schema", id="weights"
        ),
        pytest.param(lambda _: None, "got a NoneType without schema", id="nothing"),
    ],
)
def test_state_that_does_not_fit_is_refused(
    change: Callable[[FreezeState], Any], message: str
) -> None:
    """A state of another model, or none at all, is an error that changes nothing (B35)."""
    net = frozen_net()
    net.emb.weight.grad = grad = torch.ones_like(net.emb.weight)
    state = freeze_state(net)
    with pytest.raises(FreezeStateError, match=message):
        load_freeze_state(net, change(state))
    assert freeze_state(net) == state
    assert net.emb.weight.grad is grad
