"""Batches in order, each with its index; those that are not wanted are not loaded if possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

__all__ = ["Source"]


class Source:
    """The user's batches.

    Attributes:
        length: how many there are, if that is known.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        _check(batches)
        self._batches = batches
        self._chunks = _chunks(batches)
        self.length = len(self._chunks) if self._chunks is not None else _length(batches)

    def first(self) -> Any:
        """The first batch, which ``take`` gives again; ``None`` if there is none."""
        if self._chunks is not None:
            return next(iter(self._loader(self._chunks[:1])), None)
        iterator = iter(self._batches)
        batch = next(iterator, None)
        if iterator is self._batches:  # it is used up by looking: put back what was taken
            self._batches = iterator if batch is None else chain([batch], iterator)
        return batch

    def take(
        self, wanted: Callable[[int], bool], *, all_of_them: bool = False
    ) -> Iterator[tuple[int, Any, int | None]]:
        """Index, batch and size of each batch; ``None`` for a batch that need not be loaded.

        What is wanted is loaded, and the rest where it cannot be passed over, or ``all_of_them``
        are asked for. The size is known of batches that are not loaded.
        """
        chunks = self._chunks
        if chunks is None or all_of_them or all(map(wanted, range(len(chunks)))):
            for index, batch in enumerate(self._batches):
                yield index, batch, None
            return
        loaded = iter(self._loader([c for i, c in enumerate(chunks) if wanted(i)]))
        for index, chunk in enumerate(chunks):
            yield index, next(loaded) if wanted(index) else None, len(chunk)

    def _loader(self, chunks: list[list[Any]]) -> DataLoader[Any]:
        loader: Any = self._batches
        return DataLoader(
            loader.dataset,
            batch_sampler=chunks,
            num_workers=loader.num_workers if chunks else 0,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout if chunks else 0,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context if chunks else None,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor if chunks else None,
        )


def _check(batches: Any) -> None:
    if isinstance(batches, str | bytes) or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches: expected an iterable of batches, such as a DataLoader, got "
            f"{type(batches).__name__}"
        )
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, RandomSampler | WeightedRandomSampler):
        raise ValueError(  # noqa: TRY004  (an option of the loader is wrong, not its type)
            "batches: this DataLoader shuffles, and features are kept in the order of the data: "
            "use shuffle=False here, and shuffle when reading: dataset.loader(..., shuffle=True)"
        )
    if isinstance(sampler, DistributedSampler):
        raise ValueError(  # noqa: TRY004
            "batches: this DataLoader has a DistributedSampler, which repeats samples to even out "
            "the ranks; pass the whole data in every process, extract_features shares it out"
        )


def _chunks(batches: Any) -> list[list[Any]] | None:
    """The samples of each batch of a plain, map-style DataLoader."""
    plain = type(batches) is DataLoader and not isinstance(batches.dataset, IterableDataset)
    if not plain or batches.batch_sampler is None:
        return None
    return [list(chunk) for chunk in batches.batch_sampler]


def _length(batches: Any) -> int | None:
    try:
        return len(batches)
    except TypeError:
        return None
