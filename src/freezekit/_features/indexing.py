"""What a directory holds: the shards that are whole, the batches in them, and the index of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from freezekit._features.places import make_runs
from freezekit._features.shards import (
    FORMAT,
    BatchRecord,
    Shard,
    identity_digest,
    read_shard,
    shard_paths,
)

__all__ = ["Scan", "find_damaged", "make_index", "scan"]


class Scan(NamedTuple):
    """Shards that are whole and belong to one identity, and those that are not."""

    shards: list[Shard]
    damaged: list[tuple[str, str]]
    strange: list[str]
    done: dict[int, BatchRecord]

    def entries(self) -> list[dict[str, Any]]:
        """The shards as an index has them; a batch that is there twice is taken once."""
        claimed: set[int] = set()
        found = []
        for shard in self.shards:
            row, places = 0, []
            for record in shard.batches:
                if record.number not in claimed:
                    claimed.add(record.number)
                    places.append((record.number, row, record.rows))
                row += record.rows
            found.append(
                {
                    "file": shard.file,
                    "bytes": shard.nbytes,
                    "samples": sum(rows for _, _, rows in places),
                    "batches": [list(run) for run in make_runs(places)],
                    "sha256": shard.sha256,
                    "header_sha256": shard.header_sha256,
                }
            )
        return [entry for entry in found if entry["batches"]]


def scan(directory: Path, identity: Mapping[str, str]) -> Scan:
    """Read the header of every shard; what cannot be read is damaged, what is another's strange."""
    expected = identity_digest(identity)
    found = Scan([], [], [], {})
    for path in shard_paths(directory):
        try:
            shard = read_shard(path)
        except ValueError as error:
            found.damaged.append((path.name, str(error)))
            continue
        if shard.identity != expected:
            found.strange.append(path.name)
            continue
        found.shards.append(shard)
        for record in shard.batches:
            found.done.setdefault(record.number, record)
    return found


def find_damaged(directory: Path, shards: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Shards of an index that are missing or of another size, which costs no reading."""
    damaged = []
    for shard in shards:
        path = directory / shard["file"]
        if not path.exists():
            damaged.append((str(shard["file"]), "the file is missing"))
            continue
        size = path.stat().st_size
        if size != shard["bytes"]:
            damaged.append((str(shard["file"]), f"it has {size:,} of {shard['bytes']:,} bytes"))
    return damaged


def make_index(
    identity: Mapping[str, str],
    schema: Mapping[str, Any] | None = None,
    shards: Sequence[Mapping[str, Any]] = (),
    batches: int | None = None,
) -> dict[str, Any]:
    """An index; without ``batches`` that of an extraction that is under way."""
    return {
        "format": FORMAT,
        "complete": batches is not None,
        "samples": sum(shard["samples"] for shard in shards),
        "batches": batches or 0,
        "features": {},
        "columns": {},
        **(schema or {}),
        "identity": dict(identity),
        "shards": list(shards),
    }
