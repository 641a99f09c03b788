"""What is predicted for the four combinations, on a tiny model."""

from __future__ import annotations

import pytest

from _four_combos import predicted
from _four_combos.results import PredictedSettings
from benchmarks.four_combos_support import MakeTiny, SilentProgress


def test_stopping_the_backbone_by_either_switch_is_the_same(
    monkeypatch: pytest.MonkeyPatch, make_tiny: MakeTiny
) -> None:
    """a, b and c take the same and hold the same batch; d takes more and holds less."""
    monkeypatch.setattr(predicted, "tutorial_model", make_tiny)
    settings = PredictedSettings(
        batch_size=4096, length=16, budget_bytes=2**30, attentions=("sdpa",)
    )
    progress = SilentProgress()
    rows = predicted.run(settings, progress)
    assert progress.work == pytest.approx(predicted.total_work(settings))
    a, b, c, d = rows
    assert a.peak_reserved_bytes == b.peak_reserved_bytes == c.peak_reserved_bytes
    assert a.largest_batch == b.largest_batch == c.largest_batch
    assert d.peak_reserved_bytes > c.peak_reserved_bytes
    assert d.largest_batch < c.largest_batch
    assert all(row.fits == (settings.batch_size <= row.largest_batch) for row in rows)
