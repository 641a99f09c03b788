"""Group F: tied and shared weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from freezekit import (
    FreezeReport,
    audit,
    freeze,
    freeze_state,
    load_freeze_state,
    select,
    train_only,
    unfreeze,
)
from freezekit.errors import FreezeStateError, PartialTieWarning


class Tied(nn.Module):
    """An embedding, a layer, and a head that is the embedding's tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.mid = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.mid(self.emb(x)))
        return found


class TiedByMemory(Tied):
    """Two Parameter objects over one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.emb.weight.detach())


class TiedInPart(Tied):
    """A head over the first rows of the embedding's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.emb.weight.detach()[:3])


class SharedModule(Tied):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([self.mid, self.mid])


KINDS = [Tied, TiedByMemory, TiedInPart]
kinds = pytest.mark.parametrize("kind", KINDS)

WORDS = torch.tensor([0, 1, 2])


def flags(model: nn.Module) -> dict[str, bool]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter.requires_grad for name, parameter in named}


def train(model: nn.Module) -> list[str]:
    """Two steps of an optimizer that moves all it can; returns the names that moved."""
    named = dict(model.named_parameters(remove_duplicate=False))
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(WORDS).pow(2).sum().backward()
        optimizer.step()
    return [name for name, parameter in named.items() if not torch.equal(parameter, before[name])]


def test_plain_names_hide_one_side() -> None:
    """The name that named_parameters() does not list works like the one that it does (B62)."""
    plain = Tied()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    assert not plain.head.weight.requires_grad

    model = Tied()
    with pytest.warns(PartialTieWarning, match="emb.weight is the same tensor as head.weight"):
        report = train_only(model, "head")
    assert report.matches[0].parameters == ("emb.weight",)
    assert flags(model) == {
        "emb.weight": True,
        "mid.weight": False,
        "mid.bias": False,
        "head.weight": True,
    }
    assert train(model) == ["emb.weight", "head.weight"]


@kinds
@pytest.mark.parametrize(
    ("pattern", "other", "one"),
    [
        ("emb", "head.weight", "emb.weight"),
        ("emb.weight", "head.weight", "emb.weight"),
        ("head", "emb.weight", "head.weight"),
        ("head.weight", "emb.weight", "head.weight"),
        ("*head*", "emb.weight", "head.weight"),
        (r"re:head\..*", "emb.weight", "head.weight"),
        ("type:Embedding", "head.weight", "emb.weight"),
        (lambda fqn, parameter: fqn.startswith("head"), "emb.weight", "head.weight"),
    ],
    ids=["emb", "emb.weight", "head", "head.weight", "glob", "regex", "class", "callable"],
)
def test_freezing_one_name_freezes_the_tensor(
    kind: type[Tied], pattern: Any, other: str, one: str
) -> None:
    """One tensor under two names is frozen by either, and a warning names the other (B62)."""
    model = kind()
    with pytest.warns(PartialTieWarning, match=f"{other} is the same tensor as {one}, and is fro"):
        report = freeze(model, pattern)
    (tie,) = report.selection.partial_ties
    assert (tie.written, tie.unwritten, tie.excluded) == ((one,), (other,), False)
    assert "tied: " in str(report)
    assert flags(model) == {
        "emb.weight": False,
        "mid.weight": True,
        "mid.bias": True,
        "head.weight": False,
    }
    assert train(model) == ["mid.weight", "mid.bias"]


@kinds
@pytest.mark.parametrize(
    ("pattern", "one", "other"),
    [("emb", "emb.weight", "head.weight"), ("head", "head.weight", "emb.weight")],
    ids=["emb", "head"],
)
def test_unfreezing_one_name_unfreezes_the_tensor(
    kind: type[Tied], pattern: str, one: str, other: str
) -> None:
    """The way back takes the whole tensor too, and says so (B62)."""
    model = kind()
    freeze(model)
    with pytest.warns(PartialTieWarning, match=f"{other} is the same tensor as {one}, and becomes"):
        unfreeze(model, pattern)
    assert [name for name, flag in flags(model).items() if flag] == ["emb.weight", "head.weight"]
    assert train(model) == ["emb.weight", "head.weight"]


@kinds
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda m: freeze(m, ["emb", "head"]), id="both-names"),
        pytest.param(
            lambda m: freeze(m, ["mid", "emb", "head"], exclude="mid"), id="exclude-other"
        ),
        pytest.param(lambda m: train_only(m, "mid"), id="train_only-other"),
        pytest.param(lambda m: freeze(m, exclude="mid"), id="all-but"),
    ],
)
def test_no_warning_where_all_names_are_meant(
    kind: type[Tied], call: Callable[[nn.Module], FreezeReport]
) -> None:
    """Whoever covers all names of a tensor is told nothing (B62)."""
    model = kind()
    call(model)  # a warning is an error here
    assert train(model) == ["mid.weight", "mid.bias"]


@kinds
@pytest.mark.parametrize(("excluded", "other"), [("head", "emb"), ("emb", "head")])
def test_excluding_one_name_keeps_the_tensor_as_it_is(
    kind: type[Tied], excluded: str, other: str
) -> None:
    """What is excluded under one name is not frozen under another, and a warning tells (B62)."""
    model = kind()
    match = f"{other}.weight is the same tensor as {excluded}.weight, which is excluded: it is left"
    with pytest.warns(PartialTieWarning, match=match):
        freeze(model, exclude=excluded)
    assert [name for name, flag in flags(model).items() if flag] == ["emb.weight", "head.weight"]
    assert train(model) == ["emb.weight", "head.weight"]


@kinds
def test_tied_tensor_counts_once(kind: type[Tied]) -> None:
    """Reports count the tensor's memory once, and list its names once (B62)."""
    model = kind()
    report = audit(model)
    assert (report.total, report.tensors, report.parameter_bytes) == (40, 3, 160)
    assert report.tied == (("emb.weight", "head.weight"),)
    assert str(report).count("tied: emb.weight = head.weight") == 1
    selection = select(model, ["emb", "head"])
    assert (selection.parameters, selection.numel) == (("emb.weight",), 20)
    assert [match.numel for match in selection.matches] == [20, 20]
    assert freeze(model, ["emb", "head"]).frozen == 20


@pytest.mark.parametrize("kind", [TiedByMemory, TiedInPart])
def test_audit_finds_flags_that_disagree(kind: type[Tied]) -> None:
    """Frozen under one name, the memory still moves under the other: an error to audit (B62)."""
    model = kind()
    model.emb.weight.requires_grad = False
    assert {"emb.weight", "head.weight"} <= {*train(model)}
    (finding,) = [f for f in audit(model).findings if f.code == "FK401"]
    assert finding.fqns == ("emb.weight", "head.weight")
    assert finding.severity == "error"

    freeze(model, ["emb", "head"])
    assert audit(model).findings == ()
    assert train(model) == ["mid.weight", "mid.bias"]


def test_optimizer_holds_a_tied_tensor_once() -> None:
    """The tensor leaves and joins the optimizer as one, by whichever name (B62)."""
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(PartialTieWarning, match="head.weight"):
        freeze(model, "head", optimizer=optimizer)
    assert [p.shape for p in optimizer.param_groups[0]["params"]] == [(4, 4), (4,)]
    for pattern in ("emb", "head"):
        with pytest.warns(PartialTieWarning, match="becomes trainable with it"):
            unfreeze(model, pattern, optimizer=optimizer)
    held = optimizer.param_groups[0]["params"]
    assert [p is model.emb.weight for p in held] == [False, False, True]


def test_state_has_all_names_and_they_agree() -> None:
    """A state lists every name; one that tears a tensor apart is refused (B62)."""
    model = Tied()
    freeze(model, ["emb", "head"])
    state = freeze_state(model)
    assert state["frozen"] == ["emb.weight", "head.weight"]
    fresh = Tied()
    load_freeze_state(fresh, state)
    assert flags(fresh) == flags(model)

    untied = Tied()
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    untied.emb.weight.requires_grad = False
    with pytest.raises(FreezeStateError, match=r"one tensor under the names emb.weight, head"):
        load_freeze_state(fresh, freeze_state(untied))
    assert flags(fresh) == flags(model)


def test_module_under_several_names_is_one_module() -> None:
    """A module that is used in three places is frozen in all of them, and counted once (B62)."""
    model = SharedModule()
    names = ("mid", "body.0", "body.1")
    for name in names:
        with pytest.warns(PartialTieWarning, match=rf"same tensor as {name}\."):
            freeze(model, name)
        assert [n for n, flag in flags(model).items() if not flag] == [
            f"{name}.{tensor}" for name in names for tensor in ("weight", "bias")
        ]
        assert audit(model).frozen == 20
        unfreeze(model)
    freeze(model, ["mid", "body"])
    assert train(model) == ["emb.weight", "head.weight"]


def test_norm_under_two_names_is_held_once() -> None:
    """A norm that is used in two places is held, and released, as one (B62)."""
    norm = nn.BatchNorm1d(3)
    model = nn.ModuleDict({"a": norm, "b": norm, "head": nn.Linear(3, 1)})
    assert freeze(model, ["a", "b"]).held == ("a",)
    assert not model.train().get_submodule("b").training
    state = freeze_state(model)
    assert state["held"] == {"a": True}
    assert unfreeze(model, ["a", "b"]).released == ("a",)
    load_freeze_state(model, state)
    assert not norm.training


@pytest.mark.parametrize("pattern", ["lm_head", "transformer.wte", "transformer"])
def test_language_model_with_a_tied_head(pattern: str) -> None:
    """GPT-2's head is its embedding: naming either freezes both, and training agrees (B62)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=7, n_embd=4, n_layer=2, n_head=1, n_positions=8))
    assert "lm_head.weight" not in dict(model.named_parameters())
    if pattern == "transformer":
        freeze(model, "transformer.h[0]")
    with pytest.warns(UserWarning, match="lm_head.weight"):
        freeze(model, pattern, exclude="transformer.h[1]" if pattern == "transformer" else ())
    weight = model.lm_head.weight
    before = weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    ids = torch.tensor([[1, 2, 3]])
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    assert weight is model.transformer.wte.weight
    assert torch.equal(weight, before)
    assert audit(model).tied == (("transformer.wte.weight", "lm_head.weight"),)
