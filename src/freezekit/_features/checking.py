"""Whether two passes over one batch are alike to the bit, and if not, which modules differ."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from freezekit._features.hashing import digest_tensor
from freezekit._features.trees import iter_tensors
from freezekit._format import plural, shorten
from freezekit._inventory import take_inventory
from freezekit.errors import UnrepeatableFeaturesError

__all__ = ["check_repeatable", "rng_kept", "same_bits"]


def check_repeatable(backbone: nn.Module, run: Callable[[], Any]) -> None:
    """Raise unless two calls of ``run`` are alike to the bit and leave the buffers alone.

    Raises:
        UnrepeatableFeaturesError: with the modules in which the difference arises.
    """
    with rng_kept():
        before = _buffer_digests(backbone)
        first = run()
        changed = [
            name for name, bits in _buffer_digests(backbone).items() if before.get(name) != bits
        ]
        if changed:
            raise UnrepeatableFeaturesError(
                f"a forward pass changes {plural(len(changed), 'buffer')} of the backbone, though "
                f"all of it is in eval: {shorten(changed)}",
                buffers=changed,
            )
        if same_bits(first, run()):
            return
        sources = _find_sources(backbone, run)
    where = shorten([name or type(backbone).__name__ for name in sources], most=5)
    raise UnrepeatableFeaturesError(
        "two passes over one batch give different features, though all of the backbone is in "
        f"eval. The difference arises in: {where}"
        + (
            ". A functional dropout needs training=self.training; random augmentation "
            "belongs into the data"
            if sources
            else "no module: in what surrounds them"
        ),
        modules=sources,
    )


def same_bits(one: Any, other: Any) -> bool:
    """Whether all tensors in two values are alike to the bit; NaN equals itself."""
    ones, others = list(iter_tensors(one)), list(iter_tensors(other))
    return len(ones) == len(others) and all(map(_same, ones, others))


def _same(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return torch.equal(one, other) or digest_tensor(one) == digest_tensor(other)


def _buffer_digests(backbone: nn.Module) -> dict[str, bytes]:
    return {name: digest_tensor(buffer) for name, buffer in backbone.named_buffers()}


# -- where a difference arises -----------------------------------------------------------------


def _find_sources(backbone: nn.Module, run: Callable[[], Any]) -> list[str]:
    """The innermost modules that turn equal inputs into different outputs, in order of running."""
    first, second = _record(backbone, run), _record(backbone, run)
    sources: list[str] = []
    # A module's record comes after those of what runs inside it.
    for (name, took, gave, inside), (_, took_then, gave_then, _) in zip(
        first, second, strict=False
    ):
        differs = took == took_then and gave != gave_then
        if differs and not any(source in inside for source in sources) and name not in sources:
            sources.append(name)
    return sources


Record = tuple[str, bytes, bytes, frozenset[str]]


def _record(backbone: nn.Module, run: Callable[[], Any]) -> list[Record]:
    """Of each module that ran: its name, digests of what it took and gave, and its descendants."""
    records: list[Record] = []
    inventory = take_inventory(backbone)
    handles = []
    for index, info in enumerate(inventory.modules):
        if info.repeats >= 0:
            continue
        below = frozenset(inside.fqn for inside in inventory.modules[index + 1 : info.end])

        def note(
            _module: nn.Module,
            args: Any,
            kwargs: Any,
            output: Any,
            name: str = info.fqn,
            below: frozenset[str] = below,
        ) -> None:
            records.append((name, _digest((args, kwargs)), _digest(output), below))

        handles.append(inventory.module(index).register_forward_hook(note, with_kwargs=True))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return records


def _digest(value: Any) -> bytes:
    total = hashlib.sha256()
    for tensor in iter_tensors(value):
        total.update(digest_tensor(tensor))
    return total.digest()


# -- leaving the user's random numbers alone ---------------------------------------------------


@contextmanager
def rng_kept() -> Iterator[None]:
    """Put the random generators of torch, Python and NumPy back after the block."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(state)
