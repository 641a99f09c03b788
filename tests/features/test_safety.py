"""Killed, cut short, overwritten, out of space, or written to twice: never a wrong feature."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from features.store_support import Counting, assert_holds, expected, make_batches, shards_of
from features.store_workers import SIZES
from freezekit import FeatureDataset, FrozenFeatureExtractor, extract_features
from freezekit.errors import (
    DamagedShardError,
    FeatureStoreError,
    StoreBusyError,
    StoreWriteError,
)

BATCHES = make_batches(SIZES)


def go_on(directory: Path, **options: Any) -> tuple[FeatureDataset, int]:
    """Extract what is missing; the dataset, and how many samples went through the backbone."""
    net = Counting()
    options.setdefault("shard_bytes", 1)
    dataset = extract_features(
        FrozenFeatureExtractor(net),
        BATCHES,
        directory,
        keys="labels",
        progress=False,
        check=False,
        **options,
    )
    return dataset, net.seen


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete store, to be copied and damaged."""
    directory = tmp_path_factory.mktemp("whole") / "store"
    go_on(directory)
    return directory


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / "store"))


def worker(*arguments: object) -> list[str]:
    """The command of a worker."""
    script = Path(__file__).with_name("store_workers.py")
    return [sys.executable, str(script), *map(str, arguments)]


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


# -- killed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "turn", "kept"),
    [
        ("middle", 1, 0),
        ("middle", 4, 3),
        ("before-rename", 3, 1),  # the first rename is the index's
        ("after-rename", 1, 0),
        ("after-rename", 5, 4),
        ("before-rename", 13, 11),  # the last one: the complete index
    ],
)
def test_killed_while_writing(point: str, turn: int, kept: int, tmp_path: Path) -> None:
    """SIGKILL in a shard, around a rename, at the index: at most the shard being written is lost.

    What is there is right, the store says that it is not finished, and the same call makes the
    rest and nothing else.
    """
    store = tmp_path / "store"
    done = subprocess.run(worker("die", store, point, turn), env=ENVIRONMENT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(shards_of(store)) == kept
    with pytest.raises(FeatureStoreError, match=r"did not finish|no index"):
        FeatureDataset(store)
    if kept:
        part = FeatureDataset(store, partial=True)
        assert torch.equal(part[:]["features"], expected(BATCHES)[: len(part)])
        assert len(part) == sum(SIZES[:kept])
    dataset, seen = go_on(store)
    assert seen == sum(SIZES[kept:])
    assert_holds(dataset, BATCHES)
    assert not [path for path in store.iterdir() if path.name.endswith(".tmp")]


def test_an_exception_keeps_what_came_before(tmp_path: Path) -> None:
    """Interrupted by Ctrl-C, batches that were waiting for their shard are written."""

    def batches() -> Any:
        yield from BATCHES[:5]
        raise KeyboardInterrupt("on purpose")

    with pytest.raises(KeyboardInterrupt, match="on purpose"):
        extract_features(
            FrozenFeatureExtractor(Counting()), batches(), tmp_path, keys="labels", progress=False
        )
    dataset, seen = go_on(tmp_path)
    assert seen == sum(SIZES[5:])
    assert_holds(dataset, BATCHES)


# -- damaged -----------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 7, 100, -1], ids=["empty", "length", "header", "last-byte"])
def test_a_shard_that_was_cut_short(left: int, store: Path) -> None:
    """A power cut can leave less than was written: found at opening, named, made again alone."""
    victim = shards_of(store)[3]
    size = victim.stat().st_size
    os.truncate(victim, left if left >= 0 else size + left)
    with pytest.raises(DamagedShardError, match=rf"{victim.name} - it has .* of {size:,} bytes"):
        FeatureDataset(store)
    dataset, seen = go_on(store)
    assert seen == SIZES[3]
    assert_holds(dataset, BATCHES)


def test_shards_of_an_unfinished_store_that_were_cut_short(store: Path) -> None:
    """Without the index, what is cut short is told by its own header."""
    (store / "index.json").unlink()
    for number, left in ((1, 0), (4, 50), (7, shards_of(store)[7].stat().st_size - 1)):
        os.truncate(shards_of(store)[number], left)
    dataset, seen = go_on(store)
    assert seen == SIZES[1] + SIZES[4] + SIZES[7]
    assert_holds(dataset, BATCHES)


def test_a_shard_that_is_gone(store: Path) -> None:
    """Missing files are named, and made again."""
    shards_of(store)[0].unlink()
    shards_of(store)[-1].unlink()
    with pytest.raises(DamagedShardError, match=r"2 shard\(s\) are damaged.*\n.*is missing"):
        FeatureDataset(store)
    dataset, seen = go_on(store)
    assert seen == SIZES[0] + SIZES[-1]
    assert_holds(dataset, BATCHES)


@pytest.mark.parametrize("where", ["features", "labels", "metadata", "digest"])
def test_a_byte_that_was_altered(where: str, store: Path) -> None:
    """verify() reads all of it, names the shard, and ``verify=True`` makes it again alone."""
    victim = shards_of(store)[2]
    raw = bytearray(victim.read_bytes())
    header = int.from_bytes(raw[:8], "little")
    at = {
        "features": len(raw) - 1 - 4 * 8,
        "labels": 8 + header + 1,
        "metadata": raw.index(b'"batches"') + 14,
        "digest": raw.index(b"sha256") + 30,
    }[where]
    raw[at] ^= 1
    victim.write_bytes(raw)
    ((name, why),) = FeatureDataset(store).verify()
    assert name == victim.name
    assert why
    dataset, seen = go_on(store, verify=True)
    assert seen == SIZES[2]
    assert_holds(dataset, BATCHES)


def test_verify_of_a_sound_store(store: Path) -> None:
    """Nothing is found, and verify=True runs nothing through the backbone."""
    assert FeatureDataset(store).verify() == ()
    dataset, seen = go_on(store, verify=True)
    assert seen == 0
    assert_holds(dataset, BATCHES)


def test_verify_compares_the_data_too(store: Path) -> None:
    """With verify=True every batch is compared with what the store was made of."""
    changed = [*BATCHES]
    changed[5] = (changed[5][0] + 1, changed[5][1])
    with pytest.raises(ValueError, match="batch 5: it is not the batch that the store has"):
        extract_features(
            FrozenFeatureExtractor(Counting()),
            changed,
            store,
            keys="labels",
            verify=True,
            progress=False,
        )


def test_data_that_ends_earlier(store: Path) -> None:
    """A store with more batches than the data is of other data."""
    shards_of(store)[1].unlink()
    with pytest.raises(ValueError, match="the data ends here, but the store has 3 more batches"):
        extract_features(
            FrozenFeatureExtractor(Counting()),
            BATCHES[:8],
            store,
            keys="labels",
            shard_bytes=1,
            progress=False,
        )


# -- no space ----------------------------------------------------------------------------------


def test_no_space(tmp_path: Path) -> None:
    """A write that fails is said with what to do; the shards before it are kept."""
    store = tmp_path / "store"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = [*BATCHES, (torch.zeros(4000, 4), torch.full((4000,), 38))]
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(StoreWriteError, match="are complete and kept; the same call") as caught:
            extract_features(
                FrozenFeatureExtractor(Counting()),
                big,
                store,
                keys="labels",
                shard_bytes=1,
                progress=False,
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert isinstance(caught.value, OSError)
    assert not [path for path in store.iterdir() if path.name.endswith(".tmp")]
    dataset, seen = go_on(store)
    assert seen == 0
    assert_holds(dataset, BATCHES)


# -- two writers -------------------------------------------------------------------------------


def test_two_processes_do_not_write_to_one_store(tmp_path: Path) -> None:
    """The second one is told, and touches nothing; once the first is gone, it goes on."""
    store = tmp_path / "store"
    first = subprocess.Popen(
        worker("wait", store),
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout is not None
    assert first.stdin is not None
    try:
        assert first.stdout.readline() == "waiting\n"
        with pytest.raises(StoreBusyError, match="another process writes to it"):
            go_on(store)
        first.stdin.close()
        assert first.wait(60) == 0
    finally:
        first.kill()
        first.stdout.close()
    dataset, seen = go_on(store)
    assert seen == 0
    assert_holds(dataset, BATCHES)


def test_a_writer_that_was_killed_leaves_no_lock(tmp_path: Path) -> None:
    """The lock is the process's: it goes with it."""
    store = tmp_path / "store"
    first = subprocess.Popen(
        worker("wait", store),
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout is not None
    assert first.stdin is not None
    assert first.stdout.readline() == "waiting\n"
    first.kill()
    first.wait(60)
    first.stdout.close()
    first.stdin.close()
    dataset, _ = go_on(store)
    assert_holds(dataset, BATCHES)


def test_two_threads_do_not_write_to_one_store(tmp_path: Path) -> None:
    """One of them makes it, the other is told; or comes late, and reads it."""
    outcomes: list[object] = []

    def run() -> None:
        try:
            outcomes.append(go_on(tmp_path / "store")[1])
        except StoreBusyError as error:
            outcomes.append(type(error))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(SIZES) in outcomes
    assert set(outcomes) <= {sum(SIZES), 0, StoreBusyError}
    assert outcomes.count(sum(SIZES)) == 1
    assert_holds(FeatureDataset(tmp_path / "store"), BATCHES)


def test_reading_while_it_is_written(tmp_path: Path) -> None:
    """A reader in the middle sees whole batches or nothing."""

    def batches() -> Any:
        for number, batch in enumerate(BATCHES):
            if number == 6:
                part = FeatureDataset(tmp_path, partial=True)
                seen.append(len(part))
                assert torch.equal(part[:]["features"], expected(BATCHES)[: len(part)])
            yield batch

    seen: list[int] = []
    extract_features(
        FrozenFeatureExtractor(Counting()),
        batches(),
        tmp_path,
        keys="labels",
        shard_bytes=1,
        progress=False,
    )
    assert seen[0] in {sum(SIZES[:n]) for n in range(3, 7)}
    assert_holds(FeatureDataset(tmp_path), BATCHES)
