"""Before and after an extraction: what the directory holds, what is missing, and the index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from freezekit._features.identity import differences
from freezekit._features.indexing import Scan, find_damaged, make_index, scan
from freezekit._features.places import Places
from freezekit._features.rows import Schema
from freezekit._features.shards import (
    INDEX,
    BatchRecord,
    check_shard,
    is_temporary,
    read_index,
    read_shard,
    shard_paths,
    write_index,
)
from freezekit._features.sharing import Team
from freezekit._format import plural, shorten
from freezekit.errors import (
    BatchError,
    CacheMismatchError,
    FeatureStoreError,
    StoreBusyError,
    StoreWriteError,
)

__all__ = ["Plan", "check_team", "find_complete", "finish", "locked", "make_directory", "prepare"]

_LOCK = ".lock-r"


class Plan(NamedTuple):
    """What is done already: batches by index, how many there are in all, and their structure."""

    done: dict[int, BatchRecord]
    schema: Schema | None
    batches: int


def check_team(processes: Team, identity: dict[str, str], directory: str) -> None:
    """Refuse processes that would not give the same features.

    Raises:
        CacheMismatchError: this process differs from rank 0.
    """
    first = processes.gather(identity)[0]
    found = differences(first, identity)
    error = CacheMismatchError(f"{directory} (rank 0)", found) if found else None
    processes.agree(error)


def find_complete(
    path: Path, identity: dict[str, str], *, resume: bool, verify: bool
) -> Plan | None:
    """What a complete store holds; ``None`` if there is something to do. Writes nothing.

    Raises:
        FeatureStoreError: the directory holds something else, or is to be empty and is not.
        CacheMismatchError: it holds features of something else.
    """
    if not path.exists():
        return None
    if not path.is_dir():
        raise FeatureStoreError(str(path), "it is a file, not a directory")
    index = read_index(path)
    if index is None:
        _refuse_strangers(path, identity)
        return None
    if not resume:
        raise FeatureStoreError(
            str(path), "there is a store already, and resume=False; delete it or choose another"
        )
    found = differences(index["identity"], identity)
    if found:
        raise CacheMismatchError(str(path), found)
    if verify or not index["complete"] or find_damaged(path, index["shards"]):
        return None
    return _first_batch(path, index)


def _first_batch(path: Path, index: dict[str, Any]) -> Plan:
    batches = int(index["batches"])
    for shard in index["shards"]:
        if any(run[0] == 0 for run in shard["batches"]):
            found = read_shard(path / str(shard["file"]))
            done = {record.number: record for record in found.batches if record.number == 0}
            return Plan(done, Schema.from_json(found.schema), batches)
    return Plan({}, None, batches)


def prepare(path: Path, identity: dict[str, str], *, resume: bool, verify: bool) -> Plan:
    """Clear away what was left unfinished or is damaged, and say what is done.

    Raises:
        FeatureStoreError, CacheMismatchError: as :func:`find_complete`, which another process may
            have made out of date.
        StoreWriteError: the directory cannot be written to.
    """
    find_complete(path, identity, resume=resume, verify=True)
    try:
        for entry in path.iterdir():
            if is_temporary(entry.name):
                entry.unlink(missing_ok=True)
        found = scan(path, identity)
        if found.strange:
            raise FeatureStoreError(
                str(path), f"it holds shards of other features: {shorten(found.strange)}"
            )
        for name, _ in found.damaged:
            (path / name).unlink(missing_ok=True)
        if verify:
            found = _drop_altered(path, identity, found)
        if not _covers(read_index(path), found):
            write_index(path, make_index(identity))
    except OSError as error:
        raise StoreWriteError(str(path), f"it cannot be written to ({error})") from error
    schema = Schema.from_json(found.shards[0].schema) if found.shards else None
    return Plan(found.done, schema, 0)


def _covers(index: dict[str, Any] | None, found: Scan) -> bool:
    """Whether a complete index still tells the truth."""
    return bool(
        index
        and index["complete"]
        and found.entries() == index["shards"]
        and found.done.keys() == set(range(index["batches"]))
    )


def _drop_altered(path: Path, identity: dict[str, str], found: Scan) -> Scan:
    """Delete shards that differ from their checksums."""
    index = read_index(path) or {"shards": []}
    headers = {shard["file"]: shard["header_sha256"] for shard in index["shards"]}
    for shard in found.shards:
        if check_shard(path / shard.file, shard.sha256, headers.get(shard.file, "")):
            (path / shard.file).unlink(missing_ok=True)
    return scan(path, identity)


def finish(path: Path, identity: dict[str, str], batches: int) -> None:
    """Write the index of a complete store.

    Raises:
        BatchError: the store has batches that the data has not.
        FeatureStoreError: batches are missing: something deleted shards meanwhile.
    """
    found = scan(path, identity)
    beyond = sorted(index for index in found.done if index >= batches)
    if beyond:
        more = plural(len(beyond), "more batch", "more batches")
        raise BatchError(
            batches,
            f"the data ends here, but the store has {more}: it was made of other data. Use another "
            "directory",
        )
    missing = [index for index in range(batches) if index not in found.done]
    if missing:
        raise FeatureStoreError(
            str(path), f"{plural(len(missing), 'batch', 'batches')} missing, from {missing[0]} on"
        )
    entries = found.entries()
    assert Places([entry["batches"] for entry in entries]).batches == batches
    try:
        write_index(path, make_index(identity, found.shards[0].schema, entries, batches))
    except OSError as error:
        raise StoreWriteError(str(path), f"its index cannot be written ({error})") from error


def _refuse_strangers(path: Path, identity: dict[str, str]) -> None:
    """A directory without an index is empty, or was left by a writer that was killed early."""
    own = {INDEX, *(entry.name for entry in shard_paths(path))}
    strange = sorted(
        entry.name
        for entry in path.iterdir()
        if entry.name not in own
        and not is_temporary(entry.name)
        and not entry.name.startswith(_LOCK)
    )
    strange += scan(path, identity).strange
    if strange:
        raise FeatureStoreError(
            str(path),
            f"it holds something else ({shorten(strange)}) and no {INDEX}; choose an empty or a "
            "new directory",
        )


def make_directory(path: Path) -> None:
    """Make the directory, and those above it, unless it is there.

    Raises:
        StoreWriteError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreWriteError(str(path), f"it cannot be written to ({error})") from error


@contextmanager
def locked(path: Path, processes: Team) -> Iterator[None]:
    """Keep other jobs from writing to the store for the length of the block.

    Raises:
        StoreBusyError: another process writes to it.
        StoreWriteError: no lock can be made there.
    """
    from filelock import FileLock, Timeout

    with ExitStack() as stack:
        error: Exception | None = None
        try:
            stack.enter_context(FileLock(path / f"{_LOCK}{processes.rank}", timeout=0))
        except Timeout:
            error = StoreBusyError(
                str(path),
                "another process writes to it; wait until it is done, then the same call reads "
                "what it wrote",
            )
        except OSError as raised:
            error = StoreWriteError(str(path), f"it cannot be written to ({raised})")
        processes.agree(error)
        yield
