"""Rows to shards, while the backbone goes on: checksums and files are made in threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from freezekit._features.rows import Rows, Schema
from freezekit._features.shards import BatchRecord, digests, shard_name, write_shard
from freezekit.errors import BatchError, StoreWriteError

__all__ = ["ShardWriter"]

# Shards that wait to be written while the next one is filled; each takes its size in memory.
_MOST_WAITING = 2


class ShardWriter:
    """Collects batches and writes a shard whenever there is enough for one.

    On leaving the block, also by an exception, what was added is written: only the batch that
    failed is lost.
    """

    def __init__(
        self,
        directory: Path,
        *,
        identity: str,
        schema: Schema | None,
        shard_bytes: int,
        rank: int,
        world: int,
    ) -> None:
        self.schema = schema
        self._directory = directory
        self._identity = identity
        self._shard_bytes = shard_bytes
        self._rank, self._world = rank, world
        self._batches: list[BatchRecord] = []
        self._rows: list[Rows] = []
        self._bytes = 0
        # One thread each: the checksum of a shard is made while the one before is written.
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="freezekit-checksum")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="freezekit-write")
        self._waiting: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if not isinstance(error, StoreWriteError):
                self.flush()
            self._wait(0)
        except StoreWriteError:
            if error is None:
                raise
        finally:
            self._hashing.shutdown(cancel_futures=True)
            self._writing.shutdown(cancel_futures=True)

    def add(self, record: BatchRecord, rows: Rows) -> None:
        """Take a batch in.

        Raises:
            BatchError: it has another structure than the batches before it.
            StoreWriteError: an earlier shard could not be written.
        """
        if self.schema is None:
            self.schema = rows.schema
        elif rows.schema != self.schema:
            raise BatchError(record.number, _difference(self.schema, rows.schema))
        self._batches.append(record)
        self._rows.append(rows)
        self._bytes += sum(tensor.nbytes for tensor in rows.tensors.values())
        if self._bytes >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Hand what there is to the writing thread, as one shard."""
        if not self._rows:
            return
        assert self.schema is not None
        self._wait(_MOST_WAITING - 1)
        tensors = _join(self._rows)
        batches, self._batches, self._rows, self._bytes = self._batches, [], [], 0
        name = shard_name(batches[0].number, batches[-1].number, self._rank, self._world)
        sums = self._hashing.submit(digests, tensors)
        schema = self.schema.to_json()
        self._waiting.append(
            self._writing.submit(self._write, name, tensors, batches, schema, sums)
        )

    def _write(
        self,
        name: str,
        tensors: dict[str, Tensor],
        batches: list[BatchRecord],
        schema: dict[str, object],
        sums: Future[dict[str, str]],
    ) -> None:
        path = self._directory / name
        try:
            write_shard(path, tensors, batches, self._identity, schema, sums.result())
        except OSError as error:
            raise StoreWriteError(
                str(self._directory),
                f"{error}. The shards before it are complete and kept; the same call goes on from "
                "there",
            ) from error

    def _wait(self, most: int) -> None:
        while len(self._waiting) > most:
            self._waiting.pop(0).result()


def _join(rows: Sequence[Rows]) -> dict[str, Tensor]:
    """The tensors of a shard: batches one after the other, and where each sample's tokens begin."""
    tensors = {
        name: torch.cat([batch.tensors[name] for batch in rows]).contiguous()
        for name in rows[0].tensors
    }
    if rows[0].lengths is not None:
        lengths = torch.cat([batch.lengths for batch in rows if batch.lengths is not None])
        tensors["offsets"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return tensors


def _difference(before: Schema, now: Schema) -> str:
    olds = {**before.features, **before.columns}
    news = {**now.features, **now.columns}
    for name in {**olds, **news}:
        old, new = olds.get(name), news.get(name)
        if old != new:
            was = "absent" if old is None else old.text()
            text = "absent" if new is None else new.text()
            hint = (
                "; features of several lengths need an attention_mask in the batch, or a pool"
                if old is not None and new is not None and len(old.shape) == len(new.shape) > 1
                else ""
            )
            return f"{name!r} is {text}, in the batches before it was {was}{hint}"
    return "it has another structure than the batches before it"
