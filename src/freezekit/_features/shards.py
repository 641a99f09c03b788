"""The files of a feature store: shards and the index. ``feature-store-format.md`` describes them.

Every file is written beside, synced and renamed, so that under its name it is there whole or not
at all. No pickle anywhere: safetensors and JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from freezekit._features.hashing import tensor_bytes
from freezekit.errors import DamagedShardError, FeatureStoreError

__all__ = [
    "FORMAT",
    "INDEX",
    "BatchRecord",
    "Shard",
    "check_shard",
    "digests",
    "identity_digest",
    "is_temporary",
    "read_index",
    "read_shard",
    "shard_name",
    "shard_paths",
    "write_index",
    "write_shard",
]

FORMAT = "freezekit.features/1"
INDEX = "index.json"
_SHARD = re.compile(r"shard-\d{8,}-\d{8,}-r\d+of\d+\.safetensors")
_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


class BatchRecord(NamedTuple):
    """One batch of the data: its place, its samples, and a digest of what went in."""

    number: int
    rows: int
    inputs: str


class Shard(NamedTuple):
    """What there is to say of one shard without reading its tensors."""

    file: str
    nbytes: int
    batches: tuple[BatchRecord, ...]
    sha256: dict[str, str]
    header_sha256: str
    schema: dict[str, Any]
    identity: str


def shard_name(first: int, last: int, rank: int, world: int) -> str:
    """The name of the shard with the batches ``first`` to ``last`` of one of ``world`` writers."""
    return f"shard-{first:08d}-{last:08d}-r{rank}of{world}.safetensors"


def shard_paths(directory: Path) -> list[Path]:
    """All shards under their final names, in order."""
    return sorted(path for path in directory.iterdir() if _SHARD.fullmatch(path.name))


def is_temporary(name: str) -> bool:
    """Whether a file is one that a writer did not finish."""
    return _TEMPORARY.fullmatch(name) is not None


def identity_digest(identity: Mapping[str, str]) -> str:
    """One line for a whole identity, for each shard to carry."""
    return hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()


# -- shards ------------------------------------------------------------------------------------


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """SHA-256 of each tensor's bytes, in hexadecimal."""
    return {
        name: hashlib.sha256(tensor_bytes(tensor)).hexdigest() for name, tensor in tensors.items()
    }


def write_shard(
    path: Path,
    tensors: dict[str, Tensor],
    batches: Iterable[BatchRecord],
    identity: str,
    schema: Mapping[str, Any],
    sha256: Mapping[str, str],
) -> None:
    """Write one shard, so that it is there whole or not at all.

    Raises:
        OSError: it could not be written, such as for want of space.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    metadata = {
        "format": FORMAT,
        "identity": identity,
        "schema": json.dumps(dict(schema), separators=(",", ":")),
        "batches": json.dumps([list(record) for record in batches], separators=(",", ":")),
        "sha256": json.dumps(dict(sha256), separators=(",", ":")),
    }
    beside = _beside(path)
    try:
        try:
            save_file(tensors, str(beside), metadata)
        except SafetensorError as error:
            raise OSError(f"cannot write {path.name}: {error}") from error
        _commit(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read_shard(path: Path) -> Shard:
    """What a shard says of itself; its tensors are not read.

    Raises:
        ValueError: it is cut short, or no shard; the reason is its text.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            names = set(file.keys())
        header = hashlib.sha256(_header_bytes(path)).hexdigest()
    except (SafetensorError, OSError) as error:
        raise ValueError(_why_unreadable(path, error)) from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"its format is {metadata.get('format')!r}, expected {FORMAT!r}")
    try:
        batches = tuple(_batch_record(r) for r in json.loads(metadata["batches"]))
        sha256 = dict(json.loads(metadata["sha256"]))
        schema = dict(json.loads(metadata["schema"]))
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError("its metadata is not what a shard has") from error
    if set(sha256) != names:
        raise ValueError("its tensors are not those that its metadata names")
    size, identity = path.stat().st_size, metadata.get("identity", "")
    return Shard(path.name, size, batches, sha256, header, schema, identity)


def _batch_record(record: Any) -> BatchRecord:
    index, rows, inputs = record
    if not (isinstance(index, int) and isinstance(rows, int) and isinstance(inputs, str)):
        raise TypeError("a batch is [index, rows, digest]")
    if index < 0 or rows < 1:
        raise ValueError("a batch has an index and at least one sample")
    return BatchRecord(index, rows, inputs)


def check_shard(path: Path, sha256: Mapping[str, str], header_sha256: str = "") -> str:
    """Read a whole shard and compare it with its checksums: what is wrong, or ``""``."""
    from safetensors import safe_open

    try:
        shard = read_shard(path)
        if header_sha256 and shard.header_sha256 != header_sha256:
            return "its header is not the one that was written"
        with safe_open(str(path), framework="pt") as file:
            for name, expected in sha256.items():
                found = hashlib.sha256(tensor_bytes(file.get_tensor(name))).hexdigest()
                if found != expected:
                    return f"the checksum of {name!r} differs"
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def _header_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise OSError("its header is longer than the file")
        return file.read(length)


def _why_unreadable(path: Path, error: Exception) -> str:
    if not path.exists():
        return "the file is missing"
    size = path.stat().st_size
    return f"cut short or overwritten ({size:,} bytes: {error})"


# -- the index ---------------------------------------------------------------------------------


def write_index(directory: Path, index: Mapping[str, Any]) -> None:
    """Write the index, whole or not at all."""
    path = directory / INDEX
    beside = _beside(path)
    try:
        beside.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        _commit(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read_index(directory: Path) -> dict[str, Any] | None:
    """The index, or ``None`` where there is none.

    Raises:
        FeatureStoreError: it is no index of a store, or one of another format.
        DamagedShardError: a shard's name in it is not one.
    """
    path = directory / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FeatureStoreError(str(directory), f"its {INDEX} cannot be read ({error})") from error
    found = index.get("format") if isinstance(index, dict) else None
    if found != FORMAT:
        raise FeatureStoreError(
            str(directory), f"its {INDEX} is of the format {found!r}, expected {FORMAT!r}"
        )
    missing = {"identity", "features", "columns", "shards", "complete"} - index.keys()
    if missing:
        raise FeatureStoreError(str(directory), f"its {INDEX} lacks {', '.join(sorted(missing))}")
    for shard in index["shards"]:
        # A name from a file becomes a path: it may not lead anywhere else.
        if not _SHARD.fullmatch(str(shard.get("file"))):
            name = str(shard.get("file"))
            raise DamagedShardError(str(directory), [(name, "not a shard's name")])
    return dict(index)


# -- writing beside, and renaming --------------------------------------------------------------


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _commit(beside: Path, path: Path) -> None:
    """Sync what was written and give it its name; after a power cut it is there, or not."""
    with beside.open("rb+") as file:
        os.fsync(file.fileno())
    beside.replace(path)
    # The name itself is the directory's content. Not every system lets a directory be opened.
    with suppress(OSError):
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
