"""What autograd saves is counted exactly, and so is who receives a gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from _four_combos import saved
from _four_combos.combos import COMBINATIONS
from _four_combos.results import SavedRow, SavedSettings
from _four_combos.saved import SavedStorages
from benchmarks.four_combos_support import MakeTiny, SilentProgress

FLOAT32 = 4


def test_a_known_model_saves_what_its_formulas_need() -> None:
    """A linear layer keeps its input for the weight's gradient, a sigmoid keeps its output."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())
    inputs = torch.randn(5, 4)
    with SavedStorages(model) as kept:
        output = model(inputs)
    assert sum(kept.bytes_by_address.values()) == (5 * 4 + 5 * 3) * FLOAT32
    assert set(kept.bytes_by_address) == {inputs.data_ptr(), output.data_ptr()}


def test_parameters_and_buffers_are_not_counted() -> None:
    model = nn.BatchNorm1d(4).eval()
    with SavedStorages(model) as kept:
        model(torch.zeros(5, 4)).sum()
    assert sum(kept.bytes_by_address.values()) == 5 * 4 * FLOAT32


def test_views_of_one_storage_count_once_and_whole() -> None:
    weight = nn.Parameter(torch.ones(2))
    inputs = torch.randn(4)
    with SavedStorages(nn.ParameterList([weight])) as kept:
        total = inputs[:2] * weight + inputs[2:] * weight
    assert total.requires_grad
    assert kept.bytes_by_address == {inputs.data_ptr(): 4 * FLOAT32}


def test_hooks_are_gone_after_an_error() -> None:
    kept = SavedStorages(nn.Identity())
    with pytest.raises(ValueError, match="in the middle"), kept:
        raise ValueError("in the middle")
    _ = torch.ones(3, requires_grad=True).exp()
    assert kept.bytes_by_address == {}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_only_d_saves_in_the_backbone(attention: str, make_tiny: MakeTiny) -> None:
    model = make_tiny(attention)
    ids = torch.ones(2, 7, dtype=torch.long)
    rows = [saved.measure(model, c, attention, ids) for c in COMBINATIONS]
    a, b, c, d = rows
    assert a.backbone_saved_bytes == b.backbone_saved_bytes == c.backbone_saved_bytes == 0
    assert d.backbone_saved_bytes > 0
    assert len({row.head_saved_bytes for row in rows}) == 1
    head = sum(p.numel() for p in model.head_parameters())
    whole = sum(p.numel() for p in model.parameters())
    pooler = sum(p.numel() for p in model.bert.pooler.parameters())
    assert [row.marked_trainable for row in rows] == [head, whole, head, whole]
    assert [row.with_gradient for row in rows] == [head, head, head, whole - pooler]
    tensors = sum(1 for _ in model.bert.parameters())
    assert [row.backbone_without_gradient for row in rows] == [tensors, tensors, tensors, 2]


def test_measuring_leaves_no_gradient(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    saved.measure(model, COMBINATIONS[3], "sdpa", torch.ones(2, 7, dtype=torch.long))
    assert all(p.grad is None for p in model.parameters())


def test_the_whole_part_measures_each_combination_with_each_attention(
    monkeypatch: pytest.MonkeyPatch, make_tiny: MakeTiny, progress: SilentProgress
) -> None:
    monkeypatch.setattr(saved, "tutorial_model", make_tiny)
    monkeypatch.setattr(saved, "check_tutorial_counts", lambda marked, *, requires_grad: None)
    settings = SavedSettings(batch_size=2, length=7)
    rows: tuple[SavedRow, ...] = saved.run(settings, 0, progress)
    names = [(row.attention, row.combination) for row in rows]
    assert names == [(attention, key) for attention in ("eager", "sdpa") for key in "abcd"]
    assert progress.work == pytest.approx(saved.total_work(settings))


def test_a_model_of_another_size_stops_the_part(
    monkeypatch: pytest.MonkeyPatch, make_tiny: MakeTiny, progress: SilentProgress
) -> None:
    monkeypatch.setattr(saved, "tutorial_model", make_tiny)
    with pytest.raises(RuntimeError, match="the tutorial's model has 2,759,169 trainable"):
        saved.run(SavedSettings(batch_size=2, length=7), 0, progress)
