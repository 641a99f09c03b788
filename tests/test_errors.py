"""Errors and warnings: caught by builtins, carrying what they found, pickling."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from torch import nn

import freezekit as fk
from freezekit import errors
from freezekit.errors import (
    AuditFailedError,
    FreezekitError,
    FreezekitWarning,
    FreezeStateError,
    OptimizerError,
    PatternError,
    UnmatchedPatternError,
    UnsupportedModelError,
    UntrainableParameterError,
)
from zoo import BY_NAME, Encoder, IntegerTable, TiedLM


def fail_audit() -> None:
    """Raise for a model in which nothing learns."""
    model = TiedLM()
    fk.freeze(model)
    fk.audit(model).raise_for()


def load_into_another_model() -> None:
    """Load a state into a model with other names."""
    fk.load_freeze_state(TiedLM(), fk.freeze_state(Encoder(2)))


Raised: TypeAlias = tuple[FreezekitError, type[Exception]]

# Each error as the library raises it: what raises it, its class, words, the builtin it is.
RAISED: dict[str, tuple[Callable[[], object], type[FreezekitError], str, type[Exception]]] = {
    "pattern": (lambda: fk.select(TiedLM(), "a..b"), PatternError, "an empty name", ValueError),
    "pattern-type": (
        lambda: fk.select(TiedLM(), 3),  # type: ignore[arg-type]
        PatternError,
        "got int",
        ValueError,
    ),
    "unmatched": (
        lambda: fk.select(TiedLM(), ["bdy", "x[0]"]),
        UnmatchedPatternError,
        "^2 pattern",
        LookupError,
    ),
    "unmatched-exclude": (
        lambda: fk.select(TiedLM(), "*", exclude="bdy"),
        UnmatchedPatternError,
        "^1 exclude pattern",
        LookupError,
    ),
    "model": (
        lambda: fk.audit(nn.Linear),  # type: ignore[arg-type]
        UnsupportedModelError,
        "the class Linear",
        TypeError,
    ),
    "untrainable": (
        lambda: fk.unfreeze(IntegerTable(), "weight"),
        UntrainableParameterError,
        "cannot be made trainable",
        TypeError,
    ),
    "state": (load_into_another_model, FreezeStateError, "only in the model", ValueError),
    "optimizer": (
        lambda: fk.freeze(TiedLM(), "body", optimizer="adam"),  # type: ignore[arg-type]
        OptimizerError,
        "got str",
        ValueError,
    ),
    "audit": (fail_audit, AuditFailedError, "FK101", AssertionError),
}


@pytest.fixture(params=list(RAISED))
def raised(request: pytest.FixtureRequest) -> Raised:
    """An error as it is raised, and the builtin that catches it."""
    run, kind, message, builtin = RAISED[request.param]
    with pytest.raises(kind, match=message) as caught:
        run()
    assert type(caught.value) is kind
    return caught.value, builtin


def test_errors_are_caught_by_builtins(raised: Raised) -> None:
    """Each error is freezekit's own and the builtin that a caller would catch."""
    error, builtin = raised
    assert isinstance(error, builtin)
    assert isinstance(error, FreezekitError)


def test_errors_pickle_and_copy(raised: Raised) -> None:
    """An error comes out of another process as it went in, message and attributes."""
    error, _ = raised
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert vars(other) == vars(error)


def test_an_error_about_a_value_that_does_not_pickle_does() -> None:
    """The pattern in a PatternError may be anything; the error still crosses processes."""
    with pytest.raises(PatternError, match="got generator") as caught:
        fk.select(TiedLM(), TiedLM().parameters())  # type: ignore[arg-type]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_unmatched_error_is_no_key_error() -> None:
    """Its message is printed as it is: a KeyError would print its repr."""
    with pytest.raises(UnmatchedPatternError, match="did you mean 'body'") as caught:
        fk.select(TiedLM(), "bdy")
    assert not isinstance(caught.value, KeyError)
    assert str(caught.value).splitlines() == [
        "1 pattern(s) matched no parameter:",
        "  'bdy'  - did you mean 'body'?",
    ]


def test_unmatched_patterns_are_lined_up() -> None:
    """One line per pattern, hints below each other; a pattern without a hint has none."""
    error = UnmatchedPatternError(["a", "encoder"], ["near b", ""], [("b",), ()])
    assert str(error) == "2 pattern(s) matched no parameter:\n  'a'        - near b\n  'encoder'"
    assert error.suggestions == (("b",), ())
    assert error.role == "pattern"


def test_untrainable_parameters_are_listed() -> None:
    """The first ten are named with the reason, the others counted."""
    error = UntrainableParameterError([(f"layer.{i}", "int8") for i in range(12)])
    lines = str(error).splitlines()
    assert lines[0] == "12 parameter(s) cannot be made trainable:"
    assert lines[1] == "  layer.0 - int8"
    assert lines[-1] == "  ... and 2 more"
    assert len(lines) == 12
    assert len(error.parameters) == 12
    assert "more" not in str(UntrainableParameterError([("a", "b")] * 10))


def test_a_state_error_lists_the_differences() -> None:
    """Names on either side are listed, up to ten, and counted."""
    error = FreezeStateError("they differ", [f"a{i}" for i in range(12)], ["b"])
    assert str(error).splitlines() == [
        "they differ",
        "  only in the state (12): a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, ... and 2 more",
        "  only in the model (1): b",
    ]
    assert str(FreezeStateError("bad")) == "bad"


def test_an_audit_error_has_the_report() -> None:
    """What failed is at hand."""
    with pytest.raises(AuditFailedError, match="FK101 error: nothing is trainable") as caught:
        fail_audit()
    assert [finding.code for finding in caught.value.report.findings] == ["FK101"]


@pytest.mark.parametrize("name", errors.__all__)
def test_every_name_is_an_error_or_a_warning(name: str) -> None:
    """The module holds exceptions alone, each with a docstring."""
    kind = getattr(errors, name)
    assert issubclass(kind, FreezekitWarning if name.endswith("Warning") else FreezekitError)
    assert kind.__doc__.strip()
    assert kind.__module__ == "freezekit.errors"


def test_all_names_are_exported() -> None:
    """No exception of the module is left out of ``__all__``."""
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert defined == set(errors.__all__)


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name.endswith("Warning")])
def test_warnings_are_user_warnings(name: str) -> None:
    """Warnings are shown by default, and filtered by their class."""
    kind = getattr(errors, name)
    assert issubclass(kind, UserWarning)
    with pytest.warns(FreezekitWarning, match="told"):
        warnings.warn("told", kind, stacklevel=1)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: fk.freeze(TiedLM(), "lm_head"), id="freeze"),
        pytest.param(lambda: fk.unfreeze(TiedLM(), "lm_head"), id="unfreeze"),
        pytest.param(lambda: fk.train_only(TiedLM(), "lm_head"), id="train_only"),
        pytest.param(lambda: fk.frozen(TiedLM(), "lm_head").__enter__(), id="frozen"),
    ],
)
def test_a_warning_points_at_the_callers_line(call: Callable[[], object]) -> None:
    """The file that a warning names is the one that called freezekit."""
    with pytest.warns(errors.PartialTieWarning, match="is the same tensor as") as caught:
        call()
    assert [warning.filename for warning in caught] == [__file__]


def test_the_zoo_is_freezable_without_a_warning_of_torch() -> None:
    """Working on quantised tensors wakes no deprecation warning."""
    model = BY_NAME["quantized-tensor"].make()
    fk.freeze(model)
    fk.audit(model)
    assert torch.is_grad_enabled()
