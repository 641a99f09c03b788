"""Bad input: each a clear error, and what was complete stays readable."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from features.features_support import (
    FunctionalDropout,
    bare,
    make_bert,
    make_gpt2,
    token_batch,
)
from features.store_support import Counting, Tokens, assert_holds, each, make_batches
from freezekit import FeatureDataset, FrozenFeatureExtractor, extract_features
from freezekit.errors import (
    BatchError,
    FeatureStoreError,
    NonFiniteFeatureError,
    PaddingError,
    StoreWriteError,
    TrainableBackboneError,
    UnrepeatableFeaturesError,
)

quiet = partial(extract_features, progress=False)


def counting() -> FrozenFeatureExtractor:
    """An extractor of the counting backbone."""
    return FrozenFeatureExtractor(Counting())


# -- the extractor -----------------------------------------------------------------------------


def test_a_plain_backbone_is_no_extractor(tmp_path: Path) -> None:
    """The error says how to make one."""
    with pytest.raises(TypeError, match=r"got Counting; wrap the backbone"):
        quiet(Counting(), make_batches(), tmp_path)  # type: ignore[arg-type]


def test_a_thawed_backbone_is_refused(tmp_path: Path) -> None:
    """Parameters that could move, named; nothing is written."""
    extractor = counting()
    extractor.get_parameter("backbone.linear.weight").requires_grad_()
    with pytest.raises(TrainableBackboneError, match=r"linear\.weight"):
        quiet(extractor, make_batches(), tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_backbone_in_train_mode_is_refused(tmp_path: Path) -> None:
    """Someone set it by hand: the modules are named."""
    extractor = counting()
    extractor.get_submodule("backbone.norm").training = True
    with pytest.raises(TrainableBackboneError, match=r"train mode.*norm") as caught:
        quiet(extractor, make_batches(), tmp_path)
    assert caught.value.modules == ("norm",)


def test_features_that_are_not_repeatable_are_refused(tmp_path: Path) -> None:
    """A functional dropout is found at the first batch; check=False stores it all the same."""
    net = nn.Sequential(nn.Linear(4, 4), FunctionalDropout())
    batches = [x for x, _ in make_batches()]
    with pytest.raises(UnrepeatableFeaturesError, match="arises in: 1"):
        quiet(FrozenFeatureExtractor(net), batches, tmp_path / "a")
    assert len(quiet(FrozenFeatureExtractor(net), batches, tmp_path / "b", check=False)) == 23


# -- the batches -------------------------------------------------------------------------------


def with_labels(count: int) -> list[Any]:
    """Batches of which the labels are too many or too few."""
    return [(x, y[:count]) for x, y in make_batches()]


BAD_BATCHES: dict[str, tuple[Any, Any, str]] = {
    "none": ([], None, "batch 0: there is none: the iterable of batches is empty"),
    "none-iterator": (each([]), None, "the iterable of batches is empty"),
    "zero-samples": ([torch.zeros(0, 4)], None, r"it is empty: its tensor has the shape \(0, 4\)"),
    "a-sample": ([torch.zeros(4)], None, r"shape \(4,\) has no batch dimension: pass batches"),
    "a-scalar": ([torch.tensor(1.0)], None, "has no batch dimension"),
    "no-tensor": ([["text"]], None, "no tensor for the backbone"),
    "two-inputs": (make_batches(), None, r"2 elements do not fit.*keys=\['labels'\]"),
    "all-keys": ([(torch.zeros(2, 4),)], ["labels"], "none is left for the backbone"),
    "keys-of-tensor": ([torch.zeros(2, 4)], ["labels"], "it is a Tensor, which has no entries"),
    "missing-key": ([{"x": torch.zeros(2, 4)}], ["labels"], "it has no 'labels', but 'x'"),
    "short-labels": (with_labels(3), ["labels"], r"'labels' has the shape \(3,\).*4 samples"),
    "text-labels": (
        [{"x": torch.zeros(2, 4), "ids": ["a", "b"]}],
        ["ids"],
        "no tensor and no list of numbers",
    ),
    "own-word": (
        [{"x": torch.zeros(2, 4), "offsets": torch.zeros(2)}],
        None,
        "'offsets' is the store's own word",
    ),
    "twice": (
        [{"x": torch.zeros(2, 4), "features": torch.zeros(2)}],
        None,
        "'features' is a feature and a column",
    ),
    "complex": (
        [{"x": torch.zeros(2, 4), "z": torch.zeros(2, dtype=torch.complex64)}],
        None,
        r"'z' is torch\.complex64, which a store does not hold",
    ),
}


@pytest.mark.parametrize("case", list(BAD_BATCHES))
def test_bad_batches(case: str, tmp_path: Path) -> None:
    """What is wrong, with the batch and the shapes; another try in the same place works."""
    batches, keys, words = BAD_BATCHES[case]
    with pytest.raises(BatchError, match=words) as caught:
        quiet(counting(), batches, tmp_path, keys=keys)
    assert caught.value.batch == 0
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ((torch.zeros(2, 4), torch.zeros(2)), r"'labels' is f32\[\], in the batches before.*i64"),
        ((torch.zeros(2, 4, 3), torch.zeros(2).long()), "while batch 6"),
        (torch.zeros(2, 4), "keys name entries of a mapping"),
        ("text", "it is a str"),
    ],
    ids=["dtype", "backbone", "no-tuple", "text"],
)
def test_batches_of_changing_structure(last: Any, words: str, tmp_path: Path) -> None:
    """The batch is named; the ones before it are kept, and can be read and gone on from."""
    with pytest.raises((BatchError, RuntimeError)) as caught:
        quiet(counting(), [*make_batches(), last], tmp_path, keys="labels")
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
    assert "batch 6" in text
    with pytest.raises(FeatureStoreError, match="did not finish"):
        FeatureDataset(tmp_path)
    assert_holds(FeatureDataset(tmp_path, partial=True), make_batches())
    net = Counting()
    done = quiet(FrozenFeatureExtractor(net), make_batches(), tmp_path, keys="labels")
    assert net.seen == 0
    assert_holds(done, make_batches())


def test_lengths_that_change_without_a_mask(tmp_path: Path) -> None:
    """Features of several lengths cannot be told from padding: the error says what helps."""
    extractor = FrozenFeatureExtractor(Tokens())
    batches = [torch.ones(2, 5).long(), torch.ones(2, 7).long()]
    with pytest.raises(BatchError, match=r"f32\[7,6\].*need an attention_mask in the batch, or a"):
        quiet(extractor, batches, tmp_path)


def test_an_output_that_is_no_feature(tmp_path: Path) -> None:
    """A cache of keys and values, and a scalar, are named."""
    with pytest.raises(BatchError, match=r"which is no feature.*use_cache = False"):
        quiet(FrozenFeatureExtractor(make_gpt2()), [token_batch([3, 3])], tmp_path / "a")

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    with pytest.raises(BatchError, match=r"'features' has the shape \(\) for 4 samples"):
        quiet(FrozenFeatureExtractor(Mean()), [torch.randn(4, 4)], tmp_path / "b")


def test_loaders_that_shuffle_are_refused(tmp_path: Path) -> None:
    """The order of the data is what is kept; repeated samples of a DistributedSampler are not."""
    data = TensorDataset(torch.randn(10, 4))
    with pytest.raises(ValueError, match=r"this DataLoader shuffles.*shuffle=False"):
        quiet(counting(), DataLoader(data, 2, shuffle=True), tmp_path)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=3, rank=0)
    with pytest.raises(ValueError, match="DistributedSampler, which repeats samples"):
        quiet(counting(), DataLoader(data, 2, sampler=sampler), tmp_path)
    with pytest.raises(TypeError, match=r"expected an iterable of batches.*got int"):
        quiet(counting(), 3, tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", [{"dtype": torch.int8}, {"shard_bytes": 0}])
def test_wrong_options(option: dict[str, Any], tmp_path: Path) -> None:
    """Named with their value."""
    with pytest.raises(ValueError, match=next(iter(option))):
        quiet(counting(), make_batches(), tmp_path, keys="labels", **option)


# -- features that are no numbers --------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_features_that_are_not_finite(value: float, tmp_path: Path) -> None:
    """The sample is named by its place in the data; allowed, they come back as they are."""
    batches = [x.clone() for x, _ in make_batches()]
    batches[2][1:3, 0] = value
    net = nn.Sequential(nn.Identity())
    kind = "is NaN" if value != value else "is infinite"  # noqa: PLR0124
    with pytest.raises(NonFiniteFeatureError, match=rf"sample 9 \(and 1 more.*{kind}") as caught:
        quiet(FrozenFeatureExtractor(net), batches, tmp_path / "a")
    assert (caught.value.sample, caught.value.count) == (9, 2)
    assert len(FeatureDataset(tmp_path / "a", partial=True)) == 8
    dataset = quiet(FrozenFeatureExtractor(net), batches, tmp_path / "b", allow_nonfinite=True)
    torch.testing.assert_close(dataset[9]["features"], batches[2][1], equal_nan=True)


def test_float16_that_overflows(tmp_path: Path) -> None:
    """70,000 is not infinite: it does not fit, and the error says what would."""
    batches = [torch.tensor([[1.0], [-70000.0]])]
    extractor = FrozenFeatureExtractor(nn.Sequential(nn.Identity()))
    with pytest.raises(NonFiniteFeatureError, match=r"sample 1 overflows float16: it is 70000"):
        quiet(extractor, batches, tmp_path, dtype=torch.float16)
    assert quiet(extractor, batches, tmp_path / "b", dtype=torch.bfloat16)[1]["features"] == -70144


def test_nan_in_padding_does_not_matter(tmp_path: Path) -> None:
    """What is not stored need not be a number."""

    class Dirty(Tokens):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            assert attention_mask is not None
            out = super().forward(input_ids, attention_mask)
            return out.masked_fill(attention_mask.unsqueeze(2) == 0, torch.nan)

    dataset = quiet(FrozenFeatureExtractor(Dirty()), [token_batch([5, 2])], tmp_path)
    assert dataset[1]["features"].shape == (2, 6)


# -- padding -----------------------------------------------------------------------------------


def drop_mask(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch of which the mask was forgotten."""
    return {"input_ids": batch["input_ids"]}


@pytest.mark.parametrize("pool", [None, "mean", "cls"])
@pytest.mark.parametrize(
    ("net", "batch", "words"),
    [
        (Tokens, drop_mask(token_batch([6, 2])), "the batch has no attention_mask"),
        (make_bert, drop_mask(token_batch([6, 2])), "the batch has no attention_mask"),
        (partial(Tokens, uses_mask=False), token_batch([6, 2]), "does not use the mask"),
        (
            partial(Tokens, absolute=True),
            token_batch([6, 2], side="left"),
            "absolute positions count padding on the left",
        ),
    ],
    ids=["no-mask", "no-mask-bert", "unused-mask", "left-absolute"],
)
def test_features_that_change_with_padding_are_refused(
    net: Callable[[], nn.Module], batch: dict[str, Tensor], words: str, pool: Any, tmp_path: Path
) -> None:
    """The sample with the most padding, run alone, has other features: it is named."""
    extractor = FrozenFeatureExtractor(net(), pool=pool)
    batches = [token_batch([6, 6]) if "attention_mask" in batch else batch, batch]
    with pytest.raises(PaddingError, match=words) as caught:
        quiet(extractor, batches, tmp_path)
    assert caught.value.sample == (3 if "attention_mask" in batch else 1)
    assert caught.value.difference > 0.002


@pytest.mark.parametrize("pool", [None, "mean", "last_token"])
@pytest.mark.parametrize(
    ("net", "side"), [(Tokens, "left"), (Tokens, "right"), (make_bert, "right")]
)
def test_padding_that_does_not_matter_passes(
    net: Callable[[], nn.Module], side: str, pool: Any, tmp_path: Path
) -> None:
    """A mask that is used: the same features in every batch."""
    batches = [token_batch([6, 2, 5], side=side)]
    assert len(quiet(FrozenFeatureExtractor(net(), pool=pool), batches, tmp_path)) == 3


def test_left_padded_gpt2_is_refused_and_with_positions_it_passes(tmp_path: Path) -> None:
    """The advice in the error works."""
    net = make_gpt2()
    net.config.use_cache = False
    batch = token_batch([6, 2], side="left")
    extractor = FrozenFeatureExtractor(net, pool="last_token")
    with pytest.raises(PaddingError, match="pass position_ids"):
        quiet(extractor, [batch], tmp_path)
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    dataset = quiet(extractor, [batch], tmp_path)
    alone = bare(net, batch["input_ids"][1:, 4:]).last_hidden_state[0, -1]
    torch.testing.assert_close(dataset[1]["features"], alone)


def test_padding_that_is_wanted_is_allowed(tmp_path: Path) -> None:
    """A tolerance of infinity: the user knows."""
    extractor = FrozenFeatureExtractor(Tokens())
    batches = [drop_mask(token_batch([6, 2]))]
    dataset = quiet(extractor, batches, tmp_path, padding_tolerance=float("inf"))
    assert dataset[1]["features"].shape == (6, 6)


# -- the directory -----------------------------------------------------------------------------


def test_a_directory_that_holds_something_else(tmp_path: Path) -> None:
    """Nothing of it is touched."""
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FeatureStoreError, match=r"it holds something else \(thesis\.txt\)"):
        quiet(counting(), make_batches(), tmp_path, keys="labels")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(FeatureStoreError, match=r"not a feature store: it has no index\.json"):
        FeatureDataset(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "format None, expected"),
        ('{"format": "other/1"}', "format 'other/1'"),
        ('{"format": "freezekit.features/1"}', "lacks columns, complete"),
    ],
)
def test_an_index_of_something_else(text: str, words: str, tmp_path: Path) -> None:
    """Other programs have an index.json too."""
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(FeatureStoreError, match=words):
        FeatureDataset(tmp_path)
    with pytest.raises(FeatureStoreError, match=words):
        quiet(counting(), make_batches(), tmp_path)
    assert (tmp_path / "index.json").read_text() == text


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "shard-0.bin", "a/shard-00000000-00000000"]
)
def test_a_name_in_the_index_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    """A path out of a file is checked before it is opened."""
    quiet(counting(), make_batches(), tmp_path, keys="labels")
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][0]["file"] = name
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(FeatureStoreError, match="not a shard's name"):
        FeatureDataset(tmp_path)


def test_a_dtype_in_the_index_is_looked_up_in_a_list(tmp_path: Path) -> None:
    """No name out of a file reaches torch's attributes."""
    quiet(counting(), make_batches(), tmp_path, keys="labels")
    index = json.loads((tmp_path / "index.json").read_text())
    index["features"]["features"]["dtype"] = "load"
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(FeatureStoreError, match=r"describes no features.*KeyError: 'load'"):
        FeatureDataset(tmp_path)


def test_resume_false_wants_an_empty_directory(tmp_path: Path) -> None:
    """Who wants a new store is not given an old one."""
    quiet(counting(), make_batches(), tmp_path, keys="labels", resume=False)
    with pytest.raises(FeatureStoreError, match="there is a store already, and resume=False"):
        quiet(counting(), make_batches(), tmp_path, keys="labels", resume=False)


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    """It is left as it is."""
    (tmp_path / "store").write_text("x")
    with pytest.raises(FeatureStoreError, match="it is a file, not a directory"):
        quiet(counting(), make_batches(), tmp_path / "store", keys="labels")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's /proc")
def test_a_directory_that_cannot_be_made() -> None:
    """A file system that takes nothing."""
    with pytest.raises(StoreWriteError, match="cannot be written to"):
        quiet(counting(), make_batches(), "/proc/freezekit", keys="labels")


def test_a_read_only_directory(tmp_path: Path) -> None:
    """Nothing can be written, and the error says so; a complete store there is still read."""
    quiet(counting(), make_batches(), tmp_path / "full", keys="labels")
    (tmp_path / "empty").mkdir()
    for name in ("full", "empty"):
        (tmp_path / name).chmod(0o555)
    try:
        if os.access(tmp_path / "empty", os.W_OK):
            pytest.skip("this user may write everywhere")
        with pytest.raises(StoreWriteError, match="cannot be written to"):
            quiet(counting(), make_batches(), tmp_path / "empty", keys="labels")
        assert_holds(
            quiet(counting(), make_batches(), tmp_path / "full", keys="labels"), make_batches()
        )
    finally:
        for name in ("full", "empty"):
            (tmp_path / name).chmod(0o755)
