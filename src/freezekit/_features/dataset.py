"""FeatureDataset: reading what was extracted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from freezekit._features.extractor import FrozenFeatureExtractor
from freezekit._features.identity import differences, identify
from freezekit._features.indexing import find_damaged, scan
from freezekit._features.places import Places
from freezekit._features.rows import Column, Schema
from freezekit._features.shards import check_shard, read_index
from freezekit._format import format_bytes, plural
from freezekit.errors import CacheMismatchError, DamagedShardError, FeatureStoreError

__all__ = ["FeatureDataset"]


class FeatureDataset(Dataset[dict[str, Tensor]]):
    """Features on disk, as a map-style dataset; opening reads the index and nothing else.

    >>> import tempfile
    >>> from torch import nn
    >>> from freezekit import extract_features
    >>> folder = tempfile.TemporaryDirectory()
    >>> extractor = FrozenFeatureExtractor(nn.Linear(4, 3))
    >>> batches = [(torch.randn(5, 4), torch.arange(5))] * 2
    >>> _ = extract_features(extractor, batches, folder.name, keys="labels", progress=False)
    >>> dataset = FeatureDataset(folder.name, extractor)
    >>> dataset
    FeatureDataset(10 samples: features f32[3], labels i64[]; 888 B in 1 shard)
    >>> dataset[0]["features"].shape, dataset[[9, 1, 2]]["labels"]
    (torch.Size([3]), tensor([4, 1, 2]))
    >>> [len(batch["labels"]) for batch in dataset.loader(4, shuffle=True)]
    [4, 4, 2]
    >>> folder.cleanup()

    ``dataset[i]`` is a sample: a dict of tensors, copied out of the memory-mapped file, so that
    what works on them in place changes nothing on disk. ``dataset[[3, 1, 2]]`` is a batch.
    Features per token are (tokens, width) in a sample; in a batch they are padded on the right
    with zeros, beside an ``attention_mask`` (batch, longest) of 1 where there is a token.

    Works in the workers of a ``DataLoader``; :meth:`loader` reads whole batches at a time.

    Args:
        directory: what :func:`extract_features` wrote.
        extractor: check that the store was made by an extractor like this one.
        preprocessing: with an extractor: also check what was declared of the data.
        partial: open what is complete of an extraction that did not finish.

    Raises:
        CacheMismatchError: the store was made by something else; the fields are named.
        FeatureStoreError: not a store, or one that is not finished.
        DamagedShardError: a shard is missing or cut short.
    """

    def __init__(
        self,
        directory: str | Path,
        extractor: FrozenFeatureExtractor | None = None,
        *,
        preprocessing: Any = None,
        partial: bool = False,
    ) -> None:
        self.directory = Path(directory)
        index = read_index(self.directory)
        if index is None:
            raise FeatureStoreError(str(directory), "not a feature store: it has no index.json")
        self.identity: dict[str, str] = dict(index["identity"])
        if extractor is not None:
            _check_identity(self.identity, extractor, preprocessing, self.directory)
        shards, self.schema = _contents(self.directory, index, partial=partial)
        self.nbytes = sum(int(shard["bytes"]) for shard in shards)
        self._files = [str(shard["file"]) for shard in shards]
        self._shards = shards
        self._places = Places([shard["batches"] for shard in shards])
        self._open: dict[int, _OpenShard] = {}

    def __len__(self) -> int:
        return self._places.samples

    def __repr__(self) -> str:
        shards = plural(len(self._files), "shard")
        return (
            f"FeatureDataset({plural(len(self), 'sample')}: {self.schema.text()}; "
            f"{format_bytes(self.nbytes)} in {shards})"
        )

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> dict[str, Tensor]:
        if not isinstance(index, int):
            return self.read(_as_list(index, len(self)))
        shard, row = self._places.find(_checked(index, len(self)))
        return self._shard(shard).sample(row, self.schema)

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        """Samples one by one, as a ``DataLoader`` asks for them."""
        return [self[index] for index in indices]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[index] for index in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the files anew.
        return {**self.__dict__, "_open": {}}

    def read(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """One batch of these samples, in this order.

        Returns:
            Each feature and column as (batch, ...). Features per token are padded with zeros to
            the longest sample, and come with ``attention_mask`` (batch, longest), int64.
        """
        places = self._places.find_all(_all_checked(indices, len(self)))
        for shard in {shard for shard, _ in places}.difference(self._open):
            self._shard(shard)
        batch: dict[str, Tensor] = {}
        for name, column in {**self.schema.features, **self.schema.columns}.items():
            if column.layout == "dense":
                batch[name] = self._stack(places, name, column)
            else:
                tokens = [self._open[shard].tokens(name, row) for shard, row in places]
                batch[name], batch["attention_mask"] = _pad(tokens, column)
        return batch

    def _stack(self, places: Sequence[tuple[int, int]], name: str, column: Column) -> Tensor:
        out = torch.empty((len(places), *column.shape), dtype=column.dtype)
        rows = _array(out)
        arrays = {shard: opened.dense[name] for shard, opened in self._open.items()}
        # A loop: an indexed copy for each of the shards that a batch touches takes longer.
        for place, (shard, row) in enumerate(places):
            rows[place] = arrays[shard][row]
        return out

    def loader(
        self, batch_size: int, *, shuffle: bool = False, drop_last: bool = False, **options: Any
    ) -> DataLoader[dict[str, Tensor]]:
        """A ``DataLoader`` that reads whole batches, which is faster than sample by sample.

        Args:
            batch_size: samples in a batch.
            shuffle: in another order each epoch.
            drop_last: leave out a last batch that is not full.
            options: for ``DataLoader``, such as ``num_workers`` or ``generator``.
        """
        order = (
            RandomSampler(self, generator=options.get("generator"))
            if shuffle
            else SequentialSampler(self)
        )
        sampler: Any = BatchSampler(order, batch_size, drop_last)
        return DataLoader(self, batch_size=None, sampler=sampler, **options)

    def collate(self, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Put samples together, padding those of other lengths; for ``DataLoader(collate_fn=)``."""
        batch: dict[str, Tensor] = {}
        for name in samples[0]:
            values = [sample[name] for sample in samples]
            column = self.schema.features.get(name)
            if column is None or column.layout == "dense":
                batch[name] = torch.stack(values)
            else:
                arrays = [_array(value) for value in values]
                batch[name], batch["attention_mask"] = _pad(arrays, column)
        return batch

    def verify(self) -> tuple[tuple[str, str], ...]:
        """Read every shard and compare it with its checksums.

        Returns:
            ``(file name, what is wrong)`` of each damaged shard; empty if all is well.
            ``extract_features(..., verify=True)`` makes those again.
        """
        found = []
        for shard in self._shards:
            path = self.directory / shard["file"]
            wrong = check_shard(path, shard["sha256"], shard["header_sha256"])
            if wrong:
                found.append((str(shard["file"]), wrong))
        return tuple(found)

    def _shard(self, number: int) -> _OpenShard:
        opened = self._open.get(number)
        if opened is None:
            path = self.directory / self._files[number]
            opened = self._open[number] = _OpenShard(path, self.schema)
        return opened


# -- one shard ---------------------------------------------------------------------------------


class _OpenShard:
    """A shard's tensors, memory-mapped.

    Rows are copied through NumPy's views of them, which takes a fraction of the time that it
    takes through tensors. NumPy has no bfloat16: those are seen as integers.
    """

    def __init__(self, path: Path, schema: Schema) -> None:
        from safetensors import SafetensorError, safe_open

        self.dense: dict[str, Any] = {}
        self.packed: dict[str, Any] = {}
        self.offsets: Any = None
        try:
            # Private mapping: pages are read when they are touched, and never written back.
            with safe_open(str(path), framework="pt") as file:
                for name, column in {**schema.features, **schema.columns}.items():
                    kept = self.dense if column.layout == "dense" else self.packed
                    kept[name] = _array(file.get_tensor(name))
                if self.packed:
                    self.offsets = _array(file.get_tensor("offsets"))
        except (SafetensorError, OSError) as error:
            raise DamagedShardError(str(path.parent), [(path.name, str(error))]) from error

    def tokens(self, name: str, row: int) -> Any:
        """One sample's tokens, not copied."""
        return self.packed[name][self.offsets[row] : self.offsets[row + 1]]

    def sample(self, row: int, schema: Schema) -> dict[str, Tensor]:
        """A copy of one sample."""
        found = {}
        for entries in schema:
            for name, column in entries.items():
                if column.layout == "packed":
                    copy = torch.from_numpy(self.tokens(name, row).copy())
                elif column.shape:
                    copy = torch.from_numpy(self.dense[name][row].copy())
                else:
                    copy = torch.from_numpy(self.dense[name][row : row + 1].copy())[0]
                found[name] = copy.view(column.dtype) if column.dtype in _UNKNOWN else copy
        return found


# Dtypes that NumPy does not know, and integers of their size.
_UNKNOWN = {torch.bfloat16: torch.int16}


def _array(tensor: Tensor) -> Any:
    return tensor.view(_UNKNOWN.get(tensor.dtype, tensor.dtype)).numpy()


def _pad(values: Sequence[Any], column: Column) -> tuple[Tensor, Tensor]:
    """Arrays of tokens as one tensor, (batch, longest, ...), and its mask."""
    longest = max((len(value) for value in values), default=0)
    out = torch.zeros((len(values), longest, *column.shape), dtype=column.dtype)
    mask = torch.zeros((len(values), longest), dtype=torch.int64)
    rows, kept = _array(out), _array(mask)
    for place, value in enumerate(values):
        rows[place, : len(value)] = value
        kept[place, : len(value)] = 1
    return out, mask


# -- the index ---------------------------------------------------------------------------------


def _contents(
    directory: Path, index: Mapping[str, Any], *, partial: bool
) -> tuple[list[dict[str, Any]], Schema]:
    """The shards of a store and what is in them."""
    if not index["complete"] and not partial:
        raise FeatureStoreError(
            str(directory),
            "its extraction did not finish: call extract_features again with the same batches, "
            "which goes on from there, or open what is complete with partial=True",
        )
    if not index["complete"]:
        found = scan(directory, index["identity"])
        if not found.shards:
            raise FeatureStoreError(str(directory), "no shard of it is complete yet")
        return found.entries(), Schema.from_json(found.shards[0].schema)
    shards: list[dict[str, Any]] = index["shards"]
    damaged = find_damaged(directory, shards)
    if damaged:
        raise DamagedShardError(str(directory), damaged)
    try:
        return shards, Schema.from_json(index)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"its index describes no features ({type(error).__name__}: {error})"
        raise FeatureStoreError(str(directory), reason) from error


def _check_identity(
    stored: Mapping[str, str],
    extractor: FrozenFeatureExtractor,
    preprocessing: Any,
    directory: Path,
) -> None:
    here = identify(
        extractor,
        stored_dtype=stored.get("stored dtype", ""),
        preprocessing=preprocessing,
        columns=stored.get("columns", ""),
    )
    if preprocessing is None:
        here["preprocessing"] = stored.get("preprocessing", "")
    found = differences(dict(stored), here)
    if found:
        raise CacheMismatchError(str(directory), found)


def _checked(index: int, samples: int) -> int:
    position = index + samples if index < 0 else index
    if not 0 <= position < samples:
        raise IndexError(f"sample {index} of {plural(samples, 'sample')}")
    return position


def _all_checked(indices: Sequence[int], samples: int) -> Sequence[int]:
    if not indices or (min(indices) >= 0 and max(indices) < samples):
        return indices
    return [_checked(index, samples) for index in indices]


def _as_list(index: slice | Sequence[int] | Tensor, samples: int) -> list[int]:
    if isinstance(index, slice):
        return list(range(*index.indices(samples)))
    if isinstance(index, Tensor):
        if index.dtype == torch.bool:
            index = index.nonzero().flatten()
        return [int(i) for i in index.tolist()]
    return [int(i) for i in index]
