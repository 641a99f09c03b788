"""extract_features: every batch through the backbone once, kept on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from freezekit._features.batches import Batch, read_batch, to_device
from freezekit._features.dataset import FeatureDataset
from freezekit._features.extractor import FrozenFeatureExtractor
from freezekit._features.guard import trainable_names, training_names
from freezekit._features.identity import identify
from freezekit._features.padding import check_padding, has_padding
from freezekit._features.preparing import (
    Plan,
    check_team,
    find_complete,
    finish,
    locked,
    make_directory,
    prepare,
)
from freezekit._features.progress import Progress, open_progress
from freezekit._features.rows import make_rows, name_features
from freezekit._features.shards import BatchRecord, identity_digest
from freezekit._features.sharing import Team, team
from freezekit._features.source import Source
from freezekit._features.writer import ShardWriter
from freezekit._format import shorten
from freezekit.errors import BatchError, TrainableBackboneError

__all__ = ["extract_features"]


def extract_features(  # noqa: PLR0913  (options, each with a default)
    extractor: FrozenFeatureExtractor,
    batches: Iterable[Any],
    directory: str | Path,
    *,
    keys: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    preprocessing: Any = None,
    resume: bool = True,
    verify: bool = False,
    check: bool = True,
    padding_tolerance: float | None = None,
    allow_nonfinite: bool = False,
    shard_bytes: int = 256 * 2**20,
    progress: bool = True,
) -> FeatureDataset:
    """Run every batch through the backbone once, and keep the features on disk.

    >>> import tempfile
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> data = TensorDataset(torch.randn(10, 4), torch.arange(10))
    >>> extractor = FrozenFeatureExtractor(nn.Linear(4, 3))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     dataset = extract_features(
    ...         extractor, DataLoader(data, 4), directory, keys=["labels"], progress=False
    ...     )
    ...     len(dataset), dataset[7]["labels"], dataset[7]["features"].shape
    (10, tensor(7), torch.Size([3]))

    A second call with the same extractor reads what is there. An extraction that was cut short,
    by whatever, goes on from its last complete shard. A directory that was made by other weights,
    another pooling, another torch, is refused, and what differs is said.

    With torch.distributed initialised (``torchrun``), every process passes all of the batches,
    extracts its share, and gets the whole dataset, in the order of the data.

    Features per token, (batch, length, width) with a mask in the batch, are stored without their
    padding. Batches have to come in the same order each time: the store keeps the order of the
    data, and compares a digest of the first batch with its own.

    Args:
        extractor: whose features. Batches are moved to its backbone's device.
        batches: an iterable of batches, such as a ``DataLoader`` without shuffling. A mapping's
            entries go to the backbone by name, a tuple's elements by position.
        directory: where the store is, or is to be; see the page on its format.
        keys: what goes along with the features and not to the backbone: names of a mapping's
            entries, or of a tuple's last elements. By default a mapping's ``labels``, and what the
            backbone's forward does not take.
        dtype: what floating point features are stored as; by default as they come. Values that
            float16 cannot hold are an error.
        preprocessing: anything (of JSON) that tells how the data was made: the tokenizer and its
            length, the crop, a revision. It is part of the store's identity.
        resume: go on with, or read, what is in the directory; else it has to be empty.
        verify: first compare every shard with its checksums, and make damaged ones again.
        check: that two passes over the first batch are alike to the bit.
        padding_tolerance: how much, relative to the largest feature, a sample's features may
            change with the padding beside it; by default what rounding explains.
        allow_nonfinite: store NaN and infinite features as they are.
        shard_bytes: bytes of a shard, about; so much is kept in memory, and lost at a crash.
        progress: show progress on standard error.

    Returns:
        The features, as a map-style dataset.

    Raises:
        CacheMismatchError: the directory holds features of something else.
        TrainableBackboneError: the backbone has trainable parameters, or modules in train mode.
        UnrepeatableFeaturesError: two passes differ; the modules are named.
        PaddingError: features change with the padding: a mask is missing, or is not used.
        NonFiniteFeatureError: a feature is NaN or infinite, or overflows; the sample is named.
        BatchError: a batch is no batch, or of another structure than those before.
        FeatureStoreError: the directory holds something else; ``StoreBusyError``: another process
            writes to it; ``StoreWriteError``: it cannot be written to.
    """
    if not isinstance(extractor, FrozenFeatureExtractor):
        raise TypeError(
            f"extractor: expected a FrozenFeatureExtractor, got {type(extractor).__name__}; "
            "wrap the backbone: FrozenFeatureExtractor(backbone)"
        )
    _refuse_unfrozen(extractor.backbone)
    _check_options(dtype, shard_bytes)
    names = [keys] if isinstance(keys, str) else keys
    source, path = Source(batches), Path(directory)
    identity = identify(
        extractor,
        stored_dtype="as computed" if dtype is None else str(dtype).removeprefix("torch."),
        preprocessing=preprocessing,
        columns="by default" if names is None else ", ".join(names),
    )
    with team() as processes:
        check_team(processes, identity, str(directory))
        job = _Job(
            extractor,
            source,
            names,
            dtype,
            check,
            padding_tolerance,
            allow_nonfinite,
            processes,
            verify,
        )
        complete = processes.first(
            lambda: find_complete(path, identity, resume=resume, verify=verify)
        )
        if complete is not None:
            job.compare_first(complete)
        else:
            with _locked_by_all(path, processes):
                plan = processes.first(
                    lambda: prepare(path, identity, resume=resume, verify=verify)
                )
                total = job.run(path, identity, plan, shard_bytes, shown=progress)
                processes.first(lambda: finish(path, identity, total))
    return FeatureDataset(path)


class _Job(NamedTuple):
    """What does not change from batch to batch."""

    extractor: FrozenFeatureExtractor
    source: Source
    keys: Sequence[str] | None
    dtype: torch.dtype | None
    check: bool
    padding_tolerance: float | None
    allow_nonfinite: bool
    processes: Team
    verify: bool

    def run(
        self, path: Path, identity: dict[str, str], plan: Plan, shard_bytes: int, *, shown: bool
    ) -> int:
        """Extract this process's share of what is missing; how many batches there are in all."""
        processes = self.processes
        total, error = 0, None
        try:
            self._compare_ranks()
            left = None if self.source.length is None else self._count_left(plan)
            with (
                open_progress(left, shown=shown and processes.rank == 0) as progress,
                ShardWriter(
                    path,
                    identity=identity_digest(identity),
                    schema=plan.schema,
                    shard_bytes=shard_bytes,
                    rank=processes.rank,
                    world=processes.world,
                ) as writer,
            ):
                total = self._extract(plan, writer, progress)
            _refuse_empty(total)
        except Exception as raised:  # noqa: BLE001  (every process hears of it, then it is raised)
            error = raised
        processes.agree(error)
        if len(set(processes.gather(total))) > 1:
            raise RuntimeError("the processes were given different numbers of batches")
        return total

    def compare_first(self, complete: Plan) -> None:
        """Refuse to read a store for other data than it was made of.

        Raises:
            BatchError: the first batch is another one, or the number of batches is.
        """
        if self.source.length not in (None, complete.batches):
            raise BatchError(
                self.source.length or 0,
                f"there are {self.source.length:,} batches, but the store holds "
                f"{complete.batches:,}: it was made of other data, or other batches of it",
            )
        first = self.source.first()
        _refuse_empty(0 if first is None else 1)
        self._compare(self._read(first, 0), complete)

    def _extract(self, plan: Plan, writer: ShardWriter, progress: Progress) -> int:
        total = first_sample = 0
        unchecked, unpadded = self.check, True
        for index, raw, known in self.source.take(
            lambda i: self.processes.owns(i) and i not in plan.done, all_of_them=self.verify
        ):
            total = index + 1
            batch = None if raw is None else self._read(raw, index)
            if batch is not None and self.processes.owns(index):
                if index in plan.done:
                    self._compare(batch, plan)
                else:
                    args, kwargs = to_device(batch, _device(self.extractor.backbone))
                    if unchecked:
                        self._check(batch, args, kwargs)
                        unchecked = False
                    output = self._features(batch, args, kwargs)
                    if unpadded and has_padding(self.extractor, args, kwargs):
                        check_padding(
                            self.extractor,
                            batch,
                            args,
                            kwargs,
                            output,
                            tolerance=self.padding_tolerance,
                            first_sample=first_sample,
                        )
                        unpadded = False
                    rows = make_rows(
                        name_features(output, index),
                        batch.columns,
                        mask=self.extractor.token_mask(args, kwargs),
                        size=batch.size,
                        index=index,
                        dtype=self.dtype,
                        first_sample=first_sample,
                        allow_nonfinite=self.allow_nonfinite,
                    )
                    writer.add(BatchRecord(index, batch.size, batch.digest()), rows)
                    progress.advance(batch.size)
            first_sample += batch.size if batch is not None else (known or 0)
        return total

    def _read(self, raw: Any, index: int) -> Batch:
        return read_batch(raw, index, self.extractor.backbone, self.keys)

    def _features(self, batch: Batch, args: Any, kwargs: Any) -> Any:
        try:
            return self.extractor(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            error.add_note(
                f"while batch {batch.number} ({batch.size} samples) ran through the backbone, "
                f"which was given {shorten([*map(_shape, args), *_named_shapes(kwargs)], most=6)}"
            )
            raise

    def _check(self, batch: Batch, args: Any, kwargs: Any) -> None:
        self._features(batch, args, kwargs)  # its own errors, before those of the check
        self.extractor.check(kwargs or args)

    def _compare(self, batch: Batch, plan: Plan) -> None:
        stored = plan.done.get(batch.number)
        if stored is not None and stored.inputs != batch.digest():
            raise BatchError(
                batch.number,
                "it is not the batch that the store has in this place: the data is another one, or "
                "comes in another order or in batches of another size. Use another directory",
            )

    def _compare_ranks(self) -> None:
        """Refuse processes that were given different data."""
        if self.processes.world == 1:
            return
        first = self.source.first()
        digest = None if first is None else self._read(first, 0).digest()
        if len(set(self.processes.gather(digest))) > 1:
            raise BatchError(
                0,
                "it is another one in each process: pass the whole data, in the same order, in "
                "every process; extract_features shares it out",
            )

    def _count_left(self, plan: Plan) -> int:
        length = self.source.length or 0
        return sum(self.processes.owns(i) and i not in plan.done for i in range(length))


# -- helpers -----------------------------------------------------------------------------------


@contextmanager
def _locked_by_all(path: Path, processes: Team) -> Iterator[None]:
    """Every process holds its lock, or none goes on."""
    processes.first(lambda: make_directory(path))
    with locked(path, processes):
        yield


def _refuse_unfrozen(backbone: nn.Module) -> None:
    parameters, modules = trainable_names(backbone), training_names(backbone)
    if parameters or modules:
        raise TrainableBackboneError(parameters, modules)


def _refuse_empty(batches: int) -> None:
    if not batches:
        raise BatchError(0, "there is none: the iterable of batches is empty")


def _check_options(dtype: object, shard_bytes: object) -> None:
    allowed = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    if dtype is not None and dtype not in allowed:
        raise ValueError(
            "dtype: expected torch.float32, torch.float16, torch.bfloat16 or torch.float64, got "
            f"{dtype!r}"
        )
    if not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise ValueError(f"shard_bytes: expected a positive integer, got {shard_bytes!r}")


def _device(backbone: nn.Module) -> torch.device | None:
    for tensor in (*backbone.parameters(), *backbone.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return None


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def _named_shapes(kwargs: dict[str, Any]) -> list[str]:
    return [f"{name}={_shape(value)}" for name, value in kwargs.items()]
