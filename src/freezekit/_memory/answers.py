"""What code gets that asks a fake tensor for data: what is known, else a stand-in, which counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.overrides import TorchFunctionMode

from freezekit._memory import stand_ins
from freezekit._memory.known import UNKNOWN, KnownValues

__all__ = ["DATA_FUNCTIONS", "Answers", "DataFunctions"]

# What gives a tensor's data to code outside of torch, or says something of a result's.
DATA_FUNCTIONS = frozenset({"__format__", "__array__", "numpy", "one_hot", "tensor", "as_tensor"})

_EQUAL = torch.ops.aten.equal.default
_SPLIT = torch.ops.aten.split_with_sizes.default
_GROUPED = torch.ops.aten._grouped_mm.default
# Operators that fake mode refuses, or takes long for, and whose results are known in some cases.
_SHORTCUTS: dict[Any, Callable[[tuple[Any, ...]], Any]] = {
    torch.ops.aten.native_batch_norm.default: stand_ins.batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: stand_ins.batch_norm_backward,
    _GROUPED: stand_ins.grouped_product,
}
# What a mask goes through before it is asked where it holds.
_ELEMENTWISE = frozenset({"aten._to_copy", "aten.clone", "aten.eq", "aten.gt", "aten.ne"})
# The attribute of a fake tensor that is what all() gave.
_IS_ALL = "_freezekit_is_all"


class Answers:
    """Runs operators, and answers for data that is not there.

    Args:
        find: tells a tensor's allocation, which its views share.
        known: values that need no stand-in.
        checks_hold: whether ``all()`` of something unknown is true.

    Attributes:
        values: how many values were assumed.
        sizes: how many sizes were.
    """

    def __init__(
        self,
        find: Callable[[torch.Tensor], int | None],
        known: KnownValues,
        *,
        checks_hold: bool = False,
    ) -> None:
        self.values = 0
        self.sizes = 0
        self.checks_hold = checks_hold
        self._find = find
        self._known = known
        # Of results of nonzero: the shape that they are places in.
        self._places: dict[int | None, Sequence[int]] = {}
        # Of results of one_hot: how many classes there are.
        self._classes: dict[int | None, int] = {}

    @property
    def assumed(self) -> bool:
        """Whether anything was."""
        return self.values + self.sizes > 0

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator's result, also where it depends on data."""
        if args and isinstance(args[0], FakeTensor):
            if func in _SHORTCUTS:
                result = _SHORTCUTS[func](args)
                if result is not None:
                    return result
            if func is _EQUAL:
                return self._are_equal(*args)
            if func is _SPLIT and self.values:
                args = (args[0], stand_ins.split_sizes(*args), *args[2:])
        try:
            return func(*args, **kwargs)
        except DynamicOutputShapeException as error:
            found = self._known.sized(func, args, kwargs)
            if found is not None:
                return found
            try:
                return stand_ins.sized(func, args, kwargs, self._count)
            except KeyError:
                raise error from None

    def follow(
        self,
        func: Any,
        operation: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """Note what is known of an operator's result; its allocation must have been."""
        self._known.follow(func, args, kwargs, result)
        if not isinstance(result, FakeTensor):
            return
        if self._classes and operation in _ELEMENTWISE and isinstance(args[0], torch.Tensor):
            classes = self._classes.get(self._find(args[0]))
            if classes is not None:
                self._classes[self._find(result)] = classes
        elif operation == "aten.all":
            setattr(result, _IS_ALL, True)
        elif operation == "aten.nonzero":
            self._places[self._find(result)] = args[0].shape

    def note_one_hot(self, result: torch.Tensor) -> None:
        """Note that one in so many elements is not zero."""
        self._classes[self._find(result)] = max(1, result.shape[-1])

    def value(self, tensor: FakeTensor) -> bool | int | float:
        """Of a single element."""
        known = self._known.value(tensor)
        if known is not None:
            return known
        self.values += 1
        allocation = self._find(tensor)
        if allocation in self._places:
            return stand_ins.place(self._places[allocation], int(tensor.storage_offset()))
        if self.checks_hold and hasattr(tensor, _IS_ALL):
            return True
        return stand_ins.value(tensor.dtype)

    def array(self, tensor: torch.Tensor) -> Any:
        """NumPy's array of a tensor's values if they are known; of zeros if not."""
        values = self._known.of(tensor)
        if values is None:
            self.values += 1
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            if values is None:
                values = torch.zeros(tensor.shape, dtype=tensor.dtype)
            return values.numpy()

    def _are_equal(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        """Two tensors whose values are not known are not."""
        known = self._known.run(_EQUAL, (first, second), {})
        if known is not UNKNOWN:
            return bool(known)
        if first is not second and first.shape == second.shape:
            self.values += 1
        return first is second

    def _count(self, mask: torch.Tensor) -> int:
        """How many elements a mask selects: those that are known to be, or all.

        Of a class's mask from ``one_hot`` its even share: of so many tokens for each expert.
        """
        known = self._known.count(mask)
        if known is not None:
            return known
        self.sizes += 1
        return -(-mask.numel() // self._classes.get(self._find(mask), 1))


class DataFunctions(TorchFunctionMode):
    """While it is entered, fake tensors give data also where no operator is asked for it.

    Args:
        answers: what they give; without, nothing is changed.
    """

    def __init__(self, answers: Answers | None = None) -> None:
        super().__init__()
        self._answers = answers

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function, or give what it would."""
        return self.call(func, getattr(func, "__name__", ""), args, kwargs or {})

    def call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of that name."""
        if self._answers is None or name not in DATA_FUNCTIONS or not args:
            return func(*args, **kwargs)
        first, *rest = args
        if name in ("tensor", "as_tensor"):
            return func(_as_numbers(first), *rest, **kwargs)
        if not isinstance(first, FakeTensor):
            return func(*args, **kwargs)
        if name == "one_hot":
            result = func(*args, **kwargs)
            self._answers.note_one_hot(result)
            return result
        if name == "__format__":
            # f"expert_{index}" is about the value.
            return format(first.item() if first.dim() == 0 else repr(first), *rest)
        array = self._answers.array(first)
        return array if name == "numpy" else array.__array__(*rest, **kwargs)


def _as_numbers(value: Any) -> Any:
    """Fake tensors in a list as the numbers that a tensor is to be made of."""
    if type(value) in (tuple, list):
        return [
            item.tolist() if isinstance(item, FakeTensor) else _as_numbers(item) for item in value
        ]
    return value
