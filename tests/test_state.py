"""The freeze as plain JSON, into a checkpoint and out of it."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from torch import nn

import freezekit as fk
from freezekit.errors import FreezeStateError
from zoo import BY_NAME, Encoder, IntegerTable, NormZoo, SharedTwice, StorageTied, TiedLM, snapshot

SCHEMA = "freezekit.FreezeState/1"


def state_of(**changes: Any) -> dict[str, Any]:
    """The state of a Linear with a frozen bias, with changes."""
    state = {"schema": SCHEMA, "trainable": ["weight"], "frozen": ["bias"], "held": {}}
    return {**state, **changes}


# -- what a state is ---------------------------------------------------------------------------


def test_a_state_has_every_name() -> None:
    """All names, those of tied tensors too, are either trainable or frozen."""
    model = TiedLM()
    fk.freeze(model, ["wte", "lm_head"])
    assert fk.freeze_state(model) == {
        "schema": SCHEMA,
        "trainable": ["body.weight", "body.bias"],
        "frozen": ["wte.weight", "lm_head.weight"],
        "held": {},
    }


def test_a_state_has_the_modes_of_what_is_held() -> None:
    """Held modules are listed with the mode that was last asked for."""
    model = NormZoo()
    fk.freeze(model, ["bn1d", "bn2d"])
    model.bn2d.eval()
    assert fk.freeze_state(model)["held"] == {"bn1d": True, "bn2d": False}


def test_a_shared_module_is_held_under_one_name() -> None:
    """A module at three places is in the state once."""
    model = SharedTwice()
    fk.freeze(model, exclude="head")
    assert fk.freeze_state(model)["held"] == {"first.1": True}


def test_a_state_is_plain_json() -> None:
    """Dumped and read back, a state is equal."""
    model = NormZoo()
    fk.freeze(model, "bn1d")
    state = fk.freeze_state(model)
    assert json.loads(json.dumps(state)) == state


def test_a_state_goes_into_a_safe_checkpoint() -> None:
    """torch.load(weights_only=True) reads it beside a state dict."""
    model = NormZoo()
    fk.freeze(model, "bn1d")
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "freeze": fk.freeze_state(model)}, file)
    file.seek(0)
    checkpoint = torch.load(file, weights_only=True)
    other = NormZoo()
    fk.load_freeze_state(other, checkpoint["freeze"])
    assert fk.freeze_state(other) == fk.freeze_state(model)


def test_a_state_is_read_not_kept() -> None:
    """The state is taken at the call; the model is not changed by it."""
    model = TiedLM()
    before = snapshot(model)
    state = fk.freeze_state(model)
    model.body.bias.requires_grad = False
    assert "body.bias" in state["trainable"]
    model.body.bias.requires_grad = True
    assert snapshot(model) == before


# -- loading -----------------------------------------------------------------------------------


def test_loading_makes_flags_and_holds_those_of_the_state() -> None:
    """What was frozen is frozen, what was trainable is trainable, holds likewise."""
    source, target = NormZoo(), NormZoo()
    fk.freeze(source, ["bn1d", "layer_norm"])
    fk.freeze(target, ["bn1d", "bn2d"])
    report = fk.load_freeze_state(target, fk.freeze_state(source))
    assert report.action == "load_freeze_state"
    assert report.changed == (
        *("bn2d.weight", "bn2d.bias"),
        *("layer_norm.weight", "layer_norm.bias"),
    )
    assert (report.held, report.released) == ((), ("bn2d",))
    assert fk.freeze_state(target) == fk.freeze_state(source)
    assert not target.train().bn1d.training
    assert target.bn2d.training


def test_loading_holds_and_keeps_the_pending_mode() -> None:
    """A held module gets the mode of the state when it is released later."""
    source, target = NormZoo(), NormZoo()
    fk.freeze(source, "bn1d")
    source.eval()
    report = fk.load_freeze_state(target, fk.freeze_state(source))
    assert report.held == ("bn1d",)
    fk.unfreeze(target, "bn1d")
    assert not target.bn1d.training
    assert target.bn2d.training


def test_a_hold_that_is_there_gets_the_states_pending_mode() -> None:
    """Where both hold, the mode that the state asks for wins."""
    source, target = NormZoo(), NormZoo()
    fk.freeze(source, "bn1d")
    fk.freeze(target, "bn1d")
    source.eval()
    report = fk.load_freeze_state(target, fk.freeze_state(source))
    assert (report.held, report.released) == ((), ())
    assert fk.freeze_state(target)["held"] == {"bn1d": False}


def test_a_norm_held_by_name_goes_round() -> None:
    """A norm without parameters, held by its name, is held after loading."""
    source = BY_NAME["batch-norm-without-affine"].make()
    target = BY_NAME["batch-norm-without-affine"].make()
    fk.freeze(source, "1")
    assert fk.load_freeze_state(target, fk.freeze_state(source)).held == ("1",)


def test_loading_clears_gradients_of_what_is_frozen() -> None:
    """As with freeze, no leftover gradient can move a weight."""
    model = nn.Linear(2, 1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    report = fk.load_freeze_state(model, state_of())
    assert report.cleared == ("bias",)
    assert (model.weight.grad is None, model.bias.grad is None) == (False, True)


def test_loading_again_changes_nothing() -> None:
    """A state that the model is in already is no change."""
    model = NormZoo()
    fk.freeze(model, "bn1d")
    before = snapshot(model)
    report = fk.load_freeze_state(model, fk.freeze_state(model))
    assert (report.changed, report.held, report.released) == ((), (), ())
    assert snapshot(model) == before


def test_a_wrapped_model_takes_the_state_of_the_bare_one() -> None:
    """Names are those of the unwrapped model on both sides."""
    source = NormZoo()
    fk.freeze(source, "bn1d")
    target = nn.DataParallel(NormZoo())
    fk.load_freeze_state(target, fk.freeze_state(source))
    assert fk.freeze_state(target) == fk.freeze_state(source)


def test_the_report_says_what_was_loaded() -> None:
    """A load's report has no patterns, and the totals."""
    text = str(fk.load_freeze_state(nn.Linear(2, 1), state_of()))
    assert text.splitlines()[0] == "Linear: loaded 1 tensor, 1 parameters (4 B); 1 changed"
    assert text.endswith("now trainable: 2 of 3 parameters (66.7%); frozen: 1")


# -- what does not load ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "message"),
    [
        pytest.param(None, r"^expected what freeze_state\(\) returns, got a NoneType w", id="none"),
        pytest.param([], r"got a list without schema$", id="list"),
        pytest.param({}, r"got a dict without schema$", id="empty"),
        pytest.param(
            nn.Linear(1, 1).state_dict(), "got a OrderedDict without schema$", id="state-dict"
        ),
        pytest.param(
            state_of(schema="freezekit.FreezeState/2"),
            r"^expected the schema 'freezekit\.FreezeState/1', got 'freezekit\.FreezeState/2'$",
            id="schema",
        ),
        pytest.param(
            state_of(trainable="weight"),
            "^'trainable': expected a list of names, got 'weight'$",
            id="trainable",
        ),
        pytest.param(
            state_of(frozen=[1]), r"^'frozen': expected a list of names, got \[1\]$", id="frozen"
        ),
        pytest.param(
            {"schema": SCHEMA, "trainable": [], "frozen": []},
            "^'held': expected names with true or false, got None$",
            id="no-held",
        ),
        pytest.param(
            state_of(held={"bn": 1}), r"^'held': expected names .* got \{'bn': 1\}$", id="held"
        ),
        pytest.param(
            state_of(frozen=["bias", "weight"]),
            "^'weight' is both trainable and frozen in the state$",
            id="both",
        ),
        pytest.param(
            state_of(held={"norm": True}),
            r"^the state holds modules with running statistics that this model has not\n"
            r"  only in the state \(1\): norm$",
            id="held-unknown",
        ),
        pytest.param(
            state_of(held={"": True}),
            r"^the state holds modules with running statistics that this model has not",
            id="held-without-statistics",
        ),
    ],
)
def test_what_is_no_state_of_this_model_is_told(state: Any, message: str) -> None:
    """Each way in which a state can be wrong has its message; nothing is changed."""
    model = nn.Linear(2, 1)
    model.weight.grad = torch.ones(1, 2)
    before = snapshot(model)
    with pytest.raises(FreezeStateError, match=message):
        fk.load_freeze_state(model, state)
    assert snapshot(model) == before


def test_all_names_that_differ_are_listed() -> None:
    """Names on either side alone are in the message and in the error."""
    state = state_of(trainable=["weight", "scale"], frozen=[])
    with pytest.raises(FreezeStateError, match=r"^the state is of a model with other parame") as e:
        fk.load_freeze_state(nn.Linear(2, 1), state)
    assert (e.value.missing, e.value.unexpected) == (("scale",), ("bias",))
    assert str(e.value).splitlines()[1:] == [
        "  only in the state (1): scale",
        "  only in the model (1): bias",
    ]


@pytest.mark.parametrize(
    ("make", "frozen"),
    [(TiedLM, "lm_head.weight"), (StorageTied, "decode.weight")],
    ids=["tied", "storage-tied"],
)
def test_a_state_that_disagrees_about_one_tensor_is_refused(
    make: type[nn.Module], frozen: str
) -> None:
    """Two names of one tensor cannot have two flags."""
    model = make()
    state = fk.freeze_state(model)
    state["trainable"].remove(frozen)
    state["frozen"].append(frozen)
    before = snapshot(model)
    with pytest.raises(FreezeStateError, match=f"^one tensor under the names .*{frozen}, and the"):
        fk.load_freeze_state(model, state)
    assert snapshot(model) == before


def test_integers_cannot_be_loaded_as_trainable() -> None:
    """A state of a model before quantisation does not fit the quantised one."""
    model = IntegerTable()
    state = fk.freeze_state(model)
    state["frozen"].remove("weight")
    state["trainable"].append("weight")
    message = r"^'weight' cannot be trainable: int8 tensors have no gradient$"
    with pytest.raises(FreezeStateError, match=message):
        fk.load_freeze_state(model, state)


def test_an_error_leaves_holds_as_they_were() -> None:
    """A state that names an unknown held module changes neither flags nor holds."""
    model = NormZoo()
    fk.freeze(model, "bn1d")
    before = snapshot(model)
    state = fk.freeze_state(NormZoo())
    state["held"]["nothing"] = True
    with pytest.raises(FreezeStateError, match=r"only in the state \(1\): nothing"):
        fk.load_freeze_state(model, state)
    assert snapshot(model) == before


def test_a_smaller_model_is_another_model() -> None:
    """The state of 12 layers does not load into 11."""
    with pytest.raises(FreezeStateError, match=r"only in the state \(6\): encoder\.layer\.11\."):
        fk.load_freeze_state(Encoder(11), fk.freeze_state(Encoder(12)))
