"""Values that a trace knows: those that came with data, and what follows of them alone.

A fake tensor has no data. But token ids, masks and shapes often come with theirs, and what code
asks of data ("is anything padded?", "which tokens are an image's?") is mostly about these. So an
operator whose tensors are all known runs on their values, too. (Torch's fake mode does so for
single constants; these are its ``constant``.)

``torch._C._DisableTorchDispatch`` is how the fake mode itself runs an operator on real tensors
while it is entered; ``_schema`` tells what operators write to.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from freezekit._memory.nested import map_tensors, tensors_in

__all__ = ["UNKNOWN", "KnownValues", "NothingKnown"]

UNKNOWN: Final = object()

# Elements of what is followed: ids and masks of batches, not weights.
_LIMIT = 1 << 20
# The attribute of a fake tensor that holds its values. (Its identity would not do as a key: a dead
# tensor's is another's later.)
_VALUES = "_freezekit_values"


class KnownValues:
    """The values of fake tensors, as far as they follow from data that was given.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> known = KnownValues()
    >>> ids = torch.tensor([3, 5, 3])
    >>> with FakeTensorMode():
    ...     fake = torch.empty(3, dtype=torch.long)
    >>> known.tell(fake, ids)
    >>> known.run(torch.ops.aten.eq.Scalar, (fake, 3), {})
    tensor([ True, False,  True])
    """

    def __init__(self) -> None:
        # Storages of values that something unknown was written to, kept so that they stay theirs.
        self._spoiled: dict[int, torch.UntypedStorage] = {}

    @staticmethod
    def tell(twin: torch.Tensor, original: torch.Tensor) -> None:
        """Say whose twin a fake tensor is: its values are known, if they are whole numbers."""
        if original.is_meta or original.is_floating_point() or original.is_complex():
            return
        if original.numel() > _LIMIT or original.layout is not torch.strided:
            return
        # (Tensors that are met by a deep copy come while the fake mode is entered: a copy made in
        # it would be a fake one, and to compute with that as if it had data ends the process.)
        with torch._C._DisableTorchDispatch():
            twin.__dict__[_VALUES] = original.detach().to("cpu", copy=True)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor; ``None`` if they are not known."""
        if not isinstance(tensor, FakeTensor):
            return None if tensor.is_meta or tensor.numel() > _LIMIT else tensor
        if tensor.constant is not None:
            return tensor.constant
        values: torch.Tensor | None = tensor.__dict__.get(_VALUES)
        if values is None or (self._spoiled and values.untyped_storage()._cdata in self._spoiled):
            return None
        return values

    def follow(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Note what an operator gave, and what its results' values are."""
        written = _written(func)
        if written and any(_is_constant(args[place]) for place in written if place < len(args)):
            return
        followed = _may_be_known(args) and all(t.numel() <= _LIMIT for t in tensors_in(result))
        values = self.run(func, args, kwargs) if followed else UNKNOWN
        if values is not UNKNOWN:
            _note(result, values)
        elif written:
            self._spoil([args[place] for place in written if place < len(args)] + [kwargs])

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What an operator gives for known values; ``UNKNOWN`` if one is not, or it is random."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return UNKNOWN
        try:
            known_args, known_kwargs = map_tensors((args, kwargs), self._known)
            with torch._C._DisableTorchDispatch():
                values = func(*known_args, **known_kwargs)
                # What is filled later, element by element, is known then.
                return values.zero_() if _leaves_empty(func) else values
        except Exception:  # noqa: BLE001  (unknown; or refused, which the trace will tell)
            return UNKNOWN

    def sized(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Fake results of the size that they have for known values; ``None`` if it is unknown."""
        values = UNKNOWN if _written(func) else self.run(func, args, kwargs)
        if isinstance(values, torch.Tensor):
            return args[0].new_empty(values.shape, dtype=values.dtype)
        if isinstance(values, tuple):
            return tuple(args[0].new_empty(part.shape, dtype=part.dtype) for part in values)
        return None

    def count(self, mask: torch.Tensor) -> int | None:
        """How many of a mask's elements are true; ``None`` if that is unknown."""
        values = self.of(mask)
        if values is None:
            return None
        with torch._C._DisableTorchDispatch():
            return int(values.count_nonzero().item())

    def value(self, tensor: torch.Tensor) -> bool | int | float | None:
        """The value of a single element; ``None`` if it is unknown."""
        values = self.of(tensor)
        if values is None:
            return None
        with torch._C._DisableTorchDispatch():
            return values.item()

    def _known(self, tensor: torch.Tensor) -> torch.Tensor:
        values = self.of(tensor)
        if values is None:
            raise LookupError
        return values

    def _spoil(self, written: Any) -> None:
        for tensor in tensors_in(written):
            values = self.of(tensor)
            if values is not None:
                storage = values.untyped_storage()
                self._spoiled[storage._cdata] = storage


class NothingKnown(KnownValues):
    """For real tensors, whose data is there, and for traces without data."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG002
        """Not known."""
        return None

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:  # noqa: ARG002
        """Not known, and not run: operators without tensors would be."""
        return UNKNOWN


def _note(result: Any, values: Any) -> None:
    if isinstance(result, tuple | list):
        for part, value in zip(result, values, strict=True):
            _note(part, value)
    elif isinstance(result, FakeTensor) and result.shape == values.shape:
        result.__dict__[_VALUES] = values


def _is_constant(arg: Any) -> bool:
    """Fake mode has written to it by now."""
    if type(arg) in (tuple, list):
        return bool(arg) and _is_constant(arg[0])
    return isinstance(arg, FakeTensor) and arg.constant is not None


def _may_be_known(args: Sequence[Any]) -> bool:
    """Whether the first tensor is; most are activations and weights, and this is asked of each."""
    for arg in args:
        if isinstance(arg, FakeTensor):
            return _VALUES in arg.__dict__ or arg.constant is not None
        if type(arg) in (tuple, list):
            return _may_be_known(arg)
    return True


@cache
def _written(func: Any) -> tuple[int, ...]:
    """Positions of the arguments that an operator writes to."""
    return tuple(
        place
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def _leaves_empty(func: Any) -> bool:
    return str(func.overloadpacket) in {
        f"aten.{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty")
    }
