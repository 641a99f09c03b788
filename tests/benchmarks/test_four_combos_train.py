"""The four combinations, end to end, on a two-layer BERT."""

from __future__ import annotations

import pytest
import torch

from _four_combos import train
from _four_combos.combos import COMBINATIONS
from _four_combos.data import Batch, Example, split
from _four_combos.results import TrainRow, TrainSettings
from benchmarks.four_combos_support import MakeTiny, SilentProgress, WordTokenizer

SETTINGS = TrainSettings(batch_size=4, batches=4, test_texts=6)


def batch() -> Batch:
    ids = torch.tensor([[3, 4, 5], [6, 7, 0]])
    return Batch(ids, (ids > 0).long(), torch.tensor([1.0, 0.0]))


@pytest.fixture
def rows(make_tiny: MakeTiny, progress: SilentProgress) -> dict[str, TrainRow]:
    words = ["a", "very", "good", "film", "with", "no", "end"]
    texts = [f"{' '.join(words[: 1 + n % 7])} {n}" for n in range(60)]
    corpus = split([Example(text, positive=len(text) % 2 == 0) for text in texts], 0)
    found = train.run(make_tiny(), WordTokenizer(), corpus, SETTINGS, 0, progress)
    assert progress.work == pytest.approx(train.total_work(SETTINGS))
    return {row.label: row for row in found}


def test_end_to_end(rows: dict[str, TrainRow]) -> None:
    """Every claim of the docs page about the real run, on a small scale."""
    a, b, c, d, small = rows.values()
    assert list(rows) == ["a", "b", "c", "d", "d, BERT 2e-05"]
    # a, b and c learn the same thing, to the last bit.
    assert a.head_sha256 == b.head_sha256 == c.head_sha256 != d.head_sha256
    assert a.losses == b.losses == c.losses != d.losses
    # All begin alike, d too.
    assert len({row.losses[0] for row in rows.values()}) == 1
    # Only d moves the backbone, all of it but the unused pooler's two tensors.
    assert [row.backbone_tensors_changed for row in (a, b, c)] == [0, 0, 0]
    assert d.backbone_tensors_changed == small.backbone_tensors_changed == d.backbone_tensors - 2
    # a, b and c have the same peak; d has gradients, Adam's state and saved activations besides.
    assert a.peak_bytes == b.peak_bytes == c.peak_bytes < d.peak_bytes == small.peak_bytes
    for row in rows.values():
        assert len(row.step_seconds) == len(row.losses) == SETTINGS.batches
        assert row.tested == SETTINGS.test_texts
        assert 0 <= row.correct <= row.tested


def test_training_draws_the_same_dropout_whatever_the_turn(
    make_tiny: MakeTiny, progress: SilentProgress
) -> None:
    base = make_tiny()
    alone = train.make_run(base, COMBINATIONS[0], head_rate=1e-3, backbone_rate=1e-3)
    train.train([alone], [batch(), batch()], 0, progress)
    together = train.make_runs(base, SETTINGS)
    train.train(together, [batch(), batch()], 0, progress)
    assert together[0].losses == alone.losses


def test_adam_is_given_every_parameter_once(make_tiny: MakeTiny) -> None:
    for run in train.make_runs(make_tiny(), SETTINGS):
        given = [id(p) for group in run.optimizer.param_groups for p in group["params"]]
        assert sorted(given) == sorted(id(p) for p in run.model.parameters())


def test_a_step_leaves_no_gradient_and_moves_the_head(make_tiny: MakeTiny) -> None:
    base = make_tiny()
    run = train.make_run(base, COMBINATIONS[3], head_rate=1e-3, backbone_rate=1e-3)
    before = train.head_hash(run.model)
    loss = train.step(run, batch())
    assert not loss.requires_grad
    assert all(p.grad is None for p in run.model.parameters())
    assert train.head_hash(run.model) != before == train.head_hash(base)


def test_a_loss_that_is_not_finite_becomes_null(make_tiny: MakeTiny) -> None:
    base = make_tiny()
    run = train.make_run(base, COMBINATIONS[3], head_rate=float("inf"), backbone_rate=1.0)
    train.train([run], [batch(), batch()], 0, _Quiet())
    row = train.finish(run, base, [batch()], batch())
    assert row.losses[0] is not None
    assert row.losses[1] is None


def test_correct_answers_are_counted_with_dropout_off(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    with torch.no_grad():
        model.out.weight.zero_()
        model.out.bias.fill_(1.0)
    assert train.count_correct(model, [batch(), batch()]) == 2
    assert model.training


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [(float("nan"), float("nan"), True), (0.0, -0.0, False), (1.0, 1.0, True)],
    ids=["NaN is itself", "signed zeros differ", "equal"],
)
def test_bits(first: float, second: float, same: bool) -> None:
    assert (train.bits(torch.tensor([first])) == train.bits(torch.tensor([second]))) is same


def test_one_changed_bit_is_found(make_tiny: MakeTiny) -> None:
    original, other = make_tiny(), make_tiny()
    assert train.count_changed(other, original) == 0
    with torch.no_grad():
        other.out.bias.copy_(torch.nextafter(other.out.bias, torch.tensor(torch.inf)))
    assert train.count_changed(other, original) == 1


class _Quiet:
    def start(self, part: str) -> None:
        pass

    def advance(self, work: float, note: str) -> None:
        pass
