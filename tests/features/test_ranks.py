"""Several processes, one dataset: in the order of the data and without duplicates."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from features.store_support import Counting, assert_holds, make_batches, shards_of
from features.store_workers import SIZES, work
from freezekit import FeatureDataset, FrozenFeatureExtractor, extract_features

NOBODY = -1


def run(world: int, store: Path, *, dies: int = NOBODY, loader: bool = False) -> list[int]:
    """Extract with so many processes; how many samples each ran through its backbone."""
    spawn(  # type: ignore[no-untyped-call]
        work, (world, str(store), dies, loader), nprocs=world
    )
    notes = [(store.parent / f"rank{rank}.txt").read_text().split() for rank in range(world)]
    assert {int(length) for _, length in notes} == {sum(SIZES)}
    return [int(seen) for seen, _ in notes]


def test_ranks_share_the_batches(tmp_path: Path) -> None:
    """Uneven data: every batch is run once, by its rank, and all ranks get the whole."""
    world, store = 3, tmp_path / "store"
    seen = run(world, store)
    assert seen == [sum(SIZES[rank::world]) for rank in range(world)]
    assert_holds(FeatureDataset(store), make_batches(SIZES))
    writers = {path.stem.rpartition("-")[2] for path in shards_of(store)}
    assert writers == {f"r{rank}of{world}" for rank in range(world)}


def test_a_rank_that_is_killed_and_started_again(tmp_path: Path) -> None:
    """What was complete is kept, by another number of processes too; the rest is made once."""
    store = tmp_path / "store"
    with pytest.raises(ProcessExitedException, match="terminated"):
        run(3, store, dies=1)
    kept = len(shards_of(store))
    assert kept > 0
    seen = run(2, store)
    part = sum(SIZES) - sum(seen)
    assert part > 0
    assert_holds(FeatureDataset(store), make_batches(SIZES))


def test_ranks_with_a_loader(tmp_path: Path) -> None:
    """A map-style loader loads each rank's own batches."""
    store = tmp_path / "store"
    seen = run(2, store, loader=True)
    assert sum(seen) == sum(SIZES)
    assert abs(seen[0] - seen[1]) <= 4
    assert_holds(FeatureDataset(store), make_batches(SIZES), exact=False)


TORCHRUN = """
import os, sys
import torch.distributed as dist
from features.store_workers import share
tries = os.environ["TORCHELASTIC_RESTART_COUNT"]
# Each try meets in a file of its own: gloo would take the address of a process that has ended.
dist.init_process_group(
    "gloo",
    init_method=f"file://{sys.argv[1]}.meeting{tries}",
    rank=int(os.environ["RANK"]),
    world_size=int(os.environ["WORLD_SIZE"]),
)
share(sys.argv[1], 1 if tries == "0" else -1, loader=False)
dist.destroy_process_group()
"""


def test_under_torchrun(tmp_path: Path) -> None:
    """A rank is killed, torchrun starts all anew, and the dataset is whole."""
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

    command += ["--nproc-per-node=2", "--max-restarts=1", str(script), str(tmp_path / "store")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert_holds(FeatureDataset(tmp_path / "store"), make_batches(SIZES))
    seen = [int((tmp_path / f"rank{r}.txt").read_text().split()[0]) for r in (0, 1)]
    assert 0 < sum(seen) < sum(SIZES)


def test_processes_that_do_not_know_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun without init_process_group would have every process extract all of it."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"one of 4 processes.*init_process_group"):
        extract_features(
            FrozenFeatureExtractor(Counting()), make_batches(), tmp_path, keys="labels"
        )


def test_a_group_of_one(tmp_path: Path) -> None:
    """A process group of one process is one process."""
    store = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        dataset = extract_features(
            FrozenFeatureExtractor(Counting()),
            make_batches(),
            tmp_path / "store",
            keys="labels",
            progress=False,
        )
        assert_holds(dataset, make_batches())
    finally:
        dist.destroy_process_group()
