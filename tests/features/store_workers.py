"""What processes of the tests run: extractions that are killed, and ranks of a group."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from features.store_support import Counting, make_batches
from freezekit import FrozenFeatureExtractor, extract_features

SIZES = (4, 4, 4, 4, 4, 3, 5, 5, 1, 2, 4)


def kill_self() -> None:
    """End this process at once, as the system does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str, turn: int) -> None:
    """Arrange for this process to be killed at a point of writing, the ``turn``-th time."""
    import safetensors.torch

    from freezekit._features import shards

    left = [turn]

    def now() -> bool:
        left[0] -= 1
        return left[0] == 0

    if point == "middle":
        save = safetensors.torch.save_file

        def half(tensors: Any, path: str, metadata: Any) -> None:
            save(tensors, path, metadata)
            if now():
                os.truncate(path, Path(path).stat().st_size // 2)
                kill_self()

        safetensors.torch.save_file = half
        return
    commit = shards._commit

    def killed(beside: Path, path: Path) -> None:
        # Index and shards alike come through here.
        due = now()
        if due and point == "before-rename":
            kill_self()
        commit(beside, path)
        if due:
            kill_self()

    shards._commit = killed


def extract_and_die(directory: str, point: str, turn: str) -> None:
    """Extract one shard for each batch, and be killed on the way."""
    arm(point, int(turn))
    extract_features(
        FrozenFeatureExtractor(Counting()),
        make_batches(SIZES),
        directory,
        keys="labels",
        shard_bytes=1,
        progress=False,
    )


def wait_in_the_middle(directory: str) -> None:
    """Extract two batches, say so, and wait with the lock held until standard input ends."""

    def batches() -> Iterator[Any]:
        for number, batch in enumerate(make_batches(SIZES)):
            if number == 2:
                sys.stdout.write("waiting\n")
                sys.stdout.flush()
                sys.stdin.read()
            yield batch

    extract_features(
        FrozenFeatureExtractor(Counting()),
        batches(),
        directory,
        keys="labels",
        shard_bytes=1,
        progress=False,
    )


def work(rank: int, world: int, directory: str, dies: int, loader: bool) -> None:
    """One rank of an extraction; the rank ``dies`` is killed at its second batch."""
    torch.set_num_threads(1)
    meeting = Path(directory).parent / f"meeting-{world}-{dies}-{loader}"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    share(directory, dies, loader=loader)
    dist.destroy_process_group()


def share(directory: str, dies: int, *, loader: bool) -> None:
    """Extract as a member of the group that there is, and write down what this rank did."""
    net = Counting()
    rank = dist.get_rank()

    def batches() -> Iterator[Any]:
        for number, batch in enumerate(make_batches(SIZES)):
            if rank == dies and number == dist.get_world_size() + rank + 1:
                kill_self()
            yield batch

    data: Any = batches()
    if loader:
        from torch.utils.data import DataLoader, TensorDataset

        parts = make_batches(SIZES)
        tensors = [torch.cat([part[i] for part in parts]) for i in (0, 1)]
        data = DataLoader(TensorDataset(*tensors), batch_size=4)
    dataset = extract_features(
        FrozenFeatureExtractor(net),
        data,
        directory,
        keys="labels",
        shard_bytes=1,
        progress=False,
        check=False,
    )
    note = Path(directory).parent / f"rank{rank}.txt"
    note.write_text(f"{net.seen} {len(dataset)}")


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "die":
        extract_and_die(*arguments)
    else:
        wait_in_the_middle(*arguments)
