"""What a batch is made of: inputs for the backbone, columns that go along, and their digest."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from freezekit._features.hashing import digest_tensor
from freezekit._features.micro import batch_size
from freezekit._features.trees import iter_tensors, map_tensors
from freezekit.errors import BatchError

__all__ = ["Batch", "read_batch", "to_device"]

# Entries that are labels under every naming, and not for a backbone that gives features.
_LABELS = ("labels", "label")


class Batch(NamedTuple):
    """One batch, taken apart.

    ``args`` and ``kwargs`` are the backbone's; ``columns`` have dimension 0 of ``size`` samples.
    """

    number: int
    size: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    columns: dict[str, Tensor]

    def digest(self) -> str:
        """16 hexadecimal digits that tell this batch from others."""
        total = hashlib.sha256()
        for part in (self.args, self.kwargs, self.columns):
            for name, value in _leaves(part):
                total.update(name.encode() + b"\0")
                total.update(
                    digest_tensor(value) if isinstance(value, Tensor) else repr(value).encode()
                )
        return total.hexdigest()[:16]


def read_batch(batch: Any, index: int, backbone: nn.Module, keys: Sequence[str] | None) -> Batch:
    """Take a batch apart.

    A mapping's entries go to the backbone by name, but for those in ``keys``; by default labels,
    and what the backbone's forward does not take, go along instead. Of a tuple or list, the last
    elements go along, as many as there are ``keys``. Anything else is the one input.

    Raises:
        BatchError: it cannot be taken apart so, or has no batch dimension.
    """
    if isinstance(batch, Mapping):
        args: tuple[Any, ...] = ()
        kwargs, extra = _split_mapping(batch, index, backbone, keys)
    elif isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        args, extra = _split_sequence(batch, index, backbone, keys)
        kwargs = {}
    elif keys:
        raise BatchError(
            index,
            f"it is a {type(batch).__name__}, which has no entries {', '.join(map(repr, keys))}; "
            "keys name entries of a mapping, or the last elements of a tuple",
        )
    else:
        args, kwargs, extra = (batch,), {}, {}
    size = _size(args, kwargs, index)
    columns = {name: _column(name, value, size, index) for name, value in extra.items()}
    return Batch(index, size, args, kwargs, columns)


def to_device(batch: Batch, device: torch.device | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The backbone's arguments on the backbone's device."""
    if device is None:
        return batch.args, batch.kwargs

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    args, kwargs = map_tensors((batch.args, batch.kwargs), move)
    return args, kwargs


def _split_mapping(
    batch: Mapping[Any, Any], index: int, backbone: nn.Module, keys: Sequence[str] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    if keys is None:
        taken = _taken(backbone)
        keys = [
            name for name in batch if name in _LABELS or (taken is not None and name not in taken)
        ]
    missing = [name for name in keys if name not in batch]
    if missing:
        raise BatchError(
            index,
            f"keys: it has no {', '.join(map(repr, missing))}, but "
            f"{', '.join(map(repr, batch)) or 'nothing'}",
        )
    kwargs = {name: value for name, value in batch.items() if name not in keys}
    return kwargs, {name: batch[name] for name in keys}


def _taken(backbone: nn.Module) -> set[str] | None:
    """Names that the backbone's forward takes; ``None`` if it takes any."""
    parameters = inspect.signature(backbone.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return set(parameters)


def _split_sequence(
    batch: Sequence[Any], index: int, backbone: nn.Module, keys: Sequence[str] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    count = len(keys or ())
    if count >= len(batch):
        raise BatchError(
            index,
            f"it has {len(batch)} elements, of which {count} go along (keys), and none is left "
            "for the backbone",
        )
    args = tuple(batch[: len(batch) - count])
    try:
        inspect.signature(backbone.forward).bind(*args)
    except (TypeError, ValueError) as error:
        raise BatchError(
            index,
            f"its {len(args)} elements do not fit the backbone's forward ({error}); name what "
            "goes along, such as keys=['labels'] for (inputs, labels)",
        ) from error
    return args, dict(zip(keys or (), batch[len(batch) - count :], strict=True))


def _size(args: Any, kwargs: Any, index: int) -> int:
    size = batch_size((args, kwargs))
    first = next(iter_tensors((args, kwargs)), None)
    if first is None:
        raise BatchError(index, "it has no tensor for the backbone")
    if size is None or (first.dim() == 1 and first.is_floating_point()):
        raise BatchError(
            index,
            f"its tensor of shape {tuple(first.shape)} has no batch dimension: pass batches (a "
            "DataLoader), not samples",
        )
    if size == 0:
        raise BatchError(index, f"it is empty: its tensor has the shape {tuple(first.shape)}")
    return size


def _column(name: str, value: Any, size: int, index: int) -> Tensor:
    if not isinstance(value, Tensor):
        try:
            value = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BatchError(
                index,
                f"{name!r} is a {type(value).__name__} that is no tensor and no list of numbers; "
                "keep it apart, or pass numbers that stand for it",
            ) from error
    if value.dim() == 0 or value.shape[0] != size:
        raise BatchError(
            index, f"{name!r} has the shape {tuple(value.shape)}, but there are {size} samples"
        )
    column: Tensor = value.detach().cpu()
    return column


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and plain values, each with where it is."""
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from _leaves(item, f"{name}.{position}")
    elif isinstance(value, Tensor | bool | int | float | str | None):
        yield name, value
    else:
        yield name, json.dumps(type(value).__qualname__)
