"""What estimate_memory and measure_memory return, and how it reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from freezekit._format import format_bytes, format_percent
from freezekit._memory.allocator import CachingAllocator
from freezekit._memory.allocator_config import AllocatorConfig
from freezekit._memory.devices import budget_bytes
from freezekit._memory.events import CATEGORIES, Category, EventStream
from freezekit._memory.replay import PhaseMemory, Replayed, replay
from freezekit._memory.tree import ModuleMemory, module_memory
from freezekit._report import Report
from freezekit._tables import Column, Section, Table
from freezekit.errors import SimulatedOutOfMemoryError

__all__ = ["MemoryComparison", "MemoryEstimate", "at_peak"]


class AtPeak(TypedDict):
    """What a replay tells of its peak and its phases: fields of :class:`MemoryEstimate`."""

    breakdown: tuple[tuple[Category, int], ...]
    modules: tuple[ModuleMemory, ...]
    peak_phase: str
    peak_step: int
    peak_module: str
    peak_operation: str
    timeline: tuple[PhaseMemory, ...]
    stream: EventStream


def at_peak(stream: EventStream, replayed: Replayed) -> AtPeak:
    """Who holds what at the peak of a replayed stream, and when that is."""
    sums: Counter[Category] = Counter()
    for index, charged in replayed.live_at_peak:
        sums[stream.allocations[index].category] += charged
    peak = stream.allocations[stream.events[replayed.peak_event].allocation]
    return AtPeak(
        breakdown=tuple((category, sums[category]) for category in CATEGORIES),
        modules=module_memory(
            (stream.allocations[index].module, charged) for index, charged in replayed.live_at_peak
        ),
        peak_phase=peak.phase,
        peak_step=peak.step,
        peak_module=peak.module,
        peak_operation=peak.operation,
        timeline=replayed.phases,
        stream=stream,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate(Report):
    """What a step takes on a CUDA GPU; all sizes in bytes.

    Attributes:
        model: the model's class.
        mode: ``"train"`` or ``"inference"``.
        optimizer: its name; ``""`` without one.
        source: ``"trace"`` for an estimate; ``"cpu"`` or ``"cuda"`` for a measured run.
        device: the GPU it is for.
        peak_allocated: as ``torch.cuda.max_memory_allocated``.
        peak_reserved: as ``torch.cuda.max_memory_reserved``; without the CUDA context.
        safe: what to plan with instead of ``peak_reserved``: it covers what cannot be known.
        margins: ``(what is not known, bytes)``; their sum is ``safe - peak_reserved``.
        context: the CUDA context, least and most; beside ``peak_reserved``.
        budget: the memory that was given, the context included; ``None``: without bound.
        out_of_memory: why it does not fit into ``budget``; ``""`` if it does.
        breakdown: ``(category, bytes)`` at the moment of the peak; their sum is
            ``peak_allocated``.
        modules: what modules hold at that moment, as a folded tree, the largest first.
        peak_phase: the phase in which the peak is.
        peak_step: the step in which it is, from 0.
        peak_module: the module that made the allocation at the peak.
        peak_operation: the operator that made it.
        timeline: the phases of all steps in order, each with its peak.
        assumptions: what was taken for granted, in words.
        stream: every allocation and free; for plots and for a closer look.
        allocator: the allocator's settings.
    """

    model: str
    mode: Literal["train", "inference"]
    optimizer: str
    source: Literal["trace", "cpu", "cuda"] = "trace"
    device: str
    peak_allocated: int
    peak_reserved: int
    safe: int
    margins: tuple[tuple[str, int], ...]
    context: tuple[int, int]
    budget: int | None
    out_of_memory: str
    breakdown: tuple[tuple[Category, int], ...] = field(repr=False)
    modules: tuple[ModuleMemory, ...] = field(repr=False)
    peak_phase: str
    peak_step: int
    peak_module: str
    peak_operation: str
    timeline: tuple[PhaseMemory, ...] = field(repr=False)
    assumptions: tuple[str, ...] = field(repr=False)
    stream: EventStream = field(repr=False, compare=False, metadata={"internal": True})
    allocator: AllocatorConfig = field(repr=False, compare=False, metadata={"internal": True})

    @property
    def total(self) -> tuple[int, int]:
        """What ``nvidia-smi`` would show for the process, least and most: with the context."""
        return self.peak_reserved + self.context[0], self.safe + self.context[1]

    def fits(self, budget: str | int) -> bool:
        """Whether the step runs on a GPU: ``"NVIDIA GeForce RTX 2080 Ti"``, ``"11GiB"`` or bytes.

        The GPU's memory must hold the CUDA context, and what ``safe`` adds for the unknown. Near
        its limit the allocator gives cached memory back before it gives up, so that a step may
        fit which would reserve more with room.

        Raises:
            ValueError: neither a size nor a known GPU; the nearest names are given.
        """
        capacity = budget_bytes(budget) - self.context[1]
        if self.safe <= capacity:
            return True
        return not self.lacks(capacity - (self.safe - self.peak_reserved))

    def lacks(self, capacity: int) -> str:
        """Why the step does not run in ``capacity`` bytes beside the context; ``""`` if it does."""
        if capacity >= self.peak_reserved:
            return ""
        try:
            replay(self.stream, CachingAllocator(self.allocator, capacity=max(capacity, 0)))
        except SimulatedOutOfMemoryError as error:
            return str(error)
        return ""

    def compare(self, other: MemoryEstimate) -> MemoryComparison:
        """What ``other`` takes more or less, term by term.

        >>> import torch
        >>> from freezekit import estimate_memory, frozen
        >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 2))
        >>> full = estimate_memory(model, torch.zeros(8, 512))
        >>> with frozen(model, "0"):
        ...     half = estimate_memory(model, torch.zeros(8, 512))
        >>> dict(full.compare(half).terms)["gradients"]
        (1055232, 4608)
        """
        return MemoryComparison(
            before=self.title,
            after=other.title,
            peak_allocated=(self.peak_allocated, other.peak_allocated),
            peak_reserved=(self.peak_reserved, other.peak_reserved),
            safe=(self.safe, other.safe),
            terms=tuple(
                (category, (size, dict(other.breakdown).get(category, 0)))
                for category, size in self.breakdown
            ),
        )

    @property
    def title(self) -> str:
        """The model and what it does."""
        doing = f"training with {self.optimizer}" if self.optimizer else self.mode
        return f"{self.model}, {doing}"

    # -- rendering

    def _sections(self) -> tuple[Section, ...]:
        table = Table(
            (Column("at the peak"), Column("bytes", "right"), Column("share", "right")),
            tuple(
                (category.replace("_", " "), format_bytes(size), self._share(size))
                for category, size in self.breakdown
                if size
            ),
            ("allocated", format_bytes(self.peak_allocated), ""),
        )
        return (
            Section(tuple(self._head()), table),
            Section((self._when(),), self._module_table()),
            Section((), self._timeline_table()),
            Section(tuple(f"assumed: {text}" for text in self.assumptions)),
        )

    def _share(self, size: int) -> str:
        return format_percent(size, self.peak_allocated)

    def _head(self) -> list[str]:
        low, high = (format_bytes(size) for size in self.total)
        lines = [
            f"{self.title}: peak reserved {format_bytes(self.peak_reserved)}, "
            f"allocated {format_bytes(self.peak_allocated)}",
        ]
        if self.source != "trace":
            return [f"{lines[0]} (measured on {self.source.upper()})"]
        why = ", ".join(f"{what} {format_bytes(size)}" for what, size in self.margins if size)
        lines += [
            f"plan with {format_bytes(self.safe)}" + (f" ({why})" if why else ""),
            f"the CUDA context is beside it: nvidia-smi would show {low} to {high}",
        ]
        if self.budget is not None:
            verdict = f"does not fit: {self.out_of_memory}" if self.out_of_memory else "fits"
            lines.append(f"budget {format_bytes(self.budget)}: {verdict}")
        return lines

    def _when(self) -> str:
        where = f" of {self.peak_module}" if self.peak_module else ""
        return (
            f"the peak is in the {self.peak_phase}{where}, step {self.peak_step}, "
            f"at {self.peak_operation or 'its beginning'}"
        )

    def _module_table(self) -> Table | None:
        if not self.modules:
            return None
        rows = tuple(
            ("  " * row.depth + row.name, format_bytes(row.nbytes), self._share(row.nbytes))
            for row in self.modules
        )
        columns = (
            Column("held for module", shrink=1),
            Column("bytes", "right"),
            Column("share", "right"),
        )
        return Table(columns, rows)

    def _timeline_table(self) -> Table | None:
        """The first step, which makes optimizer state, and the last, as all later ones are."""
        steps = {phase.step for phase in self.timeline if phase.step >= 0}
        if not steps:
            return None
        shown = (min(steps), max(steps))
        rows = tuple(
            (
                str(phase.step),
                phase.phase.replace("_", " "),
                *(
                    format_bytes(size)
                    for size in (phase.peak_allocated, phase.end_allocated, phase.reserved)
                ),
            )
            for phase in self.timeline
            if phase.step in shown
        )
        names = ("peak", "at its end", "reserved")
        columns = (Column("step", "right"), Column("phase"), *(Column(n, "right") for n in names))
        return Table(columns, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryComparison(Report):
    """Two estimates side by side; each figure is ``(before, after)`` in bytes.

    Attributes:
        before: what the first is of.
        after: what the second is of.
        peak_allocated: the peaks.
        peak_reserved: likewise.
        safe: likewise.
        terms: ``(category, (before, after))`` at the moments of the peaks.
    """

    before: str
    after: str
    peak_allocated: tuple[int, int]
    peak_reserved: tuple[int, int]
    safe: tuple[int, int]
    terms: tuple[tuple[Category, tuple[int, int]], ...]

    def _sections(self) -> tuple[Section, ...]:
        title = self.before if self.before == self.after else f"{self.before}  ->  {self.after}"
        rows = tuple(
            _row(category.replace("_", " "), pair) for category, pair in self.terms if any(pair)
        )
        more = (_row("reserved", self.peak_reserved), _row("to plan with", self.safe))
        names = ("before", "after", "change", "")
        columns = (Column("at the peak"), *(Column(name, "right") for name in names))
        table = Table(columns, (*rows, *more), _row("allocated", self.peak_allocated))
        return (Section((title,), table),)


def _row(name: str, pair: tuple[int, int]) -> tuple[str, ...]:
    before, after = pair
    sign = "-" if after < before else "+"
    if before == after:
        return name, format_bytes(before), format_bytes(after), "0", ""
    change = f"{sign}{format_bytes(abs(after - before))}"
    # (Of what is next to nothing a share says nothing.)
    share = f"{100 * (after / before - 1):+.0f} %" if before >= 1 << 20 else ""
    return name, format_bytes(before), format_bytes(after), change, share
