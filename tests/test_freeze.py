"""freeze, unfreeze, train_only: flags, gradients, held norms; all or nothing."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD

import freezekit as fk
from conftest import CompareGolden
from freezekit._modes import held_by
from freezekit.errors import (
    FreezekitWarning,
    NothingTrainableWarning,
    NumberPrefixWarning,
    OptimizerError,
    PartialTieWarning,
    PatternError,
    UninitializedParameterWarning,
    UnmatchedPatternError,
    UnsupportedModelError,
    UntrainableParameterError,
)
from zoo import (
    BY_NAME,
    ZOO,
    ClassToken,
    Encoder,
    IntegerTable,
    NormZoo,
    PackedLinear,
    SharedTwice,
    Specimen,
    StorageTied,
    TiedLM,
    batch_norm_without_affine,
    snapshot,
)


def trainable(model: nn.Module) -> set[str]:
    """Every name, second names too, of what requires a gradient."""
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if parameter.requires_grad}


def all_names(model: nn.Module) -> set[str]:
    """Every name of every parameter."""
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


# -- the whole zoo -----------------------------------------------------------------------------


@pytest.mark.parametrize("specimen", ZOO, ids=lambda specimen: specimen.name)
def test_the_whole_zoo_goes_round(specimen: Specimen) -> None:
    """Each specimen is frozen, audited, stored, unfrozen, loaded, and is as it was."""
    model = specimen.make()
    before, fresh = snapshot(model), fk.freeze_state(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UninitializedParameterWarning)
        report = fk.freeze(model)
    assert trainable(model) == set()
    assert (report.trainable, report.frozen) == (0, specimen.numel)
    assert len(report.held) == specimen.held
    model.train()
    stats = [module for module in model.modules() if held_by(module) is not None]
    assert len(stats) == specimen.held
    assert not any(module.training for module in stats)

    audit = fk.audit(model)
    found = (audit.tensors, audit.total, audit.frozen, audit.parameter_bytes)
    assert found == (specimen.tensors, specimen.numel, specimen.numel, specimen.nbytes)
    assert [f.code for f in audit.findings if f.severity == "error"] == ["FK101"]

    frozen = json.loads(json.dumps(fk.freeze_state(model)))
    report = fk.unfreeze(model)
    assert report.trainable == specimen.numel - specimen.untrainable
    assert len(report.released) == specimen.held
    fk.load_freeze_state(model, frozen)
    assert fk.freeze_state(model) == frozen
    fk.load_freeze_state(model, fresh)
    assert snapshot(model) == before


@pytest.mark.parametrize("specimen", ZOO, ids=lambda specimen: specimen.name)
def test_the_whole_zoo_restores(specimen: Specimen) -> None:
    """frozen() leaves each specimen as it was, flag by flag and mode by mode."""
    model = specimen.make()
    before = snapshot(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UninitializedParameterWarning)
        with fk.frozen(model):
            assert trainable(model) == set()
            model.eval()
    assert snapshot(model) == before


# -- flags and gradients -----------------------------------------------------------------------


def test_freeze_freezes_what_is_named_and_nothing_else() -> None:
    """Exactly the selected parameters stop requiring a gradient."""
    model = Encoder(12)
    report = fk.freeze(model, ["embeddings", "encoder.layer[:8]"])
    frozen = all_names(model) - trainable(model)
    assert frozen == set(report.changed) == set(report.selection.parameters)
    assert report.matches == report.selection.matches
    assert (len(frozen), report.trainable, report.frozen) == (49, 67, 6 + 8 * 16)
    assert (report.tensors, report.numel, report.nbytes) == (49, 6 + 8 * 16, 4 * (6 + 8 * 16))
    assert report.total == 201


def test_freeze_takes_everything_by_default() -> None:
    """Without patterns, the whole model is frozen, without a warning."""
    model = ClassToken()
    fk.freeze(model)
    assert trainable(model) == set()


def test_exclude_is_left_as_it_is() -> None:
    """What is excluded keeps its flag, whether trainable or frozen."""
    model = ClassToken()
    model.pos_embed.requires_grad = False
    report = fk.freeze(model, exclude=["head", "pos_embed"])
    assert trainable(model) == {"head.weight", "head.bias"}
    assert "pos_embed" not in report.selection.parameters


def test_freezing_twice_changes_nothing_more() -> None:
    """A second freeze reports nothing changed, held or cleared."""
    model = NormZoo()
    fk.freeze(model, "*bn*")
    again = fk.freeze(model, "*bn*")
    assert (again.changed, again.held, again.cleared) == ((), (), ())


def test_gradients_of_what_is_frozen_are_cleared() -> None:
    """A leftover gradient would still move the weight: it goes; other gradients stay."""
    model = Encoder(1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    report = fk.freeze(model, "pooler")
    assert report.cleared == ("pooler.weight", "pooler.bias")
    assert model.pooler.weight.grad is None
    assert model.embeddings.weight.grad is not None


def test_gradients_of_what_was_frozen_by_hand_are_cleared() -> None:
    """Freezing what is frozen already still clears its gradient."""
    model = Encoder(1)
    model.pooler.weight.grad = torch.ones(1, 2)
    model.pooler.requires_grad_(requires_grad=False)
    report = fk.freeze(model, "pooler")
    assert (report.changed, report.cleared) == ((), ("pooler.weight",))


def test_unfreezing_leaves_gradients_alone() -> None:
    """Unfreeze clears nothing."""
    model = Encoder(1)
    model.pooler.weight.grad = torch.ones(1, 2)
    assert fk.unfreeze(model, "pooler").cleared == ()
    assert model.pooler.weight.grad is not None


def test_both_tensors_of_a_storage_tie_are_frozen() -> None:
    """What shares memory is frozen together, gradients of both cleared."""
    model = StorageTied()
    model.encode.weight.grad = torch.ones(3, 2)
    model.decode.weight.grad = torch.ones(2, 3)
    report = fk.freeze(model, ["encode", "decode"])
    both = (model.encode.weight, model.decode.weight)
    assert [(tensor.requires_grad, tensor.grad) for tensor in both] == [(False, None)] * 2
    assert report.cleared == ("encode.weight",)
    fk.unfreeze(model, ["encode", "decode"])
    assert [tensor.requires_grad for tensor in both] == [True, True]


def test_unfreeze_undoes_freeze() -> None:
    """Parameters learn again; the report says which."""
    model = Encoder(2)
    fk.freeze(model)
    report = fk.unfreeze(model, "pooler")
    assert trainable(model) == set(report.changed) == {"pooler.weight", "pooler.bias"}
    assert (report.trainable, report.frozen) == (3, 38)


def test_train_only_makes_exactly_these_trainable() -> None:
    """What is named learns, whatever was frozen before; all else does not."""
    model = Encoder(2)
    fk.freeze(model, "pooler")
    report = fk.train_only(model, ["pooler", "*.LayerNorm"], exclude="encoder.layer.0")
    expected = {"pooler.weight", "pooler.bias"} | {
        f"encoder.layer.1.LayerNorm.{name}" for name in ("weight", "bias")
    }
    assert trainable(model) == expected
    assert (report.action, report.trainable) == ("train_only", 7)


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_grad_mode_does_not_matter(grad_mode: Callable[[], Any]) -> None:
    """Freezing under no_grad or inference_mode is freezing."""
    model = NormZoo()
    with grad_mode():
        fk.freeze(model, "*bn*")
        fk.unfreeze(model, "bn2d")
    assert "bn1d.weight" not in trainable(model)
    assert "bn2d.weight" in trainable(model)


def test_frozen_weights_and_outputs_stay_bit_for_bit() -> None:
    """Through three steps of training, the frozen part is the checkpoint's, outputs included."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU()), nn.Linear(3, 1)
    )
    inputs = torch.randn(8, 2) + 3
    reference = copy.deepcopy(model[0]).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    model(inputs).sum().backward()
    reference.load_state_dict(model[0].state_dict())
    fk.freeze(model, "0")
    for _ in range(3):
        model.train()
        assert torch.equal(model[0](inputs), reference(inputs))
        model(inputs).sum().backward()
        optimizer.step()
    state = model[0].state_dict()
    assert all(torch.equal(value, state[key]) for key, value in reference.state_dict().items())


# -- held norms --------------------------------------------------------------------------------


def test_every_norm_with_statistics_is_held_and_no_other() -> None:
    """Norms are told by their buffers: those without statistics keep their mode."""
    model = NormZoo()
    report = fk.freeze(model)
    model.train()
    assert report.held == ("bn1d", "bn2d", "bn3d", "sync", "instance")
    training = {name for name, module in model.named_children() if module.training}
    assert training == {"plain_instance", "layer_norm"}


@pytest.mark.parametrize("name", ["spectral-norm", "old-spectral-norm"])
def test_spectral_norm_is_held(name: str) -> None:
    """Power iteration moves its vectors in train mode: a frozen one stands still."""
    model = BY_NAME[name].make()
    fk.freeze(model, "0")
    model.train()
    before = copy.deepcopy(model.state_dict())
    model(torch.ones(1, 2))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_norm_that_still_learns_is_not_held() -> None:
    """A norm with one trainable parameter is in training, and is let go when one becomes so."""
    model = NormZoo()
    assert fk.freeze(model, "bn1d.weight").held == ()
    assert model.train().bn1d.training
    assert fk.freeze(model, "bn1d.bias").held == ("bn1d",)
    assert fk.unfreeze(model, "bn1d.bias").released == ("bn1d",)
    assert model.bn1d.training


def test_keep_leaves_modes_alone() -> None:
    """norm_stats="keep" freezes the parameters and nothing else."""
    model = NormZoo()
    report = fk.freeze(model, "*bn*", norm_stats="keep")
    assert report.held == ()
    assert all(module.training for module in model.train().modules())
    assert fk.train_only(model, "layer_norm", norm_stats="keep").held == ()


def test_a_norm_without_parameters_is_held_with_what_surrounds_it() -> None:
    """BatchNorm without affine is held when all of the smallest block around it is frozen."""
    model = nn.Sequential(batch_norm_without_affine(), nn.Linear(1, 1))
    assert fk.freeze(model, "0.0").held == ()
    assert fk.freeze(model, "0").held == ("0.1",)
    assert fk.unfreeze(model, "0").released == ("0.1",)


def test_a_norm_without_parameters_is_held_by_its_name() -> None:
    """Named itself, it is held although what is around it learns; and released by its name."""
    model = batch_norm_without_affine()
    report = fk.freeze(model, "1")
    assert (report.held, report.changed) == (("1",), ())
    model.train()
    assert not model.get_submodule("1").training
    assert fk.unfreeze(model, "1").released == ("1",)
    assert model.get_submodule("1").training


def test_an_excluded_norm_is_not_held() -> None:
    """A norm that exclude names is left as it is, with and without parameters of its own."""
    for affine in (True, False):
        model = nn.Sequential(
            nn.Linear(2, 2), nn.BatchNorm1d(2, affine=affine), nn.Linear(2, 1), nn.Linear(1, 1)
        )
        report = fk.freeze(model, ["0", "1", "2"], exclude="1")
        assert report.held == ()
        assert model.train()[1].training


def test_an_excluded_norm_without_parameters_is_not_held() -> None:
    """Exclude decides for a norm without parameters, also where all parameters are frozen."""
    model = batch_norm_without_affine()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingTrainableWarning)
        report = fk.freeze(model, exclude="1")
    assert report.held == ()
    assert model.train().get_submodule("1").training


def test_a_shared_norm_is_held_once() -> None:
    """A module at three places is one module: held once, told by its first name."""
    model = SharedTwice()
    report = fk.freeze(model, exclude="head")
    assert report.held == ("first.1",)
    assert fk.unfreeze(model).released == ("first.1",)


def test_a_mode_comes_back_as_it_would_have_been() -> None:
    """Unfreezing gives the mode last asked for, not the one at freezing."""
    model = NormZoo()
    fk.freeze(model, "bn1d")
    model.eval()
    fk.unfreeze(model, "bn1d")
    assert not model.bn1d.training


def test_unfreezing_elsewhere_holds_on() -> None:
    """A held norm stays held when something else is unfrozen."""
    model = NormZoo()
    fk.freeze(model)
    assert fk.unfreeze(model, "layer_norm").released == ()
    assert not model.train().bn1d.training


def test_train_only_holds_every_norm_that_is_frozen() -> None:
    """All that train_only freezes is held; what it trains is released."""
    model = NormZoo()
    fk.freeze(model, "bn1d")
    report = fk.train_only(model, ["bn1d", "layer_norm"])
    assert report.held == ("bn2d", "bn3d", "sync", "instance")
    assert report.released == ("bn1d",)


@pytest.mark.parametrize("patterns", ["0", ["0", "2"], "2"], ids=str)
def test_train_only_twice_is_train_only(patterns: str | list[str]) -> None:
    """A second call with the same patterns changes no flag and no hold."""
    model = batch_norm_without_affine()
    fk.train_only(model, patterns)
    before = snapshot(model)
    again = fk.train_only(model, patterns)
    assert (again.changed, again.held, again.released) == ((), (), ())
    assert snapshot(model) == before


# -- odd parameters ----------------------------------------------------------------------------


def test_integers_are_frozen_already() -> None:
    """Freezing an integer parameter is no change and no error."""
    report = fk.freeze(IntegerTable(), "weight")
    assert (report.changed, report.frozen) == ((), 6)


def test_integers_among_others_are_skipped() -> None:
    """Unfreeze and train_only leave out what has no gradient, and say so."""
    model = IntegerTable()
    fk.freeze(model)
    report = fk.unfreeze(model)
    assert report.skipped == (("weight", "int8 tensors have no gradient"),)
    assert trainable(model) == {"scale"}
    assert "\nleft frozen: weight: int8 tensors have no gradient\n" in str(report)
    assert fk.train_only(model, "*").skipped == report.skipped


def test_what_is_skipped_is_not_said_to_be_unfrozen() -> None:
    """The report's first line counts what can learn, not what was left frozen."""
    text = str(fk.unfreeze(IntegerTable()))
    assert text.startswith("IntegerTable: unfroze 1 tensor, 3 parameters (12 B)")


@pytest.mark.parametrize("verb", [fk.unfreeze, fk.train_only], ids=["unfreeze", "train_only"])
@pytest.mark.parametrize("make", [IntegerTable, PackedLinear])
def test_integers_alone_are_an_error(
    make: Callable[[], nn.Module], verb: Callable[..., object]
) -> None:
    """A pattern that matches nothing that can learn is a mistake, whatever the others match."""
    for patterns in ("weight", ["*", "weight"]):
        with pytest.raises(
            UntrainableParameterError,
            match=r"^1 parameter\(s\) cannot be made trainable:\n  weight - u?int8 tensors have no",
        ):
            verb(make(), patterns)


def test_a_computed_parameter_cannot_be_frozen() -> None:
    """A parameter slot that holds a result of other tensors is refused, with what would do."""
    model = nn.Linear(2, 2)
    source = nn.Parameter(torch.ones(2))
    del model.bias
    model._parameters["bias"] = source * 2  # type: ignore[assignment]
    message = (
        r"^the parameter 'bias' is computed from other tensors \(not a leaf\): freeze what it is "
        r"computed from$"
    )
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        fk.freeze(model)
    assert caught.value.fqn == "bias"
    assert model.weight.requires_grad


def test_inference_parameters_stay_frozen() -> None:
    """What was made under inference_mode cannot learn: an error, with what would do."""
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    fk.freeze(model)
    message = r"weight - it was made under torch\.inference_mode\(\): clone it outside"
    with pytest.raises(UntrainableParameterError, match=message):
        fk.unfreeze(model)


def test_lazy_parameters_are_frozen_as_they_will_be() -> None:
    """A lazy parameter warns, is frozen, and stays so when it gets its value."""
    model = BY_NAME["lazy"].make()
    message = (
        r"^0\.weight, 0\.bias, 1\.weight and 1 more: not initialised yet, and frozen as it will "
        r"be initialised; run one forward, or load the weights, before freezing$"
    )
    with pytest.warns(UninitializedParameterWarning, match=message):
        report = fk.freeze(model, ["0", "1"])
    assert report.uninitialized == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert "the counts are lower bounds" in str(report)
    model.train()
    model(torch.ones(3, 4))
    assert trainable(model) == {"2.weight", "2.bias"}
    assert not model.get_submodule("1").training


@pytest.mark.parametrize(
    "look",
    [fk.audit, fk.select, fk.freeze_state, fk.freeze, fk.unfreeze],
    ids=["audit", "select", "freeze_state", "freeze", "unfreeze"],
)
def test_a_frozen_lazy_model_is_still_a_model(look: Callable[[nn.Module], object]) -> None:
    """After a lazy parameter is frozen, everything else still works on the model."""
    model = BY_NAME["lazy"].make()
    for parameter in model.parameters():
        parameter.requires_grad = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UninitializedParameterWarning)
        assert look(model) is not None


# -- warnings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "outcome"),
    [
        (fk.freeze, "is frozen with it"),
        (fk.unfreeze, "becomes trainable with it"),
        (fk.train_only, "becomes trainable with it"),
    ],
    ids=["freeze", "unfreeze", "train_only"],
)
def test_a_tie_of_which_one_side_was_written_warns(
    verb: Callable[..., object], outcome: str
) -> None:
    """The warning names the side that the user did not write, and what becomes of it."""
    message = rf"^wte\.weight is the same tensor as lm_head\.weight, and {outcome}$"
    with pytest.warns(PartialTieWarning, match=message):
        verb(TiedLM(), "lm_head")


def test_a_tie_that_exclude_decides_warns() -> None:
    """A tensor excluded under another name is left as it is, and that is told."""
    model = TiedLM()
    message = (
        r"^wte\.weight is the same tensor as lm_head\.weight, which is excluded: "
        r"it is left as it is$"
    )
    with pytest.warns(PartialTieWarning, match=message):
        fk.freeze(model, exclude="lm_head")
    assert trainable(model) == {"wte.weight", "lm_head.weight"}


def test_a_tie_excluded_from_training_is_told_to_be_frozen() -> None:
    """Under train_only what is excluded is frozen: the warning does not say it is left."""
    model = TiedLM()
    with pytest.warns(PartialTieWarning, match="which is excluded: it is frozen"):
        fk.train_only(model, "*", exclude="lm_head")
    assert trainable(model) == {"body.weight", "body.bias"}


def test_many_ties_are_one_warning() -> None:
    """One place of a shared module ties all of its parameters: one is named, the others counted."""
    message = (
        r"^second\.0\.weight, inner\.third\.0\.weight is the same tensor as first\.0\.weight, and "
        r"is frozen with it; likewise 3 more tied tensors$"
    )
    with pytest.warns(PartialTieWarning, match=message) as caught:
        fk.freeze(SharedTwice(), "first")
    assert len(caught) == 1


def test_patterns_that_leave_nothing_warn() -> None:
    """Specific patterns that together take the last trainable tensor are named."""
    model = Encoder(1)
    fk.freeze(model, "embeddings")
    message = (
        r"^nothing in Encoder is trainable after this: 'encoder', 'pooler' took the last 8 "
        r"tensors\. Exclude what is to learn, or write '\*' if everything is meant$"
    )
    with pytest.warns(NothingTrainableWarning, match=message):
        fk.freeze(model, ["encoder", "embeddings", "pooler"])


def test_everything_said_plainly_does_not_warn() -> None:
    """Freezing everything by ``*`` is meant; freezing again what is frozen is no news."""
    fk.freeze(Encoder(1))
    model = Encoder(1)
    fk.freeze(model, "*")
    fk.freeze(model, ["encoder", "embeddings", "pooler"])


def test_a_glob_that_takes_longer_numbers_warns() -> None:
    """``layer.1*`` also takes 10 and 11, and says so."""
    message = (
        r"^pattern 'encoder\.layer\.1\*' also took encoder\.layer\.10\.attention\.query\.weight, "
        r".* and 9 more; 'encoder\.layer\.1' is that number alone$"
    )
    with pytest.warns(NumberPrefixWarning, match=message):
        fk.freeze(Encoder(12), "encoder.layer.1*")


# -- all or nothing ----------------------------------------------------------------------------


class Rich(nn.Module):
    """A tie, a stack, a norm, an integer table: something for each error to go wrong with."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = TiedLM()
        self.norm = nn.BatchNorm1d(2)
        self.still = nn.BatchNorm1d(2)
        self.layer = nn.ModuleList(nn.Linear(1, 1) for _ in range(11))
        self.table = IntegerTable()


def broken(fqn: str, parameter: nn.Parameter) -> bool:
    """Fail half-way through the model."""
    if fqn.startswith("norm"):
        raise ZeroDivisionError(fqn)
    return True


NON_TABLE = ["lm", "norm", "still", "layer", "table.scale"]

# What goes wrong, in each of the calls: keyword arguments, and the error.
FAILURES: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "malformed": ("any", {"patterns": ["*", "a..b"]}, PatternError, "an empty name"),
    "no-pattern": ("any", {"patterns": []}, PatternError, "no pattern at all"),
    "wrong-type": ("any", {"patterns": ["*", 3]}, PatternError, "got int"),
    "unmatched": ("any", {"patterns": ["*", "nrm"]}, UnmatchedPatternError, "'nrm'"),
    "exclude": ("any", {"patterns": "*", "exclude": "nrm"}, UnmatchedPatternError, "exclude"),
    "nothing-left": ("any", {"patterns": "lm.*", "exclude": "lm"}, UnmatchedPatternError, "is ex"),
    "predicate": ("any", {"patterns": ["lm", broken]}, ZeroDivisionError, "norm"),
    "norm-stats": ("norm", {"patterns": "*", "norm_stats": "no"}, ValueError, "norm_stats: expec"),
    "untrainable": ("thaw", {"patterns": ["*", "table.weight"]}, UntrainableParameterError, "int8"),
    "tie": ("any", {"patterns": ["norm", "lm.lm_head"]}, PartialTieWarning, "same tensor"),
    "number": ("any", {"patterns": ["norm", "layer.1*"]}, NumberPrefixWarning, "also took"),
    "nothing": ("freeze", {"patterns": NON_TABLE}, NothingTrainableWarning, "nothing in Rich"),
}

CALLS: dict[str, Callable[..., object]] = {
    "freeze": fk.freeze,
    "unfreeze": fk.unfreeze,
    "train_only": fk.train_only,
    "frozen": lambda model, **options: fk.frozen(model, **options).__enter__(),
}
APPLIES = {
    "any": ("freeze", "unfreeze", "train_only", "frozen"),
    "norm": ("freeze", "train_only", "frozen"),
    "thaw": ("unfreeze", "train_only"),
    "freeze": ("freeze",),
}


def prepared(optimizer_class: Callable[..., Any] = SGD) -> tuple[Rich, Any]:
    """A model in the midst of training, partly frozen, with gradients and optimizer state."""
    model = Rich()
    optimizer = optimizer_class(p for p in model.parameters() if p.requires_grad)
    fk.freeze(model, ["still", "layer[:2]"])
    model.layer[3].eval()
    for index, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
            optimizer.state[parameter] = {"momentum_buffer": torch.zeros(index)}
    return model, optimizer


@pytest.mark.parametrize(
    ("call", "failure"),
    [
        pytest.param(call, name, id=f"{call}-{name}")
        for name, (kind, *_) in FAILURES.items()
        for call in APPLIES[kind]
    ],
)
def test_an_error_leaves_everything_as_it_was(call: str, failure: str) -> None:
    """Flags, gradients, modes, holds and optimizer are untouched after each kind of error."""
    _, options, error, message = FAILURES[failure]
    model, optimizer = prepared()
    before = snapshot(model, optimizer)
    if call != "frozen":
        options = {**options, "optimizer": optimizer}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FreezekitWarning)
        with pytest.raises(error, match=message):
            CALLS[call](model, **options)
    assert snapshot(model, optimizer) == before


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        pytest.param("lbfgs", {}, "its own flat list", id="lbfgs"),
        pytest.param("adam", {}, "expected a torch.optim.Optimizer", id="no-optimizer"),
        pytest.param("sgd", {"weigth_decay": 1}, "no group option", id="misspelt"),
    ],
)
def test_an_optimizer_error_leaves_everything_as_it_was(
    optimizer: str, options: dict[str, Any], message: str
) -> None:
    """What is wrong with the optimizer is found before the model is touched."""
    model, own = prepared(LBFGS if optimizer == "lbfgs" else SGD)
    before = snapshot(model, own)
    given: Any = "adam" if optimizer == "adam" else own
    with pytest.raises(OptimizerError, match=message):
        fk.unfreeze(model, optimizer=given, **options)
    assert snapshot(model, own) == before


def test_a_group_that_the_optimizer_refuses_leaves_everything_as_it_was() -> None:
    """Where add_param_group() itself raises, neither model nor optimizer is changed."""

    class Picky(SGD):
        def add_param_group(self, param_group: dict[str, Any]) -> None:
            if getattr(self, "closed", False):
                raise RuntimeError("this optimizer takes no group")
            super().add_param_group(param_group)

    model, optimizer = prepared(Picky)
    fk.freeze(model, "norm", optimizer=optimizer)
    optimizer.closed = True
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match="this optimizer takes no group"):
        fk.unfreeze(model, "norm", optimizer=optimizer, lr=0.5)
    assert snapshot(model, optimizer) == before


def test_a_lazy_warning_turned_into_an_error_leaves_everything_as_it_was() -> None:
    """A lazy parameter under warnings-as-errors is refused before anything is frozen."""
    model = BY_NAME["lazy"].make()
    before = snapshot(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UninitializedParameterWarning, match="not initialised yet"):
            fk.freeze(model)
    assert snapshot(model) == before


def test_a_computed_parameter_leaves_everything_as_it_was() -> None:
    """The one parameter that cannot be frozen is found before the others are."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1]._parameters["bias"] = nn.Parameter(torch.ones(2)) * 2  # type: ignore[assignment]
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match="not a leaf"):
        fk.freeze(model)
    assert snapshot(model) == before


# -- what is no model --------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[[Any], object]] = {
    "freeze": fk.freeze,
    "unfreeze": fk.unfreeze,
    "train_only": lambda model: fk.train_only(model, "*"),
    "frozen": lambda model: fk.frozen(model).__enter__(),
    "select": fk.select,
    "audit": fk.audit,
    "freeze_state": fk.freeze_state,
    "load_freeze_state": lambda model: fk.load_freeze_state(model, fk.freeze_state(nn.ReLU())),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_every_function_says_what_is_no_model(function: Callable[[Any], object]) -> None:
    """A class, and a generator of parameters, get the same answer from each function."""
    with pytest.raises(UnsupportedModelError, match="got the class Linear: make an instance"):
        function(nn.Linear)
    with pytest.raises(UnsupportedModelError, match=r"pass the model itself, not model\.param"):
        function(nn.Linear(1, 1).parameters())


@pytest.mark.parametrize("value", ["eval", "Hold", None, True], ids=str)
def test_norm_stats_is_one_of_two_words(value: Any) -> None:
    """Another word is an error that lists the two."""
    message = rf"^norm_stats: expected 'hold' or 'keep', got {value!r}$"
    with pytest.raises(ValueError, match=message):
        fk.freeze(NormZoo(), norm_stats=value)


def test_options_are_keyword_only() -> None:
    """A third positional argument is Python's own error."""
    with pytest.raises(TypeError, match="takes from 1 to 2 positional arguments but 3 were given"):
        fk.freeze(NormZoo(), "*", "bn1d")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'patterns'"):
        fk.train_only(NormZoo())  # type: ignore[call-arg]


# -- reports -----------------------------------------------------------------------------------


def test_the_report_of_a_freeze(golden: CompareGolden) -> None:
    """A report with patterns, exclusion, blocks, gradients and optimizer."""
    model = Encoder(12)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = SGD(model.parameters(), lr=0.1)
    report = fk.freeze(
        model,
        ["embeddings", "encoder.layer[:8]", "re:pooler.*"],
        exclude="*.bias",
        optimizer=optimizer,
    )
    golden(str(report), "freeze_encoder")


def test_the_report_of_held_norms(golden: CompareGolden) -> None:
    """Held modules are folded and named."""
    blocks = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(6))
    model = nn.ModuleDict({"blocks": nn.Sequential(*blocks), "head": nn.Linear(2, 1)})
    golden(str(fk.freeze(model, "blocks")), "freeze_norms")


def test_the_report_of_a_tie(golden: CompareGolden) -> None:
    """Both names of a tied tensor are in the report."""
    with pytest.warns(PartialTieWarning, match="is the same tensor as"):
        report = fk.freeze(TiedLM(), "lm_head")
    golden(str(report), "freeze_tied")


def test_the_report_of_an_unfreeze(golden: CompareGolden) -> None:
    """Released modules, what is left frozen, and the optimizer's new group."""
    model = Rich()
    fk.freeze(model)
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    report = fk.unfreeze(model, ["norm", "table"], optimizer=optimizer, lr=0.001)
    golden(str(report), "unfreeze_rich")


def test_the_report_of_train_only(golden: CompareGolden) -> None:
    """A head of a class-token model is all that learns."""
    golden(str(fk.train_only(ClassToken(), "head")), "train_only_class_token")


@pytest.mark.parametrize("specimen", ZOO, ids=lambda specimen: specimen.name)
def test_a_reports_figures_add_up(specimen: Specimen) -> None:
    """One pattern per module: tensors, elements and totals agree with the whole."""
    model = specimen.make()
    names = fk.select(model).parameters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FreezekitWarning)
        report = fk.freeze(model, [f"re:{re.escape(name)}" for name in names])
    assert sum(match.numel for match in report.matches) == specimen.numel
    assert sum(len(match.parameters) for match in report.matches) == len(names)
    assert len(report.selection.parameters) == specimen.tensors
    assert report.selection.nbytes == specimen.nbytes
    assert report.trainable + report.frozen == report.total == specimen.numel
