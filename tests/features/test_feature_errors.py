"""The errors about features: caught by builtins, pickling, saying all there is to say."""

from __future__ import annotations

import copy
import pickle

import pytest

from freezekit.errors import (
    BackboneMismatchError,
    BatchError,
    CacheMismatchError,
    DamagedShardError,
    FeatureStoreError,
    FreezekitError,
    LayerNotRunError,
    NonFiniteFeatureError,
    PaddingError,
    StoreBusyError,
    StoreWriteError,
    TrainableBackboneError,
    UnknownLayerError,
    UnrepeatableFeaturesError,
)

ERRORS: list[tuple[FreezekitError, type[Exception]]] = [
    (TrainableBackboneError(["a.weight"], ["a"]), RuntimeError),
    (UnknownLayerError(["a", "b"], [["c"], []]), LookupError),
    (LayerNotRunError(["a"], "a hint"), RuntimeError),
    (UnrepeatableFeaturesError("they differ", ["a"], ["b"]), RuntimeError),
    (BackboneMismatchError("ab" * 32, "cd" * 32), ValueError),
    (BatchError(3, "no tensor"), ValueError),
    (NonFiniteFeatureError(7, "features", 2, "is NaN"), ValueError),
    (PaddingError(7, 0.5, "it changes"), ValueError),
    (FeatureStoreError("store", "no index"), ValueError),
    (StoreBusyError("store", "busy"), FeatureStoreError),
    (StoreWriteError("store", "full"), OSError),
    (DamagedShardError("store", [("shard", "cut short")] * 12), FeatureStoreError),
    (CacheMismatchError("store", [("weights", "a" * 64, "b" * 64)]), ValueError),
]


@pytest.mark.parametrize(("error", "builtin"), ERRORS, ids=lambda v: getattr(v, "__name__", None))
def test_errors_are_builtins_and_pickle(error: FreezekitError, builtin: type[Exception]) -> None:
    """Ranks send them to each other: message and attributes arrive."""
    assert isinstance(error, builtin)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert vars(other) == vars(error)


def test_a_mismatch_is_a_table_of_fields() -> None:
    """Long digests are cut, names line up."""
    error = CacheMismatchError("store", [("weights", "a" * 64, "b" * 64), ("pool", "cls", "mean")])
    assert str(error).splitlines() == [
        "store holds features of something else:",
        f"  weights  {'a' * 37}... in the store, {'b' * 37}... here",
        "  pool     cls in the store, mean here",
        "use another directory, or delete this one",
    ]


def test_long_lists_are_cut() -> None:
    """Hundreds of parameters do not fill the screen."""
    text = str(TrainableBackboneError([f"layer.{i}" for i in range(300)]))
    assert "300 parameter(s)" in text
    assert "layer.9, ... and 290 more" in text
    assert "... and 2 more" in str(ERRORS[11][0])
