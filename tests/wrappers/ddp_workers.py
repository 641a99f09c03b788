"""What each process of a distributed test runs; importable, since processes are spawned."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import freezekit
from wrappers.wrappers_support import Net, bits, make_optimizer, train


def train_frozen(rank: int, sent: bytes, folder: str) -> None:
    """Train a model that came here frozen, and write down what it was and what it became.

    It comes as bytes: sent as it is, its tensors would be shared by all processes.
    """
    net: Net = pickle.loads(sent)
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    try:
        model = DistributedDataParallel(net)
        torch.manual_seed(rank)  # each process has data of its own
        train(model, make_optimizer(model))
        torch.save(
            {"after": bits(net), "state": freezekit.freeze_state(model)},
            Path(folder) / f"rank{rank}.pt",
        )
    finally:
        dist.destroy_process_group()
