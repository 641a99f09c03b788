"""Plots of what memory holds over the steps, and of which modules hold it (extra ``plot``).

>>> import torch
>>> from freezekit import estimate_memory
>>> from freezekit.plotting import plot_timeline
>>> estimate = estimate_memory(torch.nn.Linear(64, 64), torch.zeros(8, 64))
>>> axes = plot_timeline(estimate)
>>> axes.get_ylabel()
'allocated, MiB'
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from freezekit._memory.events import CATEGORIES, Category
from freezekit._memory.memory_report import MemoryEstimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_modules", "plot_timeline"]

# Okabe and Ito's colours: told apart by everybody, in print too.
COLOURS: dict[Category, str] = {
    "parameters": "#0072B2",
    "buffers": "#56B4E9",
    "inputs": "#999999",
    "optimizer_state": "#CC79A7",
    "gradients": "#D55E00",
    "activations": "#009E73",
    "temporaries": "#F0E442",
    "workspaces": "#E69F00",
}
# From the bottom up: what stays is below what comes and goes.
_ORDER: tuple[Category, ...] = tuple(COLOURS)
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("bytes", 1))
_MOST_POINTS = 4000


def plot_timeline(estimate: MemoryEstimate, axes: Axes | None = None) -> Axes:
    """Bytes in use over the events of all steps, stacked by category, phases marked.

    Args:
        estimate: of :func:`freezekit.estimate_memory` or :func:`freezekit.measure_memory`.
        axes: where to draw; by default new ones.

    Returns:
        The axes. ``axes.figure.savefig("memory.png")`` keeps the picture.

    Raises:
        ImportError: matplotlib is missing.
    """
    axes = axes or _new_axes()
    curves, phases = _curves(estimate)
    unit, size = _unit(max(sum(values) for values in zip(*curves.values(), strict=True)))
    drawn = [category for category in _ORDER if any(curves[category])]
    places = range(len(next(iter(curves.values()))))
    axes.stackplot(
        places,
        *([value / size for value in curves[category]] for category in drawn),
        labels=[category.replace("_", " ") for category in drawn],
        colors=[COLOURS[category] for category in drawn],
        step="post",
        linewidth=0,
    )
    top = 1.12 * max(sum(values) for values in zip(*curves.values(), strict=True)) / size
    axes.set_ylim(0, top)
    axes.set_xlim(0, len(places))
    for (start, name), (end, _) in pairwise([*phases, (len(places), "")]):
        axes.axvline(start, color="black", linewidth=0.4, alpha=0.5)
        if end - start > len(places) / 40:
            axes.text(
                (start + end) / 2, top * 0.985, name, ha="center", va="top", fontsize=7, rotation=30
            )
    axes.set_xlabel("allocations and frees, in order")
    axes.set_ylabel(f"allocated, {unit}")
    axes.set_title(estimate.title)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False
    )
    return axes


def plot_modules(estimate: MemoryEstimate, axes: Axes | None = None) -> Axes:
    """Bars of what modules hold at the peak, alike blocks together; arguments as above."""
    axes = axes or _new_axes()
    rows = estimate.modules[::-1]
    unit, size = _unit(max((row.nbytes for row in rows), default=1))
    names = ["· " * row.depth + row.name for row in rows]
    shades = {0: "#0072B2", 1: "#56B4E9"}
    colours = [shades.get(row.depth, "#B3DCF2") for row in rows]
    bars = axes.barh(range(len(rows)), [row.nbytes / size for row in rows], color=colours)
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.margins(x=0.12)
    axes.set_xlabel(f"held at the peak, {unit}")
    axes.set_title(estimate.title)
    return axes


def _new_axes() -> Axes:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'freezekit[plot]'") from error
    # No pyplot: it would keep every figure, and pick a window system.
    figure = Figure(figsize=(10, 5), layout="constrained")
    return figure.subplots()


def _unit(largest: int) -> tuple[str, int]:
    return next((name, size) for name, size in _UNITS if largest >= size or size == 1)


def _curves(
    estimate: MemoryEstimate,
) -> tuple[dict[Category, list[int]], Sequence[tuple[int, str]]]:
    """Live bytes by category at some 4,000 events (the most of a stretch), where phases begin."""
    stream = estimate.stream
    live = dict.fromkeys(CATEGORIES, 0)
    curves: dict[Category, list[int]] = {category: [] for category in CATEGORIES}
    phases: list[tuple[int, str]] = []
    stretch = max(1, len(stream.events) // _MOST_POINTS)
    best, best_total, where = dict(live), -1, None
    for number, event in enumerate(stream.events):
        found = stream.allocations[event.allocation]
        live[found.category] += found.nbytes if event.is_alloc else -found.nbytes
        if (event.step, event.phase) != where:
            where = (event.step, event.phase)
            name = event.phase.replace("_", " ")
            phases.append((len(curves["parameters"]), name if event.step >= 0 else ""))
        total = sum(live.values())
        if total > best_total:
            best, best_total = dict(live), total
        if (number + 1) % stretch == 0:
            for category in CATEGORIES:
                curves[category].append(best[category])
            best_total = -1
    if not curves["parameters"]:
        for category in CATEGORIES:
            curves[category].append(best[category])
    return curves, phases
