"""Several processes on one store: who does which batches, and how they agree.

All of it is torch.distributed's. Messages are small Python objects, sent through a gloo group of
their own: the user's group may be NCCL's, and times out long before a slow rank is done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

from torch import distributed as dist

__all__ = ["Team", "team"]

T = TypeVar("T")


class Team(NamedTuple):
    """This process among those that write one store."""

    rank: int
    world: int
    group: Any

    def owns(self, index: int) -> bool:
        """Whether a batch is this process's."""
        return index % self.world == self.rank

    def gather(self, value: T) -> list[T]:
        """What each process has, in the order of ranks."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self.group)
        return cast("list[T]", found)

    def first(self, work: Callable[[], T]) -> T:
        """Do ``work`` in rank 0 and return its result in all; its error is raised in all."""
        if self.world == 1:
            return work()
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = work()
            except Exception as error:  # noqa: BLE001  (or the others would wait for ever)
                outcome[1] = error
        dist.broadcast_object_list(
            outcome, src=dist.get_global_rank(self.group, 0), group=self.group
        )
        if outcome[1] is not None:
            raise outcome[1]
        return cast("T", outcome[0])

    def agree(self, error: BaseException | None) -> None:
        """Wait for all; raise this process's error, or say that another one failed."""
        told = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
        if failed:
            raise RuntimeError(
                "features were not extracted in all processes; what is complete is kept, and the "
                "same call goes on from there. " + "; ".join(failed)
            )


@contextmanager
def team() -> Iterator[Team]:
    """The processes of the default group of torch.distributed; this one alone without it.

    Raises:
        RuntimeError: torchrun started several processes that do not know of each other.
    """
    if not (dist.is_available() and dist.is_initialized()):
        launched = os.environ.get("WORLD_SIZE", "1")
        if launched.isdecimal() and int(launched) > 1:
            raise RuntimeError(
                f"this is one of {launched} processes (WORLD_SIZE), and torch.distributed is not "
                "initialised: call torch.distributed.init_process_group() first, so that they "
                "share the batches"
            )
        yield Team(0, 1, None)
        return
    if dist.get_world_size() == 1:
        yield Team(0, 1, None)
        return
    group = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    try:
        yield Team(dist.get_rank(), dist.get_world_size(), group)
    finally:
        dist.destroy_process_group(group)
