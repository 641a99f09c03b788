"""max_batch_size: the largest batch that fits, found by tracing a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from freezekit._fold import fold_names, is_number
from freezekit._format import format_bytes, shorten
from freezekit._inventory import take_inventory
from freezekit._memory.devices import budget_bytes
from freezekit._memory.estimate import estimate_memory
from freezekit._memory.memory_report import MemoryEstimate
from freezekit._report import Report
from freezekit._tables import Column, Section, Table

__all__ = ["BatchPoint", "BatchSizeEstimate", "max_batch_size"]

# No step of the search may shrink what is left to search by less than this, in the long run.
_PATIENCE = 2
# How far the next size is where the last two tell nothing (the peak is in the optimizer's step).
_LEAP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPoint:
    """One size that was traced; bytes."""

    batch_size: int
    peak_allocated: int
    peak_reserved: int
    safe: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeEstimate(Report):
    """The largest batch that fits, and what was looked at.

    Attributes:
        model: the model's class.
        budget: the memory, in bytes, the CUDA context included.
        batch_size: the largest size that fits; 0 if none does.
        next_size: the size above it; ``None`` if the search ended at its limit.
        freeze_for_next: patterns that would have to be frozen, from the front on, for
            ``next_size`` to fit; empty if that would not be enough, or everything before the last
            part is frozen already.
        advised: whether that was looked for.
        curve: the sizes that were traced, smallest first.
        estimate: of the largest batch that fits.
    """

    model: str
    budget: int
    batch_size: int
    next_size: int | None
    freeze_for_next: tuple[str, ...]
    advised: bool
    curve: tuple[BatchPoint, ...]
    estimate: MemoryEstimate | None = field(repr=False)

    def _sections(self) -> tuple[Section, ...]:
        budget = format_bytes(self.budget)
        head = (
            f"{self.model}: the largest batch in {budget} is {self.batch_size}"
            if self.batch_size
            else f"{self.model}: no batch fits into {budget}"
        )
        lines = [head]
        if self.freeze_for_next:
            parts = shorten(list(self.freeze_for_next), 6)
            lines.append(f"{self.next_size} would fit with these frozen: {parts}")
        elif self.advised and self.next_size is not None:
            lines.append(f"{self.next_size} would not fit by freezing from the front on")
        rows = tuple(
            (
                str(point.batch_size),
                format_bytes(point.peak_allocated),
                format_bytes(point.peak_reserved),
                format_bytes(point.safe),
                "yes" if point.fits else "no",
            )
            for point in self.curve
        )
        names = ("batch", "allocated", "reserved", "to plan with", "fits")
        return (Section(tuple(lines), Table(tuple(Column(n, "right") for n in names), rows)),)


def max_batch_size(
    model: nn.Module,
    make_inputs: Callable[[int], Any],
    budget: str | int,
    *,
    multiple_of: int = 1,
    precision: float = 0.01,
    limit: int = 65536,
    advise: bool = True,
    progress: Callable[[BatchPoint], None] | None = None,
    **options: Any,
) -> BatchSizeEstimate:
    """Find the largest batch whose training step fits into ``budget``, without a GPU.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 2))
    >>> found = max_batch_size(model, lambda n: torch.empty(n, 1024, device="meta"), "1GiB")
    >>> found.batch_size > 10_000
    True

    Two small sizes are traced; their difference tells where to look, which is traced again, until a
    size fits and the next does not. Then it is found how much would have to be frozen, from the
    front of the model on, for the next size.

    Args:
        model: any module; it is not touched.
        make_inputs: makes the forward's inputs for a batch size; tensors may be on meta.
        budget: a size such as ``"11GiB"``, bytes, or a GPU's name; the CUDA context included.
        multiple_of: only multiples of it are looked at.
        precision: sizes that differ by less than this share are not told apart, so that a search
            among thousands ends early; 0 for the very largest.
        limit: no larger size is looked at.
        advise: whether to find what would have to be frozen for the next size, which takes more
            traces.
        progress: called with every size that was traced.
        options: those of :func:`freezekit.estimate_memory`.

    Raises:
        ValueError: a budget that is neither a size nor a known GPU, or sizes below 1.
        TraceError: the step fails for a size.
    """
    if multiple_of < 1 or limit < multiple_of:
        raise ValueError(
            f"expected multiple_of of at least 1 and a limit of at least that, got {multiple_of} "
            f"and {limit}"
        )
    nbytes = budget_bytes(budget)
    search = _Search(model, make_inputs, nbytes, multiple_of, precision, limit, progress, options)
    largest = search.run()
    following = largest + search.step(largest)
    next_size = following if following <= limit else None
    return BatchSizeEstimate(
        model=type(model).__name__,
        budget=nbytes,
        batch_size=largest,
        next_size=next_size,
        freeze_for_next=search.freeze_for(next_size) if advise and next_size is not None else (),
        advised=advise and options.get("train") is not False,
        curve=tuple(search.points[size] for size in sorted(search.points)),
        estimate=search.estimates.get(largest),
    )


class _Search:
    def __init__(
        self,
        model: nn.Module,
        make_inputs: Callable[[int], Any],
        budget: int,
        multiple: int,
        precision: float,
        limit: int,
        progress: Callable[[BatchPoint], None] | None,
        options: dict[str, Any],
    ) -> None:
        self.model, self.make_inputs, self.budget = model, make_inputs, budget
        self.multiple, self.limit = multiple, limit - limit % multiple
        self.precision = precision
        self.progress, self.options = progress, options
        self.points: dict[int, BatchPoint] = {}
        self.estimates: dict[int, MemoryEstimate] = {}

    def step(self, size: int) -> int:
        """How far the next size is."""
        fine = int(size * self.precision)
        return max(self.multiple, fine - fine % self.multiple)

    def fits(self, size: int) -> bool:
        """Trace a size, once."""
        if size not in self.points:
            estimate = estimate_memory(self.model, self.make_inputs(size), **self.options)
            self.estimates[size] = estimate
            self.points[size] = BatchPoint(
                batch_size=size,
                peak_allocated=estimate.peak_allocated,
                peak_reserved=estimate.peak_reserved,
                safe=estimate.safe,
                fits=estimate.fits(self.budget),
            )
            if self.progress is not None:
                self.progress(self.points[size])
        return self.points[size].fits

    def run(self) -> int:
        """The largest size that fits; 0 for none."""
        low = self.multiple
        if not self.fits(low):
            return 0
        if low == self.limit:
            return low
        high: int | None = None
        candidate = _LEAP * low
        small_steps = 0
        while high is None or high - low > self.step(low):
            candidate = self._clamp(candidate, low, high)
            before = low, high
            if self.fits(candidate):
                low = candidate
                if low == self.limit:
                    return low
            else:
                high = candidate
            small_steps = small_steps + 1 if _moved_little(before, (low, high)) else 0
            candidate = self._predict(low, high)
            if high is not None and small_steps >= _PATIENCE:
                candidate, small_steps = (low + high) // 2, 0
        return low

    def _clamp(self, size: int, low: int, high: int | None) -> int:
        size -= size % self.multiple
        step = self.step(low)
        top = self.limit if high is None else high - step
        return max(low + step, min(size, top))

    def _predict(self, low: int, high: int | None) -> int:
        """Where a line meets the budget: through the two sizes around it, or the two largest."""
        sizes = sorted(self.points)[-2:] if high is None else (low, high)
        first, second = (self.points[size] for size in sizes)
        slope = (second.safe - first.safe) / (second.batch_size - first.batch_size)
        if slope <= 0:
            return _LEAP * second.batch_size
        capacity = self.budget - self.estimates[low].context[1]
        return int(first.batch_size + (capacity - first.safe) / slope)

    def freeze_for(self, size: int) -> tuple[str, ...]:
        """The fewest parts, from the front on, that must be frozen for ``size`` to fit."""
        if self.options.get("train") is False:
            return ()
        units = _units(self.model)[:-1]
        inputs = self.make_inputs(size)

        def enough(count: int) -> bool:
            fqns = [fqn for unit in units[:count] for fqn in unit[1]]
            options = {**self.options, "frozen": [*self.options.get("frozen", ()), *fqns]}
            return estimate_memory(self.model, inputs, **options).fits(self.budget)

        low, high = 0, len(units)
        if not units or not enough(high):
            return ()
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return fold_names(name for name, _ in units[:high])


def _moved_little(before: tuple[int, int | None], after: tuple[int, int | None]) -> bool:
    if before[1] is None or after[1] is None:
        return False
    return (after[1] - after[0]) * 2 > before[1] - before[0]


def _units(model: nn.Module) -> Sequence[tuple[str, list[str]]]:
    """The parts that people freeze, in the model's order, with their trainable parameters.

    A numbered child (a layer of an encoder) is a part; so is a module that has none below it.
    """
    units: dict[str, list[str]] = {}
    numbered = {
        name.rpartition(".")[0]
        for name, _ in model.named_modules()
        if is_number(name.rpartition(".")[2])
    }
    for info in take_inventory(model).parameters:
        if not info.requires_grad:
            continue
        parts = info.fqn.split(".")
        unit = info.fqn
        for end in range(1, len(parts)):
            unit = ".".join(parts[:end])
            inside = any(name == unit or name.startswith(f"{unit}.") for name in numbered)
            if is_number(parts[end - 1]) or not inside:
                break
        units.setdefault(unit, []).append(info.fqn)
    return list(units.items())
