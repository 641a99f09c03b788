"""Extraction and reading: what was computed is what is read, in every layout and dtype."""

from __future__ import annotations

import copy
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from features.features_support import bare, make_bert, token_batch
from features.store_support import (
    WIDTH,
    Counting,
    Tokens,
    assert_holds,
    each,
    expected,
    make_batches,
    shards_of,
)
from freezekit import FeatureDataset, FrozenFeatureExtractor, extract_features
from freezekit._features.places import Places, make_runs


def extract(
    directory: Path, batches: Any = None, *, keys: Any = ("labels",), **options: Any
) -> FeatureDataset:
    """A store of the counting backbone's features."""
    extractor = FrozenFeatureExtractor(Counting())
    data = make_batches() if batches is None else batches
    return extract_features(extractor, data, directory, keys=keys, progress=False, **options)


# -- what is read is what was computed ---------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [1, 200, 2**20])
@pytest.mark.parametrize("make", [list, each, lambda b: DataLoader(b, batch_size=None)])
def test_features_come_back_in_order_to_the_bit(
    make: Any, shard_bytes: int, tmp_path: Path
) -> None:
    """Lists, iterators and loaders; one shard or one for each batch."""
    batches = make_batches()
    assert_holds(extract(tmp_path, make(batches), shard_bytes=shard_bytes), batches)
    assert_holds(FeatureDataset(tmp_path), batches)
    assert len(shards_of(tmp_path)) == {1: 6, 200: 3, 2**20: 1}[shard_bytes]


def test_a_sample_and_a_batch(tmp_path: Path) -> None:
    """Integers, negative ones, slices, lists and tensors index like a list's."""
    dataset = extract(tmp_path, shard_bytes=1)
    want = expected(make_batches())
    assert torch.equal(dataset[5]["features"], want[5])
    assert torch.equal(dataset[-1]["features"], want[22])
    assert dataset[5]["labels"].shape == ()
    assert torch.equal(dataset[[7, 0, 7]]["features"], want[[7, 0, 7]])
    assert torch.equal(dataset[torch.tensor([3, 22])]["features"], want[[3, 22]])
    assert torch.equal(dataset[torch.arange(23) > 20]["features"], want[21:])
    assert dataset[20:]["labels"].tolist() == [20, 21, 22]
    assert dataset[[]]["features"].shape == (0, WIDTH)
    assert [int(sample["labels"]) for sample in dataset] == list(range(23))
    for wrong in (23, -24):
        with pytest.raises(IndexError, match=f"sample {wrong} of 23 samples"):
            dataset[wrong]


def test_what_is_read_can_be_overwritten(tmp_path: Path) -> None:
    """A head that works in place on what it read changes neither the file nor the next reading."""
    dataset = extract(tmp_path)
    before = shards_of(tmp_path)[0].read_bytes()
    for index in (0, [0]):
        want = dataset[index]["features"].clone()
        nn.ReLU(inplace=True)(dataset[index]["features"])
        dataset[index]["features"].zero_()
        assert torch.equal(dataset[index]["features"], want)
    assert shards_of(tmp_path)[0].read_bytes() == before


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_data_loader(workers: int, tmp_path: Path) -> None:
    """Plain loaders, and loader(): every sample once, in one process or in workers."""
    dataset = extract(tmp_path, shard_bytes=200)
    want = expected(make_batches())
    plain = DataLoader(dataset, batch_size=5, num_workers=workers)
    assert torch.equal(torch.cat([batch["features"] for batch in plain]), want)
    shuffled = dataset.loader(5, shuffle=True, num_workers=workers)
    seen = list(shuffled)
    labels = torch.cat([batch["labels"] for batch in seen])
    assert sorted(labels.tolist()) == list(range(23))
    assert torch.equal(torch.cat([batch["features"] for batch in seen]), want[labels])
    assert [len(b["labels"]) for b in dataset.loader(5, drop_last=True)] == [5, 5, 5, 5]


def test_copies_of_a_dataset_read_by_themselves(tmp_path: Path) -> None:
    """Pickles carry names and no features."""
    dataset = extract(tmp_path)
    dataset[0]
    sent = pickle.dumps(dataset)
    assert len(sent) < 5000
    for other in (pickle.loads(sent), copy.deepcopy(dataset)):
        assert torch.equal(other[22]["features"], dataset[22]["features"])


def test_repr_and_schema(tmp_path: Path) -> None:
    """What there is, in one line."""
    dataset = extract(tmp_path)
    assert repr(dataset).startswith(
        "FeatureDataset(23 samples: features f32[6], labels i64[]; 1.5 KiB in 1"
    )
    assert dataset.nbytes == shards_of(tmp_path)[0].stat().st_size


def test_a_head_trains_on_what_is_read(tmp_path: Path) -> None:
    """Features from disk enter a trainable head, and the loss falls."""
    dataset = extract(tmp_path)
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        for batch in dataset.loader(8, shuffle=True):
            target = (batch["labels"] % 2).float()
            loss = nn.functional.binary_cross_entropy_with_logits(
                head(batch["features"]).squeeze(1), target
            )
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]


# -- features per token ------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4),
    side=st.sampled_from(["left", "right"]),
    shard_bytes=st.sampled_from([1, 500, 10**6]),
)
def test_tokens_are_packed_without_padding(
    lengths: list[list[int]], side: str, shard_bytes: int, tmp_path_factory: Any
) -> None:
    """Law: a sample read is the sample's tokens, as many as it has, wherever its padding was."""
    directory = tmp_path_factory.mktemp("packed")
    net = Tokens()
    batches = [token_batch(chunk, side=side, seed=i) for i, chunk in enumerate(lengths)]
    dataset = extract_features(
        FrozenFeatureExtractor(net), batches, directory, shard_bytes=shard_bytes, progress=False
    )
    want = [
        row[keep.bool()]
        for batch in batches
        for row, keep in zip(bare(net, **batch), batch["attention_mask"], strict=True)
    ]
    assert len(dataset) == len(want)
    assert all(torch.equal(dataset[i]["features"], value) for i, value in enumerate(want))
    whole = dataset[:]
    assert whole["features"].shape[1] == max(len(value) for value in want)
    for row, mask, value in zip(whole["features"], whole["attention_mask"], want, strict=True):
        assert torch.equal(row[mask.bool()], value)
        assert mask.sum() == len(value)
        assert not row[len(value) :].any()
    stored = sum(load_file(path)["features"].shape[0] for path in shards_of(directory))
    assert stored == sum(len(value) for value in want)


def test_a_models_outputs_are_stored_by_name(tmp_path: Path) -> None:
    """Hidden states packed, the pooled output dense, labels beside them; loaders pad."""
    net = make_bert()
    batches = [{**token_batch([5, 3, 7]), "labels": torch.tensor([0, 1, 1])}] * 2
    dataset = extract_features(FrozenFeatureExtractor(net), batches, tmp_path, progress=False)
    assert dataset.schema.text() == (
        "last_hidden_state f32[tokens,16], pooler_output f32[16], labels i64[]"
    )
    want = bare(net, **token_batch([5, 3, 7]))
    assert torch.equal(dataset[4]["last_hidden_state"], want.last_hidden_state[1, :3])
    assert torch.equal(dataset[4]["pooler_output"], want.pooler_output[1])
    plain = DataLoader(dataset, batch_size=4, collate_fn=dataset.collate)
    padded = [batch["last_hidden_state"].shape for batch in plain]
    assert padded == [(4, 7, 16), (2, 7, 16)]
    assert [b["attention_mask"].shape for b in dataset.loader(4)] == [(4, 7), (2, 7)]


def test_layers_are_stored_by_name(tmp_path: Path) -> None:
    """Each layer is a feature of its own; pooled ones are dense."""
    batches = [token_batch([5, 3])]
    extractor = FrozenFeatureExtractor(make_bert(), ["embeddings", "encoder.layer.0"])
    dataset = extract_features(extractor, batches, tmp_path / "tokens", progress=False)
    assert dataset.schema.text() == ("embeddings f32[tokens,16], encoder.layer.0 f32[tokens,16]")
    pooled = FrozenFeatureExtractor(make_bert(), ["encoder.layer.0"], pool="mean")
    dataset = extract_features(pooled, batches, tmp_path / "pooled", progress=False)
    assert dataset.schema.text() == "encoder.layer.0 f32[16]"
    assert torch.equal(dataset[:]["encoder.layer.0"], pooled(**batches[0])["encoder.layer.0"])


# -- dtypes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_dtype_in_which_features_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    """Cast once, on the way to disk; labels keep theirs."""
    dataset = extract(tmp_path, dtype=dtype)
    read = dataset[:]
    assert (read["features"].dtype, read["labels"].dtype) == (dtype, torch.int64)
    assert torch.equal(read["features"], expected(make_batches()).to(dtype))


def test_a_backbone_in_bfloat16_is_kept_so(tmp_path: Path) -> None:
    """Without a choice the dtype is what the backbone gives."""
    extractor = FrozenFeatureExtractor(Counting(), dtype=torch.bfloat16)
    dataset = extract_features(extractor, [x for x, _ in make_batches()], tmp_path, progress=False)
    assert dataset[0]["features"].dtype == torch.bfloat16


# -- what goes along ---------------------------------------------------------------------------


def test_columns_of_every_kind(tmp_path: Path) -> None:
    """Several columns, of lists and of more dimensions; names of a mapping's entries."""
    batches = [
        {"x": x, "labels": y, "weight": y.double() / 2, "box": torch.ones(len(y), 2, 2).bool()}
        for x, y in make_batches()
    ]
    dataset = extract(tmp_path, batches, keys=None)
    assert dataset.schema.text() == ("features f32[6], labels i64[], weight f64[], box bool[2,2]")
    listed = [{"x": x, "ids": y.tolist()} for x, y in make_batches()]
    dataset = extract(tmp_path / "lists", listed, keys="ids")
    assert dataset[:]["ids"].tolist() == list(range(23))


def test_labels_do_not_reach_the_backbone(tmp_path: Path) -> None:
    """A model that would compute a loss from labels gives features instead."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    extractor = FrozenFeatureExtractor(BertForSequenceClassification(config))
    batches = [{**token_batch([5, 3]), "labels": torch.tensor([0, 1])}]
    dataset = extract_features(extractor, batches, tmp_path, progress=False)
    assert dataset.schema.text() == "logits f32[2], labels i64[]"


# -- the format --------------------------------------------------------------------------------


def test_the_format_is_read_with_json_and_safetensors_alone(tmp_path: Path) -> None:
    """As the page on the format says: no freezekit is needed."""
    dataset = extract(tmp_path, shard_bytes=200)
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["format"] == "freezekit.features/1"
    assert (index["complete"], index["samples"], index["batches"]) == (True, 23, 6)
    assert index["features"] == {"features": {"layout": "dense", "dtype": "float32", "shape": [6]}}
    found: dict[int, Tensor] = {}
    for shard in index["shards"]:
        tensors = load_file(tmp_path / shard["file"])
        for first, step, batches, row, rows in shard["batches"]:
            for k in range(batches):
                begin = row + k * rows
                found[first + k * step] = tensors["features"][begin : begin + rows]
    whole = torch.cat([found[i] for i in range(index["batches"])])
    assert torch.equal(whole, dataset[:]["features"])
    assert {path.suffix for path in tmp_path.iterdir() if not path.name.startswith(".")} == {
        ".json",
        ".safetensors",
    }


def test_reading_does_not_read_it_all(tmp_path: Path) -> None:
    """Opening, and reading one sample, touch no data of the other shards."""
    dataset = extract(tmp_path, shard_bytes=1)
    opened = FeatureDataset(tmp_path)
    opened[0]
    assert list(opened._open) == [0]
    assert len(dataset) == 23


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=30),
    world=st.integers(1, 4),
    per_shard=st.integers(1, 6),
)
def test_places_of_samples(sizes: list[int], world: int, per_shard: int) -> None:
    """Law: however batches are shared out, sample i is found where its batch was put."""
    shards: list[list[tuple[int, int, int]]] = []
    where: dict[int, tuple[int, int]] = {}
    for rank in range(world):
        own = range(rank, len(sizes), world)
        for begin in range(0, len(own), per_shard):
            row, shard = 0, []
            for batch in own[begin : begin + per_shard]:
                shard.append((batch, row, sizes[batch]))
                where[batch] = (len(shards), row)
                row += sizes[batch]
            shards.append(shard)
    places = Places([make_runs(shard) for shard in shards])
    assert (places.samples, places.batches) == (sum(sizes), len(sizes))
    sample = 0
    for batch, size in enumerate(sizes):
        for offset in range(size):
            shard_at, row = where[batch]
            assert places.find(sample) == (shard_at, row + offset)
            sample += 1


def test_even_batches_are_one_run() -> None:
    """The index of a long extraction is short."""
    assert make_runs((i, 32 * i, 32) for i in range(100_000)) == [(0, 1, 100_000, 0, 32)]
    assert make_runs((3 * i + 1, 32 * i, 32) for i in range(1000)) == [(1, 3, 1000, 0, 32)]


# -- a second call -----------------------------------------------------------------------------


def test_a_complete_store_is_read_and_not_made_again(tmp_path: Path) -> None:
    """The second call runs nothing through the backbone, and writes nothing."""
    extract(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    net = Counting()
    dataset = extract_features(
        FrozenFeatureExtractor(net), make_batches(), tmp_path, keys="labels", progress=False
    )
    assert net.seen == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert_holds(dataset, make_batches())


def test_batches_are_moved_to_the_backbone_and_checked_in_micro_batches(tmp_path: Path) -> None:
    """Parts of a batch give the same store."""
    extractor = FrozenFeatureExtractor(Counting(), micro_batch_size=3)
    dataset = extract_features(extractor, make_batches(), tmp_path, keys="labels", progress=False)
    torch.testing.assert_close(dataset[:]["features"], expected(make_batches()))


def test_a_map_style_loader_skips_what_is_done(tmp_path: Path) -> None:
    """Going on, samples of complete batches are not even loaded."""

    class Noting(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            loaded.append(index)
            return tuple(tensor[index] for tensor in self.tensors)

    loaded: list[int] = []
    batches = make_batches()
    data = Noting(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
    extract(tmp_path, DataLoader(data, batch_size=4), shard_bytes=1)
    shards_of(tmp_path)[3].unlink()
    loaded.clear()
    assert_holds(extract(tmp_path, DataLoader(data, batch_size=4), shard_bytes=1), batches)
    assert loaded == [12, 13, 14, 15]


# -- progress ----------------------------------------------------------------------------------


def test_progress_is_told_and_can_be_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a log, one line with rate and time left; with progress=False not a word."""
    extract(tmp_path / "quiet")
    assert capsys.readouterr() == ("", "")
    extract_features(
        FrozenFeatureExtractor(Counting()), make_batches(), tmp_path / "told", keys="labels"
    )
    out, err = capsys.readouterr()
    assert out == ""
    assert "features: 23 samples, " in err
    assert "batch 6 of 6, 0 s left" in err


def test_progress_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that does not know how many batches there are works as well."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    extract_features(
        FrozenFeatureExtractor(Counting()), each(make_batches()), tmp_path, keys="labels"
    )
    assert_holds(FeatureDataset(tmp_path), make_batches())


def test_headers_are_plain_safetensors(tmp_path: Path) -> None:
    """Eight bytes of length and a JSON header, as the format of safetensors has it."""
    extract(tmp_path)
    raw = shards_of(tmp_path)[0].read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert header["__metadata__"]["format"] == "freezekit.features/1"
    assert set(header) == {"__metadata__", "features", "labels"}
