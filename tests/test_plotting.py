"""Plots: drawn from the estimate's own values."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import nn

from freezekit import estimate_memory
from freezekit.plotting import plot_modules, plot_timeline

ESTIMATE = estimate_memory(
    nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Dropout(0.5)) for _ in range(4))),
    torch.empty(4096, 256, device="meta"),
)


def test_the_timeline_stacks_categories_up_to_the_peak(tmp_path: Path) -> None:
    """The highest point is the peak in requested bytes, and the phases are named."""
    axes = plot_timeline(ESTIMATE)
    top = axes.dataLim.y1
    assert top == pytest.approx(ESTIMATE.stream.peak_bytes() / (1 << 20))
    labels = axes.get_legend_handles_labels()[1]
    assert {"parameters", "activations", "optimizer state"} <= set(labels)
    assert {"forward", "backward", "optimizer"} <= {text.get_text() for text in axes.texts}
    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.savefig(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_bars_are_the_modules() -> None:
    """One bar a row, in the estimate's order from the top."""
    axes = plot_modules(ESTIMATE)
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    widths = [bar.get_width() * (1 << 20) for bar in bars]
    assert widths[::-1] == pytest.approx([row.nbytes for row in ESTIMATE.modules])
    assert axes.get_yticklabels()[-1].get_text() == ESTIMATE.modules[0].name


def test_given_axes_are_drawn_on() -> None:
    """Two plots in one figure."""
    left, right = Figure().subplots(1, 2)
    assert plot_timeline(ESTIMATE, left) is left
    assert plot_modules(ESTIMATE, right) is right


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install is said."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ImportError, match=r"plots need matplotlib: pip install 'freezekit\[plot\]'"
    ):
        plot_timeline(ESTIMATE)
