"""State dicts with the backbone, and without it but with its fingerprint."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from features.features_support import make_convnet, state, unchanged
from freezekit import FrozenFeatureExtractor
from freezekit.errors import BackboneMismatchError

IMAGES = torch.randn(4, 3, 8, 8)


def make_model(*, save_backbone: bool, seed: int = 0) -> nn.Sequential:
    """A classifier on frozen features; the backbone's weights are those of the seed."""
    net = make_convnet()
    if seed:
        with torch.no_grad():
            net.conv.weight += seed
    extractor = FrozenFeatureExtractor(net, save_backbone=save_backbone)
    return nn.Sequential(extractor, nn.Linear(2, 2))


def test_the_backbone_is_saved_by_default() -> None:
    """Keys are those of any module with a child called backbone."""
    model = make_model(save_backbone=True)
    saved = model.state_dict()
    assert "0.backbone.norm.running_mean" in saved
    assert "0.backbone_fingerprint" not in saved
    other = make_model(save_backbone=True, seed=1)
    other.load_state_dict(saved)
    assert torch.equal(other(IMAGES), model(IMAGES))


def test_left_out_it_leaves_a_fingerprint(tmp_path: Path) -> None:
    """The head alone is saved, through torch.save and safetensors, and loads strictly."""
    model = make_model(save_backbone=False)
    saved = model.state_dict()
    assert list(saved) == ["0.backbone_fingerprint", "1.weight", "1.bias"]
    save_file(saved, tmp_path / "head.safetensors")
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    for loaded in (load_file(tmp_path / "head.safetensors"), torch.load(buffer, weights_only=True)):
        other = make_model(save_backbone=False)
        before = state(other[0])
        result = other.load_state_dict(loaded)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert unchanged(before, other[0])
        assert torch.equal(other(IMAGES), model(IMAGES))


@pytest.mark.parametrize("save_backbone", [True, False])
def test_another_backbone_is_refused(save_backbone: bool) -> None:
    """A head for other features is not loaded, whatever the extractor itself saves."""
    saved = make_model(save_backbone=False).state_dict()
    other = make_model(save_backbone=save_backbone, seed=1)
    before = state(other)
    with pytest.raises(BackboneMismatchError, match="made with another backbone") as caught:
        other.load_state_dict(saved)
    assert caught.value.saved != caught.value.found
    assert unchanged(before, other)


def change_statistics(net: nn.Module) -> None:
    """Move a buffer by the least."""
    net.get_buffer("norm.running_mean")[0] += 1e-6


def test_one_buffer_is_enough_to_differ() -> None:
    """Statistics count as much as weights."""
    saved = make_model(save_backbone=False).state_dict()
    other = make_model(save_backbone=False)
    change_statistics(other.get_submodule("0.backbone"))
    with pytest.raises(BackboneMismatchError, match="fingerprint"):
        other.load_state_dict(saved)


def test_a_whole_checkpoint_loads_into_one_that_leaves_it_out() -> None:
    """Weights that are there are loaded."""
    saved = make_model(save_backbone=True, seed=1).state_dict()
    other = make_model(save_backbone=False)
    other.load_state_dict(saved)
    assert torch.equal(other.state_dict()["1.weight"], saved["1.weight"])
    assert torch.equal(
        other.get_parameter("0.backbone.conv.weight"), saved["0.backbone.conv.weight"]
    )
    assert not other.get_parameter("0.backbone.conv.weight").requires_grad


def test_without_either_the_keys_are_missing() -> None:
    """No weights and no fingerprint: load_state_dict says so as ever, and the dict is untouched."""
    saved = {"1.weight": torch.zeros(2, 2), "1.bias": torch.zeros(2)}
    with pytest.raises(RuntimeError, match="Missing key"):
        make_model(save_backbone=False).load_state_dict(saved)
    assert list(saved) == ["1.weight", "1.bias"]


def test_assigning_keeps_the_backbone_frozen() -> None:
    """``load_state_dict(assign=True)`` makes new parameters; they are frozen still."""
    model = make_model(save_backbone=False)
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(saved, assign=True)
    assert not any(p.requires_grad for p in model[0].parameters())
    model(IMAGES)


def test_the_fingerprint_is_that_of_the_weights_alone() -> None:
    """The same weights in another process, copy or order of making: the same fingerprint."""
    first: Tensor = make_model(save_backbone=False).state_dict()["0.backbone_fingerprint"]
    again: Tensor = make_model(save_backbone=False).state_dict()["0.backbone_fingerprint"]
    assert first.dtype == torch.uint8
    assert first.shape == (32,)
    assert torch.equal(first, again)
