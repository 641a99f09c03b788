"""A process group of one, a compiler that remembers nothing, and one thread for tiny tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """One thread for torch: several spend their time waiting for each other on tiny tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A gloo group with this process as its only member."""
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def compiler() -> Iterator[None]:
    """A compiler without compiled code, before the test and after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
